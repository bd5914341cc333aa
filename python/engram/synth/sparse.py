"""Checkpoints of the released sizes that take no space: holes, and a few rows with bytes.

They show that offsets beyond 2**31 and 2**32 bytes are right on any disk. They are no benchmark:
holes are not read from anywhere.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .directory import SynthInfo, filling, read_manifest
from .layout import Layout
from .plan import plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from .layout import PlannedFile, RowRange, Tensor
    from .plan import Plan, SynthTable

_RELEASED: dict[str, dict[str, Any]] = {
    "qwen": {
        "config": {"ngram_vocab_size_base": 20_000_000},
        "parts": 128,
        "files": 131,
        "layout": Layout(table_files=33),
    },
    "deepseek": {"config": {"engram_vocab_size": 16_000_000}, "files": 48},
    "longcat": {"config": {"ngram_vocab_size_ratio": 78}, "files": 12},
    "gemma": {"config": {"vocab_size_per_layer_input": 262_144}, "files": 3},
}
_BOUNDARY = 1 << 31


def write_sparse(
    directory: str | os.PathLike[str],
    family: str = "qwen",
    *,
    dtype: str | None = None,
    seed: int = 0,
    overwrite: bool = False,
    **changes: Any,
) -> SynthInfo:
    """Writes a checkpoint of the released geometry whose tables are holes but for marked rows.

    Marked are the first and the last row of every piece, and the rows before, at and after every
    multiple of 2**31 bytes, counted from the start of the file and from the start of the table.

    Args:
        directory: Where to write; must be empty or not exist. Its file system must keep holes.
        family: As for `write`.
        dtype: As for `write`.
        seed: As for `write`.
        overwrite: As for `write`.
        **changes: Other arguments of `write` (`parts`, `files`, `config` ...) that differ from the
            release.

    Returns:
        The checkpoint; `marked` names the rows that hold the bytes of `expected_rows`. Every other
        row is zero.
    """
    planned = plan(family, dtype=dtype, seed=seed, **{**_RELEASED[family], **changes})
    target = Path(directory)
    marked = _marked(planned)
    with filling(target, planned, overwrite=overwrite, sparse=True):
        for file in planned.files:
            _write_file(target, file, planned, marked)
    return SynthInfo(target, planned, marked)


def load(directory: str | os.PathLike[str]) -> SynthInfo:
    """Finds a checkpoint that `write` or `write_sparse` made.

    Args:
        directory: Its directory.

    Raises:
        FileNotFoundError: The directory holds no synthetic checkpoint.
        ValueError: It was made by another version, or never finished.
    """
    planned, sparse = read_manifest(directory)
    return SynthInfo(Path(directory), planned, _marked(planned) if sparse else None)


def _marked(planned: Plan) -> Mapping[str, NDArray[np.int64]]:
    return {table.name: _marked_rows(table) for table in planned.tables}


def _marked_rows(table: SynthTable) -> NDArray[np.int64]:
    rows: set[int] = set()
    for plane in table.planes:
        for boundary in range(_BOUNDARY, table.rows * plane.row_bytes, _BOUNDARY):
            row = boundary // plane.row_bytes
            rows.update((row - 1, row, row + 1))
        for piece in plane.pieces:
            rows.update((piece.first_row, piece.first_row + piece.rows - 1))
            end = piece.offset + piece.rows * plane.row_bytes
            first_boundary = -(-piece.offset // _BOUNDARY) * _BOUNDARY
            for boundary in range(first_boundary, end, _BOUNDARY):
                row = piece.first_row + (boundary - piece.offset) // plane.row_bytes
                rows.update((row - 1, row, row + 1))
    return np.array(sorted(row for row in rows if 0 <= row < table.rows), np.int64)


def _write_file(
    directory: Path, file: PlannedFile, planned: Plan, marked: Mapping[str, NDArray[np.int64]]
) -> None:
    with (directory / file.name).open("xb") as target:
        target.truncate(file.nbytes)
        target.write(file.header)
        for tensor, offset in zip(file.tensors, file.offsets(), strict=True):
            if isinstance(tensor.content, bytes):
                os.pwrite(target.fileno(), tensor.content, offset)
            else:
                _write_marked(target.fileno(), tensor, tensor.content, offset, planned, marked)


def _write_marked(
    descriptor: int,
    tensor: Tensor,
    content: RowRange,
    offset: int,
    planned: Plan,
    marked: Mapping[str, NDArray[np.int64]],
) -> None:
    table = planned.tables[content.table]
    pattern = table.plane(content.plane).pattern
    ids = marked[table.name]
    ids = ids[(ids >= content.first_row) & (ids < content.first_row + tensor.shape[0])]
    for row, data in zip(ids.tolist(), pattern.rows(ids), strict=True):
        place = offset + (row - content.first_row) * pattern.row_bytes
        os.pwrite(descriptor, data, place)
