"""What the tests of dequantisation share."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

DTYPES = ["bfloat16", "float16", "float32"]
FRAMEWORKS = ["numpy", "torch"]
BLOCKS = {"fp8_e4m3_e8m0_32": (32, 1), "nvfp4": (16, 2), "mxfp4": (32, 2)}


def table(encoding, columns, **constants):
    return SimpleNamespace(encoding=encoding, logical_shape=(columns,), constants=constants)


def as_bytes(values, framework):
    array = np.asarray(values, dtype=np.uint8)
    return torch.from_numpy(array) if framework == "torch" else array


def bits(values):
    """The bit patterns of an array or tensor, as a NumPy array of unsigned integers."""
    if isinstance(values, torch.Tensor):
        values = values.view({2: torch.int16, 4: torch.int32}[values.dtype.itemsize]).numpy()
    return values.view(f"uint{8 * values.dtype.itemsize}")


def random_bytes(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
