"""Tables on a torch device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from engram import _engram
from engram._targets import bytes_of, row_view
from engram.buffer import HostBuffer
from engram.gather import FileGather
from engram.storage import preflight
from engram.storage.base import Progress, Storage, no_bytes
from engram.storage.device_rows import allocate_on, byte_targets, local_ids
from engram.storage.hosted import stage_progress
from engram.storage.loading import Chunk, chunks_of_views, require_same

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from engram._targets import PlaneTargets
    from engram.parallel import Shard
    from engram.table import TableInfo

__all__ = ["DeviceStorage"]

STAGING_BYTES = 64 << 20
"""Bytes of host memory that rows pass through on their way to a device."""

_cuda: Any = torch.cuda
_from_numpy = cast("Any", torch).from_numpy


class DeviceStorage(Storage):
    """Rows as a uint8 tensor on a device, plane after plane; look-ups are `index_select`.

    Rows are selected as bytes: many devices, and torch on the CPU, cannot index FP8.

    Args:
        info: The table.
        shard: The part that this rank holds.
        device: The torch device.
    """

    placement = "device"

    def __init__(
        self,
        info: TableInfo,
        shard: Shard | None = None,
        *,
        device: Any,
    ) -> None:
        super().__init__(info, shard)
        self._device: Any = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", _cuda.current_device())
        size = self.planes.nbytes(self.shard.num_local_rows)
        self._needs = preflight.Needs(info.name, self.placement, size, 1)
        self._memory: Any = None
        self._rows: list[Any] = []
        self._require_memory()

    def _require_memory(self) -> None:
        if self._device.type == "cuda":
            free, total = _cuda.mem_get_info(self._device)
            preflight.require_device_memory(self._needs, free, total)
        else:
            preflight.require_host_memory(self._needs)

    def _load(self, views: Any, progress: Progress | None) -> None:
        self._require_memory()
        memory = torch.empty(self._needs.own, dtype=torch.uint8, device=self._device)
        held = self.shard.num_local_rows
        rows = [
            memory[plane.offset(held) :][: held * plane.row_bytes].view(held, plane.row_bytes)
            for plane in self.planes
        ]
        step = max(1, min(held, STAGING_BYTES // self.row_bytes))
        staging = HostBuffer(max(1, self.planes.nbytes(step)))
        if self._device.type == "cuda":
            staging.pin()
        if isinstance(views, FileGather):
            require_same(views.info, self.info)
            chunks = self._chunks_of_files(views, staging, step)
        else:
            chunks = _through(staging, chunks_of_views(views, self.info, self.shard))
        report = stage_progress(progress, "loading rows")
        done = 0
        try:
            for plane, first, part in chunks:
                # Waits for the copy: the staging memory is used again for the next.
                rows[plane][first : first + len(part)].copy_(_from_numpy(part))
                done += part.size
                if report is not None:
                    report(done, held * self.row_bytes)
        finally:
            staging.unpin()
        self._memory, self._rows = memory, rows

    def _chunks_of_files(
        self, gather: FileGather, staging: HostBuffer, step: int
    ) -> Iterator[Chunk]:
        """The shard's rows, `step` at a time, in memory that is used again for the next."""
        held = self.shard.num_local_rows
        view = bytes_of(staging)
        for first in range(0, held, step):
            count = min(step, held - first)
            offsets = [plane.offset(count) for plane in self.planes]
            _engram.load_rows(
                gather._native,  # pyright: ignore[reportPrivateUsage]
                self.shard.first_row + first,
                count,
                [(staging, offset) for offset in offsets],
                None,
            )
            for number, (plane, offset) in enumerate(zip(self.planes, offsets, strict=True)):
                part = view[offset : offset + count * plane.row_bytes]
                yield Chunk(number, first, part.reshape(count, plane.row_bytes))

    def _gather(self, ids: NDArray[np.int64], into: PlaneTargets, pad_id: int | None) -> None:
        local, may_pad = local_ids(
            _from_numpy(_writable(ids)).to(self._device), self.info, self.shard, pad_id
        )
        for stored, target in zip(self._held(), into, strict=True):
            found = _select(stored, local, may_pad).cpu().numpy()
            row_view(target, ids.size, stored.shape[1])[:] = found

    def _lookup_on_device(self, ids: Any, out: Any, pad_id: int | None) -> Any:
        held = self._held()
        shape = tuple(ids.shape)
        rows = allocate_on(self.planes, shape, ids.device) if out is None else out
        views = byte_targets(self.planes, rows, shape, ids.device)
        local, may_pad = local_ids(ids, self.info, self.shard, pad_id)
        local = local.to(self._device)
        for stored, view in zip(held, views, strict=True):
            if not may_pad and view.is_contiguous() and view.device == stored.device:
                torch.index_select(stored, 0, local, out=view)
            else:
                view.copy_(_select(stored, local, may_pad))
        return rows

    def _held(self) -> list[Any]:
        rows = self._rows
        if not rows:
            self._require_open()
        return rows

    def _release(self) -> None:
        self._memory, self._rows = None, []

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes held, all of them `device`."""
        return {**no_bytes(), "device": 0 if self._memory is None else self._memory.numel()}

    def stats(self) -> dict[str, Any]:
        """As `Storage.stats`; adds `device`."""
        return {**super().stats(), "device": str(self._device)}


def _through(staging: HostBuffer, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """The same rows, some at a time, in staging memory.

    A driver that reads a private mapping of a file may copy its pages, which would put the table
    into memory a second time.
    """
    view = bytes_of(staging)
    for plane, first, rows in chunks:
        row_bytes = rows.shape[1]
        step = len(view) // row_bytes
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            staged = view[: part.size].reshape(part.shape)
            staged[:] = part
            yield Chunk(plane, first + start, staged)


def _select(stored: Any, local: Any, may_pad: bool) -> Any:  # noqa: FBT001
    """Rows of local ids, zeros where an id is -1."""
    if not may_pad:
        return torch.index_select(stored, 0, local)
    if stored.shape[0] == 0:
        return stored.new_zeros((local.numel(), stored.shape[1]))
    found = torch.index_select(stored, 0, local.clamp(min=0))
    return found.masked_fill_((local < 0).unsqueeze(1), 0)


def _writable(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Torch warns about memory that it may not write to."""
    return ids if ids.flags.writeable else ids.copy()
