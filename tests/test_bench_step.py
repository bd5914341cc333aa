"""The step's benchmark keeps running, and its rows keep agreeing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import engram

pytest.importorskip("torch")
pytest.importorskip("rich")

SCRIPT = Path(__file__).parents[1] / "benches" / "step.py"


@pytest.mark.skipif(not SCRIPT.exists(), reason="benchmarks are not in a wheel")
def test_step_benchmark_runs(tmp_path):
    paths = [str(Path(engram.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--size", "16MiB", "--tokens", "8"],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "ENGRAM_BENCH_DIR": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        },
    )
    assert result.returncode == 0, result.stderr
    assert "128 rows of 160 bytes" in result.stdout
    assert "target: at most 1.3x" in result.stdout
