"""The benchmarks run, check what they read, and say what they cannot do here."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rich")
import engram
from engram import _engram, synth

BENCHES = Path(__file__).parents[1] / "benches"
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not BENCHES.is_dir(),
    reason="benchmarks ask the Linux kernel about its page cache, and are not in a wheel",
)
HAS_BARE = hasattr(_engram, "bench_uring")
QUICK = ["--quick", "--size", "16MiB", "--rows", "16,4096", "--seconds", "0"]
CONFIG = {"ngram_vocab_size_base": 1000, "vocab_size": 248_320, "eos_token_id": 248_044}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("benches")


@pytest.fixture
def support(monkeypatch):
    """Imports a module as the benchmarks do."""
    monkeypatch.syspath_prepend(BENCHES)
    return importlib.import_module


def run(script: str, directory: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHES / f"{script}.py"), *map(str, arguments)]
    environment = {**os.environ, "ENGRAM_BENCH_DIR": str(directory)}
    paths = [str(Path(engram.__file__).parents[1]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=200, env=environment
    )


def measured(script: str, directory: Path, *arguments: object) -> dict:
    """Runs a benchmark and returns its JSON."""
    result = directory / f"{script}.json"
    given = [*QUICK, "--json", result, "--plot", directory / f"{script}.png", *arguments]
    if not HAS_BARE:
        given.append("--without-bare")
    told = run(script, directory, *given)
    assert told.returncode == 0, told.stderr + told.stdout
    assert "rows checked, 0 wrong" in told.stdout
    document = json.loads(result.read_text())
    assert document["version"] == 1
    for key in ("machine", "memory", "kernel", "load", "versions", "table", "file system"):
        assert document["machine"][key]
    for entry in document["measurements"]:
        assert entry["rows_wrong"] == 0
        assert entry["seconds"]["median"] > 0
        bare = entry["method"].startswith("bare io_uring")
        assert (
            bare
            or entry["rows_checked"] == entry["calls"] * entry["rows"]
            or ("only missing" in entry["method"])
        )
    return document


def methods(document: dict, **wanted: object) -> set[str]:
    return {
        entry["method"]
        for entry in document["measurements"]
        if all(entry[key] == value for key, value in wanted.items())
    }


def test_warm(directory):
    document = measured("warm", directory, "--section", "rows", "--ids", "uniform")
    assert document["machine"]["resident after"] == "100.00%"
    bare = {"bare copy loop"} if HAS_BARE else set()
    everywhere = {"engram", "np.take", "engram, io='mmap'", "32 threads over a map"} | bare
    assert everywhere <= methods(document, rows=4096)
    assert everywhere <= methods(document, rows=16)
    figures = {figure["name"] for figure in document["figures"]}
    assert "warm, uniform ids, 16 rows: engram / np.take" in figures
    assert "warm, uniform ids, 4,096 rows: engram / np.take" in figures


def test_opening(directory):
    pytest.importorskip("safetensors")
    told = run("warm", directory, *QUICK, "--section", "open", "--json", directory / "o.json")
    assert told.returncode == 0, told.stderr
    opening = json.loads((directory / "o.json").read_text())["opening"]
    assert (opening["pieces"], opening["files"]) == (128, 131)
    ways = {"engram", "described", "all", "held"}
    if importlib.util.find_spec("torch"):
        ways.add("torch")
    assert set(opening["seconds_first"]) == ways
    assert 0 < opening["memory"][0]["resident"] < 64 << 20


def test_cold(directory):
    document = measured("cold", directory, "--ids", "uniform", "--fio-seconds", 0)
    assert document["machine"]["resident after dropping"] == "0.00%"
    assert document["machine"]["left in memory after a drop"].startswith("at most 0 B")
    cold = [entry for entry in document["measurements"] if entry["rows"] == 4096]
    for entry in cold:
        # 4,096 rows of 160 bytes cannot come from fewer bytes, whoever reads them.
        if entry["method"] in ("engram", "engram, io='uring'", "engram, io='mmap'", "np.take"):
            assert entry["bytes_read_per_call"] > 2 << 20
    if HAS_BARE:
        assert "bare io_uring" in methods(document)
    pages = [figure for figure in document["figures"] if "pages read" in figure["name"]]
    assert len(pages) == 2
    assert all(figure["met"] for figure in pages)


def test_mixed(directory):
    document = measured("mixed", directory, "--section", "resident", "--ids", "uniform")
    for share in (25, 50, 75):
        state = f"{share}% resident"
        shown = methods(document, state=state, rows=4096)
        assert {"engram", "engram, just opened", "np.take", "32 threads over a map"} <= shown
        assert {f"engram, io={mode!r}" for mode in ("pread", "mmap")} <= shown
        before = float(document["machine"][f"{state}, uniform ids"].split("%")[0])
        assert before == pytest.approx(share, abs=3)
        by_name = {
            entry["method"]: entry["bytes_read_per_call"]
            for entry in document["measurements"]
            if (entry["state"], entry["rows"]) == (state, 4096)
        }
        # What is resident is not read again, known or not.
        assert by_name["engram, just opened"] < 1.3 * by_name["engram, only missing"]


def test_memory_and_limits(directory, support):
    document = measured("mixed", directory, "--section", "memory")
    assert document["memory"]["grown"] > 0
    document = measured("mixed", directory, "--section", "limit", "--cgroup", directory / "none")
    assert any("no control group" in note for note in document["notes"])
    document = measured("mixed", directory, "--section", "advice", "--cgroup", directory / "none")
    assert any("advice was not compared" in note for note in document["notes"])
    document = measured("mixed", directory, "--section", "advice")
    if not any("advice was not compared" in note for note in document["notes"]):
        assert set(document["advice"]) == {"random", "normal"}
        assert all(0 < told["missing"] <= 1 for told in document["advice"].values())
    groups = support("support.control_group")
    fake = directory / "group"
    fake.mkdir()
    (fake / "cgroup.controllers").write_text("memory\n")
    with groups.limited(4096, fake) as group:
        assert group.path.parent == fake
        assert (group.path / "memory.max").read_text() == "4096"
        group.join()
        assert (group.path / "cgroup.procs").read_text() == str(os.getpid())
        for path in group.path.iterdir():
            path.unlink()
    assert not group.path.exists()


def test_wrong_rows_fail_the_run(directory):
    broken = synth.write(directory / "broken", "qwen", size=4 << 20, parts=1, files=1, dtype="fp8")
    piece = broken.tables[0].planes[0].pieces[0]
    with broken.files[0].open("r+b") as file:
        file.seek(piece.offset)
        file.write(bytes(piece.rows * broken.tables[0].row_bytes))
    arguments = ["--section", "memory", "--checkpoint", broken.directory, "--without-bare"]
    told = run("mixed", directory, *QUICK, *arguments, "--json", directory / "w.json")
    assert told.returncode == 1
    assert "4,096 rows checked, 4,096 wrong" in told.stdout


def test_bare_loops_are_asked_for(support, monkeypatch):
    bare = support("support.bare")
    monkeypatch.delattr(_engram, "bench_copy", raising=False)
    with pytest.raises(SystemExit, match="--features bench"):
        bare.require(without=False)
    assert bare.require(without=True) is False


def test_a_checkpoint_is_made_once_and_again_when_it_differs(support, tmp_path, capsys):
    options = support("support.options")
    arguments = ["--dir", str(tmp_path), "--size", "1MiB"]
    chosen = options.parsed(options.parser("", seconds=1), arguments)
    info = options.checkpoint(chosen)
    assert "writing" in capsys.readouterr().err
    assert options.checkpoint(chosen) == info
    assert capsys.readouterr().err == ""
    with info.files[0].open("r+b") as file:
        file.truncate(100)
    assert options.checkpoint(chosen) == info
    assert "writing" in capsys.readouterr().err
    ids = np.arange(50)
    with engram.FileGather(info.directory) as gather:
        rows = gather.gather(ids, out=np.empty((50, 160), np.uint8))
    assert np.array_equal(rows, info.tables[0].expected(ids)["weight"])


def test_pages_are_made_resident_and_dropped_one_by_one(support, tmp_path):
    kernel = support("support.kernel")
    path = tmp_path / "file"
    path.write_bytes(os.urandom(4096 * 900 + 5))
    engram.drop_cache(path)
    pages = kernel.FilePages(path)
    assert pages.count == 901
    assert not pages.resident().any()
    chosen = np.flatnonzero(np.random.default_rng(0).random(901) < 0.3)
    kernel.make_resident(path, chosen)
    assert np.array_equal(np.flatnonzero(pages.resident()), chosen)
    assert np.array_equal(pages.resident(10, 20), pages.resident()[10:30])
    kernel.drop_pages(path, chosen[::2])
    assert np.array_equal(np.flatnonzero(pages.resident()), chosen[1::2])
    kernel.make_resident(path, np.array([900]))
    assert pages.resident()[900]


def test_under_another_name_a_gather_knows_nothing(support, tmp_path):
    """As an object that was opened a moment ago in another process would."""
    partly = support("support.partly_resident")
    info = synth.write(tmp_path / "model", "qwen", size=4 << 20, parts=1, files=1, dtype="fp8")
    ids = np.arange(1000)
    with engram.FileGather(info.directory) as known, partly.linked(info.directory) as other:
        known.gather(ids)
        for directory, shared in ((info.directory, True), (other, False)):
            with engram.FileGather(directory) as fresh:
                assert np.array_equal(fresh.gather(ids), known.gather(ids))
                assert (fresh.stats()["rows_resident"] == 1000) == shared
                assert (fresh.stats()["rows_fetched"] == 0) == shared
    assert not Path(other).exists()


@pytest.mark.skipif(not HAS_BARE, reason="the function is in the extension for benchmarks")
def test_what_was_dropped_is_forgotten(support, tmp_path):
    bare = support("support.bare")
    info = synth.write(tmp_path / "model", "qwen", size=4 << 20, parts=1, files=1, dtype="fp8")
    ids = np.arange(0, 20_000, 100)
    with engram.FileGather(info.directory) as gather:
        gather.gather(ids)
        piece = info.tables[0].planes[0].pieces[0]
        bare.forget(gather, np.unique((piece.offset + ids[:50] * 160) // 4096))
        gather.gather(ids)
        assert gather.stats()["rows_fetched"] == 250


def test_figures_decide_the_exit_status_only_when_strict(support, tmp_path, capsys):
    options, report = support("support.options"), support("support.report")
    for strict, status in ((False, 0), (True, 1)):
        arguments = ["--json", str(tmp_path / "r.json"), *(["--strict"] if strict else [])]
        chosen = options.parsed(options.parser("", seconds=1), arguments)
        made = report.Report("try", chosen)
        made.figure("small enough", 1.0, at_most=1.0)
        made.figure("large enough", 1.0, at_least=1.0)
        assert made.finish() == 0
        made.figure("too small", 0.99, at_least=1.0)
        assert made.finish() == status
        assert "MISSED" in capsys.readouterr().out
    document = json.loads((tmp_path / "r.json").read_text())
    assert [figure["met"] for figure in document["figures"]] == [True, True, False]


# text


def trace_of(support, documents: list[list[int]]):
    text_trace = support("text_trace")
    tokens = np.concatenate([np.array(document, np.int32) for document in documents])
    starts = np.concatenate([[0], np.cumsum([len(document) for document in documents])])
    return text_trace, text_trace.TextTrace(tokens, starts, "", {})


def test_row_ids_of_windows_are_those_of_whole_documents(support):
    generator = np.random.default_rng(4)
    documents = [generator.integers(0, 1000, length).tolist() for length in (1, 7, 2, 30)]
    text_trace, trace = trace_of(support, documents)
    config = synth.plan("qwen", rows=20_000).config
    row_ids = text_trace.RowIds(trace, config)
    rule = text_trace.QwenHash(text_trace.RELEASED)
    whole = np.concatenate([rule.ids(np.array(document)) for document in documents])
    for first in range(40):
        for last in range(first + 1, 41):
            assert np.array_equal(row_ids.released(first, last), whole[first:last])
    table = text_trace.QwenHash(config)
    folded = row_ids.folded(0, 40)
    offsets, sizes = np.array(table.head_offsets), np.array(table.head_sizes)
    assert ((folded >= offsets) & (folded < offsets + sizes)).all()
    released = whole - np.array(rule.head_offsets)
    assert np.array_equal(folded - offsets, released % sizes)
    batch = next(row_ids.batches(100, generator))
    assert batch.shape == (100,)
    assert batch.dtype == np.int64


def test_the_trace_is_cached_and_made_again_when_damaged(support, tmp_path, monkeypatch):
    text_trace = support("text_trace")
    made = (np.arange(50, dtype="<i4"), np.array([0, 20, 50], "<i8"))
    monkeypatch.setattr(text_trace, "_tokenised", lambda limit: made)
    monkeypatch.setattr(text_trace, "_versions", lambda: {"python": "3"})
    said: list[str] = []
    trace = text_trace.load(tmp_path, say=said.append)
    data = b"".join(part.tobytes() for part in made)
    assert trace.sha256 == hashlib.sha256(data).hexdigest()
    assert f"50 tokens in 2 documents, sha256 {trace.sha256} (python 3)" in str(trace)
    assert len(said) == 2
    again = text_trace.load(tmp_path, say=said.append)
    assert (len(said), again.sha256) == (2, trace.sha256)
    (home,) = tmp_path.iterdir()
    np.save(home / "tokens.npy", trace.tokens + 1)
    repaired = text_trace.load(tmp_path, say=said.append)
    assert len(said) == 4
    assert np.array_equal(repaired.tokens, trace.tokens)
    assert len(text_trace.load(tmp_path, limit=9, say=said.append).tokens) == 50
    assert len(said) == 6, "a limit makes another trace"


def test_real_text(support, tmp_path):
    pytest.importorskip("mistral_common", reason="the text needs its vocabulary")
    pytest.importorskip("transformers")
    text_trace = support("text_trace")
    paths = text_trace.sources()
    assert len(paths) == len(set(paths))
    assert len(paths) > 1000
    assert all(path.suffix == ".py" and path.stat().st_size < 400_000 for path in paths)
    assert [path.as_posix() for path in paths] != sorted(path.as_posix() for path in paths)
    trace = text_trace.load(tmp_path, limit=500)
    assert len(trace.tokens) >= 500
    assert trace.starts[0] == 0
    assert trace.starts[-1] == len(trace.tokens)
    assert 1000 <= trace.tokens.min() < trace.tokens.max() < 131_072, "special tokens or none"


def test_text_says_what_it_needs(support, monkeypatch, tmp_path):
    text_trace = support("text_trace")

    def absent(name):
        raise text_trace.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(text_trace.importlib.metadata, "version", absent)
    with pytest.raises(text_trace.Unavailable, match=r"engram-gather\[bench\]"):
        text_trace.load(tmp_path)


# memory budgets


def zipf_trace(support, count: int):
    generator = np.random.default_rng(5)
    documents = [(generator.zipf(1.4, 400) % 3000).tolist() for _ in range(count)]
    return trace_of(support, documents)


def test_budget(directory, support, monkeypatch, capsys):
    budget = support("budget")
    text_trace, trace = zipf_trace(support, 80)
    monkeypatch.setattr(text_trace, "load", lambda *_, **__: trace)
    paths = [str(Path(engram.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    result = directory / "budget.json"
    arguments = [*QUICK, "--dir", directory, "--json", result, "--plot", directory / "budget.png"]
    if not HAS_BARE:
        arguments.append("--without-bare")
    assert budget.main([*map(str, arguments)]) == 0
    told = capsys.readouterr().out
    assert "rows checked, 0 wrong" in told
    document = json.loads(result.read_text())
    assert methods(document, state="warm") == {"engram", "engram, cache_bytes"}
    assert "- missed meanwhile: 0 rows" in told
    if HAS_BARE:
        by_name = {entry["name"]: entry for entry in document["simulated"]["policies"]}
        for entry in by_name.values():
            rates = list(entry["hits_by_bytes"].values())
            assert rates == sorted(rates)
            assert 0 < rates[0] <= by_name["optimum"]["hits_by_bytes"]["67108864"]
        before, after = by_name["LRU"]["without_and_with_scan"]
        assert after < before
    if any("no control group" in note for note in document["notes"]):
        return
    contenders = document["contenders"]
    assert {"engram, cache_bytes", "engram, page cache", "engram, io='mmap'"} <= set(contenders)
    for name, entry in contenders.items():
        assert entry["tokens_per_second"] > 0
        assert 0 < entry["decode"]["p50"] <= entry["decode"]["p99"]
        assert entry["used"] <= entry["limit"]
        assert (entry["rows_checked"] > 0) == (not name.startswith("bare"))
    kept = contenders["engram, cache_bytes"]
    assert kept["cache"]["budget_bytes"] == 104_704 * 160 // 16
    assert kept["reads_per_token"] < contenders["engram, io='direct'"]["reads_per_token"]
    if HAS_BARE:
        simulated = document["simulated_misses_per_token"]
        assert simulated["optimum"] < kept["misses_per_token"]
        twin = simulated["13-way sets, as in engram"]
        assert kept["misses_per_token"] == pytest.approx(twin, rel=0.1)


@pytest.mark.skipif(not HAS_BARE, reason="simulations are in the extension for benchmarks")
def test_a_sample_of_lookups_stands_for_all(support):
    simulated = support("support.simulated")
    text_trace, trace = zipf_trace(support, 100)
    config = synth.plan("qwen", rows=400_000).config
    row_ids = text_trace.RowIds(trace, config)
    shares = {}
    for sample in (simulated.Sample(), simulated.Sample(heads=8), simulated.Sample(8, 4)):
        lookups = simulated.Lookups(row_ids, config, sample, chunk=200)
        lookups.add(0, len(trace.tokens))
        assert lookups.batches == 200
        assert lookups.tokens == 40_000
        distinct = lookups.distinct().sum()
        for policy in (simulated.OPTIMUM, simulated.LRU, simulated.OURS):
            missed = lookups.misses(policy, 2 << 20, 160).sum()
            shares.setdefault(policy, []).append(missed / distinct)
    for exact, *sampled in shares.values():
        assert sampled == pytest.approx([exact] * 2, abs=0.04)
    whole = simulated.Lookups(row_ids, config, simulated.Sample(), chunk=200)
    whole.add(0, 1000)
    for batch, first in enumerate(range(0, 1000, 200)):
        rows = np.unique(row_ids.folded(first, first + 200))
        assert whole.distinct()[batch] == len(rows)


def test_text_to_serve_has_what_requests_decode_behind_it(support):
    budgeted = support("support.budgeted")
    generator = np.random.default_rng(6)
    _, trace = trace_of(support, [generator.integers(0, 9999, 50).tolist() for _ in range(100)])
    served = budgeted.text_of(trace, 1000, 30)
    assert np.array_equal(served.tokens[:1000], trace.tokens[:1000])
    assert len(served.tokens) == 1000 + budgeted.REQUESTS * 30
    assert served.starts[-1] == len(served.tokens)
    assert np.array_equal(served.starts[:20], np.arange(0, 1000, 50))
    windows = np.lib.stride_tricks.sliding_window_view(trace.tokens[1000:], 30)
    for request in range(budgeted.REQUESTS):
        first = 1000 + request * 30
        assert first in served.starts
        assert (windows == served.tokens[first : first + 30]).all(axis=1).any()


def test_memory_for_a_table_is_a_size_or_a_share(support):
    budget = support("budget")
    assert budget.bytes_of("1/16", 160) == 10
    assert budget.bytes_of("3MiB", 160) == 3 << 20


def test_storage(directory):
    pytest.importorskip("torch")
    result = directory / "storage.json"
    told = run("storage", directory, *QUICK, "--ids", "uniform", "--json", result)
    assert told.returncode == 0, told.stderr + told.stdout
    assert "rows checked, 0 wrong" in told.stdout
    document = json.loads(result.read_text())
    places = {entry["place"]: entry for entry in document["places"]}
    assert set(places) == {"device", "pinned", "huge", "shared", "file"}
    assert places["pinned"]["anonymous_bytes"] >= places["pinned"]["nbytes"]["pinned"]
    assert places["shared"]["shared_bytes"] >= places["shared"]["nbytes"]["shared"]
    assert places["file"]["nbytes"]["pinned"] == 0
    assert set(places) <= methods(document, rows=4096)


def test_a_cache_is_held_to_its_budget(directory):
    given = ["--size", "16MiB", "--budget", "2MiB", "--seconds", "3", "--pause", "0.02"]
    told = run("endure", directory, *given)
    assert told.returncode == 0, told.stderr + told.stdout
    assert "rows checked, 0 wrong" in told.stdout
    assert "most beside the budget" in told.stdout
