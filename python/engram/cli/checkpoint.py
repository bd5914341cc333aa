"""What commands that look into a checkpoint share: which tables, and which paths are wrong."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import engram

from .errors import Failed

if TYPE_CHECKING:
    from pathlib import Path

_NOT_THERE = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
)


def is_wrong_path(error: BaseException, path: Path) -> bool:
    """Whether there is nothing at `path` to look at, rather than something wrong with it."""
    if not isinstance(error, OSError) or error.errno not in _NOT_THERE:
        return False
    named: object = error.filename
    return isinstance(named, str) and named == os.fspath(path)


def chosen_tables(path: Path, table: str | None) -> list[engram.TableInfo]:
    """The tables at `path`, or the one that is asked for.

    Args:
        path: A checkpoint.
        table: A name, a plain tensor's too; a place in layer order; None for all tables.

    Raises:
        Failed: There is no table, or not this one; those that are there are listed.
        Exception: As `engram.tables` does.
    """
    found = engram.tables(path)
    if table is None:
        if not found:
            raise Failed(
                f"no n-gram or per-layer embedding table in {path}; "
                f"`engram inspect --plain` lists every two-dimensional tensor, for --table"
            )
        return found
    if table.isdecimal():
        if int(table) < len(found):
            return [found[int(table)]]
    else:
        for info in (*found, *engram.tables(path, plain=True)):
            if info.name == table:
                return [info]
    names = ", ".join(f"{place}: {info.name}" for place, info in enumerate(found)) or "none"
    raise Failed(f"no table {table!r} in {path}; there are {names}")
