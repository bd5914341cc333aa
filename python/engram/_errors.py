"""Exceptions that say where: every one engram raises carries the same five attributes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_Error = TypeVar("_Error", bound=BaseException)
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

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


def completes(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorates what users call: each exception that leaves it carries the five attributes."""

    @functools.wraps(function)
    def completed(*args: _Parameters.args, **keywords: _Parameters.kwargs) -> _Result:
        try:
            return function(*args, **keywords)
        except Exception as error:
            complete(error)
            raise

    return completed
