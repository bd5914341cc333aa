"""Public names change on purpose only: they are written down in `data/public_api.txt`.

To change them, run `python tests/test_public_api.py > tests/data/public_api.txt`, look at the
difference, and say so in the CHANGELOG.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import tempfile
from pathlib import Path

import numpy as np
import pytest

import engram
from checkpoint_support import safetensors, tensor

WRITTEN = Path(__file__).parent / "data" / "public_api.txt"


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


def names_and_values():
    """Public names, and those of modules that are imported by name."""
    for name in sorted(engram.__all__):
        yield name, getattr(engram, name)
    metrics = importlib.import_module("engram.metrics")
    for name in sorted(metrics.__all__):
        yield f"metrics.{name}", getattr(metrics, name)


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


def test_public_names_are_those_written_down():
    pytest.importorskip("torch")
    pytest.importorskip("prometheus_client")
    assert public_api().splitlines() == WRITTEN.read_text().splitlines()


def test_every_public_name_is_documented():
    for name in engram.__all__:
        value = getattr(engram, name)
        if name == "__version__":
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
