"""Public names change on purpose only: they are written down in `data/public_api.txt`.

To change them, run `python tests/test_public_api.py > tests/data/public_api.txt`, look at the
difference, and say so in the CHANGELOG.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest

import engram
from checkpoint_support import safetensors, tensor

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
WRITTEN = Path(__file__).parent / "data" / "public_api.txt"


needs_sources = pytest.mark.skipif(not REFERENCE.exists(), reason="not a checkout of the project")


def parameters(function) -> str:
    """Names, kinds and defaults of parameters; annotations are for the type checker to watch."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return "(...)"
    plain = [
        each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return text.replace("(self, ", "(").replace("(self)", "()").replace("(cls, ", "(")


def members(kind: type) -> list[str]:
    """The public attributes of a class, its own and those of its bases in this package."""
    lines = []
    fields = (
        {field.name for field in dataclasses.fields(kind)}
        if dataclasses.is_dataclass(kind)
        else set()
    )
    names = {
        name
        for base in kind.__mro__
        if base.__module__.startswith("engram")
        for name in vars(base)
        if not name.startswith("_")
    }
    for name in sorted(names | fields):
        value = inspect.getattr_static(kind, name, None)
        if isinstance(value, classmethod | staticmethod):
            lines.append(f".{name}{parameters(getattr(kind, name))} class method")
        elif inspect.isfunction(value) or (
            inspect.ismethoddescriptor(value) and name not in fields
        ):
            lines.append(f".{name}{parameters(value)}" if callable(value) else f".{name}")
        else:
            lines.append(f".{name}")
    return lines


def keys(prefix: str, document: dict) -> list[str]:
    lines = []
    for name, value in document.items():
        lines.append(f"{prefix}[{name!r}]")
        if isinstance(value, dict):
            lines += keys(lines[-1], value)
    return lines


def described() -> set[str]:
    """What the reference describes, below `engram`: names, and all those of a module."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in REFERENCE.glob("*.md"))
    found = set()
    for path in re.findall(r"(?m)^::: engram\.([\w.]+)$", text):
        value = value_of(path)
        names = value.__all__ if inspect.ismodule(value) else [""]
        found |= {f"{path}.{name}".rstrip(".") for name in names}
    return found


def value_of(path: str):
    """The object at a path below `engram`, whose modules need not be imported yet."""
    parent, _, name = path.rpartition(".")
    holder = importlib.import_module(f"engram.{parent}".rstrip("."))
    try:
        return getattr(holder, name)
    except AttributeError:
        return importlib.import_module(f"engram.{path}")


def names_and_values():
    """Public names: what the package exports, and what its reference describes besides."""
    for name in sorted({*engram.__all__, *described()}):
        yield name, value_of(name)


def public_api() -> str:
    lines = []
    for name, value in names_and_values():
        if inspect.isclass(value):
            bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
            opaque = issubclass(value, Exception | tuple) and not hasattr(value, "_fields")
            callable_as = "" if opaque else parameters(value)
            lines.append(f"{name}{callable_as}" + (f" is {bases}" if bases else ""))
            lines += [f"{name}{line}" for line in members(value)]
        elif callable(value):
            lines.append(f"{name}{parameters(value)}")
        else:
            lines.append(name)
    with tempfile.TemporaryDirectory() as folder:
        path = safetensors(Path(folder) / "t.safetensors", tensor("t", "U8", (4, 4)))
        with engram.FileGather(path, "t") as gather:
            gather.gather(np.arange(4))
            lines += sorted(keys("FileGather.stats()", gather.stats()))
    return "\n".join(lines) + "\n"


@needs_sources
def test_public_names_are_those_written_down():
    pytest.importorskip("torch")
    pytest.importorskip("prometheus_client")
    pytest.importorskip("transformers")
    assert public_api().splitlines() == WRITTEN.read_text().splitlines()


@needs_sources
def test_names_that_only_the_reference_describes_are_among_them():
    pytest.importorskip("torch")
    pytest.importorskip("prometheus_client")
    pytest.importorskip("transformers")
    names = {line.partition("(")[0] for line in WRITTEN.read_text().splitlines()}
    beside = {name for name in described() if "." in name}
    assert {
        "late.LateStep",
        "hashing.QwenHash",
        "storage.Storage",
        "synth.write",
        "integrations.transformers.attach",
        "metrics.PrometheusCollector",
    } <= beside
    assert {name for name in beside if not any(n.split(" ")[0] == name for n in names)} == set()


@needs_sources
def test_every_public_name_is_documented():
    pytest.importorskip("torch")
    pytest.importorskip("prometheus_client")
    pytest.importorskip("transformers")
    for name, value in names_and_values():
        if name == "__version__" or not callable(value):
            continue
        assert inspect.getdoc(value), name
        if inspect.isclass(value) and not issubclass(value, Exception):
            for attribute, member in vars(value).items():
                if not attribute.startswith("_") and (
                    callable(member) or isinstance(member, property)
                ):
                    assert inspect.getdoc(member), f"{name}.{attribute}"


def test_dir_lists_public_names():
    assert set(engram.__all__) <= set(dir(engram))
    assert len(engram.__all__) == len(set(engram.__all__))
    with pytest.raises(AttributeError, match="nothing"):
        engram.nothing  # noqa: B018


if __name__ == "__main__":
    print(public_api(), end="")
