"""Tables that are not there: zeros for profiling without weights, nothing on other stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from engram._errors import placed
from engram._targets import row_view
from engram.storage.base import Progress, Storage, no_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engram._targets import PlaneTargets
    from engram.table import TableInfo

__all__ = ["AbsentStorage", "DummyStorage"]


class DummyStorage(Storage):
    """Rows of zeros, checked like any others; no file is read and no table allocated.

    Args:
        info: The table.
        instead_of: The placement that the configuration asks for.
    """

    placement = "dummy"

    def __init__(self, info: TableInfo, instead_of: str) -> None:
        super().__init__(info)
        self._instead_of = instead_of
        self._loaded = True

    def _gather(self, ids: NDArray[np.int64], into: PlaneTargets, pad_id: int | None) -> None:
        wrong = (ids < 0) | (ids >= self.num_rows)
        if pad_id is not None:
            wrong &= ids != pad_id
        if wrong.any():
            from engram.storage.errors import outside

            position = int(np.flatnonzero(wrong)[0])
            row = int(ids.reshape(-1)[position])
            raise outside(self.info.name, self.num_rows, row, position)
        for plane, target in zip(self.planes, into, strict=True):
            row_view(target, ids.size, plane.row_bytes)[:] = 0

    def _lookup_on_device(self, ids: Any, out: Any, pad_id: int | None) -> Any:
        from engram.storage.device_rows import allocate_on, byte_targets, local_ids

        shape = tuple(ids.shape)
        rows = allocate_on(self.planes, shape, ids.device) if out is None else out
        views = byte_targets(self.planes, rows, shape, ids.device)
        local_ids(ids, self.info, self.shard, pad_id)
        for view in views:
            view.zero_()
        return rows

    def _load(self, views: Any, progress: Progress | None) -> None:
        raise AssertionError

    def _release(self) -> None:
        pass

    @property
    def nbytes(self) -> dict[str, int]:
        """Nothing of any kind."""
        return no_bytes()

    def stats(self) -> dict[str, Any]:
        """As `Storage.stats`; adds `instead_of`."""
        return {**super().stats(), "instead_of": self._instead_of}


class AbsentStorage(Storage):
    """What a pipeline stage without the table's layer has: nothing.

    Args:
        info: The table.
        why: Why this stage has none.
    """

    placement = "absent"

    def __init__(self, info: TableInfo, why: str) -> None:
        super().__init__(info)
        self._why = why

    def _require_open(self) -> None:
        if not self.closed:
            raise placed(RuntimeError(self._why))
        super()._require_open()

    def _load(self, views: Any, progress: Progress | None) -> None:
        raise placed(RuntimeError(self._why))

    def _release(self) -> None:
        pass

    def _gather(self, ids: NDArray[np.int64], into: PlaneTargets, pad_id: int | None) -> None:
        raise AssertionError

    def _lookup_on_device(self, ids: Any, out: Any, pad_id: int | None) -> Any:
        raise AssertionError

    @property
    def nbytes(self) -> dict[str, int]:
        """Nothing of any kind."""
        return no_bytes()
