"""A few seconds of what `tests/soak.py` does for minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).parent.parent / "soak.py"


def test_everything_at_once(tmp_path):
    finished = subprocess.run(
        [sys.executable, SOAK, "--seconds", "6", "--seed", "1", "--directory", tmp_path],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "'right'" in finished.stdout
