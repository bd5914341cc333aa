"""Rows of n-gram embedding tables, read in place from safetensors checkpoints."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from engram._engram import CheckpointError, __version__

if TYPE_CHECKING:
    from engram.hashing import TokenHistory, hasher

__all__ = [
    "CheckpointError",
    "TokenHistory",
    "__version__",
    "hasher",
]

_MODULE_OF = {
    "TokenHistory": "engram.hashing",
    "hasher": "engram.hashing",
}


def __getattr__(name: str) -> Any:
    # Public names are imported when first asked for.
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
