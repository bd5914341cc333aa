"""A thread that lets graphs go on for which nobody brings rows."""

from __future__ import annotations

import atexit
import threading
import time
from typing import Protocol

__all__ = ["Watch", "Watched"]

_AT_EXIT_SECONDS = 5.0
_LONGEST_PAUSE = 0.5


class Watched(Protocol):
    """What may hold up a device."""

    patience: float
    """Seconds that it may."""

    def look(self, now: float) -> None:
        """Ends what has lasted too long; `now` is `time.monotonic()`."""
        ...

    def give_back(self, seconds: float) -> None:
        """Ends whatever there is, waiting for the device for at most so long."""
        ...


class Watch:
    """One thread that looks after everything that is watched, for as long as there is something.

    It also keeps what it watches: a graph reads its memory whether or not anybody remembers it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: set[Watched] = set()
        self._thread: threading.Thread | None = None
        atexit.register(self.release)

    def __contains__(self, watched: object) -> bool:
        return watched in self._watched

    def add(self, watched: Watched) -> None:
        """Begins to watch."""
        with self._lock:
            self._watched.add(watched)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="engram late", daemon=True)
                self._thread.start()

    def discard(self, watched: Watched) -> None:
        """Watches no longer."""
        with self._lock:
            self._watched.discard(watched)

    def release(self) -> None:
        """Ends everything, before the process does."""
        for watched in list(self._watched):
            watched.give_back(min(watched.patience, _AT_EXIT_SECONDS))

    def _run(self) -> None:
        while True:
            with self._lock:
                watched = list(self._watched)
                if not watched:
                    self._thread = None
                    return
            time.sleep(_look_at(watched))


def _look_at(watched: list[Watched]) -> float:
    """Looks at everything once; how long to sleep afterwards."""
    for one in watched:
        one.look(time.monotonic())
    pause = min(one.patience for one in watched) / 10
    watched.clear()
    return min(max(pause, 1e-3), _LONGEST_PAUSE)
