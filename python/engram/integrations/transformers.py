"""Qwen4-Exp models of transformers whose n-gram tables stay where they are.

    from engram.integrations.transformers import from_pretrained

    model = from_pretrained("Qwen3.8-Flash-Next/", dtype="bfloat16")
    model.generate(**tokenizer("text", return_tensors="pt"))

The table is never materialised, not on the way in either: the model is built without it, and of the
checkpoint's tensors only the others are read. FP8 tables are scaled as their engines do;
transformers itself reads the stored bytes without their scale.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from engram._errors import completes, placed
from engram._files import CONFIG_BYTES, parse_json, read_small
from engram.config import EngramConfig
from engram.embedding import NgramEmbedding, RowStorage
from engram.gather import FileGather
from engram.hashing import hasher
from engram.storage import Topology, open_storage
from engram.table import tables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engram.hashing.base import NgramHash, OutOfVocab
    from engram.table import TableInfo

__all__ = ["attach", "from_pretrained"]

LoadFormat = Literal["auto", "dummy"]

_UNEXPECTED = r"\.ple\.ple_embedding\."
_OWN_MODULE = "ple_embedding"
_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "token")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@completes
def from_pretrained(
    path: str | os.PathLike[str],
    *,
    engram_config: EngramConfig | Mapping[str, Any] | str | None = None,
    parallel: Any = None,
    load_format: LoadFormat = "auto",
    out_of_vocab: OutOfVocab = "raise",
    **kwargs: Any,
) -> Any:
    """A Qwen4-Exp model with all weights but its n-gram tables, which are served by engram.

    Args:
        path: A checkpoint directory, or a model's name on the Hugging Face hub.
        engram_config: Where tables live; None for the checkpoint's files (`disk_offload`). Tables
            that live elsewhere are read once, after the other weights.
        parallel: As for `engram.open_storage`.
        load_format: `"dummy"` serves zeros and opens no table.
        out_of_vocab: As for `engram.hasher`.
        **kwargs: As for the model class's own `from_pretrained`: `dtype`, `device_map` and so on.

    Returns:
        A model of the class that the checkpoint names. Its `save_pretrained` saves no table.

    Raises:
        ImportError: transformers is missing, or too old for Qwen4-Exp.
        ValueError: The model has no n-gram tables.
        Exception: As `engram.hasher`, `engram.open_storage` and transformers do.
    """
    config = _config(engram_config)
    transformers: Any = importlib.import_module("transformers")
    directory = _local(path, kwargs)
    model_config = kwargs.pop("config", None)
    if model_config is None:
        model_config = transformers.AutoConfig.from_pretrained(directory)
    _verify(config, model_config, parallel)
    # Opened first: what is wrong with the tables shows before the weights are read.
    modules = _sources(directory, model_config, load_format, out_of_vocab)
    base = _model_class(transformers, model_config)
    without = _without_tables(base)
    loaded: Any = without.from_pretrained(directory, config=model_config, **kwargs)
    # With `output_loading_info` the model comes with what was said about the loading.
    model = cast("tuple[Any, ...]", loaded)[0] if isinstance(loaded, tuple) else loaded
    model.__class__ = base
    _replace(model, modules, config, parallel)
    return cast("Any", loaded)


@completes
def attach(
    model: Any,
    path: str | os.PathLike[str],
    *,
    engram_config: EngramConfig | Mapping[str, Any] | str | None = None,
    parallel: Any = None,
    dtype: torch.dtype | None = None,
    load_format: LoadFormat = "auto",
    out_of_vocab: OutOfVocab = "raise",
) -> None:
    """Replaces the n-gram embeddings of a model, and lets go of the tables it holds.

    Args:
        model: A Qwen4-Exp model of transformers, or any module around one.
        path: The checkpoint directory whose tables to serve.
        engram_config: As for `from_pretrained`.
        parallel: As for `engram.open_storage`.
        dtype: Of the embeddings; None for that of the layer that reads them.
        load_format: As for `from_pretrained`.
        out_of_vocab: As for `engram.hasher`.

    Raises:
        RuntimeError: The model is served by engram already.
        ValueError: The model has no n-gram embedding, or others than the checkpoint.
        Exception: As `engram.hasher` and `engram.open_storage` do.
    """
    config = _config(engram_config)
    found = _ple_layers(model)
    if any(isinstance(layer.ple_embedding, NgramEmbedding) for layer in found.values()):
        raise RuntimeError("this model's tables are served by engram already; attach once")
    configuration = getattr(model, "config", None)
    source = os.fspath(path) if configuration is None else configuration
    _verify(config, _read_config(path) if configuration is None else configuration, parallel)
    sources = _sources(Path(path), source, load_format, out_of_vocab)
    _replace(model, sources, config, parallel, dtype)


class _NoTable(nn.Module):
    """Holds the place of an n-gram embedding while a model's other weights are loaded."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx


def _without_tables(base: type[Any]) -> type[Any]:
    """A model class that builds `base` without its tables, and expects none in a checkpoint.

    transformers builds models on the meta device before it loads them, so the tables that `base`
    makes on the way take no memory.
    """

    class WithoutTables(base):
        _keys_to_ignore_on_load_unexpected = (
            *(base._keys_to_ignore_on_load_unexpected or ()),
            _UNEXPECTED,
        )

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)  # pyright: ignore[reportUnknownMemberType]
            for index, layer in _ple_layers(self).items():
                layer.ple_embedding = _NoTable(index)

    WithoutTables.__name__ = base.__name__
    WithoutTables.__qualname__ = base.__qualname__
    WithoutTables.__module__ = base.__module__
    return WithoutTables


def _ple_layers(model: Any) -> dict[int, Any]:
    """The modules that own an n-gram embedding, by decoder layer.

    Raises:
        ValueError: There is none.
    """
    found: dict[int, Any] = {}
    for module in cast("nn.Module", model).modules():
        own = getattr(module, _OWN_MODULE, None)
        index = getattr(own, "layer_idx", None)
        if isinstance(own, nn.Module) and isinstance(index, int):
            found[index] = module
    if not found:
        raise placed(
            ValueError(
                f"{type(model).__name__} has no n-gram embedding: no module named {_OWN_MODULE!r}"
            )
        )
    return found


def _sources(
    directory: Path, model_config: Any, load_format: str, out_of_vocab: OutOfVocab
) -> dict[int, tuple[NgramHash, FileGather | None]]:
    """Per decoder layer its hash and, unless zeros will do, its table."""
    if load_format not in ("auto", "dummy"):
        raise placed(ValueError(f'load_format is {load_format!r}: choose "auto" or "dummy"'))
    if load_format == "dummy":
        layers = sorted(set(_text(model_config).ple_layer_ids))
        hashes = (
            hasher(model_config, place, out_of_vocab=out_of_vocab) for place in range(len(layers))
        )
        return {layer - 1: (hash, None) for layer, hash in zip(layers, hashes, strict=True)}
    found: dict[int, tuple[NgramHash, FileGather | None]] = {}
    for place, info in enumerate(_tables(directory)):
        of_layer = hasher(directory, place, out_of_vocab=out_of_vocab)
        found[cast("int", info.layer)] = (of_layer, FileGather(directory, info.name))
    return found


def _tables(directory: Path) -> list[TableInfo]:
    found = [info for info in tables(directory) if info.family == "qwen"]
    if not found:
        raise placed(
            ValueError(
                f"{directory} holds no Qwen n-gram table; engram.tables lists what it holds"
            ),
            path=str(directory),
        )
    return found


def _replace(
    model: Any,
    sources: dict[int, tuple[NgramHash, FileGather | None]],
    config: EngramConfig,
    parallel: Any,
    dtype: torch.dtype | None = None,
) -> None:
    layers = _ple_layers(model)
    if set(layers) != set(sources):
        raise placed(
            ValueError(
                f"the model has n-gram embeddings in layers {sorted(layers)}, the checkpoint "
                f"tables for layers {sorted(sources)}"
            )
        )
    made: dict[int, NgramEmbedding] = {}
    for index, layer in layers.items():
        of_layer, gather = sources[index]
        made[index] = NgramEmbedding(of_layer, dtype=dtype or _dtype_of(layer), layer_idx=index)
        if gather is None:
            made[index].bind_dummy()
        else:
            made[index].bind(_placed(gather, config, parallel, layer))
    # All or none: a model is not left with some of its tables.
    for index, layer in layers.items():
        layer.ple_embedding = made[index].train(layer.training)


def _placed(gather: FileGather, config: EngramConfig, parallel: Any, layer: Any) -> RowStorage:
    """The table where the configuration says, read through `gather` unless it stays in files."""
    device = layer.value_proj.weight.device
    storage = open_storage(
        config, gather, parallel=parallel, device=None if device.type == "meta" else device
    )
    if storage.placement == "file" and not Topology.of(parallel).read_once_per_node:
        return gather
    if storage.placement != "file":
        gather.close()
    return storage


def _dtype_of(layer: Any) -> torch.dtype:
    """What the layer computes in; bfloat16 where its own weights are quantised."""
    dtype = layer.value_proj.weight.dtype
    return dtype if dtype in _DTYPES else torch.bfloat16


def _config(given: EngramConfig | Mapping[str, Any] | str | None) -> EngramConfig:
    return EngramConfig(disk_offload=True) if given is None else EngramConfig.of(given)


def _verify(config: EngramConfig, model_config: Any, parallel: Any) -> None:
    """Holds the settings against the model, then the topology, before anything is loaded."""
    config.verify_model_config(model_config)
    topology = Topology.of(parallel)
    config.resolve_dp_shared_memory(topology)
    config.verify_parallel_config(topology)


def _read_config(directory: str | os.PathLike[str]) -> Any:
    path = Path(directory) / "config.json"
    return parse_json(read_small(path, CONFIG_BYTES), path, "not JSON")


def _model_class(transformers: Any, model_config: Any) -> type[Any]:
    """The class that the checkpoint names."""
    names: list[str] = getattr(model_config, "architectures", None) or []
    for name in names:
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    if names:
        raise ImportError(
            f"transformers {transformers.__version__} has no {' or '.join(names)}; Qwen4-Exp needs "
            "transformers 5.23 or later"
        )
    mapping = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return mapping[type(model_config)]


def _text(model_config: Any) -> Any:
    return model_config.get_text_config()


def _local(path: str | os.PathLike[str], kwargs: dict[str, Any]) -> Path:
    """The checkpoint's directory, downloaded if `path` is the name of a model."""
    directory = Path(path)
    if directory.is_dir():
        for option in _HUB_OPTIONS:
            kwargs.pop(option, None)
        return directory
    if directory.is_absolute() or len(directory.parts) > 2:
        raise placed(
            FileNotFoundError(2, "no such checkpoint directory", os.fspath(path)),
            path=os.fspath(path),
        )
    hub: Any = importlib.import_module("huggingface_hub")
    options = {name: kwargs.pop(name) for name in _HUB_OPTIONS if name in kwargs}
    return Path(hub.snapshot_download(os.fspath(path), **options))
