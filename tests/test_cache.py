"""A budget for cached rows: rows are right, the budget is kept, what is cached is not read."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import engram
from checkpoint_support import DEEPSEEK, opened, raises, raw, read_rows, safetensors, tensor
from engram._sizes import budget

ROWS, COLUMNS = 20_000, 160


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A table of 3.2 MB at an odd offset."""
    path = tmp_path_factory.mktemp("cache") / "t.safetensors"
    return safetensors(path, tensor("t", "U8", (ROWS, COLUMNS)), residue=5)


@pytest.fixture(scope="module")
def stored(path):
    return read_rows(path, "t", np.arange(ROWS))


def cache(gather):
    return gather.stats()["cache"]


def test_rows_are_cached_and_not_read_again(path, stored, io):
    ids = np.random.default_rng(0).integers(0, ROWS, 5000)
    distinct = len(np.unique(ids))
    with opened(path, "t", io, cache_bytes="8MiB") as gather:
        engram.drop_cache(path)
        assert np.array_equal(gather.gather(ids), stored[ids])
        first = gather.stats()
        assert first["cache"]["rows"] == first["cache"]["insertions"] == distinct
        assert (first["cache"]["hits"], first["cache"]["misses"]) == (0, 5000)
        out = np.empty((5000, COLUMNS), np.uint8)
        gather.gather(ids, out=out)
        assert np.array_equal(out, stored[ids])
        second = gather.stats()
        assert gather._native.runs == second["io"]["runs"]
    assert second["reads"] == first["reads"]
    assert second["cache"]["hits"] == 5000
    assert second["cache"]["misses"] == 5000
    assert second["cache"]["bytes_saved"] == 5000 * COLUMNS
    assert second["cache"]["bytes_saved_by_plane"] == {"weight": 5000 * COLUMNS}
    assert second["io"]["runs"].startswith("cache+")


def test_every_plane_of_a_row_is_cached(two_planes, io):
    ids = np.random.default_rng(0).integers(0, 100, (30, 7))
    with opened(two_planes, None, io, cache_bytes="1MiB") as gather:
        for _ in range(2):
            rows = gather.gather(ids, pad_id=-1)
            assert rows.weight.dtype == ml_dtypes.float8_e4m3fn
            for name in ("weight", "scale"):
                expected = read_rows(two_planes, f"{DEEPSEEK}.{name}", ids)
                assert np.array_equal(raw(rows[name]), expected)
        saved = cache(gather)["bytes_saved_by_plane"]
    assert saved == {"weight": 210 * 64, "scale": 210 * 2}


def test_auto_reads_past_the_page_cache_and_says_so(path):
    with engram.FileGather(path, "t", cache_bytes="1MiB") as gather:
        engram.drop_cache(path)
        gather.gather(np.arange(0, ROWS, 100))
        io = gather.stats()["io"]
        if io["direct_alignment"] is None:
            assert "direct I/O refused" in " ".join(io["fallbacks"])
            pytest.skip("no direct I/O here")
        assert io["asked"] == "auto"
        assert io["runs"].endswith("-direct")
        assert gather.residency().resident in (0, None)
        gather.resize(0)
        assert gather.stats()["io"]["direct_alignment"] is None
        gather.gather(np.arange(0, ROWS, 100))
        assert gather.residency().resident != 0


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "freshly opened"])
def test_a_warm_page_cache_is_used(path, stored, asked):
    """Also by a table that was opened a moment ago, and believes nothing in memory yet."""
    path.read_bytes()
    ids = np.random.default_rng(1).integers(0, ROWS, 3000)
    with engram.FileGather(path, "t") as other:
        if not other.residency().resident:
            pytest.skip("the kernel does not tell")
    with engram.FileGather(path, "t", cache_bytes="1MiB") as gather:
        if asked:
            gather.residency()
        assert np.array_equal(gather.gather(ids), stored[ids])
        stats = gather.stats()
        assert stats["reads"] == 0
        assert stats["major_faults"] == 0
        assert stats["cache"]["insertions"] > 0


@pytest.mark.parametrize("cache_bytes", [4000, 20_000, 400_000])
def test_rows_are_right_while_others_give_way(path, stored, io, cache_bytes):
    generator = np.random.default_rng(2)
    with opened(path, "t", io, cache_bytes=cache_bytes) as gather:
        for count in (1, 16, 300, 5000) * 3:
            ids = generator.zipf(1.2, count) % ROWS
            assert np.array_equal(gather.gather(ids), stored[ids])
        stats = cache(gather)
    assert stats["rows"] <= stats["capacity"]
    assert stats["evictions"] > 0
    assert stats["evictions"] + stats["rows"] == stats["insertions"]
    assert stats["hits"] > 0


@pytest.mark.parametrize("rows", [1, 7, 90, 160, 264])
def test_the_budget_holds_index_and_rows(tmp_path, rows):
    path = safetensors(tmp_path / "t.safetensors", tensor("t", "U8", (50_000, rows)))
    with engram.FileGather(path, "t", cache_bytes=1 << 20) as gather:
        stats = cache(gather)
        assert stats["budget_bytes"] == 1 << 20
        assert stats["index_bytes"] + stats["capacity"] * rows <= 1 << 20
        beside = (1 << 20) / stats["capacity"] - rows
        assert beside < 6 or stats["capacity"] >= 50_000


BAD = [
    "x",
    "",
    "GiB",
    "1.5",
    "-1GiB",
    "2 GiBs",
    "five%",
    "1e9",
    "inf",
    1.5,
    None,
    True,
    b"1GiB",
    [1],
]


@pytest.mark.parametrize("value", [bad for bad in BAD if bad != "1.5"], ids=repr)
def test_a_budget_that_is_no_size(path, value):
    with raises(ValueError, "cache_bytes=", "2GiB", "25%"):
        engram.FileGather(path, "t", cache_bytes=value)
    with engram.FileGather(path, "t", cache_bytes="1MiB") as gather:
        with raises(ValueError, "cache_bytes=", table="t"):
            gather.resize(value)
        assert cache(gather)["budget_bytes"] == 1 << 20


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (-1, ["negative"]),
        (1, ["too small", "160 bytes", "the minimum is 2144 bytes"]),
        (2143, ["the minimum is 2144"]),
        (1 << 62, ["more than", "bytes of memory"]),
        (1 << 70, ["more than", "bytes of memory"]),
        ("999PiB", ["more than", "bytes of memory"]),
        ("101%", ["more than", "bytes of memory"]),
    ],
)
def test_a_budget_that_cannot_be(path, value, parts):
    with raises(ValueError, "cache_bytes", *parts):
        engram.FileGather(path, "t", cache_bytes=value)
    with engram.FileGather(path, "t") as gather:
        with raises(ValueError, *parts, table="t"):
            gather.resize(value)
        gather.resize(2144)
        assert cache(gather)["capacity"] == 13


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1KiB", 1024),
        ("2 gib", 2 << 30),
        ("1TiB", 1 << 40),
        ("512MB", 512_000_000),
        ("3kB", 3000),
        (" 1.5GB ", 1_500_000_000),
        ("0", 0),
        ("4096", 4096),
        ("0%", 0),
        (0, 0),
        (np.int64(7), 7),
    ],
)
def test_sizes(text, value):
    assert budget("cache_bytes", text) == value


def test_a_share_is_of_the_memory_there_is():
    memory = engram._engram.memory_bytes()[1]
    assert budget("cache_bytes", "25%") == pytest.approx(memory / 4, abs=1)
    text = Path("/proc/meminfo").read_text()
    total = int(re.search(r"MemTotal:\s+(\d+)", text)[1]) * 1024
    assert memory <= total


@pytest.mark.parametrize(
    "value",
    [f"{'9' * 400}GiB", f"{'9' * 400}.5GiB", f"{'9' * 400}%", "9" * 5000, 10**400],
    ids=["whole", "part", "share", "bytes", "number"],
)
def test_a_budget_beyond_all_numbers_is_refused(path, value):
    with raises(ValueError, "of memory"):
        engram.FileGather(path, "t", cache_bytes=value)
    with engram.FileGather(path, "t") as gather, raises(ValueError, "of memory"):
        gather.resize(value)


def test_resizing_keeps_rows_and_ends_at_nothing(path, stored):
    ids = np.arange(0, ROWS, 3)
    with engram.FileGather(path, "t", cache_bytes="8MiB") as gather:
        gather.gather(ids)
        hot = ids[:1000]
        for _ in range(3):
            gather.gather(hot)
        gather.resize("6MiB")
        reads = gather.stats()["reads"]
        assert np.array_equal(gather.gather(ids), stored[ids])
        assert gather.stats()["reads"] == reads, "all fit, and were kept"
        gather.resize("400KiB")
        assert cache(gather)["rows"] <= cache(gather)["capacity"] < 2600
        before = cache(gather)["hits"]
        gather.gather(hot)
        assert cache(gather)["hits"] - before > 900, "those wanted most were kept"
        gather.resize(0)
        stats = cache(gather)
        assert (stats["budget_bytes"], stats["rows"], stats["capacity"]) == (0, 0, 0)
        assert np.array_equal(gather.gather(ids), stored[ids])
        gather.resize("1MiB")
        assert np.array_equal(gather.gather(ids), stored[ids])
        assert cache(gather)["rows"] > 0
    with raises(ValueError, "closed"):
        gather.resize(0)


def test_prefetch_fills_the_cache(path, stored):
    ids = np.arange(0, ROWS, 7)
    with engram.FileGather(path, "t", io="direct", cache_bytes="8MiB") as gather:
        gather.prefetch(ids)
        while gather.stats()["rows_prefetched"] < len(ids):
            assert gather.stats()["prefetches_failed"] == 0
        reads = gather.stats()["reads"]
        assert np.array_equal(gather.gather(ids), stored[ids])
        assert gather.stats()["reads"] == reads
        assert cache(gather)["misses"] == 0


def test_reopening_begins_with_an_empty_cache(tmp_path, path, stored):
    copy = tmp_path / "t.safetensors"
    other = tensor("t", "U8", (ROWS, COLUMNS), seed=9)
    copy.write_bytes(path.read_bytes())
    ids = np.arange(500)
    with engram.FileGather(copy, "t", cache_bytes="1MiB") as gather:
        assert np.array_equal(gather.gather(ids), stored[:500])
        gather.resize("2MiB")
        changed = safetensors(tmp_path / "new", other, residue=5)
        changed.replace(copy)
        gather.reopen()
        assert cache(gather)["rows"] == 0
        assert cache(gather)["budget_bytes"] == 2 << 20
        assert np.array_equal(gather.gather(ids), read_rows(copy, "t", ids))


@pytest.mark.case("D19")
def test_tables_with_equal_ids_have_caches_of_their_own(tmp_path):
    path = safetensors(
        tmp_path / "t.safetensors", tensor("a", "U8", (300, 24)), tensor("b", "U8", (300, 24))
    )
    ids = np.random.default_rng(0).integers(0, 300, 2000)
    tables = engram.TableSet(
        {
            "a": engram.FileGather(path, "a", cache_bytes=4000),
            "b": engram.FileGather(path, "b", cache_bytes="1MiB"),
            "c": engram.FileGather(path, "b"),
        }
    )
    with tables:
        for _ in range(3):
            rows = tables.gather({"a": ids, "b": ids[::-1], "c": ids[:100]}, pad_id=-1)
            assert np.array_equal(rows["a"], read_rows(path, "a", ids))
            assert np.array_equal(rows["b"], read_rows(path, "b", ids[::-1]))
            assert np.array_equal(rows["c"], read_rows(path, "b", ids[:100]))
        assert cache(tables.gathers["c"])["budget_bytes"] == 0


def test_one_table_twice_in_a_set(path, stored):
    gather = engram.FileGather(path, "t", cache_bytes="1MiB")
    ids = np.arange(1000)
    with engram.TableSet({"one": gather, "two": gather}) as tables:
        rows = tables.gather({"one": ids, "two": ids[::-1]}, timeout=20)
        assert np.array_equal(rows["one"], stored[ids])
        assert np.array_equal(rows["two"], stored[ids[::-1]])


def test_tickets_and_timeouts(path, stored):
    ids = np.random.default_rng(3).integers(0, ROWS, 4000)
    with engram.FileGather(path, "t", cache_bytes="300KiB") as gather:
        tickets = [gather.submit(ids[start::4], deadline=20) for start in range(4)]
        for start, ticket in enumerate(tickets):
            assert np.array_equal(ticket.wait(20), stored[ids[start::4]])
        with raises(TimeoutError, table="t"):
            gather.gather(np.tile(ids, 100), timeout=1e-9)
        assert np.array_equal(gather.gather(ids, timeout=20), stored[ids])


def test_ids_outside_and_padding(path, stored):
    with engram.FileGather(path, "t", cache_bytes="1MiB") as gather:
        for _ in range(2):
            rows = gather.gather([3, -1, 5, -1], pad_id=-1)
            assert not rows[[1, 3]].any()
            assert np.array_equal(rows[[0, 2]], stored[[3, 5]])
            with raises(IndexError, row=ROWS, position=1, table="t"):
                gather.gather([0, ROWS])


def test_every_row_can_be_checked(path, stored, monkeypatch):
    monkeypatch.setenv("ENGRAM_VERIFY", "1")
    ids = np.arange(300)
    with engram.FileGather(path, "t", cache_bytes="1MiB") as gather:
        for _ in range(2):
            assert np.array_equal(gather.gather(ids), stored[ids])
        assert gather.verify(200).ok
        # A row changed in the file is one whose cached copy is not what a second read gives.
        data = bytearray(path.read_bytes())
    copy = path.with_name("copy.safetensors")
    copy.write_bytes(data)
    with engram.FileGather(copy, "t", cache_bytes="1MiB") as gather:
        gather.gather(ids)
        place = gather.planes[0].pieces[0].offset + 7 * COLUMNS
        with copy.open("r+b") as file:
            file.seek(place)
            file.write(bytes([data[place] ^ 1]))
        with raises(OSError, "ENGRAM_VERIFY", row=7, position=7, table="t"):
            gather.gather(ids)
