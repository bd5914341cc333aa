"""What tables a checkpoint holds: names, sizes, encodings and where the bytes lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, cast, overload

from engram import _engram
from engram._arguments import path_text
from engram._dtypes import numpy_dtype

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    import numpy as np

PLANE_ALIGNMENT = 64
"""Planes that share one `HostBuffer` start at multiples of this many bytes."""


# A tuple and no dataclass: a table may have hundreds, and every opening makes them all.
class PieceInfo(NamedTuple):
    """Consecutive rows of one plane inside one file.

    Attributes:
        tensor: Tensor name in the checkpoint.
        file: Path of the file, symlinks resolved.
        offset: Absolute byte offset of the piece's first row in the file.
        first_row: Id of that row.
        rows: Number of rows.
    """

    tensor: str
    file: str
    offset: int
    first_row: int
    rows: int


# What `PieceInfo._make` does, without a call of Python for each.
_piece: Callable[[Any], PieceInfo] = partial(cast("Any", tuple).__new__, PieceInfo)


@dataclass(frozen=True, slots=True)
class PlaneInfo:
    """One stored region of every row, such as the values or their block scales.

    Attributes:
        name: `"weight"`, `"scale"` or `"bias"`.
        stored_dtype: Element type as stored, e.g. `"fp8_e4m3"`.
        dtype: numpy dtype rows are returned in.
        row_shape: Shape of one row in `dtype` elements.
        row_bytes: Bytes of one row.
        pieces: Where the rows lie, in row order.
        before: Bytes per row of the planes that come before this one.
    """

    name: str
    stored_dtype: str
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]
    row_bytes: int
    pieces: tuple[PieceInfo, ...]
    before: tuple[int, ...]

    def offset(self, rows: int) -> int:
        """Byte offset of this plane in a `HostBuffer` that holds `rows` rows of every plane.

        Planes lie one after another, each at a multiple of 64 bytes.
        """
        offset = 0
        for row_bytes in self.before:
            offset = _align(offset + rows * row_bytes)
        return offset


def _align(offset: int) -> int:
    return -(-offset // PLANE_ALIGNMENT) * PLANE_ALIGNMENT


class Planes(tuple[PlaneInfo, ...]):
    """The planes of a table, in order; also indexed by name: `planes["scale"]`."""

    __slots__ = ()

    @overload
    def __getitem__(self, key: str | SupportsIndex, /) -> PlaneInfo: ...
    @overload
    def __getitem__(self, key: slice, /) -> tuple[PlaneInfo, ...]: ...
    def __getitem__(self, key: str | SupportsIndex | slice, /) -> PlaneInfo | tuple[PlaneInfo, ...]:
        """The plane at a position, or of that name."""
        if isinstance(key, str):
            for plane in self:
                if plane.name == key:
                    return plane
            raise KeyError(f"no plane {key!r}; this table has {[plane.name for plane in self]}")
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        """Whether there is such a plane, by name or by value."""
        if isinstance(key, str):
            return any(plane.name == key for plane in self)
        return super().__contains__(key)

    def nbytes(self, rows: int) -> int:
        """Bytes a `HostBuffer` needs to hold `rows` rows of every plane."""
        last = self[-1]
        return int(last.offset(rows) + rows * last.row_bytes)


@dataclass(frozen=True, slots=True)
class TableInfo:
    """One table: a single space of row ids.

    Attributes:
        name: What the table's tensors have in common, or a plain tensor's full name.
        family: `"qwen"`, `"deepseek"`, `"longcat"`, `"gemma"` or `"plain"`.
        layer: Zero-based decoder layer in the tensor name; None where there is none.
        rows: Number of rows; ids run from 0 to `rows - 1`.
        encoding: How stored bytes stand for values, e.g. `"bf16"`, `"fp8_e4m3"`, `"nvfp4"`.
        planes: Stored regions of every row, by position and by name.
        files: Paths of the files that hold rows, symlinks resolved.
        bytes: Bytes of all rows over all planes.
        row_bytes: Bytes of one row over all planes.
        logical_shape: Values per row after dequantisation.
        constants: Table-wide numbers, e.g. `{"weight_scale": 0.000199}`.
    """

    name: str
    family: str
    layer: int | None
    rows: int
    encoding: str
    planes: Planes
    files: tuple[str, ...]
    bytes: int
    row_bytes: int
    logical_shape: tuple[int, ...]
    constants: Mapping[str, float]

    @classmethod
    def from_native(cls, description: dict[str, Any]) -> TableInfo:
        """Builds the description from the dictionary the native half gives."""
        files = tuple(description["files"])
        planes: list[PlaneInfo] = []
        for plane in description["planes"]:
            dtype = numpy_dtype(plane["dtype"])
            planes.append(
                PlaneInfo(
                    name=plane["name"],
                    stored_dtype=plane["dtype"],
                    dtype=dtype,
                    row_shape=(plane["row_bytes"] // dtype.itemsize,),
                    row_bytes=plane["row_bytes"],
                    pieces=tuple(map(_piece, plane["pieces"])),
                    before=tuple(earlier.row_bytes for earlier in planes),
                )
            )
        row_bytes = sum(plane.row_bytes for plane in planes)
        return cls(
            name=description["name"],
            family=description["family"],
            layer=description["layer"],
            rows=description["rows"],
            encoding=description["encoding"],
            planes=Planes(planes),
            files=files,
            bytes=description["rows"] * row_bytes,
            row_bytes=row_bytes,
            logical_shape=tuple(description["logical_shape"]),
            constants=dict(description["constants"]),
        )


def tables(path: str | os.PathLike[str], *, plain: bool = False) -> list[TableInfo]:
    """Lists the tables of a checkpoint, in layer order.

    Only headers are read.

    Args:
        path: A `.safetensors` file, a checkpoint directory, or an index JSON.
        plain: Also list every other two-dimensional tensor, each as a table of family `"plain"`.

    Returns:
        One description per table; empty if the checkpoint has none.

    Raises:
        FileNotFoundError: Files are missing; every one of them is listed.
        CheckpointError: The files contradict themselves, the index or `config.json`.
        OSError: The kernel refused to open or read a file.
    """
    return [TableInfo.from_native(item) for item in _engram.tables(path_text(path), plain)]
