"""LongCat-Flash n-gram embeddings."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar, Literal

from engram import _engram
from engram._errors import placed
from engram.hashing.base import DeviceRule, NgramHash, OutOfVocab, wraps
from engram.hashing.fields import ConfigLike, Fields, divided, read_config

__all__ = ["LongCatHash", "LongCatVariant"]

LongCatVariant = Literal["hf", "vllm"]


class LongCatHash(NgramHash):
    """The hash of the model's one n-gram table, whose ids run over all embedders.

    The rule of the model's own code: a polynomial in the vocabulary size, modulo the odd sizes
    `m + 1, m + 3, ...`, with `m = int(ngram_vocab_size_ratio * vocab_size)`. The sum ends where the
    segment does; an EOS token belongs to the segment it ends.

    Attributes:
        multipliers: For each head, the powers of the vocabulary size modulo the head's size: for
            the current token, the one before, and so on.
        variant: `"hf"` or `"vllm"`.
    """

    family: ClassVar[str] = "longcat"

    def __init__(
        self,
        config: ConfigLike,
        *,
        variant: LongCatVariant = "hf",
        out_of_vocab: OutOfVocab = "raise",
        dead_id: int | None = None,
    ) -> None:
        """Derive the constants from a configuration.

        Args:
            config: Parsed `config.json`, a transformers configuration, or a path. The older names
                `oe_vocab_size_ratio`, `oe_neighbor_num` and `oe_split_num` are understood. Where
                there is a `text_vocab_size`, it bounds the hash; `oe_ignored_token_ids` hash as
                token 0.
            variant: `"hf"`: an n-gram that ends in EOS sees its segment, as in the model's own code
                and SGLang. `"vllm"`: it sees nothing, so that every id is its head's first row.
            out_of_vocab: `"raise"`: refuse tokens and context outside the vocabulary. `"wrap"`:
                hash them by floor modulo; with `"vllm"`, negative tokens end a segment.
            dead_id: Id of padding tokens; None for the first row of every head.

        Raises:
            ValueError: A field is missing or impossible, or embedders do not divide `hidden_size`.
        """
        if variant not in ("hf", "vllm"):
            raise placed(ValueError(f'variant is {variant!r}: choose "hf" or "vllm"'))
        fields, _ = read_config(config)
        bound_field = "vocab_size" if fields.get("text_vocab_size") is None else "text_vocab_size"
        vocab_size = fields.integer(bound_field, least=1)
        self.eos_token_id = fields.token("eos_token_id")
        valid_tokens = max(vocab_size, fields.integer("vocab_size", vocab_size, least=1))
        if self.eos_token_id >= valid_tokens:
            raise placed(
                ValueError(
                    f"{fields.name('eos_token_id')} is {self.eos_token_id}, outside the vocabulary "
                    f"of {valid_tokens}"
                )
            )
        ignored = tuple(fields.integers("oe_ignored_token_ids"))
        native = _engram.NgramHash.longcat(
            vocab_size=vocab_size,
            valid_tokens=valid_tokens,
            base_size=int(_ratio(fields) * vocab_size),
            ngram=fields.integer(_either(fields, "emb_neighbor_num", "oe_neighbor_num"), least=2),
            splits=fields.integer(_either(fields, "emb_split_num", "oe_split_num"), least=1),
            eos=self.eos_token_id,
            ignored=ignored,
            vllm=variant == "vllm",
            wrap=wraps(out_of_vocab),
            dead_id=dead_id,
        )
        super().__init__(
            native,
            partial(
                LongCatHash,
                fields.root,
                variant=variant,
                out_of_vocab=out_of_vocab,
                dead_id=dead_id,
            ),
            layer=None,
            row_dim=divided(
                fields, "hidden_size", native.heads, "(emb_neighbor_num - 1) * emb_split_num"
            ),
            out_of_vocab=out_of_vocab,
            dead_id=dead_id,
        )
        self.variant: LongCatVariant = variant
        self.ignored_token_ids = ignored
        self.multipliers = tuple(tuple(powers) for powers in native.multipliers)

    def device_rule(self) -> DeviceRule:
        """The rule in the form that the device implementation applies."""
        vllm = self.variant == "vllm"
        return DeviceRule(
            fill=0,
            multipliers=self.multipliers,
            xor=False,
            last=None if vllm else self.eos_token_id,
            blank=self.eos_token_id if vllm else None,
            negatives_blank=vllm,
            ignored=self.ignored_token_ids,
        )


def _either(fields: Fields, name: str, older: str) -> str:
    return older if fields.get(name) is None and fields.get(older) is not None else name


def _ratio(fields: Fields) -> float:
    name = _either(fields, "ngram_vocab_size_ratio", "oe_vocab_size_ratio")
    value = fields.get(name)
    if value is None:
        raise placed(ValueError(f"{fields.name(name)} is missing from the configuration"))
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise placed(ValueError(f"{fields.name(name)} is {value!r}, not a number"))
    if value <= 0:
        raise placed(ValueError(f"{fields.name(name)} is {value}: the tables would have no rows"))
    return value
