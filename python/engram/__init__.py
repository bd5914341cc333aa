"""Rows of n-gram embedding tables, read in place from safetensors checkpoints.

    rows = engram.FileGather("checkpoint/").gather(ids)

Importing engram imports neither torch nor pydantic; names that need them are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engram._engram import CheckpointError, __version__
from engram.buffer import HostBuffer
from engram.gather import FileGather, Residency, TableSet, drop_cache
from engram.rows import Rows
from engram.table import PieceInfo, PlaneInfo, Planes, TableInfo, tables

if TYPE_CHECKING:
    from engram.hashing import TokenHistory, hasher

__all__ = [
    "CheckpointError",
    "FileGather",
    "HostBuffer",
    "PieceInfo",
    "PlaneInfo",
    "Planes",
    "Residency",
    "Rows",
    "TableInfo",
    "TableSet",
    "TokenHistory",
    "__version__",
    "drop_cache",
    "hasher",
    "tables",
]

_LAZY: dict[str, str] = {
    "TokenHistory": "engram.hashing",
    "hasher": "engram.hashing",
}
"""Public names by the module they are loaded from on first use."""


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'engram' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
