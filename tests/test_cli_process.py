"""The `engram` command as a process: exit status, signals, pipes, terminals."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("typer")

import engram
from checkpoint_support import safetensors, tensor
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


def writes_below(directory: Path):
    """Whether a file lies below `directory`; for `interrupted`."""
    return lambda _: bool(list(directory.rglob("*.safetensors")))


def has_open(directory: Path):
    """Whether a process has a file below `directory` open; for `interrupted`."""

    def look(process: int) -> bool:
        for entry in Path(f"/proc/{process}/fd").iterdir():
            try:
                target = entry.readlink()
            except OSError:
                continue
            if target.is_relative_to(directory) and target.suffix == ".safetensors":
                return True
        return False

    return look


def interrupted(*arguments: object, when, directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs the command and presses Ctrl-C as soon as `when`, called with its number, is true."""
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
    while not when(process.pid) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, None, stderr)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return synth.write(tmp_path_factory.mktemp("checkpoint") / "c", "qwen", rows=5000)


@pytest.fixture(scope="module")
def two_tables(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two") / "c"
    return synth.write(directory, "deepseek", rows=5000, config={"engram_head_dim": 64})


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A table of released size whose rows are holes: whatever is done with all of it takes long."""
    return synth.write_sparse(tmp_path_factory.mktemp("large") / "c", "qwen", dtype="fp8")


def test_success_is_status_0_and_silent_on_stderr(checkpoint):
    result = run("inspect", checkpoint.directory)
    assert (result.returncode, result.stderr) == (0, "")
    assert checkpoint.tables[0].name in result.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["inspect", "/no/such/path"], 1, "/no/such/path"),
        (["bench", "/no/such/path"], 1, "/no/such/path"),
        (["prewarm", "/no/such/path"], 1, "/no/such/path"),
        (["verify", "/no/such/path"], 2, "/no/such/path"),
        (["doctor", "/no/such/path", "--quick"], 2, "/no/such/path"),
        (["prewarm"], 2, "Missing argument"),
        (["verify"], 2, "Missing argument"),
        (["verify", "/tmp", "--sample", "some"], 2, "--sample"),
        (["doctor", "--seconds", "0"], 2, "--seconds"),
        (["synth", "/proc/nothing/here"], 1, "/proc/nothing"),
        (["demo", "--size", "huge"], 2, "'huge' is not a size"),
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


LOOKING = [
    pytest.param(["inspect"], 1, id="inspect"),
    pytest.param(["bench", "--warm-only"], 1, id="bench"),
    pytest.param(["prewarm"], 1, id="prewarm"),
    pytest.param(["verify"], 2, id="verify"),
    pytest.param(["doctor", "--quick"], 2, id="doctor"),
]
"""Commands that look into a checkpoint, and their status when there is nothing to look at."""


@pytest.mark.parametrize(("command", "status"), LOOKING)
def test_a_checkpoint_without_a_table(tmp_path, command, status):
    safetensors(tmp_path / "model.safetensors", tensor("norm.weight", "F32", (16,)))
    result = run(*command, tmp_path)
    assert result.returncode == status
    assert "table" in result.stderr
    assert str(tmp_path) in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("engram: ")


@pytest.mark.parametrize(("command", "status"), LOOKING[1:])
def test_a_table_that_is_not_there(two_tables, command, status):
    result = run(*command, two_tables.directory, "--table", "no.such.table")
    assert result.returncode == status
    assert "no.such.table" in result.stderr
    assert all(table.name in result.stderr for table in two_tables.tables)
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["verify", "prewarm", "doctor", "bench"])
def test_several_tables(two_tables, command):
    options = ["--quick"] if command == "doctor" else []
    result = run(command, two_tables.directory, *options)
    if command == "bench":
        assert result.returncode == 1, "figures are those of one table"
        said = result.stderr
    else:
        assert result.returncode == 0, result.stderr
        said = result.stdout
    assert all(table.name in said for table in two_tables.tables)


@pytest.mark.parametrize(("command", "status"), LOOKING)
def test_a_directory_that_may_not_be_read_is_named(tmp_path, command, status):
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
    result = run(*command, closed, code=code)
    assert result.returncode == status
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


PRINTING = [
    (["inspect", "--json"], 1),
    (["inspect"], 1),
    (["verify"], 2),
    (["prewarm"], 1),
    (["doctor", "--quick", "--json"], 2),
    (["bench", "--warm-only", "--rows", "4", "--seconds", "0", "--json"], 1),
]
"""What prints on standard output, and the status when that cannot be done."""


@pytest.mark.parametrize("arguments", [*(each for each, _ in PRINTING), ["--help"]], ids=" ".join)
def test_a_closed_pipe_ends_it_quietly(checkpoint, arguments):
    read, write = os.pipe()
    os.close(read)
    where = [] if arguments == ["--help"] else [checkpoint.directory]
    result = run(*arguments, *where, stdout=write)
    os.close(write)
    assert result.returncode == 1
    assert result.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(("arguments", "status"), PRINTING)
def test_a_full_device_is_reported_once(checkpoint, arguments, status):
    with Path("/dev/full").open("w") as full:
        result = run(*arguments, checkpoint.directory, stdout=full)
    assert result.returncode == status
    assert result.stderr.count("\n") == 1
    assert "No space left on device" in result.stderr


def test_closed_standard_output_is_no_failure(checkpoint):
    result = run("inspect", checkpoint.directory, preexec_fn=lambda: os.close(1))
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("command", ["synth", "demo"])
def test_ctrl_c_while_writing_leaves_nothing_and_is_status_130(tmp_path, command):
    where = [tmp_path / "c"] if command == "synth" else []
    result = interrupted(
        command, *where, "--size", "2GiB", when=writes_below(tmp_path), directory=tmp_path
    )
    assert result.returncode == 130
    assert result.stderr == "engram: interrupted\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        ("inspect", {"COLUMNS": "20"}),
        ("inspect", {"NO_COLOR": "1"}),
        ("inspect", {"TERM": ""}),
        ("inspect", {"PYTHONIOENCODING": "ascii"}),
        ("verify", {"COLUMNS": "20", "PYTHONIOENCODING": "ascii"}),
        ("prewarm", {"COLUMNS": "20", "NO_COLOR": "1"}),
        ("doctor", {"COLUMNS": "20", "TERM": ""}),
    ],
)
def test_output_is_whole_and_plain_without_a_terminal(checkpoint, command, variables):
    options = ["--quick"] if command == "doctor" else []
    result = run(command, checkpoint.directory, *options, env=variables)
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    assert result.stderr == ""
    assert any(checkpoint.tables[0].name in line for line in result.stdout.splitlines())
    if command == "inspect":
        assert f"{checkpoint.tables[0].name}\n" in result.stdout
        assert f"{checkpoint.tables[0].rows:,}\n" in result.stdout


TERMINALS = [
    {"TERM": "dumb"},
    {"TERM": "xterm", "COLUMNS": "20"},
    {"TERM": "xterm", "NO_COLOR": "1"},
]


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        *(("doctor", variables) for variables in TERMINALS),
        *((command, TERMINALS[1]) for command in ("inspect", "verify", "prewarm")),
    ],
)
def test_output_on_terminals(checkpoint, command, variables):
    options = ["--quick"] if command == "doctor" else []
    status, shown = on_a_terminal(command, checkpoint.directory, *options, **variables)
    assert status == 0, shown
    assert "Traceback" not in shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert checkpoint.tables[0].name in plain, "names are never cut"
    coloured = bool(re.search(r"\x1b\[[0-9;]*3[0-7]m", shown))
    assert coloured == (command == "doctor" and variables == TERMINALS[1])


def on_a_terminal(*arguments: object, **variables: str) -> tuple[int, str]:
    """Runs the command on a terminal of its own; its status and all that was shown there."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "engram", *map(str, arguments)],
        env=environment(**variables),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:
            break  # The other end is closed.
        if not part:
            break
        shown += part
    os.close(ours)
    return process.wait(timeout=60), shown.decode(errors="replace")


@pytest.mark.parametrize(
    "arguments",
    [["verify", "--all"], ["prewarm"], ["doctor", "--seconds", "600"], ["bench"]],
    ids=" ".join,
)
def test_ctrl_c_while_reading(large, tmp_path, arguments):
    when = has_open(large.directory)
    result = interrupted(*arguments, large.directory, when=when, directory=tmp_path)
    assert result.returncode == 130, result.stderr
    assert result.stderr == "engram: interrupted\n"


def test_file_names_that_are_not_text_are_printed_somehow(tmp_path):
    strange = os.fsencode(tmp_path) + b"/\xff\xc3\xa9"
    synth.write(os.fsdecode(strange), "gemma", rows=300)
    for variables in ({}, {"PYTHONIOENCODING": "ascii"}):
        result = run("inspect", os.fsdecode(strange), "--json", env=variables)
        assert result.returncode == 0, result.stderr
        missing = run("inspect", os.fsdecode(strange + b"x"), env=variables)
        assert missing.returncode == 1
        assert "Traceback" not in missing.stderr
