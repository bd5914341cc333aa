"""The kernel's page cache: how much of a table is in it, and getting rid of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from engram import _engram
from engram._arguments import path_text
from engram._errors import placed


@dataclass(frozen=True, slots=True)
class Residency:
    """How much of a table is in memory.

    Attributes:
        pages: Pages that hold rows of the table.
        resident: Those that are in memory; None where the kernel does not tell (it tells only the
            owner of a file and those who may write it) or the file is not mapped.
        believed: Those that engram believes to be in memory.
        page_bytes: Bytes of a page.
    """

    pages: int
    resident: int | None
    believed: int
    page_bytes: int

    @property
    def share(self) -> float | None:
        """Share of the table's pages in memory, from 0.0 to 1.0; None where unknown."""
        if self.resident is None:
            return None
        return self.resident / self.pages if self.pages else 1.0


def drop_cache(files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> int:
    """Drops the page cache of files, for benchmarks and tests.

    Args:
        files: One path or several, such as `FileGather.files`.

    Returns:
        Bytes that stayed resident all the same, because another process maps or locks them.

    Raises:
        IsADirectoryError: A path is a directory.
        OSError: A file cannot be opened or synced.
    """
    given: Any = files
    one = isinstance(given, str | bytes | os.PathLike) or not isinstance(given, Iterable)
    paths: list[Any] = [given] if one else list(cast("Iterable[Any]", given))
    named = [path_text(path) for path in paths]
    for path in named:
        if os.path.isdir(path):  # noqa: PTH112 - pathlib takes milliseconds to import
            said = "this is a directory: pass the files in it, such as FileGather.files"
            raise placed(IsADirectoryError(errno.EISDIR, said, path), path=path)
    return _engram.drop_cache(named)
