"""LongCat-Flash: one table whose pieces are the embedders, each two rows longer than the last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .constants import longcat_sizes
from .families import (
    Contents,
    Family,
    PlaneSpec,
    Request,
    TableSpec,
    merge,
    ones,
    row_tensor,
    solve,
)

if TYPE_CHECKING:
    from .families import Config


def _build_longcat(request: Request) -> Contents:
    fields: Config = {
        "architectures": ["LongcatFlashNgramForCausalLM"],
        "model_type": "longcat_flash_ngram",
        "vocab_size": 131072,
        "hidden_size": 3072,
        "ngram_vocab_size_ratio": 0,
        "emb_neighbor_num": 4,
        "emb_split_num": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_layers": 14,
    }
    config = merge(fields, request.overrides)
    vocab_size: int = config["vocab_size"]
    orders, splits = config["emb_neighbor_num"], config["emb_split_num"]
    count: int = (orders - 1) * splits
    if request.rows is not None:
        half = solve(
            request.rows,
            lambda half: sum(
                longcat_sizes(ngram_vocab_size=2 * half, max_ngram_size=orders, splits=splits)
            ),
            smallest=1,
            step=2 * count,
        )
        config["ngram_vocab_size_ratio"] = _ratio(2 * half, vocab_size)
    ngram_vocab_size = int(config["ngram_vocab_size_ratio"] * vocab_size)
    sizes = longcat_sizes(ngram_vocab_size=ngram_vocab_size, max_ngram_size=orders, splits=splits)
    if config["hidden_size"] % count:
        raise ValueError(f"hidden_size {config['hidden_size']} is no multiple of {count} embedders")
    columns: int = config["hidden_size"] // count
    table = TableSpec(
        name="model.ngram_embeddings.embedders",
        layer=None,
        rows=sum(sizes),
        encoding="bf16",
        planes=(PlaneSpec("weight", "BF16", columns, 2 * columns),),
        values_per_row=columns,
        constants={},
    )
    contents = Contents(
        config, [table], [], [ones("model.norm.weight", config["hidden_size"])], shuffle=True
    )
    first = 0
    for index, size in enumerate(sizes):
        name = f"{table.name}.{index}.weight"
        contents.units.append([row_tensor(name, table.planes[0], 0, first, size)])
        first += size
    return contents


def _ratio(ngram_vocab_size: int, vocab_size: int) -> int | float:
    if ngram_vocab_size % vocab_size == 0:
        return ngram_vocab_size // vocab_size
    # Readers truncate the product, so a quotient that was rounded down needs a nudge.
    ratio = ngram_vocab_size / vocab_size
    exact = int(ratio * vocab_size) == ngram_vocab_size
    return ratio if exact else (ngram_vocab_size + 0.5) / vocab_size


LONGCAT = Family(
    dtypes=("bf16",),
    rows=500_000,
    layers=(),
    parts=1,
    files=4,
    build=_build_longcat,
    sizing_fields=("ngram_vocab_size_ratio",),
)
