"""Look-ups of a table whose rows lie on several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from engram._arrays import int64_ids, is_torch
from engram._targets import allocate, row_view, targets
from engram.exchange import ShardedLookup
from engram.storage.device_rows import allocate_on, byte_targets, int64_tensor, is_integer
from engram.storage.errors import outside

if TYPE_CHECKING:
    from engram.parallel import Groups
    from engram.storage.base import Storage

__all__ = ["Exchange"]

_from_numpy = cast("Any", torch).from_numpy

_NOT_PADDING = torch.iinfo(torch.int64).min
"""Stands for an id of -1 that is no padding, which the exchange takes -1 for."""


class Exchange:
    """What a sharded storage does instead of looking rows up by itself.

    Args:
        storage: Holds this rank's rows.
        groups: Who holds the others.
        timeout: Seconds to wait for other ranks in each step.
    """

    def __init__(self, storage: Storage, groups: Groups, timeout: float | None) -> None:
        self._storage = storage
        self._sharded = ShardedLookup(
            storage.shard,
            self._read,
            storage.row_bytes,
            groups,
            lookup_ids="global",
            timeout=timeout,
        )

    def lookup(self, ids: Any, out: Any, pad_id: int | None) -> Any:
        """As `Storage.lookup`. What is wrong with `out` is said once the others have their rows."""
        storage = self._storage
        on_device = is_torch(ids) and ids.device.type != "cpu"
        # Ids that are no integers go on as they are: the exchange tells the other ranks, which
        # would wait in vain if this one raised here.
        given: Any = ids
        if is_torch(ids):
            given = int64_tensor(ids) if is_integer(ids) else ids
        else:
            try:
                flat, lengths = int64_ids(ids, storage.info)
                given = _from_numpy(flat.copy()).reshape(lengths)
            except (TypeError, IndexError):
                given = np.asarray(ids)
        if is_torch(given):
            given = _with_padding(given, pad_id)
        try:
            found = self._sharded(given)
        except IndexError as error:
            row = getattr(error, "row", 0)
            position = getattr(error, "position", 0)
            row = -1 if row == _NOT_PADDING else row
            raise outside(storage.info.name, storage.num_rows, row, position) from None
        shape = tuple(given.shape)
        flat = found.reshape(-1, storage.row_bytes)
        if on_device:
            rows = allocate_on(storage.planes, shape, ids.device) if out is None else out
            views = byte_targets(storage.planes, rows, shape, ids.device)
            for plane, view in zip(storage.planes, views, strict=True):
                start = sum(plane.before)
                view.copy_(flat[:, start : start + plane.row_bytes])
            return rows
        rows = allocate(storage.planes, shape, torch_like=is_torch(ids)) if out is None else out
        into = targets(storage.planes, rows, shape, given.numel())
        bytes_found = flat.numpy()
        for plane, target in zip(storage.planes, into, strict=True):
            start = sum(plane.before)
            view = row_view(target, len(bytes_found), plane.row_bytes)
            view[:] = bytes_found[:, start : start + plane.row_bytes]
        return rows

    def _read(self, ids: Any) -> Any:
        """Rows of global ids that this rank holds, uint8 `[ids, row_bytes]`."""
        storage = self._storage
        if ids.device.type == "cpu":
            rows = np.empty((ids.numel(), storage.row_bytes), np.uint8)
            storage._gather_bytes(ids.numpy(), rows, None)  # pyright: ignore[reportPrivateUsage]
            return _from_numpy(rows)
        out = torch.empty((ids.numel(), storage.row_bytes), dtype=torch.uint8, device=ids.device)
        storage._lookup_on_device(ids, out, None)  # pyright: ignore[reportPrivateUsage]
        return out


def _with_padding(ids: Any, pad_id: int | None) -> Any:
    """Ids in which -1, and nothing else, marks padding."""
    if not is_integer(ids) or pad_id == -1:
        return ids
    marked = ids.masked_fill(ids == -1, _NOT_PADDING)
    return marked if pad_id is None else marked.masked_fill(ids == pad_id, -1)
