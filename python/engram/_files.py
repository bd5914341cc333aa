"""Small files of a checkpoint, whose content and kind are untrusted."""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING, Any

from engram._engram import CheckpointError
from engram._errors import placed

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["CONFIG_BYTES", "INDEX_BYTES", "open_regular", "parse_json", "read_small"]

CONFIG_BYTES = 64 << 20
"""Longest `config.json` read."""

INDEX_BYTES = 512 << 20
"""Longest index read."""


def open_regular(path: Path) -> tuple[int, int]:
    """Opens a file read-only, never waiting for the other end of a pipe.

    Returns:
        Its descriptor, for the caller to close, and its bytes.

    Raises:
        OSError: It cannot be opened.
        CheckpointError: It is no regular file.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
    descriptor = os.open(path, flags)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        return descriptor, status.st_size
    os.close(descriptor)
    raise placed(CheckpointError(f"{path} is not a regular file"), path=str(path))


def read_small(path: Path, most: int) -> bytes:
    """The content of a file of at most `most` bytes.

    Raises:
        OSError: It cannot be read.
        CheckpointError: It is longer, or no regular file.
    """
    descriptor, size = open_regular(path)
    with os.fdopen(descriptor, "rb") as stream:
        if size > most:
            raise placed(
                CheckpointError(f"{path} has {size} bytes; the limit is {most}"), path=str(path)
            )
        return stream.read(most)


def parse_json(text: bytes, path: Path, what: str) -> Any:
    """Parses JSON.

    Raises:
        CheckpointError: It is none, or nested beyond reason.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise placed(CheckpointError(f"{path}: {what} ({error})"), path=str(path)) from None
