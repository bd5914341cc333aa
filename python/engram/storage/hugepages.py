"""Huge pages for tables in private memory: asked for, prefaulted, collapsed, counted.

The kernel promises nothing. It takes the advice and gives ordinary pages all the same where huge
pages are off, forbidden for the process, or not to be had because memory is in pieces. So what
counts is what it says afterwards, in `/proc/self/smaps`.
"""

from __future__ import annotations

import time
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram import _engram
from engram._notices import notify

if TYPE_CHECKING:
    from collections.abc import Callable

    from engram.buffer import HostBuffer

__all__ = ["collapse", "coverage", "prefault", "report"]

SLICE_BYTES = 64 << 20
"""Bytes handed to the kernel in one call: small enough to stop in time."""

COLLAPSE_SECONDS = 60.0
"""Longest time spent on making huge pages of ordinary ones."""

ENOUGH = 0.95
"""Share of a table in huge pages below which a warning says so."""

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_STATUS = Path("/proc/self/status")


def _slices(nbytes: int) -> list[tuple[int, int]]:
    return [(start, min(SLICE_BYTES, nbytes - start)) for start in range(0, nbytes, SLICE_BYTES)]


def _words(error: OSError | MemoryError) -> str:
    strerror = error.strerror if isinstance(error, OSError) else None
    return strerror or str(error)


def prefault(
    buffer: HostBuffer, threads: int, progress: Callable[[int, int], Any] | None = None
) -> str | None:
    """Makes the kernel give all of `buffer` memory, with several threads; best effort.

    What could not be prefaulted is touched when rows are put there, in whatever pages there are.

    Args:
        buffer: Memory that nobody uses yet.
        threads: How many at once.
        progress: Called with `(bytes_done, bytes_total)` on the calling thread.

    Returns:
        Why parts of it could not be, in the kernel's words; None where all could.
    """
    done = 0
    with ThreadPoolExecutor(max(1, threads)) as pool:
        pending = {
            pool.submit(buffer.prefault, start, length): length
            for start, length in _slices(buffer.capacity)
        }
        try:
            for finished in as_completed(pending):
                try:
                    finished.result()
                except (OSError, MemoryError) as error:
                    pool.shutdown(wait=True, cancel_futures=True)
                    return f"prefaulting: {_words(error)}"
                done += pending[finished]
                if progress is not None:
                    progress(done, buffer.capacity)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return None


def collapse(buffer: HostBuffer, seconds: float = COLLAPSE_SECONDS) -> str | None:
    """Makes huge pages of the ordinary pages of `buffer`, once, while time remains.

    Returns:
        Why parts of it could not be, in the kernel's words; None where all could.
    """
    deadline = time.monotonic() + seconds
    refused = None
    for start, length in _slices(buffer.capacity):
        if time.monotonic() >= deadline:
            return f"{seconds:g} s were not enough"
        try:
            buffer.collapse(start, length)
        # A MemoryError says that no huge page is free, and nothing of ordinary ones.
        except (OSError, MemoryError) as error:
            refused = _words(error)
    return refused


def coverage(buffer: HostBuffer) -> float:
    """Share of the memory behind `buffer` that is huge pages, from 0.0 to 1.0."""
    try:
        resident, huge = _engram.huge_page_bytes(buffer.address, buffer.capacity)
    except OSError:
        return 0.0
    return min(1.0, huge / resident) if resident else 0.0


def report(buffer: HostBuffer, *refusals: str | None) -> float:
    """Warns if much of `buffer` is ordinary pages, with the reason; gives the share that is not.

    Args:
        buffer: The memory.
        refusals: What `prefault` and `collapse` gave.
    """
    share = coverage(buffer)
    if share < ENOUGH:
        why = "; ".join(filter(None, refusals))
        notify(f"use_thp: {share:.0%} of the table is in huge pages: {_reason(why)}")
        warnings.warn(
            f"use_thp: {share:.0%} of the table is in huge pages, the rest in ordinary ones: "
            f"{_reason(why)}. Rows are the same; look-ups are somewhat slower",
            UserWarning,
            stacklevel=2,
        )
    return share


def _reason(refused: str) -> str:
    try:
        setting = _SETTING.read_text()
    except OSError:
        return "this kernel has no transparent huge pages"
    if "[never]" in setting:
        return f"{_SETTING} is set to never"
    try:
        forbidden = "THP_enabled:\t0" in _STATUS.read_text()
    except OSError:
        forbidden = False
    if forbidden:
        return "huge pages are disabled for this process (prctl PR_SET_THP_DISABLE)"
    why = f" ({refused})" if refused else ""
    return f"the kernel found no room for more{why}; memory is full or in pieces"
