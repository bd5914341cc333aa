"""What each model family stores: configuration, tables, pieces and the small tensors beside them.

Field names, tensor names and shapes are those of the released checkpoints. Row counts follow from
the configuration by the family's own hash rule, so that a reader that derives them agrees.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .layout import RowRange, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from .layout import Layout

Config = dict[str, Any]


@dataclass(frozen=True)
class PlaneSpec:
    """One plane of a table: its role, safetensors dtype and elements per row."""

    name: str
    dtype: str
    columns: int
    row_bytes: int


@dataclass(frozen=True)
class TableSpec:
    """One table: its name, decoder layer (None where names have none), rows and planes."""

    name: str
    layer: int | None
    rows: int
    encoding: str
    planes: tuple[PlaneSpec, ...]
    values_per_row: int
    constants: Mapping[str, float]


@dataclass(frozen=True)
class Contents:
    """Everything a checkpoint holds.

    Attributes:
        config: The document of `config.json`.
        tables: Tables in layer order.
        units: Table pieces with their scales, each a list of tensors that belong together.
        others: Every other tensor.
        shuffle: Whether the family's pieces are spread over the files in no order.
    """

    config: Config
    tables: list[TableSpec]
    units: list[list[Tensor]]
    others: list[Tensor]
    shuffle: bool


@dataclass(frozen=True)
class Request:
    """What a caller asked of a family.

    Attributes:
        rows: Wanted rows per table; None where `overrides` fix them.
        dtype: One of the family's dtypes.
        layers: Zero-based decoder layers that get a table.
        parts: Pieces a table is cut into (Qwen only).
        overrides: Values for fields of the (text) configuration.
        layout: Naming and placement rules.
    """

    rows: int | None
    dtype: str
    layers: tuple[int, ...]
    parts: int
    overrides: Mapping[str, Any]
    layout: Layout


@dataclass(frozen=True)
class Family:
    """A family's defaults and its builder.

    Attributes:
        dtypes: Supported dtypes, the default first.
        rows: Default rows per table.
        layers: Default decoder layers.
        parts: Default number of pieces per table; 1 where the family never cuts tables.
        files: Default number of files.
        build: Makes the contents for a request.
        sizing_fields: Configuration fields that fix the row count.
    """

    dtypes: tuple[str, ...]
    rows: int
    layers: tuple[int, ...]
    parts: int
    files: int
    build: Callable[[Request], Contents]
    sizing_fields: tuple[str, ...]


def merge(fields: Config, overrides: Mapping[str, Any], optional: Iterable[str] = ()) -> Config:
    """`fields` with `overrides` applied; an unknown field is refused by name."""
    known = {*fields, *optional}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise ValueError(f"unknown configuration field {unknown[0]!r}; known: {sorted(known)}")
    return {**fields, **overrides}


def solve(wanted: int, rows_for: Callable[[int], int], *, smallest: int, step: int) -> int:
    """The parameter, not below `smallest`, whose row count comes nearest to `wanted`.

    Args:
        wanted: Rows to aim at.
        rows_for: Rows that a parameter gives; grows by about `step` per unit.
        smallest: Smallest parameter allowed.
        step: Rows added per unit of the parameter.
    """
    if wanted < 1 or wanted * 2 < rows_for(smallest):
        raise ValueError(
            f"{wanted} rows are too few: the hash rule gives {rows_for(smallest)} rows at least "
            "(fewer heads in the configuration give smaller tables)"
        )
    guess = max(smallest, wanted // step)
    best, best_distance = guess, abs(rows_for(guess) - wanted)
    for _ in range(8):
        guess = max(smallest, guess + (wanted - rows_for(guess)) // step)
        distance = abs(rows_for(guess) - wanted)
        if distance >= best_distance:
            break
        best, best_distance = guess, distance
    return best


def bf16(value: float) -> bytes:
    """`value` truncated to BF16, little-endian."""
    return struct.pack("<f", value)[2:]


def f32(value: float) -> bytes:
    """`value` as F32, little-endian."""
    return struct.pack("<f", value)


def int64(name: str, values: Sequence[int]) -> Tensor:
    """A one-dimensional I64 tensor.

    Raises:
        ValueError: A value does not fit.
    """
    if values and not -(2**63) <= min(values) <= max(values) < 2**63:
        raise ValueError(f"{name} would hold {max(values)}, which does not fit 64 bits: fewer rows")
    return Tensor(name, "I64", (len(values),), np.asarray(values, "<i8").tobytes())


def ones(name: str, *shape: int) -> Tensor:
    """A BF16 tensor of ones."""
    return Tensor(name, "BF16", shape, bf16(1.0) * int(np.prod(shape)))


def row_tensor(name: str, plane: PlaneSpec, table: int, first_row: int, rows: int) -> Tensor:
    """The tensor that stores `rows` rows of a plane from `first_row` on."""
    return Tensor(name, plane.dtype, (rows, plane.columns), RowRange(table, plane.name, first_row))
