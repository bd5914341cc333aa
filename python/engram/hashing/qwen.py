"""Qwen4-Exp / Qwen3.8-Flash-Next: per-layer n-gram embeddings (PLE)."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from engram import _engram
from engram._errors import placed
from engram.hashing.base import DeviceRule, NgramHash, OutOfVocab, wraps
from engram.hashing.fields import ConfigLike, divided, read_config

__all__ = ["QwenHash"]

_ANNOUNCING = ("ple_layer_ids", "ple_embed_dim", "ngram_size", "ngram_vocab_size_base")


class QwenHash(NgramHash):
    """The hash of one PLE layer's table.

    The rule of transformers' `Qwen4ExpTextNGramEmbedding`: symbols times odd multipliers, XORed,
    modulo successive primes. A segment ends with its EOS token; beyond, and before the sequence,
    n-grams see EOS. Image placeholders hash as ordinary tokens. Padding that an attention mask
    hides hashes as EOS: put `filler` there before calling `ids`.

    Attributes:
        multipliers: `ngram_size` odd integers, the current token's first; the checkpoint's
            `layer_multipliers`.
    """

    family: ClassVar[str] = "qwen"

    def __init__(
        self,
        config: ConfigLike,
        ple_index: int = 0,
        *,
        out_of_vocab: OutOfVocab = "raise",
        dead_id: int | None = None,
    ) -> None:
        """Derive the constants from a configuration.

        Args:
            config: Parsed `config.json` (flat or with `text_config`), a transformers configuration,
                or a path. Fields that are absent have transformers' defaults.
            ple_index: Place of the layer among the sorted `ple_layer_ids`.
            out_of_vocab: `"raise"`: refuse tokens and context outside the vocabulary. `"wrap"`:
                hash them as the engines do, with wrapping products and floor modulo.
            dead_id: Id of padding tokens; None for the ids of an EOS token.

        Raises:
            ValueError: A field is missing or impossible, or heads do not divide `ple_embed_dim`.
        """
        fields, _ = read_config(config)
        if all(fields.get(field) is None for field in _ANNOUNCING):
            raise placed(
                ValueError(
                    f"{fields.name('ple_layer_ids')} is missing from the configuration, and so are "
                    "the other n-gram fields: this is no Qwen model with n-gram tables"
                )
            )
        layers = sorted(set(fields.integers("ple_layer_ids", least=1)))
        if ple_index < 0 or (layers and ple_index >= len(layers)):
            raise placed(
                ValueError(
                    f"ple_index is {ple_index}, but {fields.name('ple_layer_ids')} has "
                    f"{len(layers)} layers: {layers}"
                )
            )
        self.eos_token_id = fields.token("eos_token_id")
        vocab_size = fields.integer("vocab_size", 248_320, least=1)
        if self.eos_token_id >= vocab_size:
            raise placed(
                ValueError(
                    f"{fields.name('eos_token_id')} is {self.eos_token_id}, outside "
                    f"{fields.name('vocab_size')} {vocab_size}"
                )
            )
        native = _engram.NgramHash.qwen(
            vocab_size=vocab_size,
            ngram_size=fields.integer("ngram_size", 3, least=2),
            heads_per_ngram=fields.integer("heads_per_ngram", 8, least=1),
            vocab_size_base=fields.integer("ngram_vocab_size_base", 20_000_000, least=1),
            divisor=fields.integer("make_ngram_vocab_size_divisible_by", 128, least=1),
            seed=fields.integer("seed", 1234, least=-(2**63)) % 2**64,
            ple_index=ple_index,
            eos=self.eos_token_id,
            wrap=wraps(out_of_vocab),
            dead_id=dead_id,
        )
        dimension = "hidden_size" if fields.get("ple_embed_dim") is None else "ple_embed_dim"
        super().__init__(
            native,
            partial(QwenHash, fields.root, ple_index, out_of_vocab=out_of_vocab, dead_id=dead_id),
            # Layers are counted from one in the configuration, from zero in tensor names.
            layer=layers[ple_index] - 1 if layers else None,
            row_dim=divided(fields, dimension, native.heads, "(ngram_size - 1) * heads_per_ngram"),
            out_of_vocab=out_of_vocab,
            dead_id=dead_id,
        )
        self.ple_index = ple_index
        self.multipliers = tuple(native.multipliers[0])

    def device_rule(self) -> DeviceRule:
        """The rule in the form that the device implementation applies."""
        return DeviceRule(
            fill=self.eos_token_id,
            multipliers=by_head(self.multipliers, self.heads),
            xor=True,
            last=self.eos_token_id,
        )


def by_head(multipliers: tuple[int, ...], heads: int) -> tuple[tuple[int, ...], ...]:
    """Shared multipliers for each head: as many as its n-gram is long."""
    per_order = heads // (len(multipliers) - 1)
    return tuple(multipliers[: head // per_order + 2] for head in range(heads))
