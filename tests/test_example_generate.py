"""The README's two commands: a tiny model, and text from it with rows from files."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import engram

torch = pytest.importorskip("torch")
pytest.importorskip("typer")
transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "Qwen4ExpConfig"):
    pytest.skip("this transformers has no Qwen4-Exp", allow_module_level=True)

from typer.testing import CliRunner  # noqa: E402

from engram.cli.app import app  # noqa: E402

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "generate.py"


def run_example(*arguments):
    paths = [str(Path(engram.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        [sys.executable, EXAMPLE, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def example():
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("example_generate", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield module
    torch.set_num_threads(threads)


@pytest.mark.skipif(not EXAMPLE.exists(), reason="examples are not in a wheel")
def test_the_commands_of_the_readme(tmp_path, example, monkeypatch, capsys):
    """New processes, which import everything anew, only where memory is compared."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "engram synth --model tiny/\n" in readme
    assert 'python examples/generate.py tiny/ "Once upon a time"' in readme
    made = CliRunner().invoke(app, ["synth", "--model", str(tmp_path / "tiny")])
    assert made.exit_code == 0, made.output
    said = run_example(tmp_path / "tiny", "Once upon a time", "--tokens", "3")
    assert said.startswith("Once upon a time")
    found = re.findall(r"^ *(engram|plain): peak +([\d.]+) MiB, weights of the model", said, re.M)
    assert [way for way, _ in found] == ["engram", "plain"]
    assert all(float(peak) > 50 for _, peak in found)

    def here(command, **_):
        monkeypatch.setattr(sys, "argv", command[1:])
        assert example.main() == 0
        return subprocess.CompletedProcess(command, 0, capsys.readouterr().out)

    config = '{"cpu_offload": true}'
    options = ["--tokens", "3", "--only-engram", "--engram-config", config]
    with monkeypatch.context() as patch:
        patch.setattr(example.subprocess, "run", here)
        patch.setattr(sys, "argv", [str(EXAMPLE), str(tmp_path / "tiny"), *options])
        assert example.main() == 0
    other = capsys.readouterr().out
    text, _, _ = said.partition("  engram: ")
    assert other.startswith(text), "the same text, with tables in host memory"
    assert "plain:" not in other
