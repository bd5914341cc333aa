"""`engram verify` and `engram prewarm`: what they find, and what they say."""

from __future__ import annotations

import io
import json
import os
import re
import time

import pytest

pytest.importorskip("typer")
from rich.console import Console
from typer.testing import CliRunner

import engram
from engram import _engram, synth
from engram.cli import prewarm, progress, verify
from engram.cli import synth as writing
from engram.cli.app import app


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def verified(path, *options):
    result = run("verify", path, "--json", *options)
    assert result.exit_code in {0, 1}, result.stderr
    document = json.loads(result.stdout)
    assert document["schema_version"] == verify.SCHEMA_VERSION
    assert (result.exit_code == 0) == document["ok"] == (not document["problems"])
    return document


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    directory = tmp_path_factory.mktemp("verify") / "deepseek"
    return synth.write(directory, "deepseek", rows=6000, config={"engram_head_dim": 64})


@pytest.fixture
def qwen(tmp_path):
    return synth.write(
        tmp_path / "c",
        "qwen",
        dtype="fp8",
        rows=20_000,
        parts=8,
        files=5,
        layout=synth.Layout(table_files=4),
    )


def table_files(info):
    names = {piece.file for plane in info.tables[0].planes for piece in plane.pieces}
    return sorted(info.directory / name for name in names)


# verify


def test_nothing_is_wrong(sound):
    result = run("verify", sound.directory)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.endswith("nothing is wrong\n")
    document = verified(sound.directory, "--sample", 100)
    assert document["files"] == len(sound.files)
    assert document["file_bytes"] == sum(path.stat().st_size for path in sound.files)
    assert document["index"].endswith(".index.json")
    for seen, table in zip(document["tables"], sound.tables, strict=True):
        assert (seen["name"], seen["rows"], seen["rows_read"]) == (table.name, table.rows, 100)
        assert len(set(seen["ways"])) == 2
    one = verified(sound.directory, "--all", "--table", "1")
    assert [seen["rows_read"] for seen in one["tables"]] == [sound.tables[1].rows]
    assert one["tables"][0]["name"] == sound.tables[1].name


def test_files_and_plain_tensors_can_be_verified(qwen):
    path = table_files(qwen)[0]
    alone = verified(path, "--table", qwen.tables[0].planes[0].pieces[0].tensor)
    assert alone["index"] is None
    assert alone["files"] == 1


@pytest.mark.case("F17")
def test_every_missing_and_short_file_is_listed(qwen):
    missing, cut, stub = table_files(qwen)[:3]
    sizes = {path: path.stat().st_size for path in (missing, cut, stub)}
    missing.unlink()
    os.truncate(cut, sizes[cut] - 1000)
    os.truncate(stub, 20)
    document = verified(qwen.directory)
    found = {problem["path"]: problem for problem in document["problems"]}
    assert set(found) == {str(missing), str(cut), str(stub)}
    assert found[str(missing)]["kind"] == "missing"
    assert found[str(missing)]["found_bytes"] is None
    assert found[str(cut)]["kind"] == found[str(stub)]["kind"] == "short"
    assert found[str(cut)]["expected_bytes"] == sizes[cut]
    assert found[str(cut)]["found_bytes"] == sizes[cut] - 1000
    assert found[str(stub)]["found_bytes"] == 20
    assert 20 < found[str(stub)]["expected_bytes"] < sizes[stub], "as far as its header goes"
    result = run("verify", qwen.directory)
    assert result.exit_code == 1
    assert "3 problems found" in result.stdout
    assert f"expected bytes: {sizes[cut]:,}, found: {sizes[cut] - 1000:,}" in result.stdout
    assert "expected bytes: unknown, found: none" in result.stdout


def test_the_index_says_how_large_a_missing_file_is(qwen):
    missing, cut = table_files(qwen)[:2]
    header = int.from_bytes(missing.read_bytes()[:8], "little")
    data = missing.stat().st_size - 8 - header
    missing.unlink()
    os.truncate(cut, cut.stat().st_size - 1)
    found = {problem["path"]: problem for problem in verified(qwen.directory)["problems"]}
    assert found[str(missing)]["expected_bytes"] == data
    index = qwen.directory / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    del document["metadata"]
    index.write_text(json.dumps(document))
    found = {problem["path"]: problem for problem in verified(qwen.directory)["problems"]}
    assert found[str(missing)]["expected_bytes"] is None


def test_what_is_no_safetensors_file_is_listed(qwen):
    page, pointer = table_files(qwen)[:2]
    page.write_bytes(b"<!DOCTYPE html><html>log in</html>")
    pointer.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    document = verified(qwen.directory)
    assert [problem["kind"] for problem in document["problems"]] == ["malformed", "malformed"]
    messages = " ".join(problem["message"] for problem in document["problems"])
    assert "HTML page" in messages
    assert "git lfs pull" in messages


def test_a_broken_index_alone_in_its_directory_is_the_problem(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{")
    for path in (tmp_path, index):
        document = verified(path)
        (problem,) = document["problems"]
        assert (problem["kind"], problem["path"]) == ("index", str(index))
        assert document["files"] == 0
        assert "no .safetensors file" not in problem["message"]


def test_links_that_lead_nowhere_are_missing(qwen):
    path = table_files(qwen)[0]
    path.unlink()
    path.symlink_to("../blobs/abc")
    problem = verified(qwen.directory)["problems"][0]
    assert problem["kind"] == "missing"
    assert "blobs/abc" in problem["message"]


@pytest.mark.case("F16")
def test_a_stale_index_is_listed_tensor_by_tensor(qwen):
    index = qwen.directory / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    files = sorted(set(document["weight_map"].values()))
    moved = sorted(document["weight_map"])[:3]
    for name in moved:
        here = document["weight_map"][name]
        document["weight_map"][name] = next(file for file in files if file != here)
    document["weight_map"]["gone"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(document))
    problems = verified(qwen.directory)["problems"]
    assert {problem["kind"] for problem in problems} == {"index"}
    messages = [problem["message"] for problem in problems]
    for name in moved:
        assert sum(repr(name)[1:-1] in message for message in messages) == 1
    assert sum("elsewhere" in message for message in messages) == 1


def test_an_index_that_is_no_index_does_not_hide_the_files(qwen):
    (qwen.directory / "model.safetensors.index.json").write_text("{")
    os.truncate(table_files(qwen)[0], 100)
    kinds = [problem["kind"] for problem in verified(qwen.directory)["problems"]]
    assert sorted(kinds) == ["index", "short"]


def test_pieces_that_are_not_there_at_all(qwen):
    (qwen.directory / "model.safetensors.index.json").unlink()
    table_files(qwen)[1].unlink()
    document = verified(qwen.directory)
    assert [problem["kind"] for problem in document["problems"]] == ["coverage"]
    assert document["tables"] == []


def test_rows_that_differ_are_listed(qwen, monkeypatch):
    wrong = engram.Problem("rotted", "a.safetensors", 7, 99, "row 7 differs")
    answer = engram.Verification(10, ("mmap+uring", "direct"), (wrong,), 3, (("t", "b"),))
    monkeypatch.setattr(engram.FileGather, "verify", lambda *_, **__: answer)
    document = verified(qwen.directory)
    assert document["problems"][0]["row"] == 7
    assert document["problems"][0]["offset"] == 99
    assert document["more_problems"] == 3
    assert document["ignored"] == [{"tensor": "t", "file": "b"}]
    result = run("verify", qwen.directory)
    assert result.exit_code == 1
    assert "and 3 more problems of the kind" in result.stdout
    assert "4 problems found" in result.stdout


@pytest.mark.parametrize("options", [["--table", "5"], ["--table", "nothing"]])
def test_no_such_table(sound, options):
    result = run("verify", sound.directory, *options)
    assert result.exit_code == 2
    assert all(table.name in result.stderr for table in sound.tables)
    assert result.stdout == ""


def test_nothing_at_the_path(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        result = run("verify", path)
        assert result.exit_code == 2
        assert str(path) in result.stderr
        assert result.stdout == ""


def test_a_survey_has_an_end(tmp_path):
    names = [f"model-{number:05}-of-01500.safetensors" for number in range(1500)]
    index = {"weight_map": {f"t{number}": name for number, name in enumerate(names)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = _engram.survey(str(tmp_path))
    assert (len(found["flaws"]), found["more"], found["files"]) == (1000, 500, 1500)


# prewarm


def test_prewarm_reads_all_tables(sound):
    engram.drop_cache(sound.files)
    result = run("prewarm", sound.directory)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    for line, table in zip(lines, sound.tables, strict=True):
        assert line.startswith(f"{table.name}: ")
        assert line.endswith("100.0% in memory")
        assert "/s;" in line


def test_prewarm_reads_one_table_or_so_many_bytes(sound):
    first, second = sound.tables
    result = run("prewarm", sound.directory, "--table", "1")
    assert first.name not in result.stdout
    assert second.name in result.stdout
    result = run("prewarm", sound.directory, "--max", "100KiB")
    assert "100.0 KiB of " in result.stdout
    assert f"{second.name}: 0 B of" in result.stdout
    assert "were left out: --max 100.0 KiB" in result.stdout


def test_prewarm_obeys_what_memory_has_room_for(sound, monkeypatch):
    monkeypatch.setattr(prewarm._engram, "memory_bytes", lambda: (200 << 10, 1 << 30))
    for options in ([], ["--max", "1GiB"]):
        result = run("prewarm", sound.directory, *options)
        assert "200.0 KiB of " in result.stdout
        assert "were left out: no more than 200.0 KiB of memory may be used" in result.stdout
    monkeypatch.setattr(prewarm._engram, "memory_bytes", lambda: (0, 1 << 30))
    result = run("prewarm", sound.directory)
    assert result.exit_code == 1
    assert "no memory" in result.stderr


def test_prewarm_refuses(sound, tmp_path):
    for status, arguments, words in (
        (2, [sound.directory, "--max", "lots"], "'lots' is not a size"),
        (2, [sound.directory, "--max", "9" * 400 + ".5GiB"], "is more than the"),
        (1, [sound.directory, "--table", "9"], sound.tables[0].name),
        (1, [tmp_path / "nowhere"], "nowhere"),
    ):
        result = run("prewarm", *arguments)
        assert result.exit_code == status
        assert words in result.stderr
        assert result.stdout == ""


def test_prewarm_as_json(sound):
    result = run("prewarm", sound.directory, "--max", "100KiB", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["schema_version"] == prewarm.SCHEMA_VERSION
    assert document["path"] == str(sound.directory)
    assert document["max_bytes"] == 100 << 10
    first, second = document["tables"]
    assert [first["name"], second["name"]] == [table.name for table in sound.tables]
    assert (first["bytes_read"], second["bytes_read"]) == (100 << 10, 0)
    assert document["left_out_bytes"] == sum(table.nbytes for table in sound.tables) - (100 << 10)
    assert first["seconds"] > 0
    assert 0 <= second["resident_share"] <= 1


# progress


@pytest.fixture
def terminal(monkeypatch):
    """What a terminal that somebody watches was shown, frame by frame."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=140, height=20)
    for module in (progress, writing):
        monkeypatch.setattr(module, "status", lambda: console)

    def frames():
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
        return [frame for frame in re.split(r"[\r\n]+", plain) if frame.strip()]

    return frames


def test_prewarm_shows_a_bar_with_rate_and_time_left(sound, monkeypatch, terminal):
    total = 64 << 20

    def slowly(gather, most, report):
        # Half of it in as long as it takes for a rate to be known, and no more.
        for done in range(8):
            report(done * total // 16, total)
            time.sleep(0.1)
        return most

    monkeypatch.setattr(engram.FileGather, "prewarm", slowly)
    result = run("prewarm", sound.directory, "--table", "0")
    assert result.exit_code == 0, result.stderr
    frames = [frame for frame in terminal() if "MiB" in frame]
    assert any(
        re.search(r"\d+(\.\d+)?/64(\.0)? MiB [\d.]+ [kMG]?B/s 0:00:0\d", frame) for frame in frames
    ), frames
    assert any(sound.tables[0].name[-20:] in frame for frame in frames)


def test_verify_shows_a_bar_that_counts_rows(sound, monkeypatch, terminal):
    reads = engram.FileGather.verify

    def slowly(gather, rows, *, seed, progress):
        for done in (0, 500, 1000):
            progress(done, 4000)
            time.sleep(0.15)
        return reads(gather, rows, seed=seed, progress=progress)

    monkeypatch.setattr(engram.FileGather, "verify", slowly)
    result = run("verify", sound.directory, "--table", "0", "--sample", 4000)
    assert result.exit_code == 0, result.stderr
    frames = terminal()
    assert any(re.search(r"reading rows twice .* (500|1000)/4000", frame) for frame in frames), (
        frames
    )
    # What verifying itself reports in the end, whatever stood there before.
    assert any("4000/4000" in frame for frame in frames), frames


def test_synth_shows_a_bar_of_bytes_written(tmp_path, monkeypatch, terminal):
    writes = synth.write

    def slowly(directory, family, *, progress, **arguments):
        for done in range(3):
            progress(done << 20, 8 << 20)
            time.sleep(0.15)
        return writes(directory, family, progress=progress, **arguments)

    monkeypatch.setattr(writing.library, "write", slowly)
    result = run("synth", tmp_path / "c", "--size", "2MiB")
    assert result.exit_code == 0, result.stderr
    frames = terminal()
    assert any(re.search(r"writing .* [12]\.0/8\.0 MiB", frame) for frame in frames), frames
    info = synth.load(tmp_path / "c")
    whole = f"{info.nbytes / 2**20:.1f}"
    assert any(f"{whole}/{whole} MiB" in frame for frame in frames), frames


def test_nothing_is_drawn_where_nobody_watches(sound, tmp_path):
    for arguments in (
        ("verify", sound.directory),
        ("prewarm", sound.directory),
        ("synth", tmp_path / "c", "--size", "2MiB"),
    ):
        assert run(*arguments).stderr == ""
