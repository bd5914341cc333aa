"""Tensors in this process's memory, as the native half takes them."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from engram import _engram
from engram._arguments import mode_argument, optional_number, table_argument
from engram._arrays import is_torch
from engram._errors import placed
from engram._files import CONFIG_BYTES, read_small
from engram._sizes import optional_budget

_SAFETENSORS: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}
"""Names of element types in torch and ml_dtypes, and in safetensors files."""


class Expectation(NamedTuple):
    """What says how many rows a table has: the number, or the text of a configuration."""

    num_rows: int | None
    config: str | None


def open_views(
    views: Mapping[str, Any],
    others: int,
    expected: Expectation,
    table: Any = None,
    *,
    io: str = "auto",
    threads: int | None = None,
    advice: str = "auto",
    max_mapped_bytes: int | str | None = None,
) -> _engram.Reader:
    """Opens the files behind views of a table; see `ViewLoader.bind`.

    Args:
        views: Tensors by name, all of them of tables.
        others: How many tensors of no table there were besides.
        expected: How many rows there have to be.
        table: Which table.
        io: As for `FileGather`.
        threads: As for `FileGather`.
        advice: As for `FileGather`.
        max_mapped_bytes: As for `FileGather`.
    """
    if not views:
        raise placed(
            ValueError(
                f"none of the {others} tensors given belongs to an n-gram or per-layer table"
                if others
                else "no tensor was added, so there is no table to bind"
            )
        )
    return _engram.bind_views(
        [(name, *described(name, tensor)) for name, tensor in views.items()],
        expected.num_rows,
        expected.config,
        *opening(table, io, threads, advice, max_mapped_bytes),
    )


def opening(
    table: Any, io: Any, threads: Any, advice: Any, max_mapped_bytes: Any
) -> tuple[str | int | None, str, int | None, str, int | None]:
    """What opening a table takes in every way, checked, in the native half's order.

    Raises:
        TypeError: A name or a place that is none.
        ValueError: A number or a size that is none.
    """
    return (
        table_argument(table),
        mode_argument("io", io),
        optional_number("threads", threads),
        mode_argument("advice", advice),
        optional_budget("max_mapped_bytes", max_mapped_bytes),
    )


def described(name: str, tensor: Any) -> tuple[str, tuple[int, ...], int]:
    """Safetensors dtype, shape and address of a contiguous tensor in host memory."""
    kind = type(cast("object", tensor))
    if is_torch(tensor):
        if tensor.device.type != "cpu":
            raise placed(
                TypeError(
                    f"tensor {name!r} is on {tensor.device}; a view into a mapped file is on the "
                    "CPU. Load the table's tensors with device='cpu'"
                )
            )
        if _is_pinned(tensor):
            raise placed(
                ValueError(
                    f"tensor {name!r} is backed by pinned host memory, not by a checkpoint file: "
                    "its loader made a copy of it. Hand over the views that safetensors' safe_open "
                    "gives, or open the checkpoint by its path: engram.FileGather(path)"
                )
            )
        contiguous, address = tensor.is_contiguous(), tensor.data_ptr()
    elif issubclass(kind, np.ndarray):
        contiguous, address = tensor.flags.c_contiguous, tensor.__array_interface__["data"][0]
    else:
        raise placed(
            TypeError(
                f"tensor {name!r} is a {kind.__name__}; pass a CPU torch tensor or a NumPy "
                "array, such as safe_open(...).get_tensor(name) gives"
            )
        )
    if not contiguous:
        raise placed(ValueError(f"tensor {name!r} is not contiguous; its rows lie apart in memory"))
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _SAFETENSORS:
        raise placed(TypeError(f"tensor {name!r} has dtype {dtype}, which safetensors has not"))
    shape: tuple[int, ...] = tuple(tensor.shape)
    return _SAFETENSORS[dtype], shape, address


def _is_pinned(tensor: Any) -> bool:
    """Whether CUDA knows the memory, where this process uses CUDA at all."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and cuda.is_initialized() and tensor.is_pinned()


def expectation(given: Any) -> Expectation:
    """The number of rows, or the text of the configuration that implies it."""
    if isinstance(given, int | np.integer) and not isinstance(given, bool):
        rows = operator.index(cast("Any", given))
        if rows < 1:
            raise placed(ValueError(f"num_rows={rows} must be at least 1"))
        return Expectation(rows, None)
    return Expectation(None, configuration_text(given))


def configuration_text(given: Any) -> str:
    """A model's configuration as JSON.

    Args:
        given: A transformers configuration, vLLM's `ModelConfig`, the content of a `config.json` as
            a mapping, or its path or directory.

    Raises:
        TypeError: None of these.
        FileNotFoundError: There is no such file.
        CheckpointError: It is too long, or no regular file.
    """
    if isinstance(given, str | os.PathLike):
        from pathlib import Path

        path = Path(cast("Any", given))
        path = path / "config.json" if path.is_dir() else path
        return read_small(path, CONFIG_BYTES).decode(errors="replace")
    config: Any = getattr(given, "hf_config", given)
    to_dict = getattr(config, "to_dict", None)
    if callable(to_dict):
        config = to_dict()
    if not isinstance(config, Mapping):
        raise placed(
            TypeError(
                "expected a number of rows, a model configuration, its mapping or the path of its "
                f"config.json, not {type(given).__name__}"
            )
        )
    import json

    return json.dumps(dict(cast("Mapping[str, Any]", config)), default=str)
