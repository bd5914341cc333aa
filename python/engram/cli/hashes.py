"""How tokens become row ids of a table, also where a checkpoint has no tokenizer with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import engram
from engram.hashing.fields import read_config

if TYPE_CHECKING:
    from pathlib import Path

    from engram.hashing import NgramHash

_MOST_TOKENS = 1 << 24
"""Many times the largest vocabulary there is; a configuration that says more is damaged."""


def table_hasher(path: Path, info: engram.TableInfo) -> NgramHash | None:
    """The hash of a table; None where a row's id is the token's.

    DeepSeek's hashes compressed ids, which follow from the tokenizer. How many rows a token has and
    how they spread does not depend on which ids those are, so any map of the right size stands in.

    Args:
        path: The checkpoint.
        info: One of its tables.

    Raises:
        ValueError: The configuration is damaged, or has no n-gram fields.
        OSError: There is no `config.json`, or it cannot be read.
    """
    if info.family in {"gemma", "plain"}:
        return None
    if info.family != "deepseek":
        return engram.hasher(path, info.name)
    fields, _ = read_config(path)
    compressed = fields.of_either("engram_compressed_vocab_size")
    tokens = fields.of_either("vocab_size") or compressed or 1
    compressed = compressed or tokens
    if max(tokens, compressed) > _MOST_TOKENS:
        raise ValueError(
            f"config.json: vocab_size {tokens} or engram_compressed_vocab_size {compressed} is "
            "more tokens than any tokenizer has"
        )
    token_map = np.minimum(np.arange(tokens), compressed - 1)
    return engram.hasher(path, info.name, token_map=token_map)
