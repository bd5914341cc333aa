"""The `engram` command as a process: exit status, signals, pipes, terminals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("typer")

import engram
from engram import synth

SOURCE = str(Path(engram.__file__).parents[1])


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    return {**kept, "PYTHONPATH": SOURCE, "TERM": "dumb", **changes}


def run(*arguments: object, code: str | None = None, **options: object):
    start = ["-c", code] if code else ["-m", "engram"]
    return subprocess.run(
        [sys.executable, *start, *map(str, arguments)],
        env=environment(**options.pop("env", {})),
        capture_output="stdout" not in options,
        stderr=subprocess.PIPE if "stdout" in options else None,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def interrupted(directory: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the command and presses Ctrl-C as soon as it writes a file below `directory`."""
    # Heeds Ctrl-C even where this process was started with it ignored.
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from engram.cli import main\n"
        "main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment(TMPDIR=str(directory)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(directory.rglob("*.safetensors")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, None, stderr)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return synth.write(tmp_path_factory.mktemp("checkpoint") / "c", "qwen", rows=5000)


def test_success_is_status_0_and_silent_on_stderr(checkpoint):
    result = run("inspect", checkpoint.directory)
    assert (result.returncode, result.stderr) == (0, "")
    assert checkpoint.tables[0].name in result.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["inspect", "/no/such/path"], 1, "/no/such/path"),
        (["synth", "/proc/nothing/here"], 1, "/proc/nothing"),
        (["demo", "--size", "huge"], 1, "'huge' is not a size"),
        (["inspect"], 2, "Missing argument"),
        (["dance"], 2, "dance"),
    ],
)
def test_failure_is_a_sentence_and_a_status(arguments, status, words):
    result = run(*arguments)
    assert result.returncode == status
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_directory_that_may_not_be_read_is_named(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    # Root may read everything, so it becomes somebody else once all modules are loaded.
    code = (
        "import contextlib, io, os\n"
        "from engram.cli.app import app\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):\n"
        "    app(['inspect', '/nowhere'])\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "from engram.cli import main\n"
        "main()"
    )
    result = run("inspect", closed, code=code)
    assert result.returncode == 1
    assert "Permission denied" in result.stderr
    assert str(closed) in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_what_to_install(missing):
    code = f"import sys; sys.modules[{missing!r}] = None\nfrom engram.cli import main\nmain()"
    result = run("inspect", ".", code=code)
    assert result.returncode == 1
    assert "install engram-gather[cli]" in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize("arguments", [["inspect", "--json"], ["inspect"], ["--help"]])
def test_a_closed_pipe_ends_it_quietly(checkpoint, arguments):
    read, write = os.pipe()
    os.close(read)
    where = [checkpoint.directory] if "inspect" in arguments else []
    result = run(*arguments, *where, stdout=write)
    os.close(write)
    assert result.returncode == 1
    assert result.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [["inspect", "--json"], ["inspect"]])
def test_a_full_device_is_reported_once(checkpoint, arguments):
    with Path("/dev/full").open("w") as full:
        result = run(*arguments, checkpoint.directory, stdout=full)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "No space left on device" in result.stderr


def test_closed_standard_output_is_no_failure(checkpoint):
    result = run("inspect", checkpoint.directory, preexec_fn=lambda: os.close(1))
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("command", ["synth", "demo"])
def test_ctrl_c_while_writing_leaves_nothing_and_is_status_130(tmp_path, command):
    where = [tmp_path / "c"] if command == "synth" else []
    result = interrupted(tmp_path, command, *where, "--size", "2GiB")
    assert result.returncode == 130
    assert result.stderr == "engram: interrupted\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "variables",
    [{"COLUMNS": "20"}, {"NO_COLOR": "1"}, {"TERM": ""}, {"PYTHONIOENCODING": "ascii"}],
)
def test_output_is_whole_and_plain_without_a_terminal(checkpoint, variables):
    result = run("inspect", checkpoint.directory, env=variables)
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    assert f"{checkpoint.tables[0].name}\n" in result.stdout
    assert f"{checkpoint.tables[0].rows:,}\n" in result.stdout


def test_file_names_that_are_not_text_are_printed_somehow(tmp_path):
    strange = os.fsencode(tmp_path) + b"/\xff\xc3\xa9"
    synth.write(os.fsdecode(strange), "gemma", rows=300)
    for variables in ({}, {"PYTHONIOENCODING": "ascii"}):
        result = run("inspect", os.fsdecode(strange), "--json", env=variables)
        assert result.returncode == 0, result.stderr
        missing = run("inspect", os.fsdecode(strange + b"x"), env=variables)
        assert missing.returncode == 1
        assert "Traceback" not in missing.stderr
