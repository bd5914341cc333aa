"""What is counted with a cache of rows: every position once, as copied from memory or as read."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import engram
from checkpoint_support import DEEPSEEK, opened, read_rows, safetensors, tensor
from test_threads import run

ROWS, COLUMNS = 20_000, 160


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("counts") / "t.safetensors"
    weight = tensor(f"{DEEPSEEK}.weight", "F8_E4M3", (ROWS, 64))
    scale = tensor(f"{DEEPSEEK}.scale", "F8_E8M0", (ROWS, 2))
    return safetensors(path, tensor("t", "U8", (ROWS, COLUMNS)), weight, scale, residue=5)


@pytest.fixture(scope="module")
def stored(path):
    return read_rows(path, "t", np.arange(ROWS))


def counted(gather, planes=1):
    """Rows copied from memory and rows read; all of them are one or the other."""
    stats = gather.stats()
    resident, fetched = stats["rows_resident"], stats["rows_fetched"]
    assert resident + fetched == planes * (stats["rows"] - stats["rows_padded"])
    return resident // planes, fetched // planes


@pytest.mark.parametrize("cache_bytes", [0, 4000, "8MiB"])
@pytest.mark.parametrize("warm", [True, False])
def test_repeats_count_as_their_row_came(path, stored, io, warm, cache_bytes):
    ids = np.repeat(np.arange(0, 3000, 3), 3)
    ids[::100] = -1
    with opened(path, "t", io, cache_bytes=cache_bytes) as gather:
        gather.prewarm() if warm else engram.drop_cache(path)
        for _ in range(2):
            rows = gather.gather(ids, pad_id=-1)
            assert np.array_equal(rows[1:100], stored[ids[1:100]])
        resident, fetched = counted(gather)
        if gather.stats()["reads"] == 0 and io == "auto":
            assert fetched == 0
        if cache_bytes == "8MiB":
            assert resident >= 2970, "the second time at the latest"
        elif io == "direct":
            assert resident < 1000


def test_every_plane_counts_for_itself(path):
    with engram.FileGather(path, DEEPSEEK, cache_bytes="300KiB") as gather:
        for seed in range(4):
            gather.gather(np.random.default_rng(seed).integers(0, 9000, 6000))
        counted(gather, planes=2)


def test_rows_that_another_call_read_count_as_copied(path, stored):
    ids = np.arange(5000, 15_000)
    barrier = threading.Barrier(6)
    with engram.FileGather(path, "t", io="direct", cache_bytes="8MiB", threads=1) as gather:

        def work():
            barrier.wait(20)
            assert np.array_equal(gather.gather(ids, timeout=60), stored[ids])

        run([work] * 6)
        assert counted(gather) == (5 * len(ids), len(ids))


def test_rows_read_ahead_are_nobodys_rows_yet(path, stored, tmp_path):
    ids = np.repeat(np.arange(0, 9000, 9), 2)
    with engram.FileGather(path, "t", io="direct", cache_bytes="8MiB") as gather:
        gather.prefetch(ids)
        while gather.stats()["rows_prefetched"] < 1000:
            assert gather.stats()["prefetches_failed"] == 0
            time.sleep(0.001)
        assert counted(gather) == (0, 0)
        assert np.array_equal(gather.gather(ids), stored[ids])
        assert counted(gather) == (2000, 0)
        gather.save_hot(tmp_path / "hot")
        gather.resize(0)
        gather.resize("8MiB")
        assert gather.load_hot(tmp_path / "hot") == 1000
        assert counted(gather) == (2000, 0)
