"""Checkpoints written by hand, so that they can also lie, and a reader that is too simple to."""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import engram

PLACE = ("path", "table", "row", "position", "offset")
"""Attributes of every exception that engram raises."""

IO_MODES = ("auto", "mmap", "pread", "uring", "direct")

QWEN = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"
DEEPSEEK = "layers.1.engram.embed"

INDEX = "model.safetensors.index.json"

STORED = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""numpy dtype of each safetensors dtype whose elements are whole bytes."""


@dataclass(frozen=True)
class Tensor:
    """A tensor to be stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def tensor(name: str, dtype: str, shape: tuple[int, ...], seed: int | None = None) -> Tensor:
    """A tensor of random bytes, the same for the same name."""
    count = math.prod(shape) * STORED[dtype].itemsize
    generator = np.random.default_rng(list(name.encode()) if seed is None else seed)
    high = 2 if dtype == "BOOL" else 256
    return Tensor(name, dtype, shape, generator.integers(0, high, count, np.uint8).tobytes())


def scalar(name: str, value: float, dtype: str = "F32", shape: tuple[int, ...] = (1,)) -> Tensor:
    return Tensor(name, dtype, shape, np.array(value, STORED[dtype]).tobytes())


def entries(*tensors: Tensor) -> dict[str, dict[str, object]]:
    """The header of tensors whose data follow one another."""
    header, begin = {}, 0
    for each in tensors:
        end = begin + len(each.data)
        header[each.name] = {
            "dtype": each.dtype,
            "shape": list(each.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    return header


def raw_file(path: Path, header: str | bytes | dict, data: bytes = b"") -> Path:
    """A file of this header, as it is, and this data."""
    if isinstance(header, dict):
        header = json.dumps(header)
    text = header.encode() if isinstance(header, str) else header
    # A file cut and written anew is flushed to the disk by some filesystems; a new one is not.
    path.unlink(missing_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def safetensors(path: Path, *tensors: Tensor, residue: int | None = None) -> Path:
    """A good file; its header is unpadded, or padded to a length of `residue` modulo 4096."""
    text = json.dumps(entries(*tensors)).encode()
    if residue is not None:
        text += b" " * ((residue - len(text)) % 4096)
    return raw_file(path, text, b"".join(each.data for each in tensors))


def write_index(directory: Path, weight_map: dict[str, str], name: str = INDEX) -> Path:
    path = directory / name
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return path


def checkpoint(directory: Path, files: dict[str, list[Tensor]], config: dict | None = None) -> Path:
    """A directory of files with an index of all their tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for name, tensors in files.items():
        safetensors(directory / name, *tensors)
        weight_map.update({each.name: name for each in tensors})
    write_index(directory, weight_map)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def shards(sizes: list[int], columns: int, naming: str = "shard_{}", stem: str = QWEN):
    """The BF16 pieces of one Qwen table: equal bytes per row whatever the names of the pieces."""
    pieces, first = [], 0
    whole = tensor(stem, "BF16", (sum(sizes), columns)).data
    for number, rows in enumerate(sizes):
        data = whole[first * columns * 2 : (first + rows) * columns * 2]
        name = f"{stem}.{naming.format(number)}.weight"
        pieces.append(Tensor(name, "BF16", (rows, columns), data))
        first += rows
    return pieces


def read_rows(path: Path, name: str, ids) -> np.ndarray:
    """The oracle: the stored bytes of rows, each found by a seek and a read."""
    ids = np.asarray(ids)
    with Path(path).open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(header_bytes))[name]
        begin, end = entry["data_offsets"]
        row_bytes = (end - begin) // entry["shape"][0]
        rows = []
        for row in ids.reshape(-1).tolist():
            file.seek(8 + header_bytes + begin + row * row_bytes)
            rows.append(file.read(row_bytes))
    return np.frombuffer(b"".join(rows), np.uint8).reshape(*ids.shape, row_bytes)


def raw(rows) -> np.ndarray:
    """The bytes of an array or CPU tensor, as uint8, the last dimension grown to fit."""
    if type(rows).__module__ == "torch":
        import torch

        rows = rows.detach().contiguous().view(torch.uint8).numpy()
    return np.ascontiguousarray(rows).view(np.uint8)


def opened(path, table=None, io: str = "auto", **options) -> engram.FileGather:
    """A gather; skips the test where this machine cannot do `io`."""
    try:
        return engram.FileGather(path, table, io=io, **options)
    except OSError as error:
        if io == "uring" and error.filename is None:
            pytest.skip(f"no io_uring here: {error}")
        raise


@contextlib.contextmanager
def raises(kind: type[BaseException], *parts: str, **place):
    """Expects exactly `kind`, with these parts in its message and these values of its place."""
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    check_error(error, kind, *parts, **place)


def check_error(error: BaseException, kind: type[BaseException], *parts: str, **place) -> None:
    assert type(error) is kind, f"{type(error).__name__}: {error}"
    text = str(error)
    for part in parts:
        assert str(part) in text, f"{part!r} is not in {text!r}"
    for name in PLACE:
        assert hasattr(error, name), f"no {name} on {error!r}"
    for name, value in place.items():
        if name == "path" and value is not None:
            value = os.fspath(value)
        assert getattr(error, name) == value, (name, getattr(error, name), value)


def check_os_error(error: BaseException, errno: int, path) -> None:
    assert isinstance(error, OSError)
    assert error.errno == errno
    assert error.filename == os.fspath(path)
    assert error.strerror
    check_error(error, type(error), path=path)
