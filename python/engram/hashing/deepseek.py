"""DeepSeek-V4.1 Engram, and the original Engram demo."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from engram import _engram
from engram._errors import placed
from engram.hashing._arrays import integers
from engram.hashing.base import DeviceRule, NgramHash, OutOfVocab, wraps
from engram.hashing.fields import ConfigLike, Fields, divided, read_config
from engram.hashing.qwen import by_head
from engram.hashing.token_map import token_map_checksum

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DeepSeekHash"]


class DeepSeekHash(NgramHash):
    """The hash of one Engram layer's table.

    The rule of the model's reference code: tokens are mapped to compressed ids, these times odd
    multipliers (draws of `numpy.random.default_rng(seed + 10007 * layer)`) are XORed and reduced
    modulo primes that no other layer or order uses. An image token carries no n-gram: its own
    n-grams are all padding, and the tokens after it see padding from there on. EOS is an ordinary
    token. Beyond a barrier, and before the sequence, n-grams see the pad token.

    A configuration whose `engram_vocab_size` is a list, one entry per order, is that of the
    original demo: its `seed` counts, and with `out_of_vocab="wrap"` negative tokens hash as they
    are.

    Attributes:
        multipliers: `max_ngram_size` odd integers, the current token's first.
        token_map: Compressed id of every token, int32 `[vocab_size]`.
        token_map_checksum: SHA-256 of the map as little-endian int64, to compare with that of
            another process or engine: two tokenizer revisions may give maps of equal size.
        compressed_vocab_size: Distinct compressed ids.
        image_token_id: The token that carries no n-gram, or None.
    """

    family: ClassVar[str] = "deepseek"

    def __init__(
        self,
        config: ConfigLike,
        layer: int,
        token_map: Any,
        image_token_id: int | None = None,
        *,
        out_of_vocab: OutOfVocab = "raise",
        dead_id: int | None = None,
    ) -> None:
        """Derive the constants from a configuration.

        Args:
            config: Parsed `config.json` (flat or with `text_config`), a transformers configuration,
                or a path; for the demo, its configuration's fields.
            layer: Zero-based decoder layer, one of `engram_layer_ids`.
            token_map: Integers `[vocab_size]`, the compressed id of every token; see
                [`compressed_token_map`][engram.hashing.compressed_token_map].
            image_token_id: The token that carries no n-gram.
            out_of_vocab: `"raise"`: refuse tokens and context outside the map. `"wrap"`: such
                tokens carry no n-gram, as in the engines.
            dead_id: Id of tokens that carry no n-gram and of padding; None for the ids of an
                n-gram of pad tokens.

        Raises:
            ValueError: A field is missing or impossible; `layer` has no table; the map's size
                disagrees with `engram_compressed_vocab_size`, or the rows with
                `engram_num_embeddings`.
            TypeError: `token_map` holds no integers.
        """
        fields, _ = read_config(config)
        layers = fields.integers(_named(fields, "engram_layer_ids", "layer_ids"))
        if not layers:
            raise placed(
                ValueError(
                    f"{fields.name('engram_layer_ids')} is missing from the configuration, or "
                    "empty: this is no model with Engram tables"
                )
            )
        if layer not in layers:
            raise placed(
                ValueError(
                    f"layer {layer} has no Engram table: {fields.name('engram_layer_ids')} is "
                    f"{layers}"
                )
            )
        demo = _is_list(fields.get("engram_vocab_size"))
        max_ngram = fields.integer(
            _named(fields, "engram_max_ngram_size", "max_ngram_size"), least=2
        )
        heads_field = _named(fields, "engram_n_heads", "n_head_per_ngram")
        mapping = integers(token_map, "token_map")
        if mapping.ndim != 1 or mapping.size == 0:
            raise placed(
                ValueError(f"token_map: shape is {mapping.shape}; pass one id for every token")
            )
        if image_token_id is not None and not 0 <= image_token_id < mapping.size:
            raise placed(
                ValueError(
                    f"image_token_id is {image_token_id}, but the token map has {mapping.size} "
                    "tokens"
                )
            )
        self.compressed_vocab_size = _compressed_size(fields, mapping)
        native = _engram.NgramHash.deepseek(
            layer_ids=layers,
            layer=layer,
            max_ngram=max_ngram,
            heads_per_order=fields.integer(heads_field, least=1),
            vocab_sizes=_sizes(fields, "engram_vocab_size", max_ngram - 1),
            pad_token=_pad_token(fields),
            seed=fields.integer("seed", 0) if demo else 0,
            token_map=mapping,
            image_token=image_token_id,
            demo=demo,
            wrap=wraps(out_of_vocab),
            dead_id=dead_id,
        )
        _check_rows(fields, layers, layer, native.num_rows)
        self.token_map: NDArray[np.int32] = mapping.astype(np.int32)
        self.token_map.flags.writeable = False
        if fields.get("n_embed_per_ngram") is not None:
            per_order = native.heads // (max_ngram - 1)
            row_dim = divided(fields, "n_embed_per_ngram", per_order, heads_field)
        else:
            row_dim = fields.integer("engram_head_dim", 0) or None
        super().__init__(
            native,
            partial(
                DeepSeekHash,
                fields.root,
                layer,
                self.token_map,
                image_token_id,
                out_of_vocab=out_of_vocab,
                dead_id=dead_id,
            ),
            layer=layer,
            row_dim=row_dim,
            out_of_vocab=out_of_vocab,
            dead_id=dead_id,
        )
        self.demo = demo
        self.image_token_id = image_token_id
        self.multipliers = tuple(native.multipliers[0])
        self.token_map_checksum = token_map_checksum(self.token_map)

    def device_rule(self) -> DeviceRule:
        """The rule in the form that the device implementation applies."""
        return DeviceRule(
            fill=int(self.token_map[self.filler]),
            multipliers=by_head(self.multipliers, self.heads),
            xor=True,
            dead=self.image_token_id,
            token_map=self.token_map,
            negatives_unmapped=self.demo,
        )


def _named(fields: Fields, *names: str) -> str:
    """The first of a field's names that the configuration uses, else the usual one."""
    return next((name for name in names if fields.get(name) is not None), names[0])


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _sizes(fields: Fields, name: str, orders: int) -> list[int]:
    """The start of the prime search for each order."""
    if not _is_list(fields.get(name)):
        return [fields.integer(name, least=1)] * orders
    sizes = fields.integers(name, least=1)
    if len(sizes) != orders:
        raise placed(
            ValueError(
                f"{fields.name(name)} has {len(sizes)} entries, but n-grams up to {orders + 1} "
                f"have {orders} orders"
            )
        )
    return sizes


def _pad_token(fields: Fields) -> int:
    names = ("engram_pad_token_id", "engram_pad_id", "pad_id")
    return fields.integer(_named(fields, *names), 2)


def _compressed_size(fields: Fields, mapping: NDArray[Any]) -> int:
    size = int(mapping.max()) + 1
    name = _named(fields, "engram_compressed_vocab_size", "compressed_vocab_size")
    expected = fields.integer(name, size, least=1)
    if expected != size:
        raise placed(
            ValueError(
                f"{fields.name(name)} is {expected}, but the token map has {size} compressed ids: "
                "it was built from another tokenizer"
            )
        )
    return size


def _check_rows(fields: Fields, layers: list[int], layer: int, rows: int) -> None:
    declared = fields.integers("engram_num_embeddings")
    if not declared:
        return
    if len(declared) != len(layers):
        raise placed(
            ValueError(
                f"{fields.name('engram_num_embeddings')} has {len(declared)} entries, but "
                f"{fields.name('engram_layer_ids')} has {len(layers)}"
            )
        )
    if declared[layers.index(layer)] != rows:
        raise placed(
            ValueError(
                f"{fields.name('engram_num_embeddings')} gives layer {layer} "
                f"{declared[layers.index(layer)]} rows, but its head sizes add up to {rows}"
            )
        )
