"""Prewarming, prefetching, residency, and the cap on mapped bytes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import engram
from engram import synth

if TYPE_CHECKING:
    from engram.synth import SynthInfo

ROWS = 400_000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> SynthInfo:
    return synth.write(tmp_path_factory.mktemp("qwen"), "qwen", dtype="fp8", rows=ROWS, files=3)


def assert_rows(info: SynthInfo, ids: np.ndarray, rows: np.ndarray) -> None:
    assert (rows.view(np.uint8) == synth.expected_rows(info, ids)["weight"]).all()


def test_prewarm_makes_the_whole_table_resident(checkpoint: SynthInfo) -> None:
    with engram.FileGather(checkpoint.directory) as gather:
        engram.drop_cache(gather.files)
        assert gather.residency().share < 0.5
        seen: list[tuple[int, int]] = []
        assert (
            gather.prewarm(progress=lambda done, total: seen.append((done, total))) == gather.nbytes
        )
        assert seen[0] == (0, gather.nbytes)
        assert seen[-1] == (gather.nbytes, gather.nbytes)
        residency = gather.residency()
        assert residency.share == 1.0
        assert residency.believed == residency.resident == residency.pages
        ids = np.arange(0, gather.num_rows, 97)
        assert_rows(checkpoint, ids, gather.gather(ids))
        assert gather.stats()["reads"] == 0


def test_prewarm_stops_at_its_maximum(checkpoint: SynthInfo) -> None:
    with engram.FileGather(checkpoint.directory) as gather:
        engram.drop_cache(gather.files)
        assert gather.prewarm(max_bytes=5_000_000) == 5_000_000
        share = gather.residency().share
        assert 5_000_000 / gather.nbytes * 0.9 < share < 0.9


def test_prewarm_keeps_what_was_done_when_progress_raises(checkpoint: SynthInfo) -> None:
    def stop(done: int, total: int) -> None:
        if done > 0:
            raise KeyboardInterrupt

    with engram.FileGather(checkpoint.directory) as gather:
        engram.drop_cache(gather.files)
        with pytest.raises(KeyboardInterrupt):
            gather.prewarm(progress=stop)
        assert gather.residency().resident > 0
        assert_rows(checkpoint, np.arange(64), gather.gather(np.arange(64)))


@pytest.mark.parametrize("value", [0, -1, 1.5, "0GiB", "much"])
def test_prewarm_refuses_other_maxima(checkpoint: SynthInfo, value: object) -> None:
    with (
        engram.FileGather(checkpoint.directory) as gather,
        pytest.raises(ValueError, match="max_bytes"),
    ):
        gather.prewarm(max_bytes=value)  # type: ignore[arg-type]


@pytest.mark.case("I38")
def test_prefetched_rows_need_no_read(checkpoint: SynthInfo) -> None:
    with engram.FileGather(checkpoint.directory) as gather:
        engram.drop_cache(gather.files)
        ids = np.random.default_rng(3).integers(0, gather.num_rows, 500)
        gather.prefetch(ids)
        deadline = time.monotonic() + 30
        while gather.stats()["rows_prefetched"] == 0 and time.monotonic() < deadline:
            time.sleep(0.005)
        reads = gather.stats()["reads"]
        assert_rows(checkpoint, ids, gather.gather(ids))
        assert gather.stats()["reads"] == reads
        assert gather.stats()["rows_fetched"] == 0


def test_prefetch_checks_ids_at_once(checkpoint: SynthInfo) -> None:
    with engram.FileGather(checkpoint.directory) as gather:
        with pytest.raises(IndexError, match="row id -1 at position 1"):
            gather.prefetch([0, -1])
        with pytest.raises(TypeError, match="integers"):
            gather.prefetch([0.5])
        gather.prefetch([])


def test_closing_does_not_wait_for_prefetches_and_nothing_breaks(checkpoint: SynthInfo) -> None:
    for _ in range(20):
        gather = engram.FileGather(checkpoint.directory)
        engram.drop_cache(gather.files)
        gather.prefetch(np.arange(0, gather.num_rows, 50))
        gather.close()
        with pytest.raises(ValueError, match="closed"):
            gather.prefetch([1])


@pytest.mark.case("I39")
def test_a_cap_bounds_the_mapped_bytes(checkpoint: SynthInfo) -> None:
    """Sequential reading leaves large pages in the cache; one row then maps all of one."""
    script = textwrap.dedent(
        """
        import sys
        import numpy as np
        import engram

        def mapped(path):
            total, ours = 0, False
            for line in open("/proc/self/smaps"):
                if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
                    ours = path in line
                elif ours and line.startswith("Rss:"):
                    total += int(line.split()[1]) * 1024
            return total

        directory, cap = sys.argv[1], int(sys.argv[2]) or None
        gather = engram.FileGather(directory, max_mapped_bytes=cap)
        for path in gather.files:
            with open(path, "rb") as file:
                while file.read(1 << 22):
                    pass
        out = np.empty((64, gather.row_bytes), np.uint8)
        most = 0
        generator = np.random.default_rng(0)
        for step in range(200):
            gather.gather(generator.integers(0, gather.num_rows, 64), out)
            most = max(most, mapped(directory)) if step % 10 == 0 else most
        print(most, gather.stats()["bytes_trimmed"])
        """
    )

    def most_mapped(cap: int) -> tuple[int, int]:
        command = [sys.executable, "-c", script, str(checkpoint.directory), str(cap)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        mapped, trimmed = done.stdout.split()
        return int(mapped), int(trimmed)

    cap = 16 << 20
    free, nothing = most_mapped(0)
    capped, trimmed = most_mapped(cap)
    assert nothing == 0
    assert free > 2 * cap, "without a cap the mapping creeps, or this test shows nothing"
    # Between two looks 64 rows may each map a large page of up to 2 MiB.
    assert capped <= max(2 * cap, cap + free // 2)
    assert trimmed > 0


def test_the_cap_leaves_rows_and_a_prewarm_alone(checkpoint: SynthInfo) -> None:
    with engram.FileGather(checkpoint.directory, max_mapped_bytes=8 << 20) as gather:
        gather.prewarm()
        ids = np.random.default_rng(1).integers(0, gather.num_rows, (50, 300))
        for batch in ids:
            assert_rows(checkpoint, batch, gather.gather(batch))
        assert gather.residency().share == 1.0
        assert gather.stats()["reads"] == 0


def test_dropping_the_cache_of_an_open_table_reads_again(checkpoint: SynthInfo) -> None:
    with engram.FileGather(checkpoint.directory) as gather:
        ids = np.arange(0, gather.num_rows, 1001)
        gather.gather(ids)
        before = gather.stats()["rows_fetched"]
        assert engram.drop_cache(Path(path) for path in gather.files) == 0
        assert gather.residency().resident == 0
        assert_rows(checkpoint, ids, gather.gather(ids))
        assert gather.stats()["rows_fetched"] == before + ids.size
