"""Tables that stay in the checkpoint's files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engram import _engram
from engram._arrays import int64_ids
from engram._errors import placed
from engram._locks import ForkedLock
from engram._targets import targets
from engram.buffer import HostBuffer
from engram.gather import FileGather
from engram.storage.base import Progress, Storage, no_bytes
from engram.storage.hosted import wait_for
from engram.storage.loading import bound_gather, require_same

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from engram._targets import PlaneTargets
    from engram.parallel import Groups
    from engram.table import TableInfo

__all__ = ["FileStorage"]


class FileStorage(Storage):
    """Rows gathered from files when they are wanted; the page cache is shared by all ranks.

    Args:
        info: The table.
        device: The torch device that rows are staged for, or None.
        read_once_per_node: Whether one rank of `groups.node` reads for all of them, which look the
            same ids up, and hands the rows over.
        groups: Who they are.
        timeout: Seconds to wait for other ranks in each look-up.

    Raises:
        ValueError: Rows are to be handed over, but the groups are not known.
    """

    placement = "file"

    def __init__(
        self,
        info: TableInfo,
        *,
        device: Any = None,
        read_once_per_node: bool = False,
        groups: Groups | None = None,
        timeout: float | None = 300.0,
    ) -> None:
        super().__init__(info)
        self._device = device
        self._source: FileGather | None = None
        self._owned = False
        self._staging: HostBuffer | None = None
        self._copied: Any = None
        self._one_at_a_time = ForkedLock()
        if read_once_per_node:
            self._read_once(groups, timeout)

    def _read_once(self, groups: Groups | None, timeout: float | None) -> None:
        if groups is None:
            raise placed(
                ValueError(
                    "read_once_per_node=True needs groups: the ranks of this machine hand rows "
                    "over through Groups.node"
                ),
                table=self.info.name,
            )
        if groups.node is None:
            # The only rank of its replica on this machine, or groups made by hand.
            self.fallbacks.append(
                "read_once_per_node: groups.node is None, so this rank reads its rows itself"
            )
            return
        from engram.storage.exchanged import HandOver

        self._share_rows(HandOver(self, groups, timeout))

    @property
    def source(self) -> FileGather:
        """The open files."""
        source = self._source
        if source is None:
            self._require_open()
            raise AssertionError
        return source

    def _load(self, views: Any, progress: Progress | None) -> None:
        self._owned = not isinstance(views, FileGather)
        self._source = bound_gather(views, self.info)
        require_same(self._source.info, self.info)

    def own(self) -> None:
        """Closes the files with the storage, which opened them itself."""
        self._owned = True

    def _gather(self, ids: NDArray[np.int64], into: PlaneTargets, pad_id: int | None) -> None:
        native = self.source._native  # pyright: ignore[reportPrivateUsage]
        _engram.gather_many([(native, ids, into, pad_id)])

    def _gather_bytes(
        self, ids: NDArray[np.int64], out: NDArray[np.uint8], pad_id: int | None
    ) -> None:
        self.source.gather(ids, out, pad_id=pad_id)

    def _lookup_on_device(self, ids: Any, out: Any, pad_id: int | None) -> Any:
        """Gathers on the host, which has to wait for the ids, and copies the rows over.

        A server that knows its tokens on the host spares the wait with `engram.Stage`.
        """
        import torch

        from engram.storage.device_rows import allocate_on, byte_targets

        cuda: Any = torch.cuda
        shape = tuple(ids.shape)
        rows = allocate_on(self.planes, shape, ids.device) if out is None else out
        views = byte_targets(self.planes, rows, shape, ids.device)
        flat, _ = int64_ids(ids.detach().cpu(), self.info)
        on_cuda = ids.device.type == "cuda"
        with self._one_at_a_time:
            if self._copied is not None:
                # The rows of the last call may still be on their way out of the staging memory.
                self._copied.synchronize()
            staging = self._staging_for(flat.size, pinned=on_cuda)
            self._gather(flat, targets(self.planes, staging, flat.shape, flat.size), pad_id)
            memory = torch.frombuffer(staging, dtype=torch.uint8)
            for plane, view in zip(self.planes, views, strict=True):
                start = plane.offset(flat.size)
                part = memory[start : start + flat.size * plane.row_bytes]
                view.copy_(part.reshape(view.shape), non_blocking=True)
            if on_cuda:
                self._copied = cuda.current_stream(ids.device).record_event()
        return rows

    def _staging_for(self, count: int, *, pinned: bool) -> HostBuffer:
        needed = max(1, self.planes.nbytes(count))
        staging = self._staging
        if staging is None or staging.nbytes < needed:
            # Twice the first size, so that slowly growing steps do not allocate every time.
            staging = HostBuffer(needed if staging is None else 2 * needed)
            if pinned:
                staging.pin()
            self._staging = staging
        return staging

    def _release(self) -> None:
        source, self._source = self._source, None
        staging, self._staging, self._copied = self._staging, None, None
        if staging is not None and staging.is_pinned:
            wait_for(self._device)
            staging.unpin()
        if source is not None and self._owned:
            source.close()

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the table in the files as `mapped`, and of staging memory as `pinned`."""
        return {
            **no_bytes(),
            "mapped": 0 if self._source is None else self._source.nbytes,
            "pinned": 0 if self._staging is None else self._staging.nbytes,
        }

    def stats(self) -> dict[str, Any]:
        """As `Storage.stats`; adds the counters of the open files and of rows handed over.

        They are `gather`, and `read_once_per_node`: None where every rank reads for itself.
        """
        counters = None if self._source is None else self._source.stats()
        handed = None if self._exchange is None else self._exchange.stats()
        return {**super().stats(), "gather": counters, "read_once_per_node": handed}
