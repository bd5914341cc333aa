"""What a model configuration says about n-gram tables, and what the machine can run.

Configurations come in four shapes: vLLM's `ModelConfig` (`hf_text_config`, `architecture`), a
transformers configuration (`get_text_config()`, `architectures`), the parsed `config.json`, and the
path of a checkpoint that has one. All are asked by name, so none of those packages is needed here.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

__all__ = ["Platform", "detect_platform", "ngram_layers", "require_ngram_layers"]

Platform = Literal["cuda", "rocm", "cpu"]

_RATIO = "ngram_vocab_size_ratio"

_FIELDS = {
    "DeepseekV41ForCausalLM": "engram_layer_ids",
    "Qwen4ExpForCausalLM": "ple_layer_ids",
    "Qwen4ExpForConditionalGeneration": "ple_layer_ids",
    "LongcatFlashNgramForCausalLM": _RATIO,
}
"""Architecture to the text configuration's field that announces its n-gram tables."""

# transformers fills in `architectures` when it saves; a configuration made in memory has only this.
_ARCHITECTURE_OF_MODEL_TYPE = {
    "deepseek_v41": "DeepseekV41ForCausalLM",
    "deepseek_v41_text": "DeepseekV41ForCausalLM",
    "qwen4_exp": "Qwen4ExpForConditionalGeneration",
    "qwen4_exp_text": "Qwen4ExpForCausalLM",
    "longcat_flash_ngram": "LongcatFlashNgramForCausalLM",
}

_DEVICE_ROOT = Path("/dev")
_ROCM_ROOT = Path("/opt/rocm")
_NVIDIA_NODES = ("nvidiactl", "nvidia0", "nvhost-gpu", "dxg")


def ngram_layers(model_config: object) -> tuple[str, object] | None:
    """The field that announces n-gram tables, and its value.

    Returns:
        For example `("ple_layer_ids", [2])`; None for no model, an unknown architecture or a
        field that is absent, empty or zero.

    Raises:
        FileNotFoundError: `model_config` is a path without a `config.json`.
        CheckpointError: It is a path, and the file there is no JSON object.
    """
    model_config = _read(model_config)
    if model_config is None:
        return None
    architecture = next((name for name in _architectures(model_config) if name in _FIELDS), None)
    if architecture is None:
        return None
    field = _FIELDS[architecture]
    value = _get(_text_config(model_config), field)
    return (field, value) if _announces_tables(field, value) else None


def require_ngram_layers(model_config: object) -> None:
    """Refuses a model that `ngram_layers` finds no tables in.

    Raises:
        ValueError: Says which of the model, its architecture and its field is missing.
        Exception: As `ngram_layers`.
    """
    model_config = _read(model_config)
    if ngram_layers(model_config) is not None:
        return
    if model_config is None:
        raise ValueError(
            "an engram configuration needs a model with n-gram embedding tables, got no model "
            "configuration (None)"
        )
    names = _architectures(model_config)
    known = next((name for name in names if name in _FIELDS), None)
    if known is None:
        found = ", ".join(map(repr, names)) if names else "no architecture"
        raise ValueError(
            f"an engram configuration needs a model with n-gram embedding tables, got {found}; "
            f"supported are {', '.join(_FIELDS)}"
        )
    field = _FIELDS[known]
    value = _get(_text_config(model_config), field)
    wanted = "a number above 0" if field == _RATIO else "a non-empty list"
    found = "is absent" if value is None else f"is {value!r}"
    raise ValueError(
        f"{known} announces its n-gram embedding tables by {field}, {wanted}, in the text "
        f"configuration; here it {found}, so there is no table to place"
    )


def _read(model_config: object) -> object:
    """The content of `config.json` in place of a path; anything else as it is."""
    if not isinstance(model_config, str | bytes | os.PathLike):
        return model_config
    from engram.hashing.fields import read_config

    fields, _ = read_config(cast("object", model_config))
    return fields.root


def detect_platform() -> Platform:
    """The accelerator platform of this process, without importing torch or touching a device.

    torch's build decides (its version is read from the imported module, or from the installed
    package without running it) together with the kernel's device nodes; without torch the nodes
    decide alone. Asking CUDA itself would make later forks unusable.

    Returns:
        `"cuda"`, `"rocm"` or `"cpu"`.
    """
    nvidia = any((_DEVICE_ROOT / node).exists() for node in _NVIDIA_NODES)
    amd = (_DEVICE_ROOT / "kfd").exists()
    build = _torch_build()
    if build is None:
        # An AMD laptop has /dev/kfd too: only the ROCm runtime makes it a ROCm machine.
        amd = amd and _ROCM_ROOT.exists()
        return "cuda" if nvidia else "rocm" if amd else "cpu"
    if build == "rocm":
        return "rocm" if amd else "cpu"
    return "cuda" if build == "cuda" and nvidia else "cpu"


def _torch_build() -> Platform | None:
    """What torch was built for; None where it is not installed."""
    torch = sys.modules.get("torch")
    version = getattr(torch, "version", None)
    if version is not None:
        hip, cuda = getattr(version, "hip", None), getattr(version, "cuda", None)
    else:
        try:
            spec = importlib.util.find_spec("torch")
        except (ImportError, ValueError):
            return None
        if spec is None or spec.origin is None:
            return None
        constants = _string_constants(Path(spec.origin).with_name("version.py"))
        hip, cuda = constants.get("hip"), constants.get("cuda")
    return "rocm" if hip else "cuda" if cuda else "cpu"


def _string_constants(source: Path) -> dict[str, str]:
    """Module-level `name = "text"` assignments of a Python file, read without running it."""
    try:
        module = ast.parse(source.read_text())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return {}
    found: dict[str, str] = {}
    for node in module.body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        for target in targets:
            if (
                isinstance(target, ast.Name)
                and isinstance(value, ast.Constant)
                and isinstance(value.value, str)
            ):
                found[target.id] = value.value
    return found


def _announces_tables(field: str, value: object) -> bool:
    if field == _RATIO:
        return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return False
    return len(cast("Sequence[object]", value)) > 0


def _get(config: object, name: str) -> Any:
    if isinstance(config, Mapping):
        return cast("Mapping[str, Any]", config).get(name)
    return getattr(config, name, None)


def _text_config(config: object) -> object:
    """The language model's part of a configuration of any shape; itself where it is flat."""
    for name in ("hf_text_config", "hf_config"):
        inner = _get(config, name)
        if inner is not None:
            return _text_config(inner)
    get_text_config = getattr(config, "get_text_config", None)
    inner = get_text_config() if callable(get_text_config) else _get(config, "text_config")
    return config if inner is None else inner


def _architectures(config: object) -> list[str]:
    """Architecture names, from the most to the least specific source that gives any."""
    single = _get(config, "architecture")
    if isinstance(single, str) and single:
        return [single]
    sources = [config]
    for name in ("hf_config", "hf_text_config", "text_config"):
        inner = _get(config, name)
        if inner is not None:
            sources.append(inner)
    for source in sources:
        names = _get(source, "architectures")
        if names:
            return [names] if isinstance(names, str) else [str(name) for name in names]
    for source in sources:
        named = _ARCHITECTURE_OF_MODEL_TYPE.get(str(_get(source, "model_type")))
        if named is not None:
            return [named]
    return []
