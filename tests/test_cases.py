"""`cases.md` lists the cases that tests cover, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ID = r"[A-Z]\d\d"


def test_every_case_is_listed_once_and_covered():
    listed = re.findall(rf"(?m)^\| ({ID}) \| .+ \|$", (HERE / "cases.md").read_text())
    assert len(listed) == len(set(listed))
    marked = {
        case
        for path in HERE.rglob("test_*.py")
        for case in re.findall(rf'mark\.case\("({ID})"\)', path.read_text())
    }
    rust = HERE.parent / "rust"
    if not rust.exists():
        pytest.skip("not a checkout of the project")
    mentioned = {
        case
        for path in rust.rglob("*.rs")
        for line in re.findall(r"(?m)^\s*//[/!] .*$", path.read_text())
        for case in re.findall(rf"\b({ID})\b", line)
    }
    assert marked - set(listed) == set(), "marked, but without a line in cases.md"
    assert set(listed) - marked - mentioned == set(), "listed, but no test covers them"
