"""Other ways to gather rows of a table, to hold engram against: numpy, torch, threads over a map.

They read the same files through mappings of their own, as plain arrays: a `numpy.memmap` would add
its own cost to every call.
"""

from __future__ import annotations

import importlib
import mmap
import os
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .timing import Method

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from engram import FileGather, PlaneInfo

    Ids = NDArray[np.int64]
    Bytes = NDArray[np.uint8]

POOL_THREADS = 32
"""Threads of the pool over the mapping: what servers without asynchronous reads use."""

_READ_THREADS = 32
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14; the mmap module does not name it.


@dataclass(frozen=True)
class _Run:
    """Rows of one plane that follow one another in one file."""

    first_row: int
    rows: int
    file: str
    offset: int


def _runs(plane: PlaneInfo) -> list[_Run]:
    """The plane's pieces, those that follow one another joined."""
    runs: list[_Run] = []
    for piece in plane.pieces:
        last = runs[-1] if runs else None
        if (
            last is not None
            and (last.file, last.offset + last.rows * plane.row_bytes) == (piece.file, piece.offset)
            and last.first_row + last.rows == piece.first_row
        ):
            runs[-1] = _Run(last.first_row, last.rows + piece.rows, last.file, last.offset)
        else:
            runs.append(_Run(piece.first_row, piece.rows, piece.file, piece.offset))
    return runs


class MappedTable:
    """A table as plain uint8 arrays over mappings of its own.

    Args:
        gather: The table.
        advice: For the mapping. `"random"` makes a fault read one page, `"normal"` lets the kernel
            read around it.
    """

    def __init__(self, gather: FileGather, advice: Literal["random", "normal"] = "random") -> None:
        self._maps: dict[str, mmap.mmap] = {}
        for path in gather.files:
            with Path(path).open("rb") as file:
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if advice == "random" and hasattr(mmap, "MADV_RANDOM"):
                self._maps[path].madvise(mmap.MADV_RANDOM)
        self._spans: list[tuple[str, int, int]] = []
        self._planes: list[tuple[slice, NDArray[np.int64], list[Bytes]]] = []
        for plane in gather.planes:
            runs = _runs(plane)
            first = sum(plane.before)
            arrays: list[Bytes] = []
            for run in runs:
                nbytes = run.rows * plane.row_bytes
                flat = np.frombuffer(self._maps[run.file], np.uint8, nbytes, run.offset)
                arrays.append(flat.reshape(run.rows, plane.row_bytes))
                self._spans.append((run.file, run.offset, nbytes))
            firsts = np.array([run.first_row for run in runs], np.int64)
            self._planes.append((slice(first, first + plane.row_bytes), firsts, arrays))

    @property
    def single(self) -> Bytes | None:
        """The whole table as one array `[rows, row_bytes]`; None where it is not stored so."""
        whole = len(self._planes) == 1 and len(self._planes[0][2]) == 1
        return self._planes[0][2][0] if whole else None

    def take(self, ids: Ids, out: Bytes) -> None:
        """Rows of flat `ids` into `out`, uint8 `[ids.size, row_bytes]`."""
        for columns, firsts, arrays in self._planes:
            target = out[:, columns]
            if len(arrays) == 1:
                np.take(arrays[0], ids, axis=0, out=target, mode="clip")
                continue
            homes = np.searchsorted(firsts, ids, side="right") - 1
            for home in np.unique(homes).tolist():
                chosen = homes == home
                target[chosen] = arrays[home][ids[chosen] - firsts[home]]

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        """`POOL_THREADS` threads, all of them started."""
        pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="map-pool")
        started = threading.Barrier(POOL_THREADS)
        for future in [pool.submit(started.wait) for _ in range(POOL_THREADS)]:
            future.result()
        return pool

    def populate(self) -> None:
        """Maps every page of the table, so that no later access faults."""
        page = mmap.PAGESIZE
        for path, offset, nbytes in self._spans:
            start = offset // page * page
            try:
                self._maps[path].madvise(_POPULATE_READ, start, offset + nbytes - start)
            except OSError:
                flat = np.frombuffer(self._maps[path], np.uint8, nbytes, offset)
                flat[::page].sum(dtype=np.int64)
                flat[-1:].sum(dtype=np.int64)

    def release(self, pages: NDArray[np.int64] | None = None) -> None:
        """Lets go of pages: those that are mapped somewhere stay in the page cache.

        Args:
            pages: Numbers of those to let go of, of a table in one file; all if None.
        """
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        if pages is None:
            for mapping in self._maps.values():
                mapping.madvise(mmap.MADV_DONTNEED)
            return
        (mapping,) = self._maps.values()
        for start in (pages * mmap.PAGESIZE).tolist():
            mapping.madvise(mmap.MADV_DONTNEED, start, mmap.PAGESIZE)


class StoredRows:
    """The right rows of a table by plain positional reads, whatever else may be wrong.

    Args:
        gather: The table; only its description is used.
    """

    def __init__(self, gather: FileGather) -> None:
        self._row_bytes = gather.row_bytes
        self._planes = [(plane, _runs(plane)) for plane in gather.planes]
        self._descriptors = {path: os.open(path, os.O_RDONLY) for path in gather.files}
        if hasattr(os, "posix_fadvise"):
            for descriptor in self._descriptors.values():
                # Reads of single rows must not make their neighbourhood resident.
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        self._pool = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="stored-rows")

    def expected(self, ids: Ids) -> Bytes:
        """Stored bytes of the rows `ids`, uint8 `[*ids.shape, row_bytes]`."""
        flat = ids.reshape(-1)
        out = np.empty((flat.size, self._row_bytes), np.uint8)
        step = max(1, -(-flat.size // _READ_THREADS))
        parts = [slice(at, at + step) for at in range(0, flat.size, step)]
        for future in [self._pool.submit(self._read, flat[part], out[part]) for part in parts]:
            future.result()
        return out.reshape(*ids.shape, self._row_bytes)

    def _read(self, ids: Ids, out: Bytes) -> None:
        for plane, runs in self._planes:
            before = sum(plane.before)
            firsts = np.array([run.first_row for run in runs], np.int64)
            homes = np.searchsorted(firsts, ids, side="right") - 1
            for position, row in enumerate(ids.tolist()):
                run = runs[int(homes[position])]
                data = os.pread(
                    self._descriptors[run.file],
                    plane.row_bytes,
                    run.offset + (row - run.first_row) * plane.row_bytes,
                )
                out[position, before : before + plane.row_bytes] = np.frombuffer(data, np.uint8)

    def close(self) -> None:
        """Closes the files."""
        self._pool.shutdown()
        for descriptor in self._descriptors.values():
            os.close(descriptor)


def gathering(
    name: str, gather: FileGather, before: Callable[[Ids], object] | None = None
) -> Method:
    """The `gather` of engram, through Python, into memory the caller keeps."""
    return Method(
        name,
        lambda ids, out: (ids, out),
        lambda call: gather.gather(call[0], out=call[1]),
        before,
    )


def numpy_take(
    name: str,
    table: MappedTable,
    before: Callable[[Ids], object] | None = None,
    most: int | None = None,
) -> Method:
    """`np.take(view, ids, axis=0, out=out, mode="clip")`, numpy's fastest way.

    Where the table is not one array: row by piece, each piece's rows at once.
    """
    view = table.single
    if view is None:
        return Method(
            name, _flattened, lambda call: table.take(call[0], call[1]), before, most=most
        )
    return Method(
        name,
        lambda ids, out: (ids, out),
        lambda call: np.take(view, call[0], axis=0, out=call[1], mode="clip"),
        before,
        most=most,
    )


class _Advice:
    """Advice to the kernel that pages of rows will be needed, one call for each range of pages.

    Args:
        gather: The table; only its description is used.
    """

    def __init__(self, gather: FileGather) -> None:
        descriptors = {path: os.open(path, os.O_RDONLY) for path in gather.files}
        weakref.finalize(self, _close_all, list(descriptors.values()))
        self._planes = [
            (plane.row_bytes, [(run, descriptors[run.file]) for run in _runs(plane)])
            for plane in gather.planes
        ]

    def give(self, ids: Ids) -> None:
        """For the rows `ids`, which rise. Ranges that touch are one."""
        advise, will_need = os.posix_fadvise, os.POSIX_FADV_WILLNEED
        page = mmap.PAGESIZE
        for row_bytes, runs in self._planes:
            cuts = np.searchsorted(ids, [run.first_row for run, _ in runs[1:]])
            for (run, descriptor), rows in zip(runs, np.split(ids, cuts), strict=True):
                if len(rows) == 0:
                    continue
                offsets = run.offset + (rows - run.first_row) * row_bytes
                first = offsets // page * page
                last = (offsets + (row_bytes + page - 1)) // page * page
                parted = np.flatnonzero(first[1:] > last[:-1])
                starts = np.concatenate((first[:1], first[parted + 1]))
                ends = np.concatenate((last[parted], last[-1:]))
                for start, length in zip(starts.tolist(), (ends - starts).tolist(), strict=True):
                    advise(descriptor, start, length, will_need)


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def advice_then_copy(
    name: str,
    gather: FileGather,
    table: MappedTable,
    before: Callable[[Ids], object] | None = None,
) -> Method | None:
    """How servers that read from a mapping do it, in Python: distinct ids, advice, then the copy.

    `POSIX_FADV_WILLNEED` for each range of pages, the distinct rows from the mapping, and those to
    their places. What `io="mmap"` does natively. None where the system has no such advice.
    """
    if not hasattr(os, "posix_fadvise"):
        return None
    advice = _Advice(gather)

    def run(call: tuple[Ids, Bytes]) -> None:
        ids, out = call
        distinct, places = np.unique(ids, return_inverse=True)
        advice.give(distinct)
        rows = np.empty((len(distinct), out.shape[-1]), np.uint8)
        table.take(distinct, rows)
        np.take(rows, places, axis=0, out=out, mode="clip")

    return Method(name, _flattened, run, before)


def threads_over_map(
    name: str,
    table: MappedTable,
    before: Callable[[Ids], object] | None = None,
    most: int | None = None,
) -> Method:
    """`POOL_THREADS` threads that each take a part of the rows from the mapping."""
    pool = table.pool

    def run(call: tuple[Ids, Bytes]) -> None:
        ids, out = call
        step = -(-len(ids) // POOL_THREADS)
        futures = [
            pool.submit(table.take, ids[at : at + step], out[at : at + step])
            for at in range(0, len(ids), step)
        ]
        for future in futures:
            future.result()

    return Method(name, _flattened, run, before, most=most)


def torch_select(
    name: str,
    table: MappedTable,
    before: Callable[[Ids], object] | None = None,
    most: int | None = None,
) -> Method | None:
    """`torch.index_select(tensor, 0, ids, out=out)`; None without torch or a single array."""
    view = table.single
    if view is None:
        return None
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return None
    with warnings.catch_warnings():
        # The mapping is read-only and torch cannot say so of a tensor; nothing here writes to it.
        warnings.filterwarnings("ignore", message=".*not writable.*")
        tensor: Any = torch.from_numpy(view)
    return Method(
        name,
        lambda ids, out: (
            torch.from_numpy(np.ascontiguousarray(ids)).view(-1),
            torch.from_numpy(out).view(-1, out.shape[-1]),
        ),
        lambda call: torch.index_select(tensor, 0, call[0], out=call[1]),
        before,
        most=most,
        lingers=True,
    )


def _flattened(ids: Ids, out: Bytes) -> tuple[Ids, Bytes]:
    return np.ascontiguousarray(ids).reshape(-1), out.reshape(-1, out.shape[-1])


def present(methods: Sequence[Method | None]) -> list[Method]:
    """Those methods that this machine has."""
    return [method for method in methods if method is not None]
