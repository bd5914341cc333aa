"""Which tensor lies in which file, at which offset: a plan of a checkpoint, before any byte exists.

Published checkpoints promise nothing about alignment, so neither does this: headers are unpadded
and of odd length, and a small byte tensor in front makes the rows begin at an offset that is no
multiple of anything useful. Table pieces are shuffled over the files, header keys come in another
order than the data.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

ELEMENT_BYTES = {
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "I64": 8,
}
"""Bytes per element, by safetensors dtype."""

_RESIDUES = (2, 1, 5, 7, 3, 6)
"""Offset of the first table row modulo 8, file by file; 2 is what a released checkpoint has."""


@dataclass(frozen=True)
class Layout:
    """How a synthetic checkpoint is laid out over its files; the defaults are what is published.

    Attributes:
        table_files: How many of the files hold table pieces; None means all of them (for DeepSeek,
            one per table).
        header_residue: Length of every header modulo 4096, reached by padding it with spaces. None
            leaves headers unpadded, of odd length.
        shuffled: Whether the pieces of families that spread them are dealt out in random order.
            Pieces in order follow one another without a gap where they share a file.
        scales_apart: Whether block scales lie in another file than the rows they belong to.
        naming: How Qwen names its pieces: `"shard"` (`shard_3.weight`), `"shards"`
            (`shards.3.weight`) or `"whole"` (one `weight`, not cut).
        empty_parts: Whether trailing pieces without rows are stored, as `[0, columns]` tensors.
    """

    table_files: int | None = None
    header_residue: int | None = None
    shuffled: bool = True
    scales_apart: bool = False
    naming: str = "shard"
    empty_parts: bool = False

    def __post_init__(self) -> None:
        if self.naming not in ("shard", "shards", "whole"):
            raise ValueError(f'naming must be "shard", "shards" or "whole", not {self.naming!r}')
        if self.header_residue is not None and not 0 <= self.header_residue < 4096:
            raise ValueError(f"header_residue must be from 0 to 4095, not {self.header_residue}")
        if self.table_files is not None and self.table_files < 1:
            raise ValueError(f"table_files must be at least 1, not {self.table_files}")


@dataclass(frozen=True)
class RowRange:
    """Rows of one plane, as the content of a tensor."""

    table: int
    plane: str
    first_row: int


@dataclass(frozen=True)
class Tensor:
    """A tensor to be stored: its bytes, or the table rows they are computed from."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: bytes | RowRange

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class PlannedFile:
    """One safetensors file.

    Attributes:
        name: File name.
        header: The 8-byte length, the JSON header and its padding.
        tensors: Tensors in data order.
    """

    name: str
    header: bytes
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)

    def offsets(self) -> list[int]:
        """Absolute offset of each tensor."""
        offsets: list[int] = []
        position = len(self.header)
        for tensor in self.tensors:
            offsets.append(position)
            position += tensor.nbytes
        return offsets


@dataclass
class _Contents:
    before: list[Tensor] = field(default_factory=lambda: [])
    rows: list[Tensor] = field(default_factory=lambda: [])
    after: list[Tensor] = field(default_factory=lambda: [])


def arrange(
    units: Sequence[Sequence[Tensor]],
    others: Sequence[Tensor],
    *,
    files: int,
    layout: Layout,
    generator: random.Random,
    shuffle: bool,
) -> list[PlannedFile]:
    """Deals tensors out over files.

    Args:
        units: Table pieces; the tensors of one unit (a piece and its scales) stay together unless
            `layout.scales_apart`.
        others: Every other tensor.
        files: Number of files.
        layout: Placement rules.
        generator: Source of every shuffle.
        shuffle: Whether pieces are shuffled over the table files, or dealt out in order.
    """
    contents = [_Contents() for _ in range(files)]
    table_files = min(layout.table_files or files, files)
    order = list(units)
    if shuffle and layout.shuffled:
        generator.shuffle(order)
    for index, unit in enumerate(order):
        home = index % table_files
        for position, tensor in enumerate(unit):
            place = home + position if layout.scales_apart else home
            contents[files - table_files + place % table_files].rows.append(tensor)
    for index, tensor in enumerate(others):
        target = contents[index % files]
        (target.before if (index // files) % 2 == 0 else target.after).append(tensor)
    return [
        _plan_file(_file_name(index, files), index, content, layout, generator)
        for index, content in enumerate(contents)
    ]


def index_json(files: Sequence[PlannedFile], generator: random.Random) -> bytes:
    """The index of a checkpoint of several files, its entries in random order."""
    entries = [(tensor.name, file.name) for file in files for tensor in file.tensors]
    generator.shuffle(entries)
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    document = {"metadata": {"total_size": total}, "weight_map": dict(entries)}
    return json.dumps(document, indent=2).encode() + b"\n"


def _file_name(index: int, files: int) -> str:
    if files == 1:
        return "model.safetensors"
    return f"model-{index + 1:05d}-of-{files:05d}.safetensors"


def _plan_file(
    name: str, index: int, content: _Contents, layout: Layout, generator: random.Random
) -> PlannedFile:
    rest = [*content.before, *content.rows, *content.after]
    keys = [tensor.name for tensor in rest]
    generator.shuffle(keys)
    before = sum(tensor.nbytes for tensor in content.before)
    for length in range(1, 65):
        for suffix in ("", "_"):
            shift_name = f"offset_shift.{index}{suffix}"
            shift = Tensor(shift_name, "U8", (length,), bytes(range(length)))
            tensors = (shift, *rest)
            header = _header(tensors, [*keys, shift_name], layout.header_residue)
            rows_begin = len(header) + length + before
            if layout.header_residue is not None or (
                len(header) % 2 == 1 and rows_begin % 8 == _RESIDUES[index % len(_RESIDUES)]
            ):
                return PlannedFile(name, header, tensors)
    raise AssertionError(f"no shift puts the rows of {name} at the wanted residue")


def _header(tensors: Sequence[Tensor], keys: Sequence[str], residue: int | None) -> bytes:
    entries: dict[str, dict[str, object]] = {}
    position = 0
    for tensor in tensors:
        end = position + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    document: dict[str, object] = {key: entries[key] for key in keys}
    document["__metadata__"] = {"format": "pt"}
    text = json.dumps(document, separators=(",", ":")).encode()
    if residue is not None:
        text += b" " * ((residue - len(text)) % 4096)
    return len(text).to_bytes(8, "little") + text
