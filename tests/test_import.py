"""What `import engram` costs, and that a wheel is small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import engram
from engram import _engram

SOURCE = str(Path(engram.__file__).parents[1])

MOST_SECONDS = 0.030
MOST_OF_NUMPY = 0.375
MOST_RUNS = 20
HEAVY = ("torch", "pydantic", "typer", "rich", "transformers", "prometheus_client", "engram.cli")
DEAR = ("pathlib", "urllib.parse", "asyncio", "inspect")
"""Modules of the standard library that take milliseconds."""

TIMED = """
import sys, time
begun = time.process_time()
import numpy, dataclasses  # numpy imports both from 2.4 on.
before = time.process_time()
had = set(sys.modules)
begin = time.process_time()
import engram
print(time.process_time() - begin, before - begun)
print(*sorted(set(sys.modules) - had))
"""


def imported() -> tuple[float, float, set[str]]:
    """Processor seconds of importing engram after numpy, those of numpy, and modules new then."""
    done = subprocess.run(
        [sys.executable, "-c", TIMED],
        env={"PYTHONPATH": SOURCE, "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, modules = done.stdout.splitlines()
    engram_seconds, numpy_seconds = map(float, seconds.split())
    return engram_seconds, numpy_seconds, set(modules.split())


def test_importing_engram_is_cheap_and_imports_nothing_heavy():
    """At most 30 ms of the processor beyond numpy, which itself takes 80 ms or more.

    Processor time of a process of its own, since the machine may be busy. Neighbours also take
    caches and clock rate away, but give nothing: so the best of some runs counts, and where numpy
    takes longer, engram may do so in proportion.
    """
    for _ in range(MOST_RUNS):
        seconds, of_numpy, modules = imported()
        assert not modules & {*HEAVY, *DEAR}
        assert "engram.gather" in modules
        if seconds <= max(MOST_SECONDS, MOST_OF_NUMPY * of_numpy):
            return
    pytest.fail(f"importing engram took {seconds:.3f} s beyond numpy's {of_numpy:.3f} s")


@pytest.mark.parametrize("name", ["Stage", "EngramConfig", "hasher"])
def test_what_is_heavy_comes_with_the_first_name_that_needs_it(name):
    code = f"import sys, engram; engram.{name}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": SOURCE, "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if name == "Stage":
        pytest.importorskip("torch")
    assert done.stdout.strip() == str(name == "Stage"), done.stderr


def test_the_native_module_fits_a_small_wheel():
    # All other files of a wheel together have less than a megabyte; debug builds are larger.
    if hasattr(_engram, "bench_copy"):
        pytest.skip("built with the loops of the benchmarks")
    assert Path(_engram.__file__).stat().st_size < 5_000_000
