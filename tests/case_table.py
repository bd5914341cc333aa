"""Writes `cases.md`: every case, the tests that cover it, and how they ended.

    python tests/case_table.py [--check] [F07 ...]

Runs all tests marked with a case (or with one of those given), and the core's. Exit code 1 if a
case has no test that passed here and no reason why it does not apply. With `--check` nothing is
written.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent
TABLE = HERE / "cases.md"
ID = r"[A-Z]\d\d"
ROW = re.compile(rf"(?m)^\| ({ID}) \| (.+?) \|(?: (.*?) \| (.*?) \|)?$")
ELSEWHERE = "does not apply: "
"""How a statement begins that gives a reason instead of a promise."""


def listed() -> dict[str, str]:
    """Each case, and what holds."""
    return {match[1]: match[2] for match in ROW.finditer(TABLE.read_text())}


def cases_in(node: ast.AST) -> set[str]:
    """Cases that an expression marks."""
    return {
        call.args[0].value
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "case"
        and call.args
        and isinstance(call.args[0], ast.Constant)
    }


def python_marks() -> dict[str, set[str]]:
    """Each case, and the functions that are marked with it, as `file::function`."""
    found = defaultdict(set)
    for path in sorted(HERE.rglob("test_*.py")):
        module = ast.parse(path.read_text())
        shared: dict[str, set[str]] = {}
        everywhere: set[str] = set()
        for node in module.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                shared[node.targets[0].id] = cases_in(node.value)
                if node.targets[0].id == "pytestmark":
                    everywhere = cases_in(node.value)
        file = str(path.relative_to(HERE))
        for name, decorators in test_functions(module, file):
            marked = set(everywhere)
            for decorator in decorators:
                marked |= cases_in(decorator)
                for used in ast.walk(decorator):
                    if isinstance(used, ast.Name):
                        marked |= shared.get(used.id, set())
            for case in marked:
                found[case].add(name)
    return dict(found)


def test_functions(node: ast.Module | ast.ClassDef, prefix: str):
    """Names of the tests below a node, each with its decorators and those of its classes."""
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            for name, decorators in test_functions(child, f"{prefix}::{child.name}"):
                yield name, [*child.decorator_list, *decorators]
        elif isinstance(child, ast.FunctionDef) and child.name.startswith("test"):
            yield f"{prefix}::{child.name}", child.decorator_list


def rust_marks() -> dict[str, set[str]]:
    """Each case, and the tests of the core whose comments name it, as `file::function`.

    A comment at the top of a file speaks for all tests in it.
    """
    found = defaultdict(set)
    for path in sorted((ROOT / "rust").rglob("*.rs")):
        text = path.read_text()
        name = str(path.relative_to(ROOT / "rust"))
        for case in re.findall(rf"\b({ID})\b", "\n".join(re.findall(r"(?m)^//! .*$", text))):
            found[case].add(name)
        pattern = r"((?:^ *///? .*\n)+)(?: *#\[.*\]\n|(?: *///? .*\n))*\s*fn (\w+)"
        for comment, function in re.findall(pattern, text, re.MULTILINE):
            for case in re.findall(rf"\b({ID})\b", comment):
                found[case].add(f"{name}::{function}")
    return dict(found)


def all_marks() -> dict[str, set[str]]:
    """Cases of both languages."""
    found = defaultdict(set)
    for marks in (python_marks(), rust_marks()):
        for case, tests in marks.items():
            found[case] |= tests
    return dict(found)


class Recorder:
    """Notes how tests end."""

    def __init__(self, wanted: set[str]) -> None:
        self.wanted = wanted
        self.ended: dict[str, Counter[str]] = defaultdict(Counter)
        self.reasons: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Called by pytest once it knows all tests."""
        items[:] = [
            item
            for item in items
            if any(mark.args[0] in self.wanted for mark in item.iter_markers("case"))
        ]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest for each phase of each test."""
        if report.when != "call" and report.passed:
            return
        path, _, function = report.nodeid.partition("::")
        name = f"{Path(path).relative_to(HERE.name)}::{function.split('[')[0]}"
        self.ended[name][report.outcome] += 1
        if report.skipped and isinstance(report.longrepr, tuple):
            self.reasons[name] = report.longrepr[2].removeprefix("Skipped: ")


def run_python(wanted: set[str]) -> Recorder:
    recorder = Recorder(wanted)
    arguments = ["-q", "-m", "case", "-p", "no:cacheprovider", "--rootdir", str(ROOT), str(HERE)]
    pytest.main(arguments, plugins=[recorder])
    return recorder


def run_rust() -> dict[str, Counter[str]]:
    """How the core's tests ended, by the last part of their name."""
    finished = subprocess.run(
        ["cargo", "test", "--locked", "-p", "engram-core"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    ended: dict[str, Counter[str]] = defaultdict(Counter)
    for name, outcome in re.findall(r"(?m)^test (\S+).* \.\.\. (\w+)", finished.stdout):
        ended[name.split("::")[-1]]["passed" if outcome == "ok" else "failed"] += 1
    return ended


def outcome_of(tests: set[str], python: Recorder, rust: dict[str, Counter[str]]) -> str:
    total: Counter[str] = Counter()
    reasons = []
    for test in sorted(tests):
        file, _, function = test.partition("::")
        if not file.endswith(".rs"):
            total += python.ended.get(test, Counter())
            if test in python.reasons:
                reasons.append(python.reasons[test])
        elif function:
            total += rust.get(function, Counter())
        else:
            functions = re.findall(
                r"#\[test\]\n(?: *#\[.*\]\n)* *fn (\w+)", (ROOT / "rust" / file).read_text()
            )
            for name in functions:
                total += rust.get(name, Counter())
    words = [f"{count} {what}" for what, count in sorted(total.items())]
    why = f" ({reasons[0]})" if reasons else ""
    return (", ".join(words) + why).replace("|", "/") or "none ran"


def main() -> int:
    """Runs the tests and writes the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("cases", nargs="*", help="these alone")
    arguments = parser.parse_args()
    statements, marks = listed(), all_marks()
    wanted = set(arguments.cases) or set(statements)
    python = run_python(wanted)
    in_rust = set(rust_marks()) & wanted
    rust = run_rust() if in_rust else {}
    bad = sorted(set(marks) - set(statements))
    text = TABLE.read_text()
    for match in ROW.finditer(text):
        case, statement = match[1], match[2]
        if case not in wanted:
            continue
        tests = marks.get(case, set())
        outcome = outcome_of(tests, python, rust) if tests else "-"
        applies = not statement.startswith(ELSEWHERE)
        if applies and (" passed" not in outcome or "failed" in outcome):
            bad.append(case)
        names = "<br>".join(f"`{test}`" for test in sorted(tests)) or "-"
        text = text.replace(match[0], f"| {case} | {statement} | {names} | {outcome} |")
    if not arguments.check:
        TABLE.write_text(text)
    for case in bad:
        print(f"{case}: without a test that passed here and a line that says what holds")
    print(f"{len(wanted) - len(bad)} of {len(wanted)} cases are covered")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
