"""Which rows were cached, kept in a file over a restart."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import stat
import threading
import time
import zlib

import numpy as np
import pytest

import engram
from checkpoint_support import raises, read_rows, safetensors, tensor

ROWS, COLUMNS = 20_000, 160


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("hot") / "t.safetensors"
    return safetensors(path, tensor("t", "U8", (ROWS, COLUMNS)), residue=5)


@pytest.fixture
def hot(path, tmp_path):
    """A list of 3,000 rows, 100 of which were wanted again and again."""
    listed = tmp_path / "hot"
    with engram.FileGather(path, "t", cache_bytes="8MiB") as gather:
        gather.gather(np.arange(0, 15_000, 5))
        for _ in range(4):
            gather.gather(np.arange(0, 15_000, 150))
        assert gather.save_hot(listed) == 3000
    return listed


def test_a_restart_begins_where_it_ended(path, hot):
    assert stat.S_IMODE(hot.stat().st_mode) == 0o600
    assert [each.name for each in hot.parent.iterdir()] == ["hot"]
    assert hot.stat().st_size < 3000 * 3 + 1000
    ids = np.arange(0, 15_000, 5)
    seen = []
    with engram.FileGather(path, "t", cache_bytes="8MiB") as gather:
        engram.drop_cache(path)
        assert gather.load_hot(hot, lambda *step: seen.append(step)) == 3000
        assert seen[0] == (0, 3000)
        assert seen[-1] == (3000, 3000)
        stats = gather.stats()
        assert stats["cache"]["rows"] == 3000
        if stats["io"]["direct_alignment"]:
            assert stats["reads"] < 300, "neighbours in one read"
        assert np.array_equal(gather.gather(ids), read_rows(path, "t", ids))
        assert gather.stats()["cache"]["misses"] == 0
        assert gather.load_hot(hot) == 3000, "all are there"
        assert gather.stats()["reads"] == stats["reads"]


def test_a_full_cache_begins_at_the_share_of_hits_it_had(path, tmp_path):
    """Its room is an eighth of the rows, so which of them are listed decides."""
    random = np.random.default_rng(8)
    places = random.permutation(ROWS)
    batches = [places[random.zipf(1.1, 2000) % ROWS] for _ in range(120)]

    def share(gather, batches):
        before = gather.stats()["cache"]
        for ids in batches:
            gather.gather(ids)
        after = gather.stats()["cache"]
        found = {key: after[key] - before[key] for key in ("hits", "misses")}
        return found["hits"] / (found["hits"] + found["misses"])

    with engram.FileGather(path, "t", cache_bytes="400KiB") as gather:
        cold = share(gather, batches[:1])
        share(gather, batches[1:100])
        assert gather.stats()["cache"]["rows"] > 0.95 * gather.stats()["cache"]["capacity"]
        listed = gather.save_hot(tmp_path / "hot")
        steady = share(gather, batches[100:])
    with engram.FileGather(path, "t", cache_bytes="400KiB") as gather:
        assert gather.load_hot(tmp_path / "hot") > 0.98 * listed
        first = share(gather, batches[100:101])
        again = first / 20 + share(gather, batches[101:]) * 19 / 20
    assert cold < steady - 0.1
    assert again == pytest.approx(steady, abs=0.01)
    assert first > cold + 0.9 * (steady - cold)


def test_a_smaller_budget_takes_the_rows_wanted_most(path, hot):
    with engram.FileGather(path, "t", cache_bytes=100_000) as gather:
        capacity = gather.stats()["cache"]["capacity"]
        assert capacity < 1000
        assert gather.load_hot(hot) <= capacity
        before = gather.stats()["cache"]["hits"]
        gather.gather(np.arange(0, 15_000, 150))
        assert gather.stats()["cache"]["hits"] - before > 90


def test_a_list_of_nothing(path, tmp_path):
    with engram.FileGather(path, "t", cache_bytes="1MiB") as gather:
        assert gather.save_hot(tmp_path / "hot") == 0
        gather.gather([1, 2])
        assert gather.load_hot(tmp_path / "hot") == 0
        assert gather.save_hot(tmp_path / "hot") == 2
        assert gather.load_hot(tmp_path / "hot") == 2


def test_listed_rows_that_found_no_room_do_not_count(path, tmp_path):
    wanted = np.arange(100, 113)
    with engram.FileGather(path, "t", cache_bytes=2144) as gather:
        gather.gather([1, 2])
        assert gather.save_hot(tmp_path / "hot") == 2
        gather.resize(0)
        gather.resize(2144)
        for _ in range(5):
            gather.gather(wanted)
        assert gather.stats()["cache"]["rows"] == 13
        assert gather.load_hot(tmp_path / "hot") == 0, "all others were wanted more"
        before = gather.stats()["cache"]["hits"]
        gather.gather(wanted)
        assert gather.stats()["cache"]["hits"] == before + 13


def test_a_budget_changed_meanwhile_is_the_one_that_is_filled(path, hot):
    with engram.FileGather(path, "t", cache_bytes="8MiB") as gather:
        assert gather.load_hot(hot, lambda done, _total: done or gather.resize("6MiB")) == 3000
        stats = gather.stats()["cache"]
        assert (stats["budget_bytes"], stats["rows"]) == (6 << 20, 3000)
        gather.resize(0)
        gather.resize("8MiB")
        with raises(ValueError, "has no cache of rows", table="t"):
            gather.load_hot(hot, lambda done, _total: done or gather.resize(0))
        assert gather.stats()["cache"]["rows"] == 0


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_refused_and_not_waited_for(path, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with (
        engram.FileGather(path, "t", cache_bytes="1MiB") as gather,
        raises(engram.CheckpointError, "no regular file", "save_hot", path=pipe, table="t"),
    ):
        gather.load_hot(pipe)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
def test_rows_are_listed_before_or_after_a_change_of_the_budget(tmp_path):
    """Not in its middle, where some rows are in one cache and the rest in another."""
    big = safetensors(tmp_path / "big.safetensors", tensor("t", "U8", (200_000, 160)))
    listed, inside, savers = tmp_path / "hot", [], []
    sizes = itertools.cycle([48 << 20, 47 << 20])
    with engram.FileGather(big, "t", io="pread", cache_bytes=next(sizes)) as gather:
        for start in range(0, 200_000, 20_000):
            gather.gather(np.arange(start, start + 20_000))
        rows = gather.stats()["cache"]["rows"]
        assert rows > 190_000

        def handler(*_):
            if savers:
                return
            with contextlib.suppress(ValueError):
                gather.resize(next(sizes))
                return
            with raises(ValueError, "resize or save_hot", "signal handler"):
                gather.save_hot(tmp_path / "other")
            saver = threading.Thread(target=lambda: inside.append(gather.save_hot(listed)))
            saver.start()
            savers.append(saver)
            time.sleep(0.05)

        before = signal.signal(signal.SIGALRM, handler)
        try:
            for _ in range(200):
                if savers:
                    break
                signal.setitimer(signal.ITIMER_REAL, 0.004)
                gather.resize(next(sizes))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        savers[0].join(20)
        assert inside[0] > 0.99 * rows
        gather.resize(0)
        gather.resize("48MiB")
        assert gather.load_hot(listed) > 0.99 * inside[0]


def test_without_a_budget_there_is_nothing_to_list(path, tmp_path, hot):
    with engram.FileGather(path, "t") as gather:
        with raises(ValueError, "has no cache of rows", "resize", table="t"):
            gather.save_hot(tmp_path / "other")
        with raises(ValueError, "has no cache of rows", table="t"):
            gather.load_hot(hot)
    assert not (tmp_path / "other").exists()


def test_lists_of_other_tables_are_refused(tmp_path, path, hot):
    others = {
        "table": (tensor("u", "U8", (ROWS, COLUMNS)), "u"),
        "rows": (tensor("t", "U8", (ROWS + 1, COLUMNS)), "t"),
        "rows of": (tensor("t", "U8", (ROWS, COLUMNS + 1)), "t"),
        "another": (tensor("t", "I8", (ROWS, COLUMNS)), "t"),
    }
    for number, (what, (stored, name)) in enumerate(others.items()):
        other = safetensors(tmp_path / f"{number}.safetensors", stored, residue=5)
        with engram.FileGather(other, name, cache_bytes="1MiB") as gather:
            with raises(
                engram.CheckpointError, "another table", what, "save_hot", path=hot, table=name
            ):
                gather.load_hot(hot)
            assert gather.stats()["cache"]["rows"] == 0
    longer = safetensors(
        tmp_path / "longer.safetensors",
        tensor("t", "U8", (ROWS, COLUMNS)),
        tensor("z", "U8", (9,)),
        residue=5,
    )
    with (
        engram.FileGather(longer, "t", cache_bytes="1MiB") as gather,
        raises(engram.CheckpointError, "files of", path=hot),
    ):
        gather.load_hot(hot)


def test_a_list_outlives_a_copy_of_the_files(path, hot, tmp_path):
    """Other bytes in files of the same sizes are not noticed, and harm no row."""
    copy = tmp_path / "copy.safetensors"
    other = safetensors(copy, tensor("t", "U8", (ROWS, COLUMNS), seed=9), residue=5)
    assert other.stat().st_size == path.stat().st_size
    with engram.FileGather(copy, "t", cache_bytes="8MiB") as gather:
        assert gather.load_hot(hot) == 3000
        ids = np.arange(0, 15_000, 5)
        assert np.array_equal(gather.gather(ids), read_rows(copy, "t", ids))
        assert gather.stats()["cache"]["misses"] == 0


def damaged(whole: bytes):
    """Every way to damage a list, by name."""
    yield "nothing", b"", "ends too early"
    yield "garbage", b"\xff" * 500, "is not a list"
    yield "text", b"PK\x03\x04 and so on", "is not a list"
    for length in (7, 12, 15, 100, len(whole) // 2, len(whole) - 1):
        yield f"cut to {length}", whole[:length], "damaged"
    yield "longer", whole + b"x", "checksum"
    for place in (20, 60, len(whole) // 2, len(whole) - 1):
        changed = bytearray(whole)
        changed[place] ^= 0x10
        yield f"changed at {place}", bytes(changed), ""
    newer = bytearray(whole)
    newer[8] = 2
    yield "newer", bytes(newer), "version 2"
    huge = bytearray(whole)
    huge[12:16] = b"\xff\xff\xff\x7f"
    yield "huge header", bytes(huge), "damaged"


def test_damaged_lists_are_refused_before_a_row_is_read(path, hot):
    whole = hot.read_bytes()
    assert zlib.crc32(whole[:-4]) == int.from_bytes(whole[-4:], "little")
    with engram.FileGather(path, "t", cache_bytes="1MiB") as gather:
        for name, content, part in damaged(whole):
            hot.write_bytes(content)
            with raises(engram.CheckpointError, part, "save_hot", path=hot, table="t") as caught:
                gather.load_hot(hot)
            assert gather.stats()["cache"]["rows"] == 0, (name, caught.value)
        assert gather.stats()["reads"] == 0


def test_rows_that_no_table_has_are_refused_by_a_right_checksum_too(path, hot):
    whole = hot.read_bytes()
    header = 16 + int.from_bytes(whole[12:16], "little")
    for rows in (b"\xff\xff\xff\x7f\x00", b"\xff" * 10 + b"\x00", b"\xff" * 9 + b"\x02\x00"):
        body = whole[:header] + (1).to_bytes(4, "little") + rows + bytes(4)
        hot.write_bytes(body + zlib.crc32(body).to_bytes(4, "little"))
        with (
            engram.FileGather(path, "t", cache_bytes="1MiB") as gather,
            raises(engram.CheckpointError, "it lists a row", path=hot),
        ):
            gather.load_hot(hot)


def test_files_that_cannot_be_read_or_written(path, tmp_path):
    with engram.FileGather(path, "t", cache_bytes="1MiB") as gather:
        missing = tmp_path / "none" / "hot"
        with raises(FileNotFoundError, "cached rows", path=missing, table="t"):
            gather.load_hot(missing)
        with raises(FileNotFoundError, "cannot write", path=missing, table="t"):
            gather.save_hot(missing)
        with raises(IsADirectoryError, path=tmp_path):
            gather.load_hot(tmp_path)
        with pytest.raises(OSError, match="cannot write"):
            gather.save_hot(tmp_path)
        with raises(ValueError, "NUL"):
            gather.save_hot("a\0b")
    assert list(tmp_path.iterdir()) == []


def test_a_callback_stops_the_reading_and_what_was_read_stays(path, hot):
    class Enough(Exception):
        pass

    def stop(done, _total):
        if done:
            raise Enough

    with engram.FileGather(path, "t", cache_bytes="8MiB") as gather:
        with pytest.raises(Enough):
            gather.load_hot(hot, stop)
        ids = np.arange(0, 15_000, 5)
        assert np.array_equal(gather.gather(ids), read_rows(path, "t", ids))
        assert gather.save_hot(hot) == 3000
