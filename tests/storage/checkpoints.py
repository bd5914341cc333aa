"""Small synthetic checkpoints, and what their rows must be."""

from __future__ import annotations

import numpy as np
from safetensors import safe_open

import engram
from engram import synth

VARIANTS = ("qwen-bf16", "qwen-fp8", "qwen-nvfp4", "deepseek-fp8", "longcat-bf16", "gemma-bf16")
"""Family and dtype of each checkpoint: one plane and two, with and without constants."""


def make(directory, variant, rows=5_000, **options):
    """Writes the checkpoint of a variant and gives its description."""
    family, dtype = variant.split("-", 1)
    if family == "gemma":
        options.setdefault("config", {"num_hidden_layers": 2})  # Real rows are 15 KB each.
    return synth.write(directory, family, rows=rows, dtype=dtype, **options)


def views(info, framework="pt"):
    """Every tensor as a loader hands it out, in the order of files."""
    found = {}
    for file in info.files:
        opened = safe_open(file, framework)
        for name in opened.keys():  # noqa: SIM118
            found[name] = opened.get_tensor(name)
    return found


def mapped_views(info):
    """Every tensor as NumPy views into mapped files, dtypes included."""
    from engram._dtypes import NUMPY
    from engram._views import _SAFETENSORS

    dtypes = {
        stored: np.dtype(NUMPY[name]) for name, stored in _by_stored_name(NUMPY, _SAFETENSORS)
    }
    found = {}
    for file in info.plan.files:
        memory = np.memmap(info.directory / file.name, np.uint8, mode="r")
        for tensor, offset in placed(info.directory / file.name):
            dtype = dtypes[tensor["dtype"]]
            count = int(np.prod(tensor["shape"]))
            data = memory[offset : offset + count * dtype.itemsize]
            found[tensor["name"]] = data.view(dtype).reshape(tensor["shape"])
    return found


def _by_stored_name(numpy_types, stored):
    for name, dtype in numpy_types.items():
        if dtype.name in stored:
            yield name, stored[dtype.name]


def placed(path):
    """Tensors of a safetensors file with their absolute offsets, in the order of their data."""
    import json

    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        yield {"name": name, **entry}, 8 + length + entry["data_offsets"][0]


def check_rows(rows, table, ids):
    """The rows of `ids` are the stored bytes of a synthetic table."""
    expected = table.expected(np.where(ids < 0, 0, ids))
    for name, bytes_of_plane in expected.items():
        bytes_of_plane[ids < 0] = 0
        plane = rows[name] if isinstance(rows, engram.Rows) else rows
        if not isinstance(plane, np.ndarray):
            import torch

            plane = plane.cpu().contiguous().view(torch.uint8).numpy()
        found = np.ascontiguousarray(plane).view(np.uint8).reshape(bytes_of_plane.shape)
        np.testing.assert_array_equal(found, bytes_of_plane)


def some_ids(rows, count, seed=0):
    """Random ids with the first and last row among them."""
    ids = np.random.default_rng(seed).integers(0, rows, count)
    ids[:2] = [0, rows - 1]
    return ids
