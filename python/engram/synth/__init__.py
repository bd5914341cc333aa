"""Synthetic checkpoints: the released layouts with bytes that can be checked without a copy.

    info = engram.synth.write("checkpoint", family="qwen", rows=2_000_000)
    want = engram.synth.expected_rows(info, [0, 17, 1_999_999])["weight"]

`write` makes a checkpoint, `load` finds one again, `expected_rows` computes the stored bytes of any
row (the function is written down in `engram.synth.pattern`), `write_sparse` makes files of the
released sizes that take no space, and `write_model` a whole tiny model for `transformers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .directory import MANIFEST, SynthInfo
from .layout import Layout
from .model import write_model
from .plan import FAMILIES, Plan, SynthPiece, SynthPlane, SynthTable, plan
from .sparse import load, write_sparse
from .writer import write

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

__all__ = [
    "FAMILIES",
    "MANIFEST",
    "Layout",
    "Plan",
    "SynthInfo",
    "SynthPiece",
    "SynthPlane",
    "SynthTable",
    "expected_rows",
    "load",
    "plan",
    "write",
    "write_model",
    "write_sparse",
]


def expected_rows(
    source: SynthInfo | SynthTable, ids: ArrayLike, table: int | str | None = None
) -> dict[str, NDArray[np.uint8]]:
    """Stored bytes of some rows of a synthetic checkpoint, computed without reading a file.

    Args:
        source: A checkpoint or one of its tables.
        ids: Row ids, integers of any shape.
        table: Which table of a checkpoint that has several: its name or its place in layer order.

    Returns:
        For each plane name (`"weight"`, `"scale"`) a uint8 array of shape
        `[*ids.shape, row_bytes]`. The rows of a sparse checkpoint that are not marked are zero on
        disk; they are not here.

    Raises:
        ValueError: The checkpoint has several tables and none was named, or no such table.
        IndexError: An id is outside the table.
    """
    if isinstance(source, SynthTable):
        return source.expected(ids)
    names = [entry.name for entry in source.tables]
    if table is None and len(names) == 1:
        table = 0
    if isinstance(table, str) and table in names:
        table = names.index(table)
    if not isinstance(table, int) or not 0 <= table < len(names):
        raise ValueError(f"table must be one of {names} or its place in that list, not {table!r}")
    return source.tables[table].expected(ids)
