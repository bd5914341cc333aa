"""Ids and rows that lie on an accelerator: checked there, and viewed as bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from engram._dtypes import torch_dtype
from engram._errors import placed
from engram.rows import Rows
from engram.storage.errors import outside

if TYPE_CHECKING:
    from engram.parallel import Shard
    from engram.table import PlaneInfo, Planes, TableInfo

__all__ = ["allocate_on", "byte_targets", "int64_tensor", "is_integer", "local_ids"]

_INTEGERS = {
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
}


def local_ids(ids: Any, info: TableInfo, shard: Shard, pad_id: int | None) -> tuple[Any, bool]:
    """Flat int64 ids that count from the shard's first row; -1 for rows of zeros.

    Args:
        ids: A torch tensor of integers, of any shape, on any device.
        info: The table.
        shard: The part that is held.
        pad_id: An id that stands for a row of zeros.

    Returns:
        The ids, and whether any may be -1 (known without looking).

    Raises:
        TypeError: The ids are no integers.
        IndexError: An id is outside the table. Not in a graph capture, where nothing can be looked
            at: such ids give -1.
    """
    if not is_integer(ids):
        raise placed(
            TypeError(f"ids must be integers, not {str(ids.dtype).removeprefix('torch.')}")
        )
    flat = int64_tensor(ids).reshape(-1)
    held = (flat >= shard.first_row) & (flat < shard.stop_row)
    may_pad = pad_id is not None or shard.num_local_rows < shard.num_rows
    if pad_id is not None:
        held &= flat != pad_id
    if _capturing(flat):
        may_pad = True
    else:
        wrong = (flat < 0) | (flat >= info.rows)
        if pad_id is not None:
            wrong &= flat != pad_id
        if bool(wrong.any()):
            position = int(wrong.nonzero()[0, 0])
            raise outside(info.name, info.rows, int(flat[position]), position)
    local = flat - shard.first_row
    return (local.masked_fill(~held, -1) if may_pad else local), may_pad


def int64_tensor(ids: Any) -> Any:
    """Integer ids as int64, of the same shape."""
    wide = ids.detach().to(torch.int64)
    if ids.dtype == torch.uint64:
        # What wrapped is beyond any table, and must not come out as -1.
        wide = wide.masked_fill(wide < 0, torch.iinfo(torch.int64).max)
    return wide


def is_integer(ids: Any) -> bool:
    """Whether a tensor holds integers."""
    return ids.dtype in _INTEGERS


def _capturing(ids: Any) -> bool:
    cuda: Any = torch.cuda
    return ids.device.type == "cuda" and cuda.is_current_stream_capturing()


def allocate_on(planes: Planes, shape: tuple[int, ...], device: Any) -> Any:
    """Uninitialised rows for ids of `shape` on a device; `Rows` where there are several planes."""
    made = {
        plane.name: torch.empty(
            (*shape, *plane.row_shape), dtype=torch_dtype(plane.stored_dtype), device=device
        )
        for plane in planes
    }
    return Rows(**made) if len(planes) > 1 else made[planes[0].name]


def byte_targets(planes: Planes, out: Any, shape: tuple[int, ...], device: Any) -> list[Any]:
    """A uint8 view `[ids, row_bytes]` of the memory in `out` for each plane.

    Args:
        planes: The table's planes.
        out: A tensor of the table's dtype, or of uint8 with planes side by side, or `Rows`.
        shape: Shape of the ids.
        device: Where `out` must be.

    Raises:
        TypeError: `out` is no tensor, on another device, or of another dtype.
        ValueError: `out` has another shape or is not contiguous.
    """
    if isinstance(out, Rows) and len(planes) > 1:
        return [
            _byte_view(out[plane.name], plane, shape, device, f"out.{plane.name}")
            for plane in planes
        ]
    if len(planes) == 1:
        return [_byte_view(out, planes[0], shape, device, "out")]
    row_bytes = sum(plane.row_bytes for plane in planes)
    whole = _checked(out, {torch.uint8: (row_bytes,)}, shape, device, "out")
    flat = whole.reshape(-1, row_bytes)
    starts = [sum(plane.before) for plane in planes]
    return [
        flat[:, start : start + plane.row_bytes]
        for start, plane in zip(starts, planes, strict=True)
    ]


def _byte_view(out: Any, plane: PlaneInfo, shape: tuple[int, ...], device: Any, what: str) -> Any:
    accepted = {
        torch_dtype(plane.stored_dtype): plane.row_shape,
        torch.uint8: (plane.row_bytes,),
    }
    checked = _checked(out, accepted, shape, device, what)
    return checked.reshape(-1).view(torch.uint8).reshape(math.prod(shape), plane.row_bytes)


def _checked(
    out: Any,
    accepted: dict[Any, tuple[int, ...]],
    shape: tuple[int, ...],
    device: Any,
    what: str,
) -> Any:
    if not isinstance(out, torch.Tensor):
        raise placed(
            TypeError(f"{what} is a {type(out).__name__}; for ids on {device} pass a tensor there")
        )
    tensor: Any = out
    if tensor.device != device:
        raise placed(TypeError(f"{what} is on {tensor.device}, but the ids are on {device}"))
    row_shape = accepted.get(tensor.dtype)
    if row_shape is None:
        names = " or ".join(str(dtype) for dtype in accepted)
        raise placed(TypeError(f"{what} has dtype {tensor.dtype}; rows of this table are {names}"))
    if tuple(tensor.shape) != (*shape, *row_shape):
        raise placed(
            ValueError(
                f"{what} has shape {tuple(tensor.shape)}; ids of shape {shape} give rows of shape "
                f"{(*shape, *row_shape)} in {tensor.dtype}"
            )
        )
    if not tensor.is_contiguous():
        raise placed(ValueError(f"{what} is not contiguous; pass out.contiguous()"))
    return tensor.detach()
