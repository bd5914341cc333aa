"""From a request to a complete plan: tables, files and offsets. Pure and deterministic, no I/O."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .deepseek import DEEPSEEK
from .families import Request
from .gemma import GEMMA
from .layout import Layout, RowRange, arrange
from .longcat import LONGCAT
from .pattern import Pattern
from .qwen import QWEN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from .families import Contents, Family, TableSpec
    from .layout import PlannedFile

FAMILIES: dict[str, Family] = {
    "qwen": QWEN,
    "deepseek": DEEPSEEK,
    "longcat": LONGCAT,
    "gemma": GEMMA,
}
"""Families that can be written, by name."""


_INT64_MAX = (1 << 63) - 1
_MOST_TABLES = 1000
"""No model has as many layers; the constants of more would be computed for minutes."""


@dataclass(frozen=True)
class SynthPiece:
    """A run of consecutive rows of one plane inside one file.

    Attributes:
        tensor: Tensor name.
        file: File name inside the checkpoint directory.
        offset: Absolute byte offset of the first row.
        first_row: Id of the first row.
        rows: Number of rows.
    """

    tensor: str
    file: str
    offset: int
    first_row: int
    rows: int


@dataclass(frozen=True)
class SynthPlane:
    """One stored region of every row.

    Attributes:
        name: `"weight"` or `"scale"`.
        dtype: Safetensors dtype.
        columns: Elements per row.
        row_bytes: Bytes per row.
        pieces: Pieces in row order.
        pattern: The bytes.
    """

    name: str
    dtype: str
    columns: int
    row_bytes: int
    pieces: tuple[SynthPiece, ...]
    pattern: Pattern


@dataclass(frozen=True)
class SynthTable:
    """One table of a synthetic checkpoint.

    Attributes:
        name: Common part of its tensors' names.
        family: Model family.
        layer: Zero-based decoder layer, None where the family has one table for all.
        rows: Rows, padding rows included.
        encoding: How bytes stand for values, as `FileGather.encoding` spells it.
        planes: Weight first, then scale.
        values_per_row: Values per row after dequantisation.
        constants: Table-wide scales.
    """

    name: str
    family: str
    layer: int | None
    rows: int
    encoding: str
    planes: tuple[SynthPlane, ...]
    values_per_row: int
    constants: Mapping[str, float]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all planes."""
        return sum(plane.row_bytes for plane in self.planes)

    @property
    def nbytes(self) -> int:
        """Bytes of the table over all planes."""
        return self.rows * self.row_bytes

    def plane(self, name: str) -> SynthPlane:
        """The plane called `name`."""
        return next(plane for plane in self.planes if plane.name == name)

    def expected(self, ids: ArrayLike) -> dict[str, NDArray[np.uint8]]:
        """Stored bytes of the rows `ids`, computed without reading a file.

        Args:
            ids: Row ids, integers of any shape in `[0, rows)`.

        Returns:
            For each plane name a uint8 array of shape `[*ids.shape, row_bytes]`.

        Raises:
            IndexError: An id is outside the table.
        """
        identifiers = np.asarray(ids)
        if identifiers.size and not 0 <= identifiers.min() <= identifiers.max() < self.rows:
            raise IndexError(f"ids must be from 0 to {self.rows - 1} in table {self.name!r}")
        return {plane.name: plane.pattern.rows(identifiers) for plane in self.planes}


@dataclass(frozen=True)
class Plan:
    """A checkpoint that could be written.

    Attributes:
        family: Model family.
        dtype: The family's dtype that was chosen.
        seed: Seed of bytes and shuffles.
        config: The document of `config.json`.
        tables: Tables in layer order.
        files: Files in name order.
        arguments: What `plan` was called with, as JSON values.
    """

    family: str
    dtype: str
    seed: int
    config: Mapping[str, Any]
    tables: tuple[SynthTable, ...]
    files: tuple[PlannedFile, ...]
    arguments: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all safetensors files."""
        return sum(file.nbytes for file in self.files)


def plan(
    family: str = "qwen",
    *,
    rows: int | None = None,
    size: int | None = None,
    dtype: str | None = None,
    layers: int | Sequence[int] | None = None,
    parts: int | None = None,
    files: int | None = None,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    layout: Layout | None = None,
) -> Plan:
    """Plans a checkpoint; `write` documents the arguments."""
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}; known: {', '.join(FAMILIES)}")
    rules = FAMILIES[family]
    placement = layout or Layout()
    overrides = dict(config or {})
    dtype = dtype or rules.dtypes[0]
    if dtype not in rules.dtypes:
        raise ValueError(f"{family} has no dtype {dtype!r}; known: {', '.join(rules.dtypes)}")
    if rules.parts == 1 and parts not in (None, 1):
        raise ValueError(f"{family} tables are not cut into parts, so parts={parts} has no meaning")
    chosen_layers = _layers(family, rules, layers)
    parts = rules.parts if parts is None else parts
    files = rules.files if files is None else files
    if parts < 1 or files < 1:
        raise ValueError(f"parts and files must be at least 1, not {parts} and {files}")
    sized = [name for name in rules.sizing_fields if name in overrides]
    if (rows is not None) + (size is not None) + bool(sized) > 1:
        given = ", ".join(["rows, size", *sized] if sized else ["rows", "size"])
        raise ValueError(f"give only one of what fixes the number of rows: {given}")

    def build(wanted_rows: int | None) -> Contents:
        return rules.build(Request(wanted_rows, dtype, chosen_layers, parts, overrides, placement))

    for name, value in (("rows", rows), ("size", size)):
        if value is not None and not 1 <= value <= _INT64_MAX:
            raise ValueError(f"{name} must be from 1 to {_INT64_MAX}, not {value}")
    if size is not None:
        # Row width depends on the configuration alone, so any buildable row count shows it.
        probe = build(rules.rows).tables
        width = sum(plane.row_bytes for plane in probe[0].planes)
        rows = size // (width * len(probe))
        if rows == 0:
            raise ValueError(f"size {size} is less than one row of {width} bytes per table")
    contents = build(None if sized else rows or rules.rows)
    if placement.table_files is None and rules is DEEPSEEK:
        # Released files hold one table each, with its scales, and no other file holds any.
        placement = replace(placement, table_files=len(chosen_layers))
    if placement.scales_apart and min(placement.table_files or files, files) < 2:
        raise ValueError("scales_apart needs at least two files that hold table pieces")
    generator = random.Random(f"{family} {seed}")
    planned = arrange(
        contents.units,
        contents.others,
        files=files,
        layout=placement,
        generator=generator,
        shuffle=contents.shuffle,
    )
    return Plan(
        family=family,
        dtype=dtype,
        seed=seed,
        config=contents.config,
        tables=tuple(
            _table(family, seed, index, spec, planned) for index, spec in enumerate(contents.tables)
        ),
        files=tuple(planned),
        arguments={
            "family": family,
            "rows": rows,
            "dtype": dtype,
            "layers": list(chosen_layers) or None,
            "parts": parts,
            "files": files,
            "seed": seed,
            "config": overrides,
            "layout": asdict(placement),
        },
    )


def _layers(family: str, rules: Family, layers: int | Sequence[int] | None) -> tuple[int, ...]:
    if layers is None:
        return rules.layers
    if not rules.layers:
        raise ValueError(f"{family} has one table for all layers, so layers has no meaning")
    if isinstance(layers, int):
        if layers > _MOST_TABLES:
            raise ValueError(f"layers={layers} is more than {_MOST_TABLES} tables")
        layers = [*rules.layers, *(rules.layers[-1] + 4 * step for step in range(1, layers))][
            :layers
        ]
    chosen = tuple(sorted(set(layers)))
    if len(chosen) > _MOST_TABLES:
        raise ValueError(f"{len(chosen)} layers are more than {_MOST_TABLES} tables")
    if not chosen or not 0 <= chosen[0] <= chosen[-1] < _INT64_MAX:
        found = "none" if not chosen else chosen[0] if chosen[0] < 0 else chosen[-1]
        raise ValueError(f"layers must name zero-based decoder layers, at least one, not {found}")
    return chosen


def _table(
    family: str, seed: int, index: int, spec: TableSpec, files: Sequence[PlannedFile]
) -> SynthTable:
    pieces: dict[str, list[SynthPiece]] = {plane.name: [] for plane in spec.planes}
    for file in files:
        for tensor, offset in zip(file.tensors, file.offsets(), strict=True):
            content = tensor.content
            if isinstance(content, RowRange) and content.table == index and tensor.shape[0]:
                pieces[content.plane].append(
                    SynthPiece(tensor.name, file.name, offset, content.first_row, tensor.shape[0])
                )
    return SynthTable(
        name=spec.name,
        family=family,
        layer=spec.layer,
        rows=spec.rows,
        encoding=spec.encoding,
        planes=tuple(
            SynthPlane(
                name=plane.name,
                dtype=plane.dtype,
                columns=plane.columns,
                row_bytes=plane.row_bytes,
                pieces=tuple(sorted(pieces[plane.name], key=lambda piece: piece.first_row)),
                pattern=Pattern(seed, index, plane.name, plane.dtype, plane.row_bytes),
            )
            for plane in spec.planes
        ),
        values_per_row=spec.values_per_row,
        constants=spec.constants,
    )
