"""The README's two commands: a tiny model, and text from it with rows from files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import engram

pytest.importorskip("torch")
pytest.importorskip("typer")
transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "Qwen4ExpConfig"):
    pytest.skip("this transformers has no Qwen4-Exp", allow_module_level=True)

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "generate.py"


def run(*arguments):
    paths = [str(Path(engram.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.skipif(not EXAMPLE.exists(), reason="examples are not in a wheel")
def test_the_commands_of_the_readme(tmp_path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "engram synth --model tiny/\n" in readme
    assert 'python examples/generate.py tiny/ "Once upon a time"' in readme
    run("-m", "engram", "synth", "--model", tmp_path / "tiny")
    said = run(EXAMPLE, tmp_path / "tiny", "Once upon a time", "--tokens", "3")
    assert said.startswith("Once upon a time")
    found = re.findall(r"^ *(engram|plain): peak +([\d.]+) MiB, weights of the model", said, re.M)
    assert [way for way, _ in found] == ["engram", "plain"]
    assert all(float(peak) > 50 for _, peak in found)
    config = '{"cpu_offload": true}'
    other = run(
        EXAMPLE, tmp_path / "tiny", "--tokens", "3", "--only-engram", "--engram-config", config
    )
    text, _, _ = said.partition("  engram: ")
    assert other.startswith(text), "the same text, with tables in host memory"
    assert "plain:" not in other
