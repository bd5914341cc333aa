"""Memory for the rows of a table, plane by plane, in whatever form a caller holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from engram._arrays import UINT8, byte_view, empty
from engram._errors import placed
from engram.buffer import HostBuffer
from engram.rows import Rows
from engram.table import PlaneInfo

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engram.table import Planes

PlaneTargets = list[tuple[Any, int, int]]
"""Per plane: writable memory, byte offset of its first row, bytes from one row to the next."""


def allocate(planes: Planes, shape: tuple[int, ...], *, torch_like: bool) -> Any:
    """Uninitialised rows for ids of `shape`; `Rows` where there are several planes."""
    made = {plane.name: empty(plane, shape, torch_like=torch_like) for plane in planes}
    return Rows(**made) if len(planes) > 1 else made[planes[0].name]


def targets(planes: Planes, out: Any, shape: tuple[int, ...], count: int) -> PlaneTargets:
    """Where in `out` the rows of each plane go.

    Args:
        planes: The table's planes.
        out: What a caller passes as `out` of a gather.
        shape: Shape of the ids.
        count: How many they are.

    Raises:
        TypeError: `out` is of another kind or dtype.
        ValueError: `out` is too small, of another shape, not contiguous or read-only.
    """
    if isinstance(out, HostBuffer):
        needed = planes.nbytes(count)
        if out.nbytes < needed:
            raise placed(
                ValueError(f"out is a HostBuffer of {out.nbytes} bytes; {needed} are needed")
            )
        return [(out, plane.offset(count), plane.row_bytes) for plane in planes]
    if isinstance(out, Rows):
        if absent := [plane.name for plane in planes if plane.name not in out.keys()]:  # noqa: SIM118
            raise placed(ValueError(f"out has no plane {absent[0]!r}; this table has one"))
        return [
            (byte_view(out[plane.name], plane, shape, f"out.{plane.name}"), 0, plane.row_bytes)
            for plane in planes
        ]
    if len(planes) == 1:
        plane = planes[0]
        return [(byte_view(out, plane, shape), 0, plane.row_bytes)]
    whole = side_by_side(planes)
    view = byte_view(out, whole, shape)
    return [(view, sum(plane.before), whole.row_bytes) for plane in planes]


def row_view(target: tuple[Any, int, int], rows: int, row_bytes: int) -> NDArray[np.uint8]:
    """The rows of one plane in its memory, uint8 `[rows, row_bytes]`, writable.

    Args:
        target: One of what `targets` gives.
        rows: How many there are.
        row_bytes: Bytes of each.
    """
    memory, offset, stride = target
    flat: Any = bytes_of(memory) if isinstance(memory, HostBuffer) else memory
    return np.lib.stride_tricks.as_strided(
        flat.reshape(-1)[offset:], (rows, row_bytes), (stride, 1)
    )


def bytes_of(buffer: HostBuffer) -> NDArray[np.uint8]:
    """All bytes of a buffer, writable."""
    return np.frombuffer(cast("Any", buffer), UINT8)


def side_by_side(planes: Planes) -> PlaneInfo:
    """The planes of a row side by side, as one plane of bytes."""
    row_bytes = sum(plane.row_bytes for plane in planes)
    return PlaneInfo("out", "u8", UINT8, (row_bytes,), row_bytes, (), ())
