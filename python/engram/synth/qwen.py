"""Qwen4-Exp (Qwen3.8-Flash-Next): one table per PLE layer, cut into numbered pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .constants import HashConstants, qwen_constants
from .families import (
    Contents,
    Family,
    PlaneSpec,
    Request,
    TableSpec,
    bf16,
    f32,
    int64,
    merge,
    ones,
    row_tensor,
    solve,
)
from .layout import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .families import Config

DEFAULT_SEED = 1234
FP8_SCALE = 0.00019931793212890625
NVFP4_SCALE = 0.00030517578125
_BLOCK = 16
_ENCODINGS = {"bf16": "bf16", "fp8": "fp8_e4m3"}


def _default_fields(request: Request) -> Config:
    fields: Config = {
        "model_type": "qwen4_exp_text",
        "vocab_size": 248320,
        "hidden_size": 2560,
        "hc_count": 4,
        "num_hidden_layers": max(48, request.layers[-1] + 1),
        "num_experts": 512,
        "eos_token_id": 248044,
        "ple_embed_dim": 2560,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 0,
        "make_ngram_vocab_size_divisible_by": 128,
        "split_ngram_parts": 1 if request.layout.naming == "whole" else request.parts,
    }
    if request.dtype != "bf16":
        fields["ple_embedding_dtype"] = "float8_e4m3fn" if request.dtype == "fp8" else "nvfp4"
    return fields


def _constants(text: Mapping[str, Any], tables: int, base: int) -> list[HashConstants]:
    return qwen_constants(
        tables=tables,
        vocab_size=text["vocab_size"],
        ngram_size=text["ngram_size"],
        heads_per_ngram=text["heads_per_ngram"],
        vocab_size_base=base,
        seed=text.get("seed", DEFAULT_SEED),
    )


def _padded(constants: HashConstants, divisor: int) -> int:
    return -(-constants.total // divisor) * divisor


def _build(request: Request) -> Contents:
    text = merge(_default_fields(request), request.overrides, optional=("seed",))
    text["ple_layer_ids"] = [layer + 1 for layer in request.layers]
    tables = len(request.layers)
    divisor: int = text["make_ngram_vocab_size_divisible_by"]
    heads: int = (text["ngram_size"] - 1) * text["heads_per_ngram"]
    if heads < 1 or text["ple_embed_dim"] % heads:
        raise ValueError(f"ple_embed_dim {text['ple_embed_dim']} is no multiple of {heads} heads")
    columns: int = text["ple_embed_dim"] // heads
    if request.rows is not None:
        text["ngram_vocab_size_base"] = solve(
            request.rows * tables,
            lambda base: sum(_padded(c, divisor) for c in _constants(text, tables, base)),
            smallest=2,
            step=heads * tables,
        )
    contents = Contents(_config(text, request), [], [], [], shuffle=True)
    for index, constants in enumerate(_constants(text, tables, text["ngram_vocab_size_base"])):
        module = f"model.language_model.layers.{request.layers[index]}.ple"
        name = f"{module}.ple_embedding.ngram_embedding"
        planes, scales = _planes(request.dtype, columns)
        table = TableSpec(
            name=name,
            layer=request.layers[index],
            rows=_padded(constants, divisor),
            encoding=_ENCODINGS.get(request.dtype, "nvfp4"),
            planes=planes,
            values_per_row=columns,
            constants=scales,
        )
        contents.tables.append(table)
        contents.units.extend(_units(table, index, request, text["split_ngram_parts"]))
        contents.others.extend(_others(table, constants, module, text, request.dtype))
    return contents


def _config(text: Config, request: Request) -> Config:
    config: Config = {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "image_token_id": 248056,
        "text_config": text,
    }
    if request.dtype == "fp8":
        config["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                f"model.language_model.layers.{layer}.ple.ple_embedding.ngram_embedding": {
                    "quant_algo": "FP8"
                }
                for layer in request.layers
            },
        }
    return config


def _planes(dtype: str, columns: int) -> tuple[tuple[PlaneSpec, ...], dict[str, float]]:
    if dtype == "bf16":
        return (PlaneSpec("weight", "BF16", columns, 2 * columns),), {}
    if dtype == "fp8":
        return (PlaneSpec("weight", "F8_E4M3", columns, columns),), {"weight_scale": FP8_SCALE}
    if columns % _BLOCK:
        raise ValueError(f"NVFP4 rows must have a multiple of {_BLOCK} values, not {columns}")
    planes = (
        PlaneSpec("weight", "U8", columns // 2, columns // 2),
        PlaneSpec("scale", "F8_E4M3", columns // _BLOCK, columns // _BLOCK),
    )
    spelling = "weight_global_scale" if dtype == "nvfp4-packed" else "weight_scale_2"
    return planes, {spelling: NVFP4_SCALE}


def _units(table: TableSpec, index: int, request: Request, parts: int) -> list[list[Tensor]]:
    weight, *scales = table.planes
    whole = request.layout.naming == "whole"
    if whole and scales:
        raise ValueError('naming="whole" is only for tables without block scales')
    piece_rows = -(-table.rows // parts)
    leaf = "weight_packed" if request.dtype == "nvfp4-packed" else "weight"
    units: list[list[Tensor]] = []
    for part in range(parts):
        first = part * piece_rows
        rows = max(0, min(piece_rows, table.rows - first))
        if rows == 0 and not request.layout.empty_parts:
            break
        separator = "s." if request.layout.naming == "shards" else "_"
        stem = table.name if whole else f"{table.name}.shard{separator}{part}"
        unit = [row_tensor(f"{stem}.{leaf}", weight, index, first, rows)]
        unit.extend(
            row_tensor(f"{stem}.weight_scale", scale, index, first, rows) for scale in scales
        )
        if request.dtype == "nvfp4-draft":
            unit.append(Tensor(f"{stem}.weight_scale_2", "F32", (1,), f32(NVFP4_SCALE)))
        units.append(unit)
    return units


def _others(
    table: TableSpec, constants: HashConstants, module: str, text: Config, dtype: str
) -> list[Tensor]:
    streams: int = text["hc_count"] * text["hidden_size"]
    embedding = f"{module}.ple_embedding"
    tensors = [
        int64(f"{embedding}.layer_multipliers", constants.multipliers),
        int64(f"{embedding}.ngram_heads_vocab_sizes", constants.sizes),
        int64(f"{embedding}.ngram_heads_offsets", constants.offsets),
        # Left over from training; no reader uses them.
        int64(f"{embedding}.hashstats_hits", [0] * len(constants.sizes)),
        int64(f"{embedding}.token_lookup", list(range(64))),
        *(ones(f"{module}.norm_{name}.weight", streams) for name in ("key", "query", "conv")),
        ones(f"{module}.conv1d.weight", streams, 1, text["ple_conv_kernel_size"]),
    ]
    if dtype == "fp8":
        tensors.append(Tensor(f"{table.name}.weight_scale", "BF16", (1,), bf16(FP8_SCALE)))
    if dtype in ("nvfp4", "nvfp4-packed"):
        name = next(iter(table.constants))
        tensors.append(Tensor(f"{table.name}.{name}", "F32", (1,), f32(NVFP4_SCALE)))
    return tensors


QWEN = Family(
    dtypes=("bf16", "fp8", "nvfp4", "nvfp4-draft", "nvfp4-packed"),
    rows=2_000_000,
    layers=(1,),
    parts=7,
    files=4,
    build=_build,
    sizing_fields=("ngram_vocab_size_base",),
)
"""Qwen4-Exp; the three NVFP4 spellings differ in tensor names only."""
