"""Threads and processes that share a cache of rows."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import engram
from checkpoint_support import DEEPSEEK, opened, read_rows, safetensors, tensor
from test_fork import run as run_script
from test_threads import eager_switching, run

__all__ = ["eager_switching"]

ROWS, COLUMNS = 4000, 96


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("threads") / "t.safetensors"
    weight = tensor(f"{DEEPSEEK}.weight", "F8_E4M3", (ROWS, 64))
    scale = tensor(f"{DEEPSEEK}.scale", "F8_E8M0", (ROWS, 2))
    return safetensors(path, tensor("t", "U8", (ROWS, COLUMNS)), weight, scale, residue=7)


@pytest.fixture(scope="module")
def stored(path):
    return read_rows(path, "t", np.arange(ROWS))


@pytest.fixture(scope="module")
def planes(path):
    names = ("weight", "scale")
    return np.concatenate(
        [read_rows(path, f"{DEEPSEEK}.{name}", np.arange(ROWS)) for name in names], axis=1
    )


@pytest.mark.usefixtures("eager_switching")
@pytest.mark.parametrize("cache_bytes", [2000, 30_000, "1MiB"])
def test_sixteen_threads_see_whole_rows_only(path, planes, io, cache_bytes):
    with opened(path, DEEPSEEK, io, cache_bytes=cache_bytes) as gather:

        def work(seed):
            generator = np.random.default_rng(seed)
            out = np.empty((2500, 66), np.uint8)
            for count in (1, 16, 200, 2500):
                ids = generator.zipf(1.1, count) % ROWS
                gather.gather(ids, out=out[:count])
                assert np.array_equal(out[:count], planes[ids])

        run([lambda seed=seed: work(seed) for seed in range(16)])
        stats = gather.stats()
        assert stats["cache"]["hits"] + stats["cache"]["misses"] == stats["rows"]
        assert stats["cache"]["rows"] <= stats["cache"]["capacity"]


@pytest.mark.parametrize("cache_bytes", [1500, "1MiB"])
def test_rows_that_many_threads_miss_are_read_once(path, stored, cache_bytes):
    """Whether the cache keeps them or not: its room is far smaller than the batch."""
    ids = np.random.default_rng(5).choice(ROWS, 1500, replace=False)
    with engram.FileGather(path, "t", io="direct", cache_bytes=cache_bytes, threads=1) as gather:

        def work():
            assert np.array_equal(gather.gather(ids, timeout=60), stored[ids])

        run([work] * 8)
        stats = gather.stats()
        fetched = stats["unique_rows_fetched"]
        assert stats["cache"]["misses"] + stats["cache"]["hits"] == 8 * 1500
        if cache_bytes == "1MiB":
            assert fetched == 1500
            assert stats["cache"]["waited"] == stats["cache"]["misses"] - fetched
        else:
            assert fetched < 8 * 1500
            assert stats["cache"]["waited"] > 0


def test_resizing_while_others_gather(path, stored):
    stop = threading.Event()
    with engram.FileGather(path, "t", cache_bytes="200KiB") as gather:

        def gathers(seed):
            generator = np.random.default_rng(seed)
            while not stop.is_set():
                ids = generator.zipf(1.2, 700) % ROWS
                assert np.array_equal(gather.gather(ids), stored[ids])

        def resizes():
            try:
                for size in ["1500", "1MiB", 0, "50KiB", "600KiB", 0, "1MiB", "100KiB"] * 6:
                    gather.resize(size)
                    assert gather.stats()["cache"]["budget_bytes"] <= 1 << 20
            finally:
                stop.set()

        run([*(lambda seed=seed: gathers(seed) for seed in range(4)), resizes])
        run([lambda size=size: gather.resize(size) for size in ("1MiB", "2MiB", "3MiB", "4MiB")])
        assert gather.stats()["cache"]["budget_bytes"] in {n << 20 for n in (1, 2, 3, 4)}
        assert np.array_equal(gather.gather(np.arange(ROWS)), stored)


def test_closing_while_rows_are_put_into_the_cache(path, stored, tmp_path):
    for _ in range(5):
        gather = engram.FileGather(path, "t", cache_bytes="1MiB")
        gather.prefetch(np.arange(ROWS))
        assert np.array_equal(gather.gather([3, 4], timeout=20), stored[[3, 4]])
        gather.save_hot(tmp_path / "hot")
        gather.close()
        assert gather.closed


def test_forked_children_have_the_cache_and_wait_for_nobody_of_the_parent(path):
    run_script(
        """
        gather = engram.FileGather(path, "t", io=io, cache_bytes=60_000)
        stored = engram.FileGather(path, "t").gather(np.arange(ROWS))
        stop = False

        def keep_busy(seed):
            generator = np.random.default_rng(seed)
            while not stop:
                ids = generator.integers(0, ROWS, 300)
                assert np.array_equal(gather.gather(ids), stored[ids])

        threads = [threading.Thread(target=keep_busy, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()

        def work():
            for _ in range(3):
                assert np.array_equal(gather.gather(IDS, timeout=20), stored[IDS])
            assert gather.stats()["cache"]["hits"] > 0
            gather.prefetch(IDS)
            gather.resize(100_000)
            gather.resize(0)
            assert np.array_equal(gather.gather(IDS), stored[IDS])
            gather.close()

        try:
            for _ in range(20):
                child(work)
        finally:
            stop = True
            for thread in threads:
                thread.join()
        assert np.array_equal(gather.gather(IDS), stored[IDS])
        """,
        path,
        "auto",
    )
