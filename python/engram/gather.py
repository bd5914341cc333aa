"""Rows for ids: `FileGather` reads one table in place."""

from __future__ import annotations

import atexit
import contextlib
import os
from typing import TYPE_CHECKING, Any, Literal

from engram import _engram
from engram._arguments import out_of_range, pad_argument, path_text, whole_number
from engram._arrays import int64_ids, is_torch
from engram._errors import complete, placed
from engram._locks import ForkedLock
from engram._notices import failed, opened
from engram._sizes import budget, optional_budget
from engram._targets import PlaneTargets, allocate, targets
from engram._views import expectation, open_views, opening
from engram.pagecache import Residency
from engram.table import Planes, TableInfo
from engram.ticket import Ticket, submit
from engram.verification import Verification

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

Io = Literal["auto", "mmap", "pread", "uring", "direct"]
Advice = Literal["auto", "random", "normal"]

_describing = ForkedLock()

Request = tuple[_engram.Reader, "NDArray[np.int64]", PlaneTargets, int | None]
"""Table, flat ids, where its planes go, and the id that stands for a row of zeros."""


class FileGather:
    """Reads rows of one table in place from a checkpoint's safetensors files.

    The files are opened read-only and never change. Every method may be called from any thread;
    the interpreter lock is released while rows move.

    Args:
        path: A `.safetensors` file, a checkpoint directory, or an index JSON.
        table: A table's name, its place in layer order, or a plain 2-D tensor's full name. None
            takes the only n-gram or per-layer table there is.
        io: `"auto"` copies resident rows from a mapping and reads the others with many reads in
            flight; `"mmap"` advises the kernel of every page range, then copies from a mapping;
            `"pread"` reads with threads; `"uring"` reads through io_uring; `"direct"` bypasses the
            page cache. What runs in the end, and why, is in `stats()["io"]`. Mappings come with
            a handler of SIGBUS for pages that cannot be read; `ENGRAM_SIGBUS=0` in the environment
            forbids both.
        cache_bytes: Memory for a cache of rows, 0 for none: bytes, a size such as `"2GiB"`, or a
            share such as `"25%"` of the machine's memory, or of its control group's limit where
            that is lower. For tables that memory cannot hold: a row takes its own bytes and five
            more, where the page cache keeps 4,096 of it. `"auto"` then reads rows past the page
            cache where it can, and uses what the page cache has all the same.
        threads: Threads for large copies; None for the smaller of CPU affinity and cgroup quota.
        advice: Advice for the mapping: `"random"` (which `"auto"` chooses) makes an unexpected
            fault read one page, `"normal"` lets it read ahead.
        max_mapped_bytes: Cap on resident bytes of the mapping, written as `cache_bytes` may be;
            None for none.

    Raises:
        ValueError: No such table, or several to choose from; they are listed. Or `cache_bytes` is
            no size, too small for any row (with the minimum), or more than there is memory.
        FileNotFoundError: Files are missing; every one of them is listed.
        CheckpointError: The files contradict themselves, the index or `config.json`.
        OSError: The kernel refused, or the asked `io` cannot run here; with errno and path.
    """

    _info: TableInfo | None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        table: str | int | None = None,
        *,
        io: Io = "auto",
        cache_bytes: int | str = 0,
        threads: int | None = None,
        advice: Advice = "auto",
        max_mapped_bytes: int | str | None = None,
    ) -> None:
        self._path = path_text(path)
        arguments = (
            *opening(table, io, threads, advice, max_mapped_bytes),
            budget("cache_bytes", cache_bytes),
        )
        try:
            self._native = _engram.Reader(self._path, *arguments)
        except Exception as error:
            complete(error, path=self._path)
            raise
        opened(self._described, self._path, self._native)

    @classmethod
    def _over(cls, native: _engram.Reader) -> FileGather:
        """The gather over a table that the native half has opened."""
        gather = cls.__new__(cls)
        gather._native = native
        gather._path = gather.files[0]
        opened(gather._described, gather._path, native)
        return gather

    @classmethod
    def from_views(cls, mapping: Mapping[str, Any], *, num_rows: Any) -> FileGather:
        """Opens a table by the views into its mapped files that a loader has handed out.

        Args:
            mapping: Tensors by name, as for `ViewLoader.add`; those of no table are ignored.
            num_rows: Rows of the table, padding rows included, or the model's configuration.

        Raises:
            Exception: As `ViewLoader`, its `add` and its `bind` do.
        """
        views = {
            name: tensor for name, tensor in mapping.items() if _engram.table_of(name) is not None
        }
        others = len(mapping) - len(views)
        return cls._over(open_views(views, others, expectation(num_rows)))

    def _described(self) -> TableInfo:
        """The table's description, made when first asked for: opening need not wait for it."""
        if self._info is None:
            with _describing:
                if self._info is None:
                    self._info = TableInfo.from_native(self._native.table())
        return self._info

    def gather(
        self,
        ids: Any,
        out: Any = None,
        *,
        pad_id: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Reads the rows of `ids`, as stored, in request order.

        Args:
            ids: Row ids of any integer dtype, shape and stride: numpy, torch (CPU), lists or any
                buffer.
            out: Where rows go. A numpy array or CPU tensor of the table's dtype and shape
                `[*ids.shape, *row_shape]`, or of uint8 and shape `[*ids.shape, row_bytes]` (planes
                of a row side by side); `Rows` for tables of several planes; or a `HostBuffer`,
                which receives plane after plane, each at a multiple of 64 bytes
                (`planes[name].offset(ids.size)`). After an exception its contents are unspecified.
            pad_id: An id that stands for a row of zeros, which is not read.
            timeout: Seconds after which to give up; rows not proven resident are then read rather
                than faulted in, so a hung device cannot hold the call.

        Returns:
            `out` where given. Else an array of shape `[*ids.shape, *row_shape]` (a tensor for torch
            ids), or `Rows` for a table of several planes.

        Raises:
            IndexError: An id outside `[0, num_rows)`, -1 included; it names id and position.
            TypeError: Ids that are no integers or live on a device; `out` of another dtype.
            ValueError: `out` of the wrong shape, not contiguous or read-only; or closed.
            TimeoutError: The timeout passed.
            OSError: A read failed, with errno, path, offset and row.
        """
        try:
            if self._native.gather(ids, out, pad_id, timeout):
                # A decode step with its buffers ready: nothing to convert.
                return out
            request, rows = self._request(ids, out, pad_id)
            _engram.gather_many([request], timeout)
        except OverflowError:
            raise out_of_range(self._described().name, pad_id, timeout) from None
        except Exception as error:
            complete(error, table=self._described().name)
            failed(error)
            raise
        return rows

    def submit(
        self,
        ids: Any,
        out: Any = None,
        *,
        pad_id: int | None = None,
        deadline: float | None = None,
    ) -> Ticket:
        """Starts a gather and returns at once; the rows arrive while the caller works.

        Args:
            ids: As for `gather`; copied, so that they may change afterwards.
            out: As for `gather`. It is written to inside `Ticket.wait` and at no other time.
            pad_id: As for `gather`.
            deadline: Seconds from now after which the ticket ends with TimeoutError. Tickets are
                served earliest deadline first, those without one last, in order of arrival. Rows
                not proven resident are then read rather than faulted in, as with a timeout.

        Returns:
            The ticket, whose `wait` returns the rows or raises what `gather` would have raised.

        Raises:
            TypeError: Ids that are no integers or live on a device; `out` of another dtype.
            ValueError: `out` of the wrong shape, not contiguous or read-only; or closed.
        """
        wanted = [(self._described().name, self, ids, out)]
        return submit(wanted, pad_id=pad_id, deadline=deadline, named=False)

    def _request(self, ids: Any, out: Any, pad_id: int | None) -> tuple[Request, Any]:
        """What the native half takes for one table, and the rows that it will fill."""
        flat, shape = int64_ids(ids, self._described())
        rows = self._allocate(shape, torch_like=is_torch(ids)) if out is None else out
        pad_id = pad_argument(pad_id)
        return (self._native, flat, self._targets(rows, shape, flat.size), pad_id), rows

    def _allocate(self, shape: tuple[int, ...], *, torch_like: bool) -> Any:
        return allocate(self.planes, shape, torch_like=torch_like)

    def _targets(self, out: Any, shape: tuple[int, ...], count: int) -> PlaneTargets:
        return targets(self.planes, out, shape, count)

    def prefetch(self, ids: Any) -> None:
        """Starts reading rows that will be wanted soon; returns at once.

        They go to the cache of rows, or to the page cache if there is no budget for one; rows that
        are there are skipped. With `io="direct"` and no budget nothing is done. A read that fails
        is counted in `stats()`; the gather that wants the row reports it.

        Args:
            ids: Row ids, as for `gather`.

        Raises:
            IndexError: An id outside `[0, num_rows)`.
            TypeError: Ids that are no integers or live on a device.
        """
        try:
            self._native.prefetch(int64_ids(ids, self._described())[0])
        except Exception as error:
            complete(error, table=self._described().name)
            raise

    def prewarm(self, max_bytes: int | str | None = None, progress: Any = None) -> int:
        """Reads the table into the page cache, sequentially, and maps it.

        Args:
            max_bytes: Stop after this many bytes of the table, written as `cache_bytes` may be;
                None for all. What memory allows, the control group's included, is the most.
            progress: Called with `(bytes_done, bytes_total)` now and then, on this thread.

        Returns:
            Bytes of the table made resident.
        """
        return self._native.prewarm(optional_budget("max_bytes", max_bytes), progress)

    def residency(self) -> Residency:
        """Asks the kernel how much of the table is in memory.

        Takes some tens of nanoseconds per page: a third of a second for 47.7 GiB.
        """
        return Residency(*self._native.residency())

    def stats(self) -> dict[str, Any]:
        """What runs, what it fell back from, and what has been done since opening.

        Returns:
            A plain dictionary. `"io"` says what was asked for, what runs and why; counters count
            calls, rows, bytes and reads (each position of a gather, unless padded, once per plane
            as `rows_resident` or as `rows_fetched`); `"seconds"` holds latency distributions of the
            phases `plan`, `copy` and `fetch` and of whole calls; `"cache"` has the budget and room
            of the cache of rows, and what it has done since opening: positions whose row was found
            (`hits`) or not (`misses`), repeats counted; distinct rows put in (`insertions`), given
            up for others (`evictions`) and not put in (`admission_refusals`), and those `waited`
            for because another call was reading them; and the bytes of the rows found, in all and
            by plane. Distinct rows read for the cache are `insertions` and `admission_refusals`.
        """
        return self._native.stats()

    def resize(self, cache_bytes: int | str) -> None:
        """Changes the budget of the cache of rows, also while other threads gather.

        Rows in it stay as far as they fit, those wanted most first. While they are moved the old
        and the new cache together take no more than the larger budget and a few unfinished pages
        (9 MB at most, where the kernel gives huge ones), and rows that are read are not kept. An
        exception from a signal handler gives up the rows not moved yet.

        Args:
            cache_bytes: As for `FileGather`; 0 gives all of it back.

        Raises:
            ValueError: As on opening; the budget is what it was then. Or closed, or called by a
                signal handler while this thread is in `resize` or `save_hot` already.
        """
        try:
            self._native.resize(budget("cache_bytes", cache_bytes))
        except Exception as error:
            complete(error, table=self._described().name)
            raise

    def save_hot(self, path: str | os.PathLike[str]) -> int:
        """Writes which rows are in the cache to a file, for `load_hot` after the next start.

        Ids alone are written, one or two bytes each, and how often each was wanted. The file
        appears whole or not at all, and only its owner may read it. While another thread changes
        the budget this waits, and the other way round.

        Args:
            path: The file; one that exists is replaced.

        Returns:
            Number of rows listed.

        Raises:
            ValueError: There is no cache of rows; or closed, or called by a signal handler while
                this thread is in `resize` or `save_hot` already.
            OSError: The file cannot be written.
        """
        try:
            return self._native.save_hot(path_text(path))
        except Exception as error:
            complete(error, table=self._described().name)
            raise

    def load_hot(self, path: str | os.PathLike[str], progress: Any = None) -> int:
        """Reads the rows that `save_hot` listed into the cache, in the order of the files.

        If the budget is too small for all, those wanted most are read. Other threads may gather
        meanwhile. An exception from `progress`, or a signal, leaves what has been read.

        Args:
            path: A file written by `save_hot` for the same table, of any budget.
            progress: Called with `(rows_done, rows_total)` now and then, on this thread.

        Returns:
            Number of listed rows in the cache afterwards.

        Raises:
            CheckpointError: A list of another table or of files of other sizes, one that is
                damaged, or no regular file; nothing is read then.
            FileNotFoundError: No such file.
            ValueError: There is no cache of rows, or none any more; or closed.
            OSError: A read failed.
        """
        try:
            return self._native.load_hot(path_text(path), progress)
        except Exception as error:
            complete(error, table=self._described().name)
            raise

    def verify(
        self, rows: int | None = 1024, *, seed: int = 0, progress: Any = None
    ) -> Verification:
        """Looks at what the files are now, and reads rows in two independent ways.

        Rows that an earlier call read are also compared with what it read. With `ENGRAM_VERIFY=1`
        in the environment every gathered row is read twice, and a difference is an OSError.

        Args:
            rows: How many rows, spread evenly over the table; None for all, 0 for the files alone.
            seed: Which rows of each equal part of the table.
            progress: Called with `(rows_done, rows_total)` now and then, on this thread.

        Returns:
            A report; `.ok` says whether anything is wrong, `.problems` what.
        """
        count = None if rows is None else whole_number("rows", rows, least=0)
        seed = whole_number("seed", seed, least=0)
        return Verification.from_native(self._native.verify(count, seed, progress))

    def reopen(self, path: str | os.PathLike[str] | None = None) -> None:
        """Serves the same table from new files, without a gap.

        Calls under way end with the files they began with, calls that begin later use the new ones,
        and none sees both. Counters begin anew, and so does the cache of rows, with the budget that
        it has. If this fails, the old files go on being served.

        Args:
            path: A checkpoint with a table of the same name, planes and encoding, whatever its
                number of rows; None for the path given before, where files may have been replaced.

        Raises:
            ValueError: The table there has rows of another layout; or closed.
            Exception: As on opening.
        """
        path = self._path if path is None else path_text(path)
        # Nobody may be about to describe the old files when the new ones are here.
        self._described()
        self._info = TableInfo.from_native(self._native.reopen(path))
        self._path = path
        opened(self._described, path, self._native)

    def close(self) -> None:
        """Closes the files once running calls and tickets have ended; later calls raise ValueError.

        Tickets in flight are served first; their rows can be waited for afterwards.
        """
        # Described now, since it cannot be once it is closed, which it may be already.
        with contextlib.suppress(ValueError):
            self._described()
        self._native.close()

    @property
    def info(self) -> TableInfo:
        """The table's description."""
        return self._described()

    @property
    def num_rows(self) -> int:
        """Rows in the table."""
        return self._described().rows

    @property
    def planes(self) -> Planes:
        """Stored regions of every row, by position and by name."""
        return self._described().planes

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row of the weight plane, in `dtype` elements."""
        return self.planes[0].row_shape

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all planes."""
        return self._described().row_bytes

    @property
    def dtype(self) -> np.dtype[Any]:
        """Numpy dtype of the weight plane."""
        return self.planes[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole table over all planes."""
        return self._described().bytes

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the files that hold rows, symlinks resolved."""
        return self._described().files

    @property
    def encoding(self) -> str:
        """How stored bytes stand for values, e.g. `"bf16"` or `"fp8_e4m3"`."""
        return self._described().encoding

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """Values per row after dequantisation."""
        return self._described().logical_shape

    @property
    def constants(self) -> dict[str, float]:
        """Table-wide numbers, e.g. `{"weight_scale": 0.000199}`."""
        return dict(self._described().constants)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._native.is_closed

    def __reduce__(self) -> Any:
        """Refuses to be pickled or copied.

        Raises:
            TypeError: Always.
        """
        raise placed(
            TypeError("a FileGather holds open files: open the path again where it is needed"),
            table=self._described().name,
        )

    def __enter__(self) -> FileGather:
        """Returns the gather itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes."""
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        size = f"{self.nbytes / 2**30:.2f} GiB" if self.nbytes >= 2**30 else f"{self.nbytes} bytes"
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        rows = f"{self.num_rows} rows x {self.row_bytes} bytes ({self.encoding})"
        return f"<engram.FileGather {self.info.name!r}: {rows}, {size} in {files}{state}>"


if hasattr(os, "register_at_fork"):
    # Calls that were running at a fork run on in the parent only.
    os.register_at_fork(after_in_child=_engram.after_fork)

# Calls that run on in daemon threads look for signals no more once the interpreter goes away.
atexit.register(_engram.at_exit)
