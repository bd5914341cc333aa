"""A thread that lets graphs go on for which nobody brings rows."""

from __future__ import annotations

import atexit
import os
import threading
import time
from typing import Protocol

from engram._locks import ForkedLock
from engram._notices import notify

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

    A forked child watches nothing of its parent's, whose graphs it neither has nor may touch.
    """

    def __init__(self) -> None:
        self._lock = ForkedLock()
        self._watched: set[Watched] = set()
        self._thread: threading.Thread | None = None
        self._inherited: list[set[Watched]] = []
        """Kept in a child as it was: to give it up would be to call CUDA, which no child may."""
        atexit.register(self.release)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_anew)

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
        with self._lock:
            watched = list(self._watched)
        for one in watched:
            try:
                one.give_back(min(one.patience, _AT_EXIT_SECONDS))
            except Exception as error:
                _tell(error)

    def _begin_anew(self) -> None:
        """In a child, where nobody else is yet."""
        self._inherited.append(self._watched)
        self._watched = set()
        self._thread = None

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
        try:
            one.look(time.monotonic())
        except Exception as error:
            # One that fails must not leave the graphs of all others waiting.
            _tell(error)
    pause = min(one.patience for one in watched) / 10
    watched.clear()
    return min(max(pause, 1e-3), _LONGEST_PAUSE)


def _tell(error: Exception) -> None:
    notify(f"a graph that waits for its rows could not be looked after: {error!r}")
