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
from engram.table import PLANE_ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engram.copier import Copier, Copies, Fence
    from engram.stagetables import StageTable
    from engram.table import PlaneInfo

__all__ = ["FixedBuffer", "Slot"]

_KEPT_SIZES = 64
"""Step sizes whose views are kept; servers capture graphs for a few dozen."""

MOST_IN_PASSING = 1 << 18
"""Bytes copied in vain rather than to start a second copy: PCIe moves as many in about 5 us."""


class FixedBuffer:
    """The fixed device memory of one table: all planes, the one of the longest rows last."""

    def __init__(self, table: StageTable, max_tokens: int, device: torch.device) -> None:
        heads = table.hasher.heads
        rows = max_tokens * heads
        self.tokens = max_tokens
        begins, end = _layout(table, max_tokens)
        self.whole = torch.zeros(end, dtype=torch.uint8, device=device)
        self.bytes: dict[str, torch.Tensor] = {}
        self.planes: dict[str, torch.Tensor] = {}
        for plane in table.gather.planes:
            begin = begins[plane.name]
            part = self.whole[begin : begin + rows * plane.row_bytes]
            self.bytes[plane.name] = part.view(max_tokens, heads * plane.row_bytes)
            stored = part.view(torch_dtype(plane.stored_dtype))
            self.planes[plane.name] = stored.view(max_tokens, heads, *plane.row_shape)
        self.rows: Any = (
            Rows(**self.planes) if len(self.planes) > 1 else next(iter(self.planes.values()))
        )
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


class _Lane:
    """One table's part of a slot, and where it is copied to.

    Planes lie in a slot as they do on the device, so that one copy brings them all: whole planes of
    short rows, such as block scales, and as much as is needed of the last. A slot keeps zeros
    behind the rows of a step in the former. Where these are large, or the slot holds fewer tokens
    than the device, each plane is a copy.
    """

    def __init__(
        self, table: StageTable, buffer: FixedBuffer, max_tokens: int, part: torch.Tensor
    ) -> None:
        begins, _ = _layout(table, max_tokens)
        self._target, self._source = buffer.whole, part
        self._pairs: Copies = []
        self.planes: dict[str, Any] = {}
        """Bytes `[max_tokens, heads * row_bytes]` of each, as a numpy array, the last one last."""
        self._last = self._width = 0
        for plane in _in_order(table):
            self._last = begins[plane.name]
            self._width = table.hasher.heads * plane.row_bytes
            view = part[self._last : self._last + max_tokens * self._width]
            view = view.view(max_tokens, self._width)
            self._pairs.append((buffer.bytes[plane.name], view))
            self.planes[plane.name] = view.numpy()
        self.joined = (
            len(self.planes) > 1 and max_tokens == buffer.tokens and self._last <= MOST_IN_PASSING
        )
        self._held = 0
        """Rows behind this many tokens are zeros in all planes but the last, if joined."""

    def clear_behind(self, count: int) -> None:
        """Zeros behind the rows of `count` tokens, wherever they are copied in passing."""
        if self.joined:
            if count < self._held:
                for plane in list(self.planes.values())[:-1]:
                    plane[count : self._held] = 0
            self._held = count

    def copies(self, count: int) -> Copies:
        """Targets and sources of `count` tokens' rows."""
        if self.joined:
            end = self._last + count * self._width
            return [(self._target[:end], self._source[:end])]
        return [(to[:count], source[:count]) for to, source in self._pairs]

    def zeros(self, begin: int, end: int) -> list[torch.Tensor]:
        """What is left of the device's rows from `begin` to `end` after copies of `begin`."""
        pairs = self._pairs[-1:] if self.joined and begin > 0 else self._pairs
        return [to[begin:end] for to, _ in pairs]


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
        bases: list[int] = []
        end = 0
        for table in tables:
            bases.append(_aligned(end))
            end = bases[-1] + _layout(table, max_tokens)[1]
        self.memory = copier.host(end, pin=pin)
        whole = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.planes: list[list[Any]] = []
        """Per table and plane, its bytes `[max_tokens, heads * row_bytes]` as a numpy array."""
        self._lanes: list[_Lane] = []
        requests: list[Any] = []
        for table, buffer, base in zip(tables, buffers, bases, strict=True):
            lane = _Lane(table, buffer, max_tokens, whole[base:])
            begins, _ = _layout(table, max_tokens)
            planes = table.gather.planes
            self._lanes.append(lane)
            self.planes.append([lane.planes[plane.name] for plane in planes])
            targets = [
                (self.memory, base + begins[plane.name], plane.row_bytes) for plane in planes
            ]
            pad_id = table.hasher.dead_id
            requests.append((table.hasher._native, table.gather._native, targets, pad_id))
        self.native = _engram.StepGather(requests, max_tokens)
        self._whole = whole
        self._copies: dict[int, Copies] = {}
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
        if count > 0:
            for lane in self._lanes:
                lane.clear_behind(count)
        self._fence = self._copier.upload(
            self.copies_of(count), self._zeros_of(count, before), self._place
        )

    def take(self, other: Slot, count: int, before: int) -> None:
        """The first `count` tokens' rows of another; zeros behind, as far as rows went before."""
        for ours, theirs in zip(self.planes, other.planes, strict=True):
            for plane, source in zip(ours, theirs, strict=True):
                plane[:count] = source[:count]
                plane[count:before] = 0

    def clear(self) -> None:
        """Zeros, after a step that failed."""
        self._whole.zero_()

    def copies_of(self, count: int) -> Copies:
        """What `upload` copies for `count` tokens: targets and sources."""
        kept = self._copies.get(count)
        if kept is None:
            if len(self._copies) >= _KEPT_SIZES:
                self._copies.clear()
            kept = [copy for lane in self._lanes for copy in lane.copies(count)] if count else []
            self._copies[count] = kept
        return kept

    def _zeros_of(self, begin: int, end: int) -> list[torch.Tensor]:
        if begin >= end:
            return []
        kept = self._zeros.get((begin, end))
        if kept is None:
            if len(self._zeros) >= _KEPT_SIZES:
                self._zeros.clear()
            kept = [zeros for lane in self._lanes for zeros in lane.zeros(begin, end)]
            self._zeros[begin, end] = kept
        return kept


def _in_order(table: StageTable) -> list[PlaneInfo]:
    """The planes as they lie in memory, the one of the longest rows last."""
    return sorted(table.gather.planes, key=lambda plane: plane.row_bytes)


def _layout(table: StageTable, max_tokens: int) -> tuple[dict[str, int], int]:
    """Where the planes of `max_tokens` tokens begin, and where they end."""
    begins: dict[str, int] = {}
    end = 0
    for plane in _in_order(table):
        begins[plane.name] = _aligned(end)
        end = begins[plane.name] + max_tokens * table.hasher.heads * plane.row_bytes
    return begins, end


def _aligned(offset: int) -> int:
    return -(-offset // PLANE_ALIGNMENT) * PLANE_ALIGNMENT
