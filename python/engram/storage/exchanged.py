"""Look-ups of a table whose rows come from other ranks: their owners, or a node's reader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from engram._arguments import pad_argument
from engram._arrays import int64_ids, is_torch
from engram._errors import placed
from engram._targets import allocate, row_view, targets
from engram.exchange import ReadOncePerNode, ShardedLookup
from engram.storage.device_rows import allocate_on, byte_targets, int64_tensor, is_integer
from engram.storage.errors import outside

if TYPE_CHECKING:
    from engram.parallel import Groups
    from engram.storage.base import Storage

__all__ = ["Exchange", "HandOver", "RowSource"]

_from_numpy = cast("Any", torch).from_numpy

_LIMITS = torch.iinfo(torch.int64)
_NOT_PADDING = _LIMITS.min
"""Stands for an id of -1 that is no padding, which the exchange takes -1 for."""


class RowSource(ABC):
    """What a storage does instead of looking rows up by itself.

    Args:
        storage: Holds, or opens, this rank's rows.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @abstractmethod
    def lookup(self, ids: Any, out: Any, pad_id: int | None) -> Any:
        """As `Storage.lookup`. What is wrong with `out` is said once the others have their rows."""

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Steps so far, and the rows and bytes that this rank read for them."""

    def _accepted(self, ids: Any, pad_id: int | None) -> Any:
        """Ids as an int64 tensor of the same shape.

        Raises:
            TypeError: Ids or `pad_id` are no integers.
            IndexError: An id is beyond int64.
            OverflowError: `pad_id` is beyond int64.
        """
        pad_id = pad_argument(pad_id)
        if pad_id is not None and not _LIMITS.min <= pad_id <= _LIMITS.max:
            raise OverflowError(f"pad_id={pad_id}")
        if _on_device(ids):
            if not is_integer(ids):
                raise placed(
                    TypeError(f"ids must be integers, not {str(ids.dtype).removeprefix('torch.')}")
                )
            return int64_tensor(ids)
        flat, lengths = int64_ids(ids, self._storage.info)
        return _from_numpy(flat.copy()).reshape(lengths)

    def _outside(self, ids: Any, position: int) -> IndexError:
        storage = self._storage
        row = int(ids.reshape(-1)[position])
        return outside(storage.info.name, storage.num_rows, row, position)

    def _delivered(self, found: Any, ids: Any, shape: tuple[int, ...], out: Any) -> Any:
        """Rows where the caller wants them, from uint8 `[*shape, row_bytes]`."""
        storage = self._storage
        flat = found.reshape(-1, storage.row_bytes)
        if _on_device(ids):
            rows = allocate_on(storage.planes, shape, ids.device) if out is None else out
            views = byte_targets(storage.planes, rows, shape, ids.device)
            for plane, view in zip(storage.planes, views, strict=True):
                start = sum(plane.before)
                view.copy_(flat[:, start : start + plane.row_bytes])
            return rows
        rows = allocate(storage.planes, shape, torch_like=is_torch(ids)) if out is None else out
        into = targets(storage.planes, rows, shape, len(flat))
        bytes_found = flat.numpy()
        for plane, target in zip(storage.planes, into, strict=True):
            start = sum(plane.before)
            view = row_view(target, len(bytes_found), plane.row_bytes)
            view[:] = bytes_found[:, start : start + plane.row_bytes]
        return rows

    def _read(self, ids: Any, pad_id: int | None = None) -> Any:
        """Rows that this rank reads itself, uint8 `[ids, row_bytes]`."""
        storage = self._storage
        if ids.device.type == "cpu":
            rows = np.empty((ids.numel(), storage.row_bytes), np.uint8)
            storage._gather_bytes(ids.numpy(), rows, pad_id)  # pyright: ignore[reportPrivateUsage]
            return _from_numpy(rows)
        out = torch.empty((ids.numel(), storage.row_bytes), dtype=torch.uint8, device=ids.device)
        storage._lookup_on_device(ids, out, pad_id)  # pyright: ignore[reportPrivateUsage]
        return out


class Exchange(RowSource):
    """Rows from the ranks that hold them.

    Args:
        storage: Holds this rank's rows.
        groups: Who holds the others.
        timeout: Seconds to wait for other ranks in each step.
    """

    def __init__(self, storage: Storage, groups: Groups, timeout: float | None) -> None:
        super().__init__(storage)
        self._sharded = ShardedLookup(
            storage.shard,
            self._read,
            storage.row_bytes,
            groups,
            lookup_ids="global",
            timeout=timeout,
        )

    def lookup(self, ids: Any, out: Any, pad_id: int | None) -> Any:
        """As `RowSource.lookup`."""
        try:
            given = self._accepted(ids, pad_id)
        except Exception as error:
            # Whatever is wrong: the other ranks would wait in vain if this one did not take part.
            self._sharded.refuse(error, ids.device if _on_device(ids) else "cpu")
        try:
            found = self._sharded(_with_padding(given, pad_id))
        except IndexError as error:
            raise self._outside(given, getattr(error, "position", 0)) from None
        return self._delivered(found, ids, tuple(given.shape), out)

    def stats(self) -> dict[str, int]:
        """As `RowSource.stats`."""
        return self._sharded.stats()


class HandOver(RowSource):
    """Rows that one rank of a machine reads for all, which look the same ids up.

    Args:
        storage: Opens the table; only the reader's reads rows.
        groups: `groups.node` are the ranks of this machine.
        timeout: Seconds to wait for other ranks in each step.
    """

    def __init__(self, storage: Storage, groups: Groups, timeout: float | None) -> None:
        super().__init__(storage)
        self._pad_id: int | None = None
        self._reader = ReadOncePerNode(
            lambda ids: self._read(ids, self._pad_id), storage.row_bytes, groups, timeout=timeout
        )

    @property
    def is_reader(self) -> bool:
        """Whether this rank reads."""
        return self._reader.is_reader

    def lookup(self, ids: Any, out: Any, pad_id: int | None) -> Any:
        """As `RowSource.lookup`. Wrong ids are wrong on every rank, so none begins the step."""
        given = self._accepted(ids, pad_id)
        flat = given.reshape(-1)
        wrong = (flat < 0) | (flat >= self._storage.num_rows)
        if pad_id is not None:
            wrong &= flat != pad_id
        if bool(wrong.any()):
            raise self._outside(given, int(wrong.nonzero()[0, 0]))
        self._pad_id = pad_id
        return self._delivered(self._reader(given), ids, tuple(given.shape), out)

    def stats(self) -> dict[str, int]:
        """As `RowSource.stats`."""
        return self._reader.stats()


def _on_device(ids: Any) -> bool:
    return is_torch(ids) and ids.device.type != "cpu"


def _with_padding(ids: Any, pad_id: int | None) -> Any:
    """Ids in which -1, and nothing else, marks padding."""
    if pad_id == -1:
        return ids
    marked = ids.masked_fill(ids == -1, _NOT_PADDING)
    return marked if pad_id is None else marked.masked_fill(ids == pad_id, -1)
