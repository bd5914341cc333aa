"""What the kernel knows about a file's pages and a process's memory."""

import ctypes
import mmap
import os
import re
from pathlib import Path

import numpy as np

PAGE = mmap.PAGESIZE
_AHEAD = 4096
"""Runs of pages asked for before any is waited for."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class FilePages:
    """Asks which pages of a file are in memory, through a mapping that nobody touches."""

    def __init__(self, path: str | Path) -> None:
        with Path(path).open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._address = np.frombuffer(self._map, np.uint8, 1).ctypes.data
        self.count = -(-len(self._map) // PAGE)

    def resident(self, first: int = 0, count: int | None = None) -> np.ndarray:
        """One bool for each of `count` pages from `first` on."""
        count = self.count - first if count is None else count
        states = np.empty(count, np.uint8)
        start = self._address + first * PAGE
        if _libc.mincore(start, count * PAGE, states.ctypes.data) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        return (states & 1).astype(bool)


def make_resident(path: str | Path, pages: np.ndarray) -> None:
    """Reads just these pages of a file, sorted, into the page cache, many at a time."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        runs = _runs(pages)
        for at in range(0, len(runs), _AHEAD):
            part = runs[at : at + _AHEAD]
            for first, end in part:
                os.posix_fadvise(
                    descriptor, first * PAGE, (end - first) * PAGE, os.POSIX_FADV_WILLNEED
                )
            for first, end in part:
                # Waits for what was asked for, and reads what the kernel declined to.
                os.pread(descriptor, (end - first) * PAGE, first * PAGE)
    finally:
        os.close(descriptor)


def drop_pages(path: str | Path, pages: np.ndarray) -> None:
    """Drops just these pages, sorted, as far as nobody maps them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for first, end in _runs(pages):
            os.posix_fadvise(descriptor, first * PAGE, (end - first) * PAGE, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _runs(pages: np.ndarray) -> list[tuple[int, int]]:
    if not len(pages):
        return []
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    firsts = pages[np.concatenate([[0], breaks])]
    ends = pages[np.concatenate([breaks - 1, [-1]])] + 1
    return list(zip(firsts.tolist(), ends.tolist(), strict=True))


def memory_of_process() -> dict[str, int]:
    """Bytes of this process in memory: all of them, those that no file stands behind, and those of
    files that are mapped by 2 MiB at a time.
    """
    text = Path("/proc/self/smaps_rollup").read_text()
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M))
    names = {"resident": "Rss", "anonymous": "Anonymous", "large": "FilePmdMapped"}
    return {name: int(fields.get(field, 0)) << 10 for name, field in names.items()}
