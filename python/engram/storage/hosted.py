"""Tables in host memory: private to this process, or shared by the replicas of a machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from engram import _engram
from engram._targets import bytes_of
from engram.buffer import HostBuffer
from engram.gather import FileGather
from engram.pagecache import drop_cache
from engram.storage import hugepages, preflight
from engram.storage.base import Progress, Storage, no_bytes
from engram.storage.loading import chunks_of_views, require_same
from engram.storage.numa import Numa, choose_node, place

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from engram._targets import PlaneTargets
    from engram.parallel import Shard
    from engram.table import TableInfo

__all__ = [
    "HostDeviceStorage",
    "HostedStorage",
    "PinnedStorage",
    "fill",
    "stage_progress",
    "wait_for",
]


class HostedStorage(Storage):
    """Rows in one `HostBuffer`, plane after plane; devices read them in place.

    Args:
        info: The table.
        shard: The part that this rank holds.
        device: The torch device that will look rows up, or None for the host alone.
        numa: As for `open_storage`.
    """

    def __init__(
        self,
        info: TableInfo,
        shard: Shard | None = None,
        *,
        device: Any = None,
        numa: Numa = "auto",
    ) -> None:
        super().__init__(info, shard)
        self._device = device
        self._numa: Numa = numa
        self._buffer: HostBuffer | None = None
        self._table: _engram.Hosted | None = None
        self._device_address: int | None = None

    @property
    def _local_bytes(self) -> int:
        """Bytes of this rank's rows, planes aligned."""
        return self.planes.nbytes(self.shard.num_local_rows)

    def _hold(self, buffer: HostBuffer, progress: Progress | None) -> None:
        """Serves rows from `buffer` from now on."""
        rows = self.shard.num_local_rows
        if self._device is not None and self._device.type == "cuda":
            buffer.pin(stage_progress(progress, "registering host memory"))
            try:
                self._device_address = _address_on(self._device, buffer)
            except BaseException:
                buffer.unpin()
                raise
        self._table = _engram.Hosted(
            buffer,
            self.info.name,
            self.num_rows,
            self.shard.first_row,
            rows,
            [(plane.offset(rows), plane.row_bytes) for plane in self.planes],
        )
        self._buffer = buffer

    def _gather(self, ids: NDArray[np.int64], into: PlaneTargets, pad_id: int | None) -> None:
        self._held().gather_planes(ids, into, pad_id)

    def _gather_bytes(
        self, ids: NDArray[np.int64], out: NDArray[np.uint8], pad_id: int | None
    ) -> None:
        self._held().gather(ids, out, pad_id)

    def _held(self) -> _engram.Hosted:
        table = self._table
        if table is None:  # Closed between the check and here.
            self._require_open()
            raise AssertionError
        return table

    def _lookup_on_device(self, ids: Any, out: Any, pad_id: int | None) -> Any:
        from engram.storage.device_rows import allocate_on, byte_targets, local_ids

        buffer = self._buffer
        if buffer is None:
            self._require_open()
            raise AssertionError
        if not buffer.is_pinned:
            # Opened for the host alone: no device can read this memory.
            return self._lookup_through_host(ids, out, pad_id)
        from engram.storage.kernel import copy_rows

        shape = tuple(ids.shape)
        rows = allocate_on(self.planes, shape, ids.device) if out is None else out
        views = byte_targets(self.planes, rows, shape, ids.device)
        local, _ = local_ids(ids, self.info, self.shard, pad_id)
        held = self.shard.num_local_rows
        address = buffer.address if self._device_address is None else self._device_address
        for plane, view in zip(self.planes, views, strict=True):
            copy_rows(address + plane.offset(held), plane.row_bytes, local, view)
        return rows

    def _release(self) -> None:
        buffer, self._buffer, self._table = self._buffer, None, None
        if buffer is not None and buffer.is_pinned:
            wait_for(self._device)
            buffer.unpin()

    def stats(self) -> dict[str, Any]:
        """As `Storage.stats`; adds `registered`: whether CUDA knows the memory."""
        registered = self._buffer is not None and self._buffer.is_pinned
        return {**super().stats(), "registered": registered}


class PinnedStorage(HostedStorage):
    """Rows in private memory of exactly the size they need, to the page.

    Args:
        info: The table.
        shard: The part that this rank holds.
        device: As for `HostedStorage`.
        numa: As for `open_storage`.
        huge_pages: Whether to ask for huge pages.
        ranks_here: Ranks of this machine that hold as much, for the check of its memory.
    """

    placement = "pinned"

    def __init__(
        self,
        info: TableInfo,
        shard: Shard | None = None,
        *,
        device: Any = None,
        numa: Numa = "auto",
        huge_pages: bool = False,
        ranks_here: int = 1,
    ) -> None:
        super().__init__(info, shard, device=device, numa=numa)
        self._huge_pages = huge_pages
        self._needs = preflight.Needs(info.name, self.placement, self._local_bytes, ranks_here)
        self._huge_share: float | None = None
        self._preflight()

    def _preflight(self) -> None:
        """Refuses what cannot fit before anything is allocated."""
        preflight.require_host_memory(self._needs)

    def _load(self, views: Any, progress: Progress | None) -> None:
        preflight.require_host_memory(self._needs)
        buffer = HostBuffer(self._local_bytes, self._huge_pages)
        node = choose_node(self._numa, self._device)
        place(buffer, [] if node is None else [node])
        refused = None
        if self._huge_pages:
            if isinstance(views, FileGather):
                # What the page cache holds of these files is in the way of huge pages, and will
                # be read once more at most.
                drop_cache(views.files)
            threads = len(os.sched_getaffinity(0))
            refused = hugepages.prefault(
                buffer, threads, stage_progress(progress, "reserving huge pages")
            )
        fill(buffer, views, self.info, self.shard, progress)
        if self._huge_pages:
            self._huge_share = hugepages.report(buffer, refused, hugepages.collapse(buffer))
        self._hold(buffer, progress)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes held, all of them `pinned`."""
        return {**no_bytes(), "pinned": 0 if self._buffer is None else self._buffer.capacity}

    def stats(self) -> dict[str, Any]:
        """As `HostedStorage.stats`; adds `huge_page_share`, None where none were asked for."""
        return {**super().stats(), "huge_page_share": self._huge_share}


class HostDeviceStorage(PinnedStorage):
    """What `cpu_offload=False` means where the host itself is the device: its memory, unregistered.

    Args:
        info: The table.
        shard: The part that this rank holds.
        numa: As for `open_storage`.
        ranks_here: As for `PinnedStorage`.
    """

    placement = "device"

    def __init__(
        self,
        info: TableInfo,
        shard: Shard | None = None,
        *,
        numa: Numa = "auto",
        ranks_here: int = 1,
    ) -> None:
        super().__init__(info, shard, numa=numa, ranks_here=ranks_here)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes held, all of them `device`."""
        return {**no_bytes(), "device": 0 if self._buffer is None else self._buffer.capacity}

    def stats(self) -> dict[str, Any]:
        """As `HostedStorage.stats`; adds `device`."""
        return {**super().stats(), "device": "cpu"}


def fill(
    buffer: HostBuffer, views: Any, info: TableInfo, shard: Shard, progress: Progress | None
) -> None:
    """Puts the shard's rows into `buffer`, plane after plane, straight from where they are.

    Raises:
        Exception: As `Storage.load` does.
    """
    rows = shard.num_local_rows
    offsets = [plane.offset(rows) for plane in info.planes]
    report = stage_progress(progress, "loading rows")
    if isinstance(views, FileGather):
        require_same(views.info, info)
        _engram.load_rows(
            views._native,  # pyright: ignore[reportPrivateUsage]
            shard.first_row,
            rows,
            [(buffer, offset) for offset in offsets],
            report,
        )
        return
    memory = bytes_of(buffer) if rows else None
    done = 0
    for plane, first, part in chunks_of_views(views, info, shard):
        row_bytes = info.planes[plane].row_bytes
        start = offsets[plane] + first * row_bytes
        if memory is not None:
            memory[start : start + part.size].reshape(part.shape)[:] = part
        done += part.size
        if report is not None:
            report(done, rows * info.row_bytes)


def _address_on(device: Any, buffer: HostBuffer) -> int:
    """Where a CUDA device finds pinned memory."""
    import torch

    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return buffer.device_address()
    with cuda.device(device):
        return buffer.device_address()


def wait_for(device: Any) -> None:
    """Waits until a CUDA device has finished with memory that is about to go."""
    import torch

    cuda: Any = torch.cuda
    if cuda.is_initialized():
        cuda.synchronize(device)


def stage_progress(progress: Progress | None, stage: str) -> Callable[[int, int], Any] | None:
    """A progress callback for one stage."""
    return None if progress is None else lambda done, total: progress(stage, done, total)
