"""A progress bar for people who watch a server start."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engram.storage.base import Progress

__all__ = ["bar"]

LEAST_BYTES = 1 << 30
"""Smaller tables are there before a bar would be."""

_PERIOD = 0.2
_WIDTH = 30


def bar(nbytes: int) -> Progress | None:
    """Draws on the error stream if that is a terminal and `nbytes` is worth it; else None."""
    if nbytes < LEAST_BYTES or not sys.stderr.isatty():
        return None
    drawn = 0.0

    def draw(stage: str, done: int, total: int) -> None:
        nonlocal drawn
        now = time.monotonic()
        if now - drawn < _PERIOD and done < total:
            return
        drawn = now
        share = done / total if total else 1.0
        filled = "#" * int(share * _WIDTH)
        line = f"\rengram: {stage:<26} [{filled:<{_WIDTH}}] {done / 2**30:7.2f} GiB {share:4.0%}"
        sys.stderr.write(line + "\n" * (done >= total))
        sys.stderr.flush()

    return draw
