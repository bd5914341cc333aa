"""The tour uses every public name, and runs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import engram

TOUR = Path(__file__).parents[1] / "examples" / "tour.py"
WRITTEN = Path(__file__).parent / "data" / "public_api.txt"

NOT_TOURED = {
    "from_native",  # The native half makes these.
    "begin_step",  # Steps of a collective: the two that are exported call these themselves.
    "run",
    "forward",  # Modules are called.
    "extra_repr",
    "PrometheusCollector",  # Of a package of its own.
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


def test_every_public_method_and_attribute_is_on_the_tour():
    _, used = attributes(TOUR.read_text(encoding="utf-8"))
    members = set(re.findall(r"(?m)^\w+\.(\w+)", WRITTEN.read_text(encoding="utf-8")))
    assert len(members) > 100
    assert members - used - NOT_TOURED == set()


def test_names_that_are_missing_are_noticed():
    names, used = attributes("import engram\nengram.tables('.')[0].rows\n")
    assert names == {"tables"}
    assert used == {"tables", "rows"}


def test_the_tour_runs():
    for needed in ("torch", "safetensors"):
        pytest.importorskip(needed)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(engram.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", TOUR],
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
