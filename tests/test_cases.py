"""`cases.md` lists the cases that tests cover, by which tests, and no others."""

from __future__ import annotations

import re

import pytest

import case_table

pytestmark = pytest.mark.skipif(
    not (case_table.ROOT / "rust").exists(), reason="not a checkout of the project"
)


def rows():
    return [match.groups() for match in case_table.ROW.finditer(case_table.TABLE.read_text())]


def test_every_case_is_listed_once_with_the_tests_that_cover_it():
    listed = [case for case, *_ in rows()]
    assert len(listed) == len(set(listed))
    assert len(listed) >= 108
    marks = case_table.all_marks()
    assert set(marks) - set(listed) == set(), "marked, but without a line in cases.md"
    wrong = [
        case
        for case, _, tests, _ in rows()
        if set(re.findall(r"`(.+?)`", tests or "")) != marks.get(case, set())
    ]
    assert wrong == [], "the table is old: run `python tests/case_table.py`"


def test_no_case_is_without_a_test_that_passed_or_a_reason():
    open_cases = [
        case
        for case, statement, _, outcome in rows()
        if not statement.startswith(case_table.ELSEWHERE)
        and (" passed" not in (outcome or "") or "failed" in outcome)
    ]
    assert open_cases == []


def test_a_case_without_a_test_would_be_found(tmp_path, monkeypatch):
    """The table's own check can fail."""
    table = tmp_path / "cases.md"
    table.write_text("| Z01 | Nobody tests this. |\n| Z02 | does not apply: no such device. |\n")
    monkeypatch.setattr(case_table, "TABLE", table)
    monkeypatch.setattr(case_table, "all_marks", dict)
    monkeypatch.setattr(case_table, "run_python", case_table.Recorder)
    monkeypatch.setattr(case_table, "rust_marks", dict)
    monkeypatch.setattr(case_table, "run_rust", dict)
    monkeypatch.setattr("sys.argv", ["case_table.py"])
    assert case_table.main() == 1
    assert table.read_text().splitlines() == [
        "| Z01 | Nobody tests this. | - | - |",
        "| Z02 | does not apply: no such device. | - | - |",
    ]
