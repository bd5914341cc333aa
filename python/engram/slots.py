"""A stage's memory: fixed device buffers, and the host slots that are copied to them."""

# Slots join hashes and tables below their public faces.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engram import _engram
from engram._dtypes import torch_dtype
from engram.copier import wait_for
from engram.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engram.copier import Copier, Fence
    from engram.stagetables import StageTable

__all__ = ["FixedBuffer", "Slot"]

_KEPT_SIZES = 64
"""Step sizes whose views are kept; servers capture graphs for a few dozen."""


class FixedBuffer:
    """The fixed device memory of one table."""

    def __init__(self, table: StageTable, max_tokens: int, device: torch.device) -> None:
        heads = table.hasher.heads
        self.planes = {
            plane.name: torch.zeros(
                (max_tokens, heads, *plane.row_shape),
                dtype=torch_dtype(plane.stored_dtype),
                device=device,
            )
            for plane in table.gather.planes
        }
        self.rows: Any = (
            Rows(**self.planes) if len(self.planes) > 1 else next(iter(self.planes.values()))
        )
        self.bytes = {
            name: plane.view(torch.uint8).reshape(max_tokens, -1)
            for name, plane in self.planes.items()
        }
        self.nbytes = sum(plane.numel() for plane in self.bytes.values())
        self._addresses = {name: plane.data_ptr() for name, plane in self.planes.items()}

    def require_in_place(self) -> None:
        """Refuses to copy into memory that the forward no longer reads."""
        for name, plane in self.planes.items():
            if plane.data_ptr() != self._addresses[name]:
                raise RuntimeError(
                    f"the memory of a stage's fixed buffer (plane {name!r}) was replaced: captured "
                    "graphs read the old address. Keep what Stage.rows returns as it is"
                )


class Slot:
    """Host memory for one step of every table, and the fence of its last copy."""

    def __init__(
        self,
        place: int,
        tables: Sequence[StageTable],
        buffers: Sequence[FixedBuffer],
        copier: Copier,
        max_tokens: int,
        *,
        pin: bool | None,
    ) -> None:
        self._place = place
        self._copier = copier
        self._fence: Fence | None = None
        offsets: list[list[int]] = []
        end = 0
        for table in tables:
            base = -(-end // 64) * 64
            rows = max_tokens * table.hasher.heads
            offsets.append([base + plane.offset(rows) for plane in table.gather.planes])
            end = base + table.gather.planes.nbytes(rows)
        self.memory = copier.host(end, pin=pin)
        whole = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.planes: list[list[Any]] = []
        """Per table and plane, its bytes `[max_tokens, heads * row_bytes]` as a numpy array."""
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        requests: list[Any] = []
        for table, buffer, begins in zip(tables, buffers, offsets, strict=True):
            targets: list[Any] = []
            self.planes.append([])
            for plane, begin in zip(table.gather.planes, begins, strict=True):
                width = table.hasher.heads * plane.row_bytes
                view = whole[begin : begin + max_tokens * width].view(max_tokens, width)
                self._pairs.append((buffer.bytes[plane.name], view))
                self.planes[-1].append(view.numpy())
                targets.append((self.memory, begin, plane.row_bytes))
            pad_id = table.hasher.dead_id
            requests.append((table.hasher._native, table.gather._native, targets, pad_id))
        self.native = _engram.StepGather(requests, max_tokens)
        self._whole = whole
        self._copies: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._zeros: dict[tuple[int, int], list[torch.Tensor]] = {}

    def wait(self, seconds: float) -> None:
        """Waits until the slot may be written to."""
        if self._fence is not None:
            wait_for(self._fence, seconds, f"the copy from slot {self._place}")
            self._fence = None

    def upload(self, count: int, before: int) -> None:
        """Copies the first `count` tokens' rows; zeros behind them as far as rows went before."""
        if count == 0 and before == 0:
            return
        self._fence = self._copier.upload(
            self.copies_of(count), self._zeros_of(count, before), self._place
        )

    def take(self, other: Slot, count: int, before: int) -> None:
        """The first `count` tokens' rows of another; zeros behind them as far as rows went before."""
        for ours, theirs in zip(self.planes, other.planes, strict=True):
            for plane, source in zip(ours, theirs, strict=True):
                plane[:count] = source[:count]
                plane[count:before] = 0

    def clear(self) -> None:
        """Zeros, after a step that failed."""
        self._whole.zero_()

    def copies_of(self, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What `upload` copies for `count` tokens: targets and sources."""
        kept = self._copies.get(count)
        if kept is None:
            if len(self._copies) >= _KEPT_SIZES:
                self._copies.clear()
            kept = [(to[:count], source[:count]) for to, source in self._pairs] if count else []
            self._copies[count] = kept
        return kept

    def _zeros_of(self, begin: int, end: int) -> list[torch.Tensor]:
        if begin >= end:
            return []
        kept = self._zeros.get((begin, end))
        if kept is None:
            if len(self._zeros) >= _KEPT_SIZES:
                self._zeros.clear()
            kept = self._zeros[begin, end] = [to[begin:end] for to, _ in self._pairs]
        return kept
