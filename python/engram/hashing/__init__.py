"""Row ids from token ids, bit for bit as the models were trained with.

Three families of models address n-gram tables by hashing the last few tokens: Qwen (PLE), DeepSeek
(Engram) and LongCat. [`hasher`][engram.hashing.hasher] reads a checkpoint's configuration and
returns the hash of one of its tables; the classes build one without a checkpoint:

    h = engram.hasher("Qwen3.8-Flash-Next/")
    ids = h.ids(tokens, query_start_loc, context)  # int64 [T, h.heads]

A hash is stateless. What precedes a step comes with it, as `context`, so that chunked prefill,
prefix-cache hits, rejected drafts and resumed requests need no bookkeeping here; callers that keep
no history of their own can use [`TokenHistory`][engram.hashing.TokenHistory].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engram.hashing.base import NgramHash
from engram.hashing.checkpoint import hasher
from engram.hashing.deepseek import DeepSeekHash
from engram.hashing.history import TokenHistory
from engram.hashing.longcat import LongCatHash
from engram.hashing.qwen import QwenHash
from engram.hashing.rows import gather_tokens
from engram.hashing.token_map import compressed_token_map, token_map_checksum

if TYPE_CHECKING:
    from engram.hashing.device import DeviceHash

__all__ = [
    "DeepSeekHash",
    "DeviceHash",
    "LongCatHash",
    "NgramHash",
    "QwenHash",
    "TokenHistory",
    "compressed_token_map",
    "gather_tokens",
    "hasher",
    "token_map_checksum",
]


def __getattr__(name: str) -> Any:
    # The only class that needs torch.
    if name == "DeviceHash":
        from engram.hashing.device import DeviceHash

        return DeviceHash
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
