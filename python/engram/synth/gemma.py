"""Gemma-3n: one row per token, a slice of it for every decoder layer; not hashed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .families import Contents, Family, PlaneSpec, Request, TableSpec, merge, ones, row_tensor

if TYPE_CHECKING:
    from .families import Config


def _build_gemma(request: Request) -> Contents:
    fields: Config = {
        "model_type": "gemma3n_text",
        "vocab_size": 262400,
        "vocab_size_per_layer_input": request.rows or 0,
        "hidden_size": 2048,
        "hidden_size_per_layer_input": 256,
        "num_hidden_layers": 30,
    }
    text = merge(fields, request.overrides)
    columns: int = text["num_hidden_layers"] * text["hidden_size_per_layer_input"]
    table = TableSpec(
        name="model.language_model.embed_tokens_per_layer",
        layer=None,
        rows=text["vocab_size_per_layer_input"],
        encoding="bf16",
        planes=(PlaneSpec("weight", "BF16", columns, 2 * columns),),
        values_per_row=columns,
        constants={},
    )
    config: Config = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": text,
    }
    unit = [row_tensor(f"{table.name}.weight", table.planes[0], 0, 0, table.rows)]
    others = [ones("model.language_model.norm.weight", text["hidden_size"])]
    return Contents(config, [table], [unit], others, shuffle=False)


GEMMA = Family(
    dtypes=("bf16",),
    rows=8192,
    layers=(),
    parts=1,
    files=1,
    build=_build_gemma,
    sizing_fields=("vocab_size_per_layer_input",),
)
