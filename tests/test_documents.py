"""The code of README and documentation runs as written, and what they name exists."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import os
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

import engram
from documents import INSTALL, ROOT, TIME, blocks, documents, name_of, prepare, run

DOCS = ROOT / "docs"
PAGES = [path for path in documents() if blocks(path)]

needs_sources = pytest.mark.skipif(not DOCS.exists(), reason="not a checkout of the project")


@pytest.fixture
def environment(tmp_path):
    """Variables for shell blocks, in which `engram` and `python` are those that run the tests."""
    tools = tmp_path / "bin"
    tools.mkdir()
    python = shlex.quote(sys.executable)
    for name, start in (("engram", f"{python} -m engram"), ("python", python)):
        (tools / name).write_text(f'#!/bin/sh\nexec {start} "$@"\n')
        (tools / name).chmod(0o755)
    source = str(Path(engram.__file__).parents[1])
    return {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": source,
        "OMP_NUM_THREADS": "1",
        "TERM": "dumb",
    }


@needs_sources
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_runs_from_top_to_bottom(page, tmp_path, monkeypatch, environment):
    pytest.importorskip("torch")
    pytest.importorskip("typer")
    folder = tmp_path / "reader"
    folder.mkdir()
    prepare(folder)
    monkeypatch.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        left_out = run(page, environment)
    ran = len(blocks(page)) - len(left_out)
    assert (ran == 0) == (name_of(page) in NOTHING_TO_RUN)


LEFT_OUT = [block for page in PAGES for block in blocks(page) if block.title.startswith("needs ")]

NOTHING_TO_RUN = {"docs/figures.md", "docs/reliability.md"}
"""Pages of which every block needs more than the test suite has."""

NEEDS = {
    "needs cargo and a package index",
    "needs the wheel and a package index",
    "needs a checkout, cargo and half an hour",
    "needs a minute",
    "needs cargo, a package index, 10 GiB of disk and an hour",
    "needs a checkpoint and the extra plot",
    "needs systemd and a checkpoint of some gigabytes",
    "needs docker",
    "needs a minute and the extra plot",
    "needs several processes",
    "needs a CUDA device",
}
"""What a block may need; a new reason not to run it is given on purpose."""


@needs_sources
@pytest.mark.parametrize("block", LEFT_OUT, ids=lambda block: block.name)
def test_code_that_is_left_out_says_what_it_needs(block):
    assert block.title in NEEDS
    if block.language == "python":
        compile(block.text, block.name, "exec")
    if block.missing:
        pytest.skip(block.missing)


def scripts_of(blocks_of_page) -> set[Path]:
    """Examples that shell blocks run, in the checkout."""
    return {
        ROOT / name
        for block in blocks_of_page
        for name in re.findall(r"\bpython (examples/\w+\.py)", block.text)
    }


def imported(code: str) -> set[str]:
    """Packages that code imports, other than Python's own and engram."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"engram"}


def of_ci(name: str):
    """A script beside the pipeline, as a module."""
    spec = importlib.util.spec_from_file_location(f"ci_{name}", ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_sources
def test_a_walk_installs_what_the_pages_import():
    walk, requirements = of_ci("walk"), of_ci("requirements")
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = [*document["project"]["dependencies"], *walk.MORE]
    for extra in walk.EXTRAS:
        wanted += requirements.requirements(document, extra)
    installed = {re.match(r"[\w.-]+", each)[0].lower().replace("-", "_") for each in wanted}
    needed: dict[str, str] = {}
    for page in PAGES:
        for block in blocks(page):
            if block.language == "python":
                needed |= dict.fromkeys(imported(block.text), block.name)
        for script in scripts_of(blocks(page)):
            names = imported(script.read_text(encoding="utf-8"))
            needed |= dict.fromkeys(
                names - {path.stem for path in script.parent.glob("*.py")}, script
            )
    assert {"torch", "prometheus_client", "transformers"} <= needed.keys()
    assert {name: where for name, where in needed.items() if name not in installed} == {}
    extras = set(re.findall(r"the extra (\w+)", " ".join(block.title for block in LEFT_OUT)))
    assert extras <= set(walk.EXTRAS)


@needs_sources
def test_a_walk_installs_as_the_pages_say():
    walk = of_ci("walk")
    readme = walk.installation(walk.README)
    assert "pip install dist/engram_gather-*.whl" in readme
    assert '[cli]"' in readme
    assert "make" not in readme
    assert walk.installation(walk.FIRST).startswith("pip install ")
    for page in PAGES:
        for block in blocks(page):
            assert ("pip install" in block.text) == (block.title == INSTALL), block.name


@needs_sources
def test_patience_runs_what_needs_a_minute_and_nothing_else(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    fence = "`" * 3
    titles = ["", "needs a minute", "needs a minute and the extra plot", "needs docker"]
    page.write_text(
        "\n".join(
            f'{fence}sh title="{title}"\ntouch ran-{place}\n{fence}\n'
            for place, title in enumerate(titles)
        )
    )
    monkeypatch.setattr("documents.ROOT", tmp_path)
    assert set(titles[1:3]) == TIME <= NEEDS
    for patient, places in ((False, [0]), (True, [0, 1, 2])):
        folder = tmp_path / str(patient)
        folder.mkdir()
        monkeypatch.chdir(folder)
        left_out = run(page, dict(os.environ), patient=patient)
        assert len(left_out) == len(titles) - len(places)
        assert sorted(path.name for path in folder.iterdir()) == [f"ran-{at}" for at in places]


def commands(text: str) -> list[list[str]]:
    """The arguments of each `engram` command in a shell block."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if "engram" in words:
            rest = words[words.index("engram") + 1 :]
            ends = [rest.index(end) for end in ("||", "&&", "|", ";", ">") if end in rest]
            found.append(rest[: min(ends, default=len(rest))])
    return found


COMMANDS = [
    (block.name, arguments)
    for page in PAGES
    for block in blocks(page)
    if block.language == "sh"
    for arguments in commands(block.text)
]


def parsed(arguments: list[str]) -> None:
    """Parses a command as the command line would, and runs nothing.

    Raises:
        Exception: There is no such command, option or value.
    """
    typer_main = pytest.importorskip("typer.main")
    from engram.cli.app import app

    group = typer_main.get_command(app)
    name, *rest = arguments
    command = group.commands[name]
    command.make_context(name, rest)


@needs_sources
@pytest.mark.parametrize(("name", "arguments"), COMMANDS, ids=lambda value: str(value))
def test_every_command_could_run(name, arguments):
    """Those of blocks that are left out, too: an option that is gone must not stay in a page."""
    parsed(arguments)


@pytest.mark.parametrize(
    "line", ["engram bench x --json y.json", "engram prewarm x --most 1", "engram look x", "engram"]
)
def test_a_command_that_could_not_run_is_noticed(line):
    (arguments,) = commands(f"{line} || true  # a remark")
    with pytest.raises(Exception, match=r".") as refused:
        parsed(arguments)
    assert type(refused.value).__name__ in {"UsageError", "NoSuchOption", "KeyError", "ValueError"}


@needs_sources
def test_nothing_is_installed_by_a_name_that_is_on_no_index():
    for page in PAGES:
        for block in blocks(page):
            assert not re.search(r"pip install.*engram-gather(?!_)", block.text), block.name


@needs_sources
def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    parts = {name_of(path).removeprefix("docs/") for path in (DOCS / "figures").glob("*.md")}
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert pages - parts == listed


@needs_sources
def test_every_public_name_is_in_the_reference():
    text = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    described = set(re.findall(r"^::: engram\.(\w+)$", text, re.MULTILINE))
    assert described >= set(engram.__all__) - {"__version__"}


@needs_sources
@pytest.mark.parametrize("page", ["README.md", "docs/reference/command-line.md"])
def test_pages_that_tell_statuses_tell_those_of_a_verdict_too(page):
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert re.search(r"2 (for )?a wrong command line", text)
    assert re.search(
        r"`doctor` and `verify` give a verdict: 1 [^.]*, 2 that there was nothing", text
    )


@needs_sources
def test_links_between_pages_lead_somewhere():
    # mkdocs looks at those of the documentation; the README is read elsewhere.
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert target.startswith("https://") or (ROOT / target).exists(), target


@needs_sources
def test_make_targets_that_are_named_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):.*##", makefile, re.MULTILINE))
    for path in [*documents(), ROOT / "CONTRIBUTING.md", ROOT / "DESIGN.md"]:
        text = path.read_text(encoding="utf-8")
        named = set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE))
        assert named <= targets, path
