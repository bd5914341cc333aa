"""A lock that a forked child finds free."""

from __future__ import annotations

import os
import threading
import weakref


class ForkedLock:
    """A mutual exclusion that no fork can leave taken.

    Whoever held it in the parent is not in the child, which therefore gets a lock of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self, timeout: float = -1) -> bool:
        """Waits for at most `timeout` seconds, or until it is free; whether it is the caller's."""
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        """Lets others in."""
        # The thread that forked may itself have held the one this one replaced.
        if self._lock.locked():
            self._lock.release()

    def locked(self) -> bool:
        """Whether somebody holds it."""
        return self._lock.locked()

    def renew(self) -> None:
        """Replaces the lock; in a child, before any other code runs there."""
        self._lock = threading.Lock()


_all: weakref.WeakSet[ForkedLock] = weakref.WeakSet()


def _renew() -> None:
    for lock in list(_all):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
