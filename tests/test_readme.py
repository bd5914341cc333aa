"""The README's examples run, and what it calls missing is missing."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

import engram
from engram import synth

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.mark.filterwarnings("error")
def test_examples_run_in_order(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    synth.write("Qwen3.8-Flash-Next-FP8", "qwen", rows=5000, dtype="fp8")
    synth.write("DeepSeek-V4.1-Flash", "deepseek", rows=3000)
    names: dict[str, object] = {}
    assert len(EXAMPLES) > 5
    for position, example in enumerate(EXAMPLES):
        code = compile(example, f"README.md, example {position}", "exec")
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, names)
    for name in ("gather", "tables"):
        names[name].close()


def test_examples_give_what_their_comments_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    info = synth.write("Qwen3.8-Flash-Next-FP8", "qwen", rows=5000, dtype="fp8")
    names: dict[str, object] = {}
    exec(EXAMPLES[0], names)
    rows = names["rows"]
    assert rows.shape == (2, 3, 160)
    expected = info.tables[0].expected([[3, 1, 4], [1, 5, 9]])["weight"]
    assert (rows.view("u1") == expected).all()
    names["gather"].close()


def test_what_is_called_missing_is_missing():
    section = README.partition("## What is not there yet")[2].partition("\n## ")[0]
    called_missing = re.findall(r"`((?:engram|FileGather)\.\w+)`", section)
    assert "Linux" in section
    # A finished feature leaves that list, so that the README does not undersell it.
    owners = {"engram": engram, "FileGather": engram.FileGather}
    for name in called_missing:
        owner, _, attribute = name.partition(".")
        assert not hasattr(owners[owner], attribute), f"{name} is there"


def test_make_targets_named_in_documents_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):.*##", makefile, re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md", "DESIGN.md"):
        text = (ROOT / document).read_text(encoding="utf-8")
        named = set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE))
        assert named <= targets, document
