"""Statistics of open tables, as Prometheus gets them."""

from __future__ import annotations

import gc
import sys
import threading

import numpy as np
import pytest

pytest.importorskip("prometheus_client")
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import engram
from engram import synth
from engram.metrics import PrometheusCollector


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("metrics") / "deepseek"
    return synth.write(directory, "deepseek", rows=6000, config={"engram_head_dim": 64})


def samples(registry):
    """Values by sample name and labels, as scraped and parsed."""
    text = generate_latest(registry).decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def collecting(*tables):
    registry = CollectorRegistry()
    collector = PrometheusCollector(*tables)
    registry.register(collector)
    return registry, collector


def of(table, name):
    return (name, ("table", table))


def test_counters_are_those_of_stats(checkpoint):
    name = checkpoint.tables[0].name
    with engram.FileGather(checkpoint.directory, name) as gather:
        registry, _ = collecting(gather)
        before = samples(registry)
        assert before[of(name, "engram_calls_total")] == 0
        for _ in range(3):
            gather.gather(np.arange(50))
        with pytest.raises(IndexError):
            gather.gather([gather.num_rows])
        seen, stats = samples(registry), gather.stats()
        for key, metric in {
            "calls": "engram_calls_total",
            "errors": "engram_errors_total",
            "rows": "engram_rows_total",
            "rows_resident": "engram_rows_resident_total",
            "bytes_wanted": "engram_wanted_bytes_total",
            "bytes_read": "engram_read_bytes_total",
            "reads": "engram_reads_total",
        }.items():
            assert seen[of(name, metric)] == stats[key], key
        assert seen[of(name, "engram_calls_total")] == 4
        assert seen[of(name, "engram_table_rows")] == gather.num_rows
        assert seen[of(name, "engram_table_bytes")] == gather.nbytes
        assert seen[of(name, "engram_tables_open")] == 1
        io = stats["io"]
        labels = (("asked", "auto"), ("runs", io["runs"]), ("table", name))
        assert seen[("engram_io_info", *labels)] == 1


def test_histograms_add_up(checkpoint):
    name = checkpoint.tables[0].name
    with engram.FileGather(checkpoint.directory, name) as gather:
        registry, _ = collecting(gather)
        for _ in range(20):
            gather.gather(np.arange(50))
        seen, stats = samples(registry), gather.stats()["seconds"]["call"]
        assert seen[of(name, "engram_call_seconds_count")] == stats["count"] == 20
        total = seen[of(name, "engram_call_seconds_sum")]
        assert total == pytest.approx(stats["count"] * stats["mean"])
        counts = {
            float(dict(labels)["le"]): value
            for (metric, *labels), value in seen.items()
            if metric == "engram_call_seconds_bucket"
        }
        bounds = sorted(counts)
        assert len(bounds) == 23
        assert bounds[-1] == float("inf")
        assert [counts[bound] for bound in bounds] == sorted(counts.values())
        assert counts[float("inf")] == 20
        assert dict(stats["buckets"])[10.0] == 20
        below = max((bound for bound in bounds if counts[bound] < 20), default=0)
        assert below < stats["max"]


def test_counters_never_go_down(checkpoint):
    name = checkpoint.tables[0].name
    gather = engram.FileGather(checkpoint.directory, name)
    registry, _ = collecting(gather)
    rows = of(name, "engram_rows_total")
    for _ in range(2):
        gather.gather(np.arange(50))
    assert samples(registry)[rows] == 100
    gather.reopen()
    gather.gather(np.arange(10))
    assert samples(registry)[rows] == 110
    gather.close()
    assert samples(registry)[rows] == 110
    assert of(name, "engram_tables_open") not in samples(registry)
    del gather
    gc.collect()
    assert samples(registry)[rows] == 110


def test_tables_are_held_weakly_and_counted_once(checkpoint):
    name = checkpoint.tables[0].name
    registry, collector = collecting()
    first, second = (engram.FileGather(checkpoint.directory, name) for _ in range(2))
    for _ in range(2):
        collector.add(first)
    collector.add(second)
    collector.add(second, "other")
    for gather in (first, second):
        gather.gather(np.arange(7))
    seen = samples(registry)
    assert seen[of(name, "engram_rows_total")] == 14
    assert seen[of(name, "engram_tables_open")] == 2
    assert seen[of(name, "engram_table_rows")] == first.num_rows
    assert of("other", "engram_rows_total") not in seen
    del first, gather
    gc.collect()
    assert samples(registry)[of(name, "engram_tables_open")] == 1


def test_sets_and_names(checkpoint):
    names = [table.name for table in checkpoint.tables]
    with engram.TableSet(checkpoint.directory) as tables:
        registry, collector = collecting(tables)
        tables.gather({name: [0, 1, 2] for name in names})
        seen = samples(registry)
        for name in names:
            assert seen[of(name, "engram_rows_total")] == 3
        with pytest.raises(ValueError, match="by their own names"):
            collector.add(tables, "mine")
    with engram.FileGather(checkpoint.directory, 0) as gather:
        collector.add(gather, "mine")
        assert samples(registry)[of("mine", "engram_tables_open")] == 1
    with pytest.raises(TypeError, match="FileGather or TableSet"):
        collector.add(3)


def test_a_cache_of_rows_is_collected_where_there_is_one(checkpoint, monkeypatch):
    name = checkpoint.tables[0].name
    with engram.FileGather(checkpoint.directory, name) as gather:
        registry, _ = collecting(gather)
        own = gather.stats()
        cache = {
            "hits": 5,
            "misses": 3,
            "evictions": 2,
            "admission_refusals": 1,
            "bytes_saved": 800,
            "rows": 4,
            "budget_bytes": 4096,
        }
        monkeypatch.setattr(gather, "stats", lambda: {**own, "cache": cache})
        seen = samples(registry)
    for metric, value in {
        "engram_cache_hits_total": 5,
        "engram_cache_misses_total": 3,
        "engram_cache_evictions_total": 2,
        "engram_cache_admission_refusals_total": 1,
        "engram_cache_saved_bytes_total": 800,
        "engram_cache_rows": 4,
        "engram_cache_budget_bytes": 4096,
    }.items():
        assert seen[of(name, metric)] == value


def test_scrapes_from_many_threads_while_rows_are_gathered(checkpoint):
    name = checkpoint.tables[0].name
    with engram.FileGather(checkpoint.directory, name) as gather:
        registry, _ = collecting(gather)
        seen: list[list[float]] = []

        def scrape():
            seen.append([samples(registry)[of(name, "engram_rows_total")] for _ in range(10)])

        threads = [threading.Thread(target=scrape) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(200):
            gather.gather(np.arange(50))
        for thread in threads:
            thread.join()
        assert len(seen) == 4
        assert all(values == sorted(values) for values in seen)
        assert samples(registry)[of(name, "engram_rows_total")] == 10_000


def test_without_prometheus_it_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("prometheus_client")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "engram.metrics")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(ModuleNotFoundError, match=r"engram-gather\[metrics\]"):
        import engram.metrics  # noqa: F401
