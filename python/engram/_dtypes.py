"""Stored dtypes as numpy and torch know them.

Inside engram rows are bytes; these names only decide what a caller sees. numpy has no types for
BF16, FP8 and E8M0 of its own, so `ml_dtypes` provides them. Packed FP4 pairs are bytes everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    import torch

NUMPY: dict[str, np.dtype[Any]] = {
    "bool": np.dtype(np.bool_),
    "u8": np.dtype(np.uint8),
    "i8": np.dtype(np.int8),
    "u16": np.dtype(np.uint16),
    "i16": np.dtype(np.int16),
    "u32": np.dtype(np.uint32),
    "i32": np.dtype(np.int32),
    "u64": np.dtype(np.uint64),
    "i64": np.dtype(np.int64),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "fp8_e8m0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "fp8_e4m3fnuz": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "fp8_e5m2fnuz": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "c64": np.dtype(np.complex64),
}
"""numpy dtype of each stored dtype; anything else (packed FP4 and FP6) is served as bytes."""

_TORCH_NAMES: dict[str, str] = {
    "bool": "bool",
    "u8": "uint8",
    "i8": "int8",
    "u16": "uint16",
    "i16": "int16",
    "u32": "uint32",
    "i32": "int32",
    "u64": "uint64",
    "i64": "int64",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "bf16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp8_e8m0": "float8_e8m0fnu",
    "fp8_e4m3fnuz": "float8_e4m3fnuz",
    "fp8_e5m2fnuz": "float8_e5m2fnuz",
    "c64": "complex64",
}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype rows of a stored dtype are returned in; uint8 where numpy has none."""
    return NUMPY.get(name, NUMPY["u8"])


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype rows of a stored dtype are returned in; uint8 where this torch has none."""
    import torch

    return getattr(torch, _TORCH_NAMES.get(name, "uint8"), torch.uint8)
