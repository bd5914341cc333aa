"""The `engram` command in this process: what it prints, and what it says when it cannot."""

from __future__ import annotations

import errno
import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer")
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from engram import synth
from engram.cli import demo, errors, machine, text, timing
from engram.cli.app import app

SMALL_QWEN = ["--rows", "5000"]


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def two_tables(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint") / "deepseek"
    return synth.write(directory, "deepseek", rows=5000, config={"engram_head_dim": 64})


# synth


@pytest.mark.parametrize("family", list(synth.FAMILIES))
def test_synth_writes_every_family(tmp_path, family):
    rows = 300 if family == "gemma" else 5000
    result = run("synth", tmp_path / "c", "--family", family, "--rows", rows)
    assert result.exit_code == 0, result.stderr
    info = synth.load(tmp_path / "c")
    assert info.family == family
    for table in info.tables:
        assert f"{table.name}: {table.rows:,} rows of {table.row_bytes:,} bytes" in result.stdout
    assert f"in {len(info.files)} file" in result.stdout


def test_synth_passes_every_option_on(tmp_path):
    options = ["--size", "1MiB", "--files", "3", "--dtype", "fp8", "--parts", "5", "--seed", "7"]
    result = run("synth", tmp_path / "c", *options, "--layers", "2,5")
    assert result.exit_code == 0, result.stderr
    info = synth.load(tmp_path / "c")
    assert [table.layer for table in info.tables] == [2, 5]
    assert info.tables[0].encoding == "fp8_e4m3"
    assert len(info.tables[0].planes[0].pieces) == 5
    assert (len(info.files), info.plan.seed) == (3, 7)
    assert abs(sum(table.nbytes for table in info.tables) - (1 << 20)) < 1 << 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "int3"], "qwen has no dtype 'int3'; known: bf16"),
        (["--rows", "10"], "10 rows are too few"),
        (["--rows", "1000", "--size", "1MiB"], "give only one"),
        (["--size", "many"], "'many' is not a size; write bytes, or for example 6GiB"),
        (["--size", "9" * 400 + "PiB"], "is more than the"),
        (["--layers", "one"], "'--layers': must be a number"),
        (["--layers", "x" * 10_000], "'--layers': must be a number"),
        (["--layers", "999999999999"], "more than 1000 tables"),
        (["--layers", "-1,2"], "zero-based decoder layers, at least one, not -1"),
        (["--layers", ",".join(map(str, range(2000)))], "2000 layers are more than 1000 tables"),
        (["--layers", f"1,{10**30}"], f"not {10**30}"),
        (["--model", "--layers", "9999999"], "in 1 to 3 layers, not in 9999999"),
        (["--model", "--layers", "0,5"], "in layers 0, 1 and 2, not in 5"),
        (["--family", "longcat", "--layers", "2"], "one table for all layers"),
        (["--rows", "9" * 23], f"rows must be from 1 to {2**63 - 1}"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_synth_says_what_cannot_be(tmp_path, options, message):
    result = run("synth", tmp_path / "c", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr) < 500
    assert result.stdout == ""
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("family", list(synth.FAMILIES))
def test_a_checkpoint_that_no_disk_holds_leaves_nothing(tmp_path, family):
    result = run("synth", tmp_path / "c", "--family", family, "--rows", 2**63 - 1)
    assert result.exit_code == 1
    assert result.stderr.startswith("engram: the checkpoint needs ")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--family", "llama"],
        ["--rows", "0"],
        ["--rows", "x"],
        ["--size", "x"],
        ["--layers", "x"],
        ["--dtype", "x"],
        ["--no-such-option"],
        ["--model", "--rows", "5"],
        ["--model", "--family", "gemma"],
        ["--model", "--overwrite"],
    ],
)
def test_a_wrong_command_line_is_status_2(tmp_path, options):
    result = run("synth", tmp_path / "c", *options)
    assert result.exit_code == 2
    assert options[0] in result.stderr or options[1] in result.stderr
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", ""],
        ["verify", ""],
        ["doctor", ""],
        ["bench", ""],
        ["prewarm", ""],
        ["synth", ""],
        ["demo", "--dir", ""],
        ["bench", ".", "--plot", ""],
    ],
    ids=" ".join,
)
def test_an_empty_path_is_not_the_working_directory(arguments, two_tables, monkeypatch):
    monkeypatch.chdir(two_tables.directory)
    result = run(*arguments)
    assert result.exit_code == 2
    assert "the path is empty" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments", [["demo", "--size", "x"], ["prewarm", ".", "--max", "x"]], ids=" ".join
)
def test_a_size_that_is_none_is_a_wrong_command_line(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "'x' is not a size" in result.stderr
    assert arguments[-2] in result.stderr


def test_synth_refuses_a_directory_in_use_and_overwrites_its_own(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    result = run("synth", tmp_path, *SMALL_QWEN)
    assert result.exit_code == 1
    assert "directory is not empty" in result.stderr
    assert str(tmp_path) in result.stderr
    assert run("synth", tmp_path / "c", *SMALL_QWEN).exit_code == 0
    again = run("synth", tmp_path / "c", *SMALL_QWEN, "--seed", "1", "--overwrite")
    assert again.exit_code == 0, again.stderr
    assert synth.load(tmp_path / "c").plan.seed == 1


def test_synth_model_needs_packages_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    result = run("synth", tmp_path / "c", "--model")
    assert result.exit_code == 1
    assert 'pip install "engram-gather[torch,tokenizers]" "transformers>=5.23"' in result.stderr


# inspect


def test_inspect_shows_every_table(two_tables):
    result = run("inspect", two_tables.directory)
    assert result.exit_code == 0, result.stderr
    for table in two_tables.tables:
        assert table.name in result.stdout
        assert f"deepseek, decoder layer {table.layer}" in result.stdout
        assert f"{table.rows:,}\n" in result.stdout
    assert "fp8_e4m3_e8m0_32, 66 bytes per row" in result.stdout
    assert result.stdout.count("in memory") == 2


def test_inspect_json_is_complete(two_tables):
    result = run("inspect", two_tables.directory, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["version"] == 1
    assert document["path"] == str(two_tables.directory)
    for shown, table in zip(document["tables"], two_tables.tables, strict=True):
        assert shown["name"] == table.name
        assert shown["family"] == "deepseek"
        assert shown["layer"] == table.layer
        assert shown["rows"] == table.rows
        assert shown["encoding"] == table.encoding
        assert shown["row_bytes"] == table.row_bytes
        assert shown["bytes"] == table.nbytes
        assert shown["pieces"] == 2
        assert [plane["name"] for plane in shown["planes"]] == ["weight", "scale"]
        assert [plane["row_bytes"] for plane in shown["planes"]] == [64, 2]
        files = {piece.file for plane in table.planes for piece in plane.pieces}
        assert {Path(file).name for file in shown["files"]} == files
        assert 0 <= shown["resident"] <= 1


def test_inspect_plain_adds_other_tensors(two_tables):
    directory = two_tables.directory
    shown = json.loads(run("inspect", directory, "--json").stdout)["tables"]
    more = json.loads(run("inspect", directory, "--json", "--plain").stdout)["tables"]
    assert [table["family"] for table in shown] == ["deepseek", "deepseek"]
    added = {table["name"] for table in more} - {table["name"] for table in shown}
    assert "layers.1.engram.q_weight" in added
    assert {table["family"] for table in more if table["name"] in added} == {"plain"}


def test_inspect_without_a_table_says_so(tmp_path):
    info = synth.write(tmp_path / "c", "gemma", rows=300, files=2)
    index = info.directory / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    piece = info.tables[0].planes[0].pieces[0]
    other = next(path for path in info.files if path.name != piece.file)
    lone = tmp_path / "lone"
    lone.mkdir()
    (lone / "model.safetensors").write_bytes(other.read_bytes())
    assert document["weight_map"][piece.tensor] == piece.file
    result = run("inspect", lone)
    assert result.exit_code == 1
    assert "no n-gram or per-layer embedding table in" in result.stderr
    assert "--plain" in result.stderr
    as_json = run("inspect", lone, "--json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["tables"] == []


@pytest.mark.case("F17")
def test_inspect_names_what_is_missing(tmp_path):
    result = run("inspect", tmp_path / "nowhere")
    assert result.exit_code == 1
    assert str(tmp_path / "nowhere") in result.stderr
    info = synth.write(tmp_path / "c", "qwen", rows=5000)
    info.files[1].unlink()
    result = run("inspect", info.directory)
    assert result.exit_code == 1
    assert info.files[1].name in result.stderr


def test_inspect_of_something_else_is_an_error(tmp_path):
    wrong = tmp_path / "model.safetensors"
    wrong.write_bytes(b"<html>not found</html>")
    result = run("inspect", wrong)
    assert result.exit_code == 1
    assert result.stderr.startswith("engram: ")
    assert "model.safetensors" in result.stderr


# demo


def test_demo_checks_and_compares_and_cleans_up(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_SECONDS_PER_SIZE", 0.2)
    result = run("demo", "--dir", tmp_path / "d", "--size", "2MiB")
    assert result.exit_code == 0, result.stderr + result.stdout
    for words in ("machine", "kernel", "load", "file system", "numpy / engram", "2,048", "32,768"):
        assert words in result.stdout
    if importlib.util.find_spec("torch") is not None:
        assert "torch / engram" in result.stdout
    checked = [line for line in result.stdout.splitlines() if line.startswith("checked:")]
    assert checked[0].endswith("gathered rows, 0 wrong")
    assert int(checked[0].split()[1].replace(",", "")) > 90_000
    assert not (tmp_path / "d").exists()


def test_demo_keeps_and_finds_its_checkpoint_again(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "TOKENS", (1,))
    monkeypatch.setitem(demo._ROUNDS, 1, 3)
    directory = tmp_path / "d"
    first = run("demo", "--dir", directory, "--size", "2MiB", "--keep")
    assert first.exit_code == 0, first.stderr
    assert "written to" in first.stdout
    second = run("demo", "--dir", directory, "--size", "2MiB")
    assert second.exit_code == 0, second.stderr
    assert "found in" in second.stdout
    assert synth.load(directory).files[0].exists()
    other = run("demo", "--dir", directory, "--size", "3MiB")
    assert other.exit_code == 1
    assert "not empty" in other.stderr
    assert synth.load(directory).files[0].exists()


def test_demo_leaves_other_files_alone(tmp_path):
    (tmp_path / "checkpoint").write_text("mine")
    result = run("demo", "--dir", tmp_path, "--size", "2MiB")
    assert result.exit_code == 1
    assert (tmp_path / "checkpoint").read_text() == "mine"


def test_demo_reports_wrong_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "TOKENS", (1,))
    monkeypatch.setitem(demo._ROUNDS, 1, 3)
    directory = tmp_path / "d"
    assert run("demo", "--dir", directory, "--size", "2MiB", "--keep").exit_code == 0
    info = synth.load(directory)
    piece = info.tables[0].planes[0].pieces[0]
    with (directory / piece.file).open("r+b") as file:
        file.seek(piece.offset)
        file.write(bytes(piece.rows * info.tables[0].row_bytes))
    result = run("demo", "--dir", directory, "--size", "2MiB")
    assert result.exit_code == 1
    assert "wrong bytes" in result.stderr


def test_demo_runs_without_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "TOKENS", (1,))
    monkeypatch.setitem(demo._ROUNDS, 1, 3)
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    result = run("demo", "--dir", tmp_path / "d", "--size", "2MiB")
    assert result.exit_code == 0, result.stderr
    assert "torch is not installed" in result.stdout
    assert "torch / engram" not in result.stdout


# the rest


def test_version():
    import engram

    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout == f"engram {engram.__version__}\n"


def test_timing_takes_turns_and_counts_wrong_rows():
    order = []
    ids = iter(np.arange(10_000).reshape(-1, 4))

    def expected(rows):
        return rows[:, None].astype(np.uint8)

    def method(name, error):
        def call(prepared):
            order.append(name)
            prepared[1][...] = expected(prepared[0])
            prepared[1][0] ^= error

        return timing.Method(name, lambda rows, out: (rows, out), call)

    results = timing.interleaved(
        [method("right", 0), method("wrong", 1)], ids, expected, seconds=60, rounds=131
    )
    turns = {tuple(order[turn : turn + 2]) for turn in range(0, len(order), 2)}
    assert turns == {("right", "wrong"), ("wrong", "right")}, "no order is kept"
    assert {name: len(result.seconds) for name, result in results.items()} == {
        "right": 131,
        "wrong": 131,
    }
    assert (results["right"].rows, results["right"].wrong) == (524, 0)
    assert (results["wrong"].rows, results["wrong"].wrong) == (524, 131)
    assert results["right"].median > 0


@pytest.mark.parametrize(
    ("written", "value"),
    [("4096", 4096), ("6GiB", 6 << 30), (" 1.5 gb ", 1_500_000_000), ("0.5KiB", 512)],
)
def test_sizes(written, value):
    assert text.parse_size(written) == value


@pytest.mark.parametrize("written", ["", "GiB", "-1", "1e9", "5 XB", "1GiB2"])
def test_wrong_sizes(written):
    with pytest.raises(ValueError, match="is not a size"):
        text.parse_size(written)


@pytest.mark.parametrize(
    "written",
    [f"{'9' * 400}GiB", f"{'9' * 400}.5GiB", "9" * 5000, "9000PiB", "9223372036854775808"],
    ids=["whole", "part", "bytes", "unit", "one-more"],
)
def test_sizes_that_nothing_can_have(written):
    with pytest.raises(ValueError, match="is more than the") as refused:
        text.parse_size(written)
    assert len(str(refused.value)) < 200


@given(st.integers(0, 1 << 55))
def test_printed_sizes_read_back_to_about_the_same(count):
    assert math.isclose(text.parse_size(text.format_bytes(count)), count, rel_tol=0.06)


def test_file_system_is_that_of_the_longest_mount_point(tmp_path):
    mounts = tmp_path / "mounts"
    deeper = tmp_path / "with blank"
    deeper.mkdir()
    escaped = str(deeper).replace(" ", "\\040")
    mounts.write_text(f"a / ext4 rw 0 0\nb {escaped} xfs rw 0 0\nc {tmp_path}/with zfs rw 0 0\n")
    assert machine.file_system(deeper / "not yet there", mounts) == f"xfs on {deeper}"
    assert machine.file_system(tmp_path, mounts) == "ext4 on /"
    assert machine.file_system(tmp_path, tmp_path / "absent") == "unknown"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOENT, "No such file", "a/b"), "No such file: a/b"),
        (OSError(errno.ENOENT, "cannot open a/b", "a/b"), "cannot open a/b"),
        (OSError(errno.EIO, "I/O error"), "I/O error"),
        (OSError("plain words"), "plain words"),
        (FileNotFoundError("three files are missing"), "three files are missing"),
    ],
)
def test_errors_are_described_once(error, words):
    assert errors.describe(error) == words
