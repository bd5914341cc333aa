"""The tests of late steps on a device run, and notice wrong rows, where there is none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import engram

pytest.importorskip("torch")

HERE = Path(__file__).parent
TESTS = HERE / "gpu" / "test_late_cuda.py"


@pytest.fixture(scope="module")
def said():
    """What two runs say, on a device as it should be and on one that is wrong."""
    right = [str(TESTS), "-k", "not thousand"]
    wrong = [str(TESTS), "-k", "thousand and qwen", "--wrong"]
    paths = [str(Path(engram.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, str(HERE / "thread_cuda.py"), *right, "--then", *wrong],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    first, status, rest = re.split(r"^status (\d+)$", result.stdout, maxsplit=1, flags=re.M)
    second, other, _ = re.split(r"^status (\d+)$", rest, maxsplit=1, flags=re.M)
    return (int(status), first), (int(other), second)


def test_the_tests_of_a_device_run_without_one(said):
    status, text = said[0]
    assert status == 0, text
    assert "10 passed" in text
    assert "skipped" not in text


def test_they_notice_rows_that_came_too_late(said):
    status, text = said[1]
    assert status == 1, text
    assert "1 failed" in text
    assert "server.right(" in text
