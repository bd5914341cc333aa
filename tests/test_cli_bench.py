"""`engram bench`, and the other readers it compares with."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import mmap
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

import engram
from engram import synth
from engram.cli import baselines, bench, budgets, hashes, measured, page_cache, plot, timing
from engram.cli.app import app

QUICK = ["--rows", "4,300", "--seconds", "0"]
EXPLICIT = {f"engram, io={mode!r}" for mode in ("uring", "pread", "mmap", "direct")}


def run(*arguments: object):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.fixture(scope="module")
def two_tables(tmp_path_factory):
    directory = tmp_path_factory.mktemp("deepseek") / "checkpoint"
    return synth.write(directory, "deepseek", rows=9000, config={"engram_head_dim": 64})


@pytest.fixture(scope="module")
def one_array(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen") / "checkpoint"
    return synth.write(directory, "qwen", rows=20_000, parts=1, files=1, dtype="fp8")


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pieces") / "checkpoint"
    return synth.write(directory, "qwen", rows=20_000, parts=7, files=3)


def test_bench_prints_what_it_measures(one_array):
    result = run(one_array.directory, *QUICK)
    assert result.exit_code == 0, result.stderr + result.stdout
    for words in ("processor", "kernel", "file system", "np.take", "4 rows", "300 rows"):
        assert words in result.stdout
    assert "is dropped again and again; --warm-only leaves it alone" in result.stdout
    checked = next(line for line in result.stdout.splitlines() if line.startswith("checked"))
    assert checked.endswith("gathered rows, 0 wrong")
    assert "cache_bytes: hits in the second half of " in result.stdout
    assert budgets.TEXT in result.stdout


def test_bench_measures_every_state(one_array, tmp_path, drawn):
    result = run(one_array.directory, *QUICK, "--json", "--plot", tmp_path / "b.png")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads(result.stdout)
    assert document["version"] == measured.JSON_VERSION
    assert document["table"] == one_array.tables[0].name
    seen = {(entry["state"], entry["rows"]) for entry in document["measurements"]}
    states = ("warm", "cold", "25% resident", "50% resident", "75% resident")
    assert seen == {(state, rows) for state in states for rows in (4, 300)}
    names = {entry["method"] for entry in document["measurements"]}
    assert {"engram", "np.take", "engram, only the missing rows"} <= names
    assert names & EXPLICIT
    for entry in document["measurements"]:
        assert entry["rows_wrong"] == 0
        assert entry["rows_checked"] > 0
        assert 0 < entry["seconds"]["min"] <= entry["seconds"]["median"]
        assert entry["seconds"]["median"] <= entry["seconds"]["p99"]
        assert (entry["bytes_read_per_call"] is None) == (entry["state"] == "warm")
    (figure,) = drawn
    *panels, rates = visible(figure)
    assert [panel.get_title() for panel in panels] == [f"{state}, uniform ids" for state in states]
    for panel, state in zip(panels, states, strict=True):
        measured_here = [entry for entry in document["measurements"] if entry["state"] == state]
        lines = {line.get_label(): line for line in panel.get_lines()}
        assert set(lines) == {entry["method"] for entry in measured_here}
        for method, line in lines.items():
            points = [
                (entry["rows"], 1e6 * entry["seconds"]["median"])
                for entry in measured_here
                if entry["method"] == method
            ]
            assert np.allclose(line.get_xydata(), sorted(points))
        assert panel.get_xlabel() == "rows per call"
    (line,) = rates.get_lines()
    budgets_told = document["hit_rates"]["budgets"]
    assert len(budgets_told) == 5
    expected = [(each["cache_bytes"] / 2**20, 100 * each["hit_rate"]) for each in budgets_told]
    assert np.allclose(line.get_xydata(), expected)


def test_bench_of_planes_in_several_files(two_tables, tmp_path):
    result = run(two_tables.directory, *QUICK)
    assert result.exit_code == 1
    assert all(table.name in result.stderr for table in two_tables.tables)
    name = two_tables.tables[1].name
    for table in ("1", name):
        result = run(two_tables.directory, *QUICK, "--warm-only", "--table", table)
        assert result.exit_code == 0, result.stderr
        assert f"table        {name}" in result.stdout
        assert "torch.index_select is not compared" in result.stdout


def test_bench_can_leave_the_page_cache_alone(one_array, monkeypatch):
    def refuse(*_):
        raise AssertionError("the page cache was dropped")

    monkeypatch.setattr(engram, "drop_cache", refuse)
    result = run(one_array.directory, *QUICK, "--warm-only")
    assert result.exit_code == 0, result.stderr
    assert "the page cache was left alone" in result.stdout
    assert "cold: median" not in result.stdout


def test_bench_reports_wrong_rows(one_array, monkeypatch):
    monkeypatch.setattr(
        baselines.StoredRows,
        "expected",
        lambda self, ids: np.zeros((*ids.shape, self._row_bytes), np.uint8),
    )
    result = run(one_array.directory, *QUICK, "--warm-only")
    assert result.exit_code == 1
    assert "had wrong bytes" in result.stderr


@pytest.fixture
def drawn(monkeypatch):
    """The figures that commands of a test draw."""
    pytest.importorskip("matplotlib")
    figures = []
    make = plot.figure

    def kept(*arguments):
        figures.append(make(*arguments))
        return figures[-1]

    monkeypatch.setattr(plot, "figure", kept)
    return figures


def visible(figure):
    return [axis for axis in figure.axes if axis.get_visible()]


def test_bench_draws(one_array, tmp_path, drawn):
    path = tmp_path / "b.png"
    result = run(one_array.directory, *QUICK, "--warm-only", "--plot", path)
    assert result.exit_code == 0, result.stderr
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,) = drawn
    assert len(visible(figure)) == 1 + 1


def test_bench_says_what_a_plot_needs_before_it_measures(one_array, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run(one_array.directory, "--plot", tmp_path / "b.png")
    assert result.exit_code == 1
    assert "matplotlib" in result.stderr
    assert 'pip install "engram-gather[plot]"' in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("status", "options", "message"),
    [
        (2, ["--rows", "many"], "'--rows': must be numbers of at least 1 such as"),
        (2, ["--rows", "0,5"], "'--rows': must be numbers of at least 1 such as"),
        (2, ["--rows", "x" * 10_000], "'--rows': must be numbers of at least 1 such as"),
        (1, ["--rows", "1,99999999999999"], "--rows 99999999999999: memory has room for calls of"),
        (1, ["--rows", str(10**24)], f"--rows {10**24}: memory has room for calls of"),
        (1, ["--plot", "/nonexistent/b.png"], "/nonexistent is no directory"),
        (2, ["--plot", "b.xyz"], "'b.xyz' does not end with .png"),
        (2, ["--plot", "."], "does not end with .png"),
        (1, ["--table", "nothing"], "nothing"),
        (1, ["--table", "9" * 23], f"no table '{'9' * 23}' in"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bench_refuses(one_array, status, options, message):
    result = run(one_array.directory, *options)
    assert result.exit_code == status
    assert message in result.stderr
    assert len(result.stderr) < 500
    assert result.stdout == ""


def test_bench_looks_where_a_plot_would_go_before_it_measures(one_array, tmp_path):
    pytest.importorskip("matplotlib")
    directory = tmp_path / "b.png"
    directory.mkdir()
    result = run(one_array.directory, "--plot", directory)
    assert result.exit_code == 1
    assert "it is a directory" in result.stderr
    assert result.stdout == ""


def test_bench_goes_on_without_a_mode(one_array, monkeypatch):
    opened = engram.FileGather

    def refusing(path, table=None, *, io="auto", **more):
        if io == "uring":
            raise OSError(1, "Operation not permitted")
        return opened(path, table, io=io, **more)

    monkeypatch.setattr(bench.engram, "FileGather", refusing)
    result = run(one_array.directory, *QUICK, "--warm-only")
    assert result.exit_code == 0, result.stderr
    assert "io='uring' cannot run here: Operation not permitted" in result.stdout
    assert "│ engram, io='uring'" not in result.stdout


# hit rates


@pytest.mark.parametrize("checkpoint", ["two_tables", "one_array", "pieces"])
def test_a_text_hits_more_often_in_larger_caches(checkpoint, request):
    info = request.getfixturevalue(checkpoint)
    result = run(info.directory, *QUICK, "--table", "0", "--warm-only", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    rates = document["hit_rates"]
    assert rates["tokens"] >= 8 * rates["chunk_tokens"]
    table = engram.tables(info.directory)[0]
    heads = tables_heads(info.directory, table)
    points = rates["budgets"]
    assert len(points) == 5
    sizes = [point["cache_bytes"] for point in points]
    assert sizes == sorted(sizes)
    assert sizes[-1] == rates["distinct_rows"] * (table.row_bytes + 5)
    for point in points:
        assert point["rows"] == rates["tokens"] // 2 * heads
        assert 0 <= point["hits"] <= point["rows"]
        assert point["hit_rate"] == point["hits"] / point["rows"]
        assert point["rows_checked"] == rates["tokens"] * heads
        assert point["rows_wrong"] == 0
    found = [point["hit_rate"] for point in points]
    assert found == sorted(found), "more room never finds less here"
    assert found[-1] > found[0] > 0


def tables_heads(directory, table):
    hasher = hashes.table_hasher(directory, table)
    return 1 if hasher is None else hasher.heads


def test_without_a_configuration_tokens_stand_for_rows(tmp_path):
    info = synth.write(tmp_path / "c", "qwen", rows=20_000)
    (info.directory / "config.json").unlink()
    result = run(info.directory, *QUICK, "--warm-only", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert any("tokens stand for rows" in note for note in document["notes"])
    assert all(point["hits"] > 0 for point in document["hit_rates"]["budgets"])


def test_the_made_up_text_repeats_itself_as_the_documents_say():
    text = budgets.phrases(200_000, np.random.default_rng(3))
    tokens = np.concatenate([next(text) for _ in range(4096 // budgets.CHUNK)])
    triples = np.lib.stride_tricks.sliding_window_view(tokens, 3)
    repeated = 1 - len(np.unique(triples, axis=0)) / len(triples)
    assert 0.2 < repeated < 0.5


# baselines


@pytest.mark.parametrize("checkpoint", ["two_tables", "one_array", "pieces"])
def test_every_reader_gives_the_stored_rows(checkpoint, request):
    info = request.getfixturevalue(checkpoint)
    table = info.tables[0]
    generator = np.random.default_rng(5)
    edges = [piece.first_row for plane in table.planes for piece in plane.pieces]
    ids = np.concatenate([edges, [table.rows - 1], generator.integers(0, table.rows, 200)])
    planes = table.expected(ids)
    expected = np.concatenate([planes[plane.name] for plane in table.planes], axis=1)
    with engram.FileGather(info.directory, 0) as gather:
        stored = baselines.StoredRows(gather)
        assert np.array_equal(stored.expected(ids), expected)
        square = ids[:200].reshape(4, 50)
        assert np.array_equal(stored.expected(square), expected[:200].reshape(4, 50, -1))
        stored.close()
        mapped = baselines.MappedTable(gather)
        mapped.populate()
        assert (mapped.single is None) == (checkpoint != "one_array")
        methods = baselines.present(
            [
                baselines.gathering("engram", gather),
                baselines.numpy_take("numpy", mapped),
                baselines.threads_over_map("threads", mapped),
                baselines.torch_select("torch", mapped),
                baselines.advice_then_copy("advice", gather, mapped),
            ]
        )
        for method in methods:
            out = np.zeros(expected.shape, np.uint8)
            method.run(method.prepare(ids, out))
            assert np.array_equal(out, expected), method.name
        mapped.pool.shutdown()


def test_the_page_cache_is_dropped_when_a_batch_may_find_something(one_array):
    gc.collect()
    with engram.FileGather(one_array.directory) as gather:
        mapped = baselines.MappedTable(gather)
        mapped.populate()
        cache = page_cache.PageCache(gather, mapped.release)
        assert gather.residency().share == 1.0
        cache.cold(np.arange(1))
        assert cache.drops == 1
        if cache.left_bytes:
            # Mappings of earlier tests, not yet collected, hold the pages: there is no cold state.
            pytest.skip(f"{cache.left_bytes} bytes are mapped elsewhere in this process")
        assert gather.residency().resident == 0
        for _ in range(3):
            cache.cold(np.arange(1))
        assert cache.drops == 4, "two pages of this table are more than a thousandth of it"
        stored = baselines.StoredRows(gather)
        ids = np.arange(0, 20_000, 100)
        cache.partly_resident(ids, 0.25, stored.expected, np.random.default_rng(0))
        stored.close()
        # 160 bytes every 16,000: each row has pages of its own.
        assert 50 <= (gather.residency().resident or 0) <= 100


def test_methods_may_run_less_often_and_have_ids_of_their_own():
    def expected(rows):
        return rows[:, None].astype(np.uint8)

    def copying(call):
        call[1][...] = expected(call[0])

    told: list[int] = []
    methods = [
        timing.Method("all", lambda ids, out: (ids, out), copying),
        timing.Method("few", lambda ids, out: (ids, out), copying, most=2),
        timing.Method(
            "own",
            lambda ids, out: (ids, out),
            copying,
            before=lambda ids: told.append(ids.size),
            batches=iter(np.arange(100).reshape(-1, 2)),
        ),
        timing.Method("clock", lambda ids, out: 5.0, lambda call: call, own_clock=True),
        timing.Method(
            "lost",
            lambda ids, out: None,
            lambda call: None,
            work=lambda ids: int(ids[0]),
            delivers=False,
        ),
    ]
    counter = iter(range(0, 10_000, 7))
    results = timing.interleaved(
        methods[:3] + methods[4:],
        iter(np.arange(4000).reshape(-1, 4)),
        expected,
        seconds=60,
        rounds=5,
        bytes_read=lambda: next(counter),
    )
    assert [len(result.seconds) for result in results.values()] == [5, 2, 5, 5]
    assert told == [2] * 5
    assert (results["own"].rows, results["own"].wrong) == (10, 0)
    assert results["lost"].rows == 0
    assert len(results["lost"].work) == 5
    assert results["all"].work == []
    assert results["few"].bytes_read == 14
    clocked = timing.interleaved(
        methods[3:4], iter(np.arange(80).reshape(-1, 4)), expected, seconds=0, rounds=9, least=3
    )["clock"]
    assert clocked.seconds == [5.0] * 3
    assert clocked.wrong == 12
    assert clocked.quantile(0.99) == clocked.median == 5.0
    assert clocked.bytes_read is None


def test_all_methods_of_a_round_can_be_given_the_same_ids():
    seen: dict[str, list[list[int]]] = {"all": [], "even": [], "after": []}

    def method(name: str, **given) -> timing.Method:
        def copying(call):
            ids, out = call
            seen[name].append(ids.tolist())
            out[:] = ids[:, None]

        return timing.Method(name, lambda ids, out: (ids, out), copying, **given)

    results = timing.interleaved(
        [
            method("all", after=lambda ids: seen["after"].append(ids.tolist())),
            method("even", select=lambda ids: ids[ids % 2 == 0], work=len),
        ],
        iter(np.arange(100).reshape(-1, 5)),
        lambda ids: np.repeat(ids[:, None], 3, axis=1).astype(np.uint8),
        seconds=60,
        rounds=4,
        alike=True,
    )
    assert seen["all"] == seen["after"] == np.arange(5, 25).reshape(4, 5).tolist()
    assert seen["even"] == [[6, 8], [10, 12, 14], [16, 18], [20, 22, 24]]
    assert results["even"].work == [2, 3, 2, 3]
    assert [(result.rows, result.wrong) for result in results.values()] == [(20, 0), (10, 0)]


def test_calls_are_compared_by_what_they_had_to_do():
    equal = timing.Result(seconds=[2.0, 9.0, 4.0])
    assert equal.comparable == equal.median == 4.0
    # Nothing to do is never divided by.
    differing = timing.Result(seconds=[2.0, 9.0, 4.0], work=[1, 9, 0])
    assert (differing.median, differing.comparable) == (4.0, 2.0)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system has no advice on files")
def test_advice_covers_each_page(pieces, monkeypatch):
    given: list[tuple[int, int, int]] = []

    def note(descriptor, start, length, advice):
        assert advice == os.POSIX_FADV_WILLNEED
        assert start % mmap.PAGESIZE == length % mmap.PAGESIZE == 0 < length
        given.append((os.fstat(descriptor).st_ino, start, start + length))

    with engram.FileGather(pieces.directory, 0) as gather:
        ids = np.random.default_rng(3).integers(0, gather.num_rows, 300)
        mapped = baselines.MappedTable(gather)
        method = baselines.advice_then_copy("advice", gather, mapped)
        assert method is not None
        out = np.zeros((300, gather.row_bytes), np.uint8)
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fadvise", note)
            method.run(method.prepare(ids, out))
        ranges = sorted(given)
        for (inode, _, end), (following, start, _) in itertools.pairwise(ranges):
            assert inode != following or end < start, "ranges that touch are one"
        wanted = set()
        for plane in gather.planes:
            for piece in plane.pieces:
                inode = Path(piece.file).stat().st_ino
                rows = ids[(ids >= piece.first_row) & (ids < piece.first_row + piece.rows)]
                for start in (piece.offset + (rows - piece.first_row) * plane.row_bytes).tolist():
                    last = (start + plane.row_bytes - 1) // mmap.PAGESIZE
                    wanted |= {(inode, page) for page in range(start // mmap.PAGESIZE, last + 1)}
        pages = [
            (inode, page)
            for inode, start, end in given
            for page in range(start // mmap.PAGESIZE, end // mmap.PAGESIZE)
        ]
        assert set(pages) == wanted


def test_threads_that_go_on_running_are_waited_for():
    threads: list[threading.Thread] = []
    alive: list[bool] = []

    def busy():
        # Without the interpreter, which whoever waits would otherwise have taken from it.
        hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)

    def leave_one_running(call):
        threads.append(threading.Thread(target=busy))
        threads[-1].start()

    def look(call):
        for thread in threads:
            thread.join(0.005)
        alive.append(any(thread.is_alive() for thread in threads))

    methods = [
        timing.Method("lingers", lambda ids, out: None, leave_one_running, lingers=True),
        timing.Method("looks", lambda ids, out: None, look),
    ]
    batches = iter(np.arange(80).reshape(-1, 4))
    timing.interleaved(
        methods, batches, lambda rows: rows[:, None].astype(np.uint8), seconds=60, rounds=5
    )
    assert len(threads) == 5
    assert alive == [False] * 5
