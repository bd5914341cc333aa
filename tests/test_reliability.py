"""The page on reliability names tests and commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reliability.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="not a checkout of the project")


def test_every_fault_names_tests_that_are_there():
    text = PAGE.read_text()
    rows = [
        line for line in text.splitlines() if line.startswith("| ") and "what happens" not in line
    ]
    assert len(rows) > 40
    for row in rows:
        named = re.findall(r"`([\w/]+\.(?:py|rs))`|`(make [a-z-]+)`", row.rsplit("|", 2)[-2])
        assert named, f"no test: {row}"
        for file, command in named:
            if file:
                place = ROOT if file.startswith("rust/") else ROOT / "tests"
                assert (place / file).exists(), file
                assert "test" in (place / file).read_text()
            else:
                assert re.search(rf"(?m)^{command.split()[1]}:", (ROOT / "Makefile").read_text())


def test_commands_that_take_longer_are_targets():
    targets = re.findall(r"(?m)^make ([a-z-]+) ", PAGE.read_text())
    assert set(targets) >= {"soak", "fuzz", "asan", "tsan"}
    for target in targets:
        assert re.search(rf"(?m)^{target}:", (ROOT / "Makefile").read_text()), target
