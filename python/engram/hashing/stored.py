"""Hash constants that a checkpoint stores beside its table."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast

import numpy as np

from engram._engram import CheckpointError
from engram._errors import placed
from engram._files import INDEX_BYTES, open_regular, parse_json, read_small

__all__ = ["StoredConstant", "stored_constants"]

_NAME = re.compile(
    r"(?:^|\.)layers\.(\d+)\.ple\.ple_embedding\.(?:ngram_embedding\.)?"
    r"(layer_multipliers|(?:ngram_heads|head)_(?:vocab_sizes|offsets))$"
)
_ATTRIBUTE = {"multipliers": "multipliers", "sizes": "head_sizes", "offsets": "head_offsets"}
_DTYPES = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4")}
_MAX_HEADER = 100_000_000
_MAX_CONSTANT = 16 << 20


class StoredConstant(NamedTuple):
    """One stored tensor.

    Attributes:
        attribute: The attribute of [`QwenHash`][engram.hashing.QwenHash] that it must equal.
        values: Its values, in order.
        tensor: Its name.
        path: The file that holds it.
    """

    attribute: str
    values: tuple[int, ...]
    tensor: str
    path: Path


def stored_constants(directory: Path, layer: int) -> list[StoredConstant]:
    """Multipliers, head sizes and head offsets that the files store for a decoder layer.

    Indexed names win; only where the index names none are the headers of other files read.

    Raises:
        FileNotFoundError: The index names a file that is not there.
        CheckpointError: The index or a header is malformed, or a constant is not made of integers.
    """
    indexed = _indexed(directory)
    wanted = {tensor: file for tensor, file in indexed.items() if _matches(tensor, layer)}
    if wanted:
        files = sorted(set(wanted.values()))
    else:
        files = sorted(set(directory.glob("*.safetensors")) - set(indexed.values()))
    found: list[StoredConstant] = []
    for file in files:
        _require_inside(file, directory)
        header, start = _header(file)
        for tensor in header:
            if wanted.get(tensor) == file if wanted else _matches(tensor, layer):
                found.append(_constant(file, tensor, header[tensor], start))
    missing = sorted(set(wanted) - {constant.tensor for constant in found})
    if missing:
        raise placed(
            CheckpointError(
                f"the index places {missing[0]} in {wanted[missing[0]]}, which does not contain it"
            ),
            path=str(wanted[missing[0]]),
        )
    return sorted(found, key=lambda constant: constant.tensor)


def _matches(tensor: str, layer: int) -> bool:
    match = _NAME.search(tensor)
    return match is not None and match[1] == str(layer)


def _indexed(directory: Path) -> dict[str, Path]:
    """Where the index, if there is one, places each tensor."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return {}
    try:
        parsed = parse_json(
            read_small(index, INDEX_BYTES), index, "no weight_map, for the index is not JSON"
        )
        weight_map: Any = parsed["weight_map"]
        names = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise placed(
            CheckpointError(f"{index} has no weight_map of names: {error!r}"), path=str(index)
        ) from None
    for file in set(names.values()):
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts:
            raise placed(
                CheckpointError(f"{index} points outside its directory: {file!r}"), path=str(index)
            )
    return {tensor: directory / file for tensor, file in names.items()}


def _require_inside(file: Path, directory: Path) -> None:
    """Refuses a link that leads out of the checkpoint, other than to a hub cache's own files."""
    here, target = directory.resolve(), file.resolve()
    snapshots = next((above for above in here.parents if above.name == "snapshots"), None)
    allowed = [here] if snapshots is None else [here, (snapshots.parent / "blobs").resolve()]
    if not any(target.is_relative_to(place) for place in allowed):
        raise placed(
            CheckpointError(f"{file} is a link to {target}, outside the checkpoint's directory"),
            path=str(file),
        )


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The tensors of a safetensors file, and where their data begin."""
    descriptor, size = open_regular(file)
    with os.fdopen(descriptor, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise placed(
                CheckpointError(
                    f"{file}: header of {length} bytes in a file of {size} (at most {_MAX_HEADER})"
                ),
                path=str(file),
            )
        header: object = parse_json(stream.read(length), file, "the header is not JSON")
    if not isinstance(header, dict):
        raise placed(CheckpointError(f"{file}: the header is no JSON object"), path=str(file))
    tensors = cast("dict[str, Any]", header)
    tensors.pop("__metadata__", None)
    return tensors, 8 + length


def _constant(file: Path, tensor: str, entry: Any, start: int) -> StoredConstant:
    try:
        dtype, shape = entry["dtype"], [int(length) for length in entry["shape"]]
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise placed(
            CheckpointError(f"{file}: malformed header entry of {tensor}"), path=str(file)
        ) from None
    if dtype not in _DTYPES:
        raise placed(
            CheckpointError(f"{file}: {tensor} is {dtype}; hash constants are I64"), path=str(file)
        )
    nbytes = math.prod(shape) * _DTYPES[dtype].itemsize
    if min(shape, default=0) < 0 or begin < 0 or end - begin != nbytes:
        raise placed(
            CheckpointError(
                f"{file}: {tensor} of shape {shape} has {nbytes} bytes, but its range has "
                f"{end - begin}"
            ),
            path=str(file),
        )
    descriptor, size = open_regular(file)
    with os.fdopen(descriptor, "rb") as stream:
        # Lengths in a header are believed only as far as the file reaches.
        if nbytes > min(_MAX_CONSTANT, max(0, size - start - begin)):
            raise placed(
                CheckpointError(
                    f"{file}: {tensor} takes {nbytes} bytes (at most {_MAX_CONSTANT}) from byte "
                    f"{start + begin} on, but the file has {size}: it is truncated"
                ),
                path=str(file),
            )
        stream.seek(start + begin)
        data = stream.read(nbytes)
    if len(data) != nbytes:
        raise placed(
            CheckpointError(f"{file} is truncated: it ends inside {tensor}"), path=str(file)
        )
    values = np.frombuffer(data, _DTYPES[dtype])
    attribute = next(name for end, name in _ATTRIBUTE.items() if tensor.endswith(end))
    return StoredConstant(attribute, tuple(values.tolist()), tensor, file)
