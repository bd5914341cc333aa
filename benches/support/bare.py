"""Loops with nothing around them: what the hardware and the kernel can do at best.

They are part of the extension only when it was built with the feature `bench`.
"""

import sys

import numpy as np

from engram import FileGather, _engram
from engram.cli.timing import Method

DEPTH = 128
PARALLEL_ROWS = 2048
"""From this many rows on, the bare copy loop uses threads."""

MISSING = (
    "the extension was built without the loops that the figures are ratios to; build them in:\n"
    "    maturin develop --release --features bench\n"
    "or run with --without-bare to measure the rest"
)


def available() -> bool:
    """Whether the extension has the bare loops."""
    return all(hasattr(_engram, name) for name in ("bench_copy", "bench_forget", "bench_uring"))


def require(*, without: bool) -> bool:
    """Whether bare loops run; leaves with advice where they cannot and are wanted."""
    if available():
        return not without
    if not without:
        sys.exit(f"{sys.argv[0]}: {MISSING}")
    return False


def copy(gather: FileGather, rows: int) -> Method:
    """Copies rows from addresses computed beforehand."""
    threads = gather.stats()["threads"] if rows >= PARALLEL_ROWS else 1
    return Method(
        "bare copy loop",
        lambda ids, out: (ids, out),
        lambda call: _engram.bench_copy(gather._native, *call, threads),
        own_clock=True,
    )


def distinct(ids: np.ndarray) -> np.ndarray:
    """Ids without repetitions, in the order in which they first occur."""
    _, first = np.unique(ids, return_index=True)
    return ids[np.sort(first)]


def uring(name: str, gather: FileGather, *, direct: bool, before=None) -> Method:
    """Reads each distinct row once, in request order, `DEPTH` reads in flight; keeps nothing."""
    return Method(
        name,
        lambda ids, out: distinct(ids),
        lambda ids: _engram.bench_uring(gather._native, ids, direct, DEPTH),
        before,
        own_clock=True,
        delivers=False,
    )


def forget(gather: FileGather, pages: np.ndarray) -> None:
    """Has it unmap pages of its only file and no longer believe that they are resident.

    As if it had asked the kernel after they are dropped. To ask about a whole table leaves the
    device idle for so long that it is slower for a while.
    """
    _engram.bench_forget(gather._native, pages)
