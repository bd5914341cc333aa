"""Exceptions that say where: every one engram raises carries the same five attributes."""

from __future__ import annotations

from typing import TypeVar

_Error = TypeVar("_Error", bound=BaseException)

_PLACE = ("path", "table", "row", "position", "offset")


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
    for name, value in zip(_PLACE, (path, table, row, position, offset), strict=True):
        setattr(error, name, value)
    return error


def complete(error: _Error, *, path: str | None = None, table: str | None = None) -> _Error:
    """Adds to `error` what it does not say: attributes that are missing, the path and the table."""
    known = {"path": path, "table": table}
    for name in _PLACE:
        if getattr(error, name, None) is None:
            setattr(error, name, known.get(name))
    return error
