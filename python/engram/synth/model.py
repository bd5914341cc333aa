"""A whole tiny model that `transformers` makes and saves itself, with a byte-level tokenizer.

The layout of its files is `transformers`' own: what its `save_pretrained` writes is the one thing
this module must not imitate.
"""

from __future__ import annotations

import errno
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
)
"""Tokens after the 256 bytes; the first ends a text."""

_BYTES = 256
_DECODER_LAYERS = 4
_NEEDED = (
    "writing a whole model needs torch, tokenizers and transformers >= 5.23: pip install "
    '"engram-gather[torch,tokenizers]" "transformers>=5.23"'
)


def write_model(
    directory: str | os.PathLike[str],
    *,
    layers: Sequence[int] = (1, 2),
    parts: int = 7,
    seed: int = 0,
) -> Path:
    """Writes a random Qwen4-Exp model of about 200,000 parameters, in BF16, and its tokenizer.

    `transformers.AutoModelForImageTextToText.from_pretrained(directory)` loads it. Token ids below
    256 are bytes, so any text can go in and come out.

    Args:
        directory: Where to write; must be empty or not exist.
        layers: Zero-based decoder layers with an n-gram table, among the linear-attention layers 0,
            1 and 2.
        parts: Pieces that each table is cut into; 7 makes the last one shorter.
        seed: Seed of the weights.

    Returns:
        The directory.

    Raises:
        ImportError: torch, tokenizers or a recent transformers is missing; says what to install.
        FileExistsError: The directory is not empty.
        ValueError: A layer that cannot have a table, or fewer than one part.
    """
    chosen = sorted(set(layers))
    wrong = [layer for layer in chosen if layer not in range(_DECODER_LAYERS - 1)]
    if wrong or not chosen:
        found = wrong[0] if wrong else "none"
        raise ValueError(f"layers must be among 0, 1 and 2 in the tiny model, not {found}")
    if parts < 1:
        raise ValueError(f"parts must be at least 1, not {parts}")
    try:
        torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        tokenizers: Any = importlib.import_module("tokenizers")
        config = _config(transformers.Qwen4ExpConfig, chosen, parts)
    except (ImportError, AttributeError) as error:
        raise ImportError(_NEEDED) from error
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise FileExistsError(errno.EEXIST, "directory is not empty; choose another", str(target))
    try:
        _save(target, config, seed, torch, transformers, tokenizers)
    except BaseException:
        for path in target.iterdir():
            path.unlink()
        raise
    return target


def _config(config_class: Any, layers: Sequence[int], parts: int) -> Any:
    end, image, video, vision_start, vision_end = range(_BYTES, _BYTES + len(SPECIAL_TOKENS))
    return config_class(
        text_config={
            "vocab_size": _BYTES + len(SPECIAL_TOKENS),
            "hidden_size": 32,
            "num_hidden_layers": _DECODER_LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "hc_count": 2,
            "hc_lowrank": 8,
            "ple_layer_ids": [layer + 1 for layer in layers],
            "ple_embed_dim": 64,
            "ngram_size": 3,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 500,
            "make_ngram_vocab_size_divisible_by": 16,
            "split_ngram_parts": parts,
            "eos_token_id": end,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=vision_start,
        vision_end_token_id=vision_end,
    )


def _save(
    target: Path, config: Any, seed: int, torch: Any, transformers: Any, tokenizers: Any
) -> None:
    logging = transformers.utils.logging
    had_progress_bar: bool = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = transformers.AutoModelForImageTextToText.from_config(
                config, dtype=torch.bfloat16
            )
        # Small enough for the two tables to lie in different files.
        model.save_pretrained(target, max_shard_size="200KB")
        _tokenizer(transformers, tokenizers).save_pretrained(target)
    finally:
        if had_progress_bar:
            logging.enable_progress_bar()


def _tokenizer(transformers: Any, tokenizers: Any) -> Any:
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    vocabulary = {character: place for place, character in enumerate(_byte_characters())}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[0]
    )


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte, in byte order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(_BYTES) if byte not in printable]
    return [
        chr(byte) if byte in printable else chr(_BYTES + others.index(byte))
        for byte in range(_BYTES)
    ]
