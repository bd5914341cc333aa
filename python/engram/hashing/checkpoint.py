"""From a checkpoint to the hash of one of its tables."""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING, Any, cast

from engram._engram import CheckpointError
from engram._errors import placed
from engram.hashing.deepseek import DeepSeekHash
from engram.hashing.fields import ConfigLike, Fields, read_config
from engram.hashing.longcat import LongCatHash, LongCatVariant
from engram.hashing.qwen import QwenHash
from engram.hashing.stored import stored_constants
from engram.hashing.token_map import compressed_token_map

if TYPE_CHECKING:
    from pathlib import Path

    from engram.hashing.base import NgramHash, OutOfVocab

__all__ = ["hasher"]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_LONGCAT_TABLE = "model.ngram_embeddings.embedders"
_RATIOS = ("ngram_vocab_size_ratio", "oe_vocab_size_ratio")


def hasher(
    path_or_config: ConfigLike,
    table: str | int | None = None,
    *,
    out_of_vocab: OutOfVocab = "raise",
    dead_id: int | None = None,
    token_map: Any = None,
    variant: LongCatVariant | None = None,
) -> NgramHash:
    """The hash of one table of a model.

    The family is that of the configuration's n-gram fields. Where the checkpoint stores hash
    constants (Qwen), they are compared with those that follow from the configuration.

    Args:
        path_or_config: A checkpoint's path, a parsed `config.json`, or a transformers
            configuration. DeepSeek needs the path, for `tokenizer.json`, or a `token_map`.
        table: Name of the table (or of any of its tensors), or its place in layer order. None: the
            only one.
        out_of_vocab: What becomes of tokens and context entries outside the vocabulary.
            `"raise"`: ValueError. `"wrap"`: ids as the engines compute them, by wrapping products
            and floor modulo; they always stay inside their head.
        dead_id: Id of tokens that carry no n-gram (DeepSeek's image tokens) and of padding. None:
            the ids of an n-gram of nothing but filler. -1 gathers as zeros with `pad_id=-1`,
            without a read.
        token_map: DeepSeek: the compressed id of every token, instead of `tokenizer.json`.
        variant: LongCat: `"vllm"` for vLLM's rule at EOS tokens; `"hf"`, the model's own, by
            default.

    Raises:
        FileNotFoundError: `config.json`, `tokenizer.json` or an indexed file is missing.
        CheckpointError: Stored constants disagree with the configuration; both are named.
        ValueError: The configuration has no n-gram fields, or an impossible one; `table` is not
            one of its tables, or None where there are several; an argument belongs to another
            family.
    """
    fields, directory = read_config(path_or_config)
    if token_map is not None and not _announced(fields, "engram_layer_ids", "layer_ids"):
        raise placed(ValueError("token_map: only DeepSeek's hash maps tokens"))
    if variant is not None and not _announced(fields, *_RATIOS):
        raise placed(ValueError(f"variant is {variant!r}: only LongCat's hash has variants"))

    if _announced(fields, "ple_layer_ids"):
        layers = [layer - 1 for layer in sorted(set(fields.integers("ple_layer_ids", least=1)))]
        name = "model.language_model.layers.{}.ple.ple_embedding.ngram_embedding"
        index = _choose(table, layers, [name.format(layer) for layer in layers])
        qwen = QwenHash(fields.root, index, out_of_vocab=out_of_vocab, dead_id=dead_id)
        if directory is not None:
            _compare(qwen, directory, layers[index])
        return qwen
    if _announced(fields, "engram_layer_ids", "layer_ids"):
        ids = fields.integers(
            "engram_layer_ids" if _announced(fields, "engram_layer_ids") else "layer_ids"
        )
        layers = sorted(set(ids))
        index = _choose(table, layers, [f"layers.{layer}.engram.embed" for layer in layers])
        return DeepSeekHash(
            fields.root,
            layers[index],
            _token_map(directory) if token_map is None else token_map,
            fields.of_either("image_token_id"),
            out_of_vocab=out_of_vocab,
            dead_id=dead_id,
        )
    if _announced(fields, *_RATIOS):
        _choose(table, [], [_LONGCAT_TABLE])
        return LongCatHash(
            fields.root, variant=variant or "hf", out_of_vocab=out_of_vocab, dead_id=dead_id
        )
    raise placed(ValueError(_no_table(fields)))


def _announced(fields: Fields, *names: str) -> bool:
    return any(fields.get(name) not in (None, [], 0) for name in names)


def _no_table(fields: Fields) -> str:
    if fields.get("vocab_size_per_layer_input"):
        return (
            "per-layer embeddings are not hashed: a row's id is the token's id "
            "(hidden_size_per_layer_input is a Gemma field)"
        )
    name = fields.name
    return (
        "the configuration has no n-gram fields: none of "
        f"{name('ple_layer_ids')}, {name('engram_layer_ids')} and "
        f"{name('ngram_vocab_size_ratio')} is set (model_type {fields.get('model_type')!r})"
    )


def _choose(table: str | int | None, layers: list[int], names: list[str]) -> int:
    """Which of the tables, in layer order, is meant."""
    choices = ", ".join(f"{place}: {name}" for place, name in enumerate(names))
    if table is None:
        if len(names) == 1:
            return 0
        raise placed(
            ValueError(f"the model has {len(names)} tables; choose one with table= ({choices})")
        )
    if isinstance(table, str):
        match = _LAYER.search(table)
        if match is not None and int(match[1]) in layers:
            return layers.index(int(match[1]))
        if table in names or (not layers and "ngram_embeddings" in table):
            return 0
        raise placed(ValueError(f"the model has no table {table!r}; choose one of {choices}"))
    place = operator.index(table)
    if not 0 <= place < len(names):
        raise placed(ValueError(f"the model has no table {place}; choose one of {choices}"))
    return place


def _compare(qwen: QwenHash, directory: Path, layer: int) -> None:
    """Refuses stored constants that differ from the derived ones."""
    for constant in stored_constants(directory, layer):
        derived = cast("tuple[int, ...]", getattr(qwen, constant.attribute))
        if constant.values != derived:
            raise placed(
                CheckpointError(
                    f"{constant.path}: {constant.tensor} is {list(constant.values)}, but "
                    f"config.json gives {list(derived)}. The table was trained with the stored "
                    "values, so the configuration was changed (a padded vocab_size changes every "
                    "multiplier) or belongs to another checkpoint"
                ),
                path=str(constant.path),
            )


def _token_map(directory: Path | None) -> Any:
    if directory is None:
        raise placed(
            ValueError(
                "DeepSeek hashes compressed token ids: pass the checkpoint's path, for its "
                "tokenizer.json, or token_map=engram.hashing.compressed_token_map(tokenizer)"
            )
        )
    return compressed_token_map(directory)
