"""Errors worded as the native half words them."""

from __future__ import annotations

from engram._errors import placed

__all__ = ["outside"]


def outside(table: str, rows: int, row: int, position: int) -> IndexError:
    """The error for an id outside a table."""
    hint = f"; pass pad_id={row} if this id marks padding" if row < 0 else ""
    return placed(
        IndexError(
            f'row id {row} at position {position} is outside table "{table}" with {rows} rows '
            f"(valid ids: 0 to {max(0, rows - 1)}){hint}"
        ),
        table=table,
        row=row,
        position=position,
    )
