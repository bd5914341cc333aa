"""Exceptions that say where: every one engram raises carries the same five attributes."""

from __future__ import annotations

from typing import TypeVar

_Error = TypeVar("_Error", bound=Exception)


def placed(
    error: _Error,
    *,
    path: str | None = None,
    table: str | None = None,
    row: int | None = None,
    position: int | None = None,
    offset: int | None = None,
) -> _Error:
    """Sets `path`, `table`, `row`, `position` and `offset` on `error`, None where unknown."""
    place = {"path": path, "table": table, "row": row, "position": position, "offset": offset}
    for name, value in place.items():
        setattr(error, name, value)
    return error
