"""Rows of n-gram embedding tables, read in place from safetensors checkpoints.

    rows = engram.FileGather("checkpoint/").gather(ids)

Importing engram imports neither torch nor pydantic; names that need them are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engram._engram import CheckpointError, __version__
from engram.buffer import HostBuffer
from engram.gather import FileGather
from engram.pagecache import Residency, drop_cache
from engram.rows import Rows
from engram.table import PieceInfo, PlaneInfo, Planes, TableInfo, tables
from engram.table_set import TableSet
from engram.ticket import Ticket
from engram.verification import Problem, Verification

__all__ = [
    "CheckpointError",
    "Dequantizer",
    "EngramConfig",
    "FileGather",
    "Groups",
    "HostBuffer",
    "NgramEmbedding",
    "PieceInfo",
    "PlaneInfo",
    "Planes",
    "Problem",
    "ReadOncePerNode",
    "Residency",
    "Rows",
    "Shard",
    "ShardedLookup",
    "Stage",
    "TableInfo",
    "TableSet",
    "Ticket",
    "TokenHistory",
    "Verification",
    "ViewLoader",
    "__version__",
    "dequantize",
    "drop_cache",
    "gather_tokens",
    "hasher",
    "model_has_engram_layers",
    "new_groups",
    "open_storage",
    "tables",
]

if TYPE_CHECKING:
    from engram.config import EngramConfig, model_has_engram_layers
    from engram.embedding import NgramEmbedding
    from engram.exchange import ReadOncePerNode, ShardedLookup
    from engram.hashing import TokenHistory, gather_tokens, hasher
    from engram.parallel import Groups, Shard, new_groups
    from engram.quant import Dequantizer, dequantize
    from engram.staging import Stage
    from engram.storage import open_storage
    from engram.views import ViewLoader

_LAZY: dict[str, str] = {
    "Dequantizer": "engram.quant",
    "EngramConfig": "engram.config",
    "Groups": "engram.parallel",
    "NgramEmbedding": "engram.embedding",
    "ReadOncePerNode": "engram.exchange",
    "Shard": "engram.parallel",
    "ShardedLookup": "engram.exchange",
    "Stage": "engram.staging",
    "TokenHistory": "engram.hashing",
    "ViewLoader": "engram.views",
    "dequantize": "engram.quant",
    "gather_tokens": "engram.hashing",
    "hasher": "engram.hashing",
    "model_has_engram_layers": "engram.config",
    "new_groups": "engram.parallel",
    "open_storage": "engram.storage",
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
