"""DeepSeek-V4.1 Engram: one uncut table per Engram layer, rows and block scales in two regions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .constants import HashConstants, deepseek_constants
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
    from collections.abc import Mapping

    from .families import Config

_BLOCK = 32
# At 61 and below, one published prime test disagrees with the others.
_SMALLEST_ENGRAM_VOCABULARY = 62


def _engram_constants(
    text: Mapping[str, Any], layers: tuple[int, ...], vocab_size: int
) -> list[HashConstants]:
    return deepseek_constants(
        layer_ids=layers,
        compressed_vocab_size=text["engram_compressed_vocab_size"],
        max_ngram_size=text["engram_max_ngram_size"],
        heads=text["engram_n_heads"],
        vocab_size=vocab_size,
    )


def _build_deepseek(request: Request) -> Contents:
    fields: Config = {
        "model_type": "deepseek_v41_text",
        "vocab_size": 129280,
        "hidden_size": 5120,
        "hc_mult": 4,
        "num_hidden_layers": max(48, request.layers[-1] + 1),
        "engram_max_ngram_size": 4,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_vocab_size": 0,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092,
        "image_token_id": 129264,
    }
    text = merge(fields, request.overrides)
    text["engram_layer_ids"] = list(request.layers)
    columns: int = text["engram_head_dim"]
    if columns % _BLOCK:
        raise ValueError(f"engram_head_dim must be a multiple of {_BLOCK}, not {columns}")
    heads: int = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
    if request.rows is not None:
        text["engram_vocab_size"] = solve(
            request.rows * len(request.layers),
            lambda size: sum(c.total for c in _engram_constants(text, request.layers, size)),
            smallest=_SMALLEST_ENGRAM_VOCABULARY,
            step=heads * len(request.layers),
        )
    constants = _engram_constants(text, request.layers, text["engram_vocab_size"])
    text["engram_num_embeddings"] = [entry.total for entry in constants]
    config: Config = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [_BLOCK, _BLOCK],
            "scale_fmt": "ue8m0",
        },
        "text_config": text,
    }
    weight = (
        PlaneSpec("weight", "F8_E4M3", columns, columns)
        if request.dtype == "fp8"
        else PlaneSpec("weight", "U8", columns // 2, columns // 2)
    )
    scale = PlaneSpec("scale", "F8_E8M0", columns // _BLOCK, columns // _BLOCK)
    contents = Contents(config, [], [], [ones("norm.weight", text["hidden_size"])], shuffle=False)
    for index, (layer, entry) in enumerate(zip(request.layers, constants, strict=True)):
        module = f"layers.{layer}.engram"
        table = TableSpec(
            name=f"{module}.embed",
            layer=layer,
            rows=entry.total,
            encoding="fp8_e4m3_e8m0_32" if request.dtype == "fp8" else "mxfp4",
            planes=(weight, scale),
            values_per_row=columns,
            constants={},
        )
        contents.tables.append(table)
        contents.units.append(
            [
                row_tensor(f"{table.name}.{plane.name}", plane, index, 0, table.rows)
                for plane in table.planes
            ]
        )
        contents.others.extend(
            ones(f"{module}.{name}", text["hc_mult"], text["hidden_size"])
            for name in ("q_weight", "k_weight")
        )
    return contents


DEEPSEEK = Family(
    dtypes=("fp8", "mxfp4"),
    rows=500_000,
    layers=(1, 14),
    parts=1,
    files=3,
    build=_build_deepseek,
    sizing_fields=("engram_vocab_size",),
)
