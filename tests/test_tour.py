"""The tour uses every public name, and runs."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import engram

TOUR = Path(__file__).parents[1] / "examples" / "tour.py"

NOT_TOURED = {
    "from_native",  # The native half makes these.
    "begin_step",  # Steps of a collective, which are called as functions are.
    "run",
    "unpin",  # Only where there is a CUDA device; the tour has them for that.
    "device_address",
    "extra_repr",  # Called by a print of the module.
}

pytestmark = pytest.mark.skipif(not TOUR.exists(), reason="not a checkout of the project")


def attributes(code: str) -> tuple[set[str], set[str]]:
    """Names that code takes from the package, and from any object."""
    of_package, of_anything = set(), set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            of_anything.add(node.attr)
            if isinstance(node.value, ast.Name) and node.value.id == "engram":
                of_package.add(node.attr)
    return of_package, of_anything


def test_every_public_name_is_on_the_tour():
    names, _ = attributes(TOUR.read_text(encoding="utf-8"))
    assert set(engram.__all__) <= names


def test_every_public_attribute_is_on_the_tour():
    """Those that run no code of Python, of which nothing tells whose was used."""
    _, used = attributes(TOUR.read_text(encoding="utf-8"))
    plain = {
        name
        for _, kind in exported_classes()
        for name in public_members(kind)
        if call_of(kind, name) is None
    }
    assert len(plain) > 40
    assert plain - used - NOT_TOURED == set()


def exported_classes():
    """What the package itself exports; the reference describes more, which tours need not meet."""
    for name in engram.__all__:
        value = getattr(engram, name)
        if inspect.isclass(value):
            yield name, value


def public_members(kind: type) -> set[str]:
    return {
        name
        for base in kind.__mro__
        if base.__module__.startswith("engram")
        for name in vars(base)
        if not name.startswith("_")
    }


def call_of(kind: type, name: str) -> str | None:
    """What a trace has where this method or property of a class was used; None for plain values."""
    value = inspect.getattr_static(kind, name)
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, classmethod | staticmethod):
        value = value.__func__
    elif isinstance(value, functools.cached_property):
        value = value.func
    if inspect.ismethoddescriptor(value):
        return value.__qualname__
    value = inspect.unwrap(value) if callable(value) else value
    code = getattr(value, "__code__", None)
    return None if code is None else f"{code.co_filename}:{code.co_qualname}"


def not_called(called: set[str], classes) -> set[str]:
    return {
        f"{name}.{member}"
        for name, kind in classes
        for member in public_members(kind) - NOT_TOURED
        if call_of(kind, member) not in {None, *called}
    }


def test_names_that_are_missing_are_noticed():
    names, used = attributes("import engram\nengram.tables('.')[0].rows\n")
    assert names == {"tables"}
    assert used == {"tables", "rows"}


def test_methods_that_are_not_called_are_noticed():
    classes = [("FileGather", engram.FileGather), ("TableSet", engram.TableSet)]
    called = {call_of(engram.FileGather, name) for name in public_members(engram.FileGather)}
    missing = not_called(called, classes)
    assert "TableSet.close" in missing, "another class's method of that name is no use of it"
    assert not any(name.startswith("FileGather") for name in missing)


def test_the_tour_runs_and_calls_every_public_method(tmp_path):
    for needed in ("torch", "safetensors"):
        pytest.importorskip(needed)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(engram.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    calls = tmp_path / "calls.json"
    trace = Path(__file__).with_name("tour_trace.py")
    done = subprocess.run(
        [sys.executable, "-W", "error", trace, calls, TOUR],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    stops = ("look", "read", "budget", "watch", "verify", "hash_tokens", "step", "places", "ranks")
    for stop in stops:
        assert f"\n== {stop}: " in done.stdout
    assert not_called(set(json.loads(calls.read_text())), exported_classes()) == set()
