"""The tests of late steps on a device run, and notice wrong rows, where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import engram

pytest.importorskip("torch")

HERE = Path(__file__).parent
TESTS = HERE / "gpu" / "test_late_cuda.py"


def run(*arguments):
    paths = [str(Path(engram.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, str(HERE / "thread_cuda.py"), str(TESTS), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    return result.returncode, result.stdout + result.stderr


def test_the_tests_of_a_device_run_without_one():
    status, said = run("-k", "not thousand")
    assert status == 0, said
    assert "10 passed" in said
    assert "skipped" not in said


def test_they_notice_rows_that_came_too_late():
    status, said = run("-k", "thousand and qwen", "--wrong")
    assert status == 1, said
    assert "1 failed" in said
    assert "server.right(" in said
