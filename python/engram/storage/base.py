"""What every place a table can live has in common: the look-up, its errors, loading once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from engram._arguments import pad_argument
from engram._arrays import INT64, UINT8, int64_ids, is_torch
from engram._errors import complete, placed
from engram._locks import ForkedLock
from engram._targets import PlaneTargets, allocate, targets
from engram.parallel import Shard
from engram.storage.progress_bar import bar

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from numpy.typing import NDArray

    from engram.storage.exchanged import RowSource
    from engram.table import Planes, TableInfo

__all__ = ["Progress", "Storage"]

Progress = Callable[[str, int, int], Any]
"""Called with what is being done, bytes done and bytes in all."""


class Storage(ABC):
    """A table, wherever it lives. Made by [`open_storage`][engram.storage.open_storage].

    Look-ups may be made from any thread, except where rows are exchanged with other ranks.

    Attributes:
        info: The table's description.
        shard: The part of it that this rank holds.
        fallbacks: What could not be had as configured, and why.
    """

    placement: str
    """Where the rows are: `"device"`, `"pinned"`, `"shared"`, `"file"`, `"dummy"` or `"absent"`."""

    def __init__(self, info: TableInfo, shard: Shard | None = None) -> None:
        self.info = info
        self.shard = Shard.of(info.rows, 0, 1) if shard is None else shard
        self.fallbacks: list[str] = []
        self._exchange: RowSource | None = None
        self._loading = ForkedLock()
        self._loaded = False
        self._closed = False

    def lookup(self, ids: Any, out: Any = None, *, pad_id: int | None = None) -> Any:
        """The rows of `ids`, as stored, in request order; they come back where the ids are.

        Where the table is sharded and `open_storage` was given process groups, rows of other ranks
        are fetched from them, and with `read_once_per_node` those of files from the rank that reads
        them: every rank must then call, also with no ids, and -1 counts as padding only if `pad_id`
        says so. Without groups, rows that other ranks hold come back as
        zero bytes, to be summed as integers.

        Args:
            ids: Row ids of any integer dtype and shape: NumPy, lists, any buffer, or torch on any
                device.
            out: Where rows go, as for `FileGather.gather`; for ids on a device a tensor there (or
                `Rows` of such), of the table's dtype or of uint8.
            pad_id: An id that stands for a row of zeros.

        Returns:
            `out` where given. Else an array or tensor of shape `[*ids.shape, *row_shape]`, or
            `Rows` for a table of several planes.

        Raises:
            IndexError: An id outside `[0, num_rows)`, -1 included; it names id and position. Ids on
                a device are checked there, which waits for it; in a graph capture they are not, and
                ids outside the table give rows of zeros.
            TypeError: Ids that are no integers; `out` of another dtype or on another device.
            ValueError: `out` of the wrong shape, not contiguous or read-only; or closed.
            RuntimeError: No rows have been loaded.
            OSError: A read failed, with errno, path, offset and row.
        """
        if not self._loaded:
            self._require_open()
        try:
            exchange = self._exchange
            if exchange is not None:
                return exchange.lookup(ids, out, pad_id)
            if pad_id is not None:
                pad_id = pad_argument(pad_id)
            if is_torch(ids) and ids.device.type != "cpu":
                return self._lookup_on_device(ids, out, pad_id)
            if (
                type(out) is np.ndarray
                and type(ids) is np.ndarray
                and out.dtype is UINT8
                and ids.dtype is INT64
                and ids.flags.c_contiguous
                and ids.ndim
            ):
                # A decode step with its buffers ready: nothing to convert, the native half checks.
                self._gather_bytes(ids, out, pad_id)
                return out
            flat, shape = int64_ids(ids, self.info)
            rows = allocate(self.planes, shape, torch_like=is_torch(ids)) if out is None else out
            self._gather(flat, targets(self.planes, rows, shape, flat.size), pad_id)
        except OverflowError:
            raise placed(
                ValueError(f"pad_id={pad_id!r} is out of range: a pad_id has 64 bits"),
                table=self.info.name,
            ) from None
        except Exception as error:
            complete(error, table=self.info.name)
            raise
        return rows

    def gather(self, ids: Any, out: Any = None, *, pad_id: int | None = None) -> Any:
        """The same as `lookup`, so that a storage may stand wherever a `FileGather` may."""
        return self.lookup(ids, out, pad_id=pad_id)

    @abstractmethod
    def _gather(self, ids: NDArray[np.int64], into: PlaneTargets, pad_id: int | None) -> None:
        """Puts the rows of `ids`, flat and on the host, where `into` says."""

    def _gather_bytes(
        self, ids: NDArray[np.int64], out: NDArray[np.uint8], pad_id: int | None
    ) -> None:
        """As `_gather`, into uint8 `[*ids.shape, row_bytes]`, planes side by side."""
        self._gather(ids.reshape(-1), targets(self.planes, out, ids.shape, ids.size), pad_id)

    @abstractmethod
    def _lookup_on_device(self, ids: Any, out: Any, pad_id: int | None) -> Any:
        """As `lookup`, for ids that lie on an accelerator."""

    def _lookup_through_host(self, ids: Any, out: Any, pad_id: int | None) -> Any:
        """Gathers on the host, which has to wait for the ids, and copies the rows over."""
        from engram.storage.device_rows import allocate_on, byte_targets

        shape = tuple(ids.shape)
        rows = allocate_on(self.planes, shape, ids.device) if out is None else out
        views = byte_targets(self.planes, rows, shape, ids.device)
        flat, _ = int64_ids(ids.detach().cpu(), self.info)
        found = allocate(self.planes, flat.shape, torch_like=True)
        self._gather(flat, targets(self.planes, found, flat.shape, flat.size), pad_id)
        parts = byte_targets(self.planes, found, flat.shape, ids.new_empty(0).cpu().device)
        for part, view in zip(parts, views, strict=True):
            view.copy_(part)
        return rows

    def load(self, views: Any, progress: Progress | None = None) -> None:
        """Loads the table's rows, once.

        Args:
            views: Where rows come from: tensors by name as a loader hands them out (a mapping, or
                pairs of name and tensor, used one at a time), a `ViewLoader`, or a `FileGather`.
                Tensors of other tables are ignored. For the file storage, views into mapped files.
            progress: Called with what is being done, bytes done and bytes in all; None draws a bar
                for a gibibyte and more, if the error stream is a terminal.

        Raises:
            RuntimeError: The table was loaded before: weights are loaded once.
            CheckpointError: Pieces are missing, or do not have the rows and columns they should.
            ValueError: Closed; or a piece comes twice, or (for the file storage) is not backed by
                a file.
            TypeError: A piece has another dtype.
            MemoryError: There is not enough memory; nothing was allocated.
        """
        with self._loading:
            if self._closed:
                raise placed(ValueError("this storage is closed; open a new one"))
            if self._loaded:
                raise placed(
                    RuntimeError(
                        f"table {self.info.name!r} is loaded already; weights are loaded once. "
                        "Open a new storage to serve others"
                    )
                )
            size = self.shard.num_local_rows * self.row_bytes
            try:
                self._load(views, bar(size) if progress is None else progress)
            except Exception as error:
                complete(error, table=self.info.name)
                raise
            self._loaded = True

    @abstractmethod
    def _load(self, views: Any, progress: Progress | None) -> None:
        """Does what `load` says, for a table that is not loaded."""

    def close(self) -> None:
        """Gives the memory or files back; later look-ups raise ValueError.

        Memory lives on until look-ups that are running have ended. Look-ups on a device must have
        been waited for.
        """
        with self._loading:
            if not self._closed:
                self._closed = True
                self._loaded = False
                self._exchange = None
                self._release()

    @abstractmethod
    def _release(self) -> None:
        """Gives back what `_load` took."""

    @property
    @abstractmethod
    def nbytes(self) -> dict[str, int]:
        """Bytes this rank holds, by kind: `device`, `pinned`, `shared` and `mapped`.

        `pinned` is private host memory, registered with CUDA where there is CUDA; `shared` is
        counted by every rank that maps it; `mapped` is address space backed by files.
        """

    def stats(self) -> dict[str, Any]:
        """Where the table lives, what it takes, and what could not be had as configured.

        Returns:
            A plain dictionary: `placement`, `nbytes`, `rows` held here, `fallbacks`, and what the
            placement adds.
        """
        return {
            "placement": self.placement,
            "nbytes": self.nbytes,
            "rows": self.shard.num_local_rows,
            "first_row": self.shard.first_row,
            "loaded": self._loaded,
            "fallbacks": list(self.fallbacks),
        }

    def _require_open(self) -> None:
        if self._closed:
            raise placed(ValueError("this storage is closed; open a new one"))
        raise placed(
            RuntimeError(f"no rows of table {self.info.name!r} have been loaded; call load(views)")
        )

    def _share_rows(self, exchange: RowSource) -> None:
        """From now on look-ups fetch rows from other ranks."""
        self._exchange = exchange

    @property
    def num_rows(self) -> int:
        """Rows in the whole table."""
        return self.info.rows

    @property
    def planes(self) -> Planes:
        """Stored regions of every row, by position and by name."""
        return self.info.planes

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row of the weight plane, in `dtype` elements."""
        return self.planes[0].row_shape

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all planes."""
        return self.info.row_bytes

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy dtype of the weight plane."""
        return self.planes[0].dtype

    @property
    def encoding(self) -> str:
        """How stored bytes stand for values, e.g. `"bf16"` or `"fp8_e4m3"`."""
        return self.info.encoding

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """Values per row after dequantisation."""
        return self.info.logical_shape

    @property
    def constants(self) -> Mapping[str, float]:
        """Table-wide numbers, e.g. `{"weight_scale": 0.000199}`."""
        return dict(self.info.constants)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def __enter__(self) -> Self:
        """Returns the storage itself."""
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
        state = "closed" if self._closed else "" if self._loaded else "not loaded"
        held = f"rows {self.shard.first_row} to {self.shard.stop_row} of {self.num_rows}"
        return (
            f"<engram storage {self.placement!r} of {self.info.name!r}: {held}, "
            f"{self.row_bytes} bytes each{', ' * bool(state)}{state}>"
        )


def no_bytes() -> dict[str, int]:
    """Nothing of any kind."""
    return {"device": 0, "pinned": 0, "shared": 0, "mapped": 0}
