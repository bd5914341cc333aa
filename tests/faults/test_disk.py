"""A disk that fails, stalls, lies and vanishes, under every way of reading."""

from __future__ import annotations

import errno
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from children import child, mappings, right

import engram
from checkpoint_support import IO_MODES

UNCACHED = ("pread", "uring", "direct")


def place(gather, row):
    """File name and byte offset of a row."""
    for piece in gather.planes[0].pieces:
        if piece.first_row <= row < piece.first_row + piece.rows:
            return Path(piece.file).name, piece.offset + (row - piece.first_row) * gather.row_bytes
    raise AssertionError(row)


def apart(gather, row, count=200):
    """Rows that lie a mebibyte or more away from a row."""
    far = (1 << 20) // gather.row_bytes
    ids = np.random.default_rng(row).integers(0, gather.num_rows, 4 * count)
    return ids[abs(ids - row) > far][:count]


@pytest.mark.case("I03")
@pytest.mark.case("I26")
@pytest.mark.parametrize("io", IO_MODES)
def test_a_sector_that_cannot_be_read(disk, table, io):
    with engram.FileGather(disk.path, 0, io=io) as gather:
        bad = 4321
        name, offset = place(gather, bad)
        disk.set(name, errors=[(offset, offset + 1)])
        good = apart(gather, bad)
        batch = good.copy()
        batch[70] = bad
        with pytest.raises(OSError, match="Input/output error") as caught:
            gather.gather(batch)
        error = caught.value
        assert (error.errno, error.row, error.position) == (errno.EIO, bad, 70)
        assert error.path == error.filename == str(disk.path / name)
        assert error.offset is not None
        assert abs(error.offset - offset) < 4096
        assert error.table == gather.info.name
        # Nothing left in flight spoils the next batch.
        for _ in range(3):
            assert right(table, good, gather.gather(good))
        # Read well at last, it is served.
        disk.set(name)
        assert right(table, batch, gather.gather(batch))
        assert gather.stats()["errors"] == 1


@pytest.mark.case("I25")
@pytest.mark.parametrize("most", [7, 100])
@pytest.mark.parametrize("io", UNCACHED)
def test_short_reads(disk, table, io, most):
    with engram.FileGather(disk.path, 0, io="pread") as gather:
        names = [Path(file).name for file in gather.files]
    for name in names:
        # The kernel takes a short answer for the end of the file unless the cache is off.
        disk.set(name, direct_io=True)
    with engram.FileGather(disk.path, 0, io=io) as gather:
        for name in names:
            disk.set(name, direct_io=True, most=most)
        ids = np.arange(0, gather.num_rows, 4999)
        assert right(table, ids, gather.gather(ids))


@pytest.mark.case("R08")
@pytest.mark.parametrize("io", IO_MODES)
def test_a_hung_device_holds_neither_the_call_nor_other_tables(disk, table, io):
    with (
        engram.FileGather(disk.path, 0, io=io) as gather,
        engram.FileGather(disk.path, 1, io=io) as other,
    ):
        stuck = 777
        name, offset = place(gather, stuck)
        disk.set(name, stalls=[(offset, offset + 160)])
        try:
            ids = np.array([stuck, 1])
            started = time.monotonic()
            with pytest.raises(TimeoutError):
                gather.gather(ids, timeout=0.2)
            assert time.monotonic() - started < 5
            if name not in {Path(file).name for file in other.files}:
                rows = other.gather(np.arange(100), timeout=5)
                assert right(table, np.arange(100), rows, 1)
            far = apart(gather, stuck)
            assert right(table, far, gather.gather(far, timeout=20))
        finally:
            disk.set(name)
        assert right(table, ids, gather.gather(ids, timeout=20))


@pytest.mark.parametrize("io", ["auto", "pread", "uring"])
def test_reads_that_hang_do_not_hold_the_exit(disk, table, io):
    script = """
    directory, io, row = sys.argv[1:]
    gather = engram.FileGather(directory, 0, io=io)
    late = 0
    for _ in range(3):
        try:
            gather.gather([int(row)], timeout=0.1)
        except TimeoutError:
            late += 1
    threading.Thread(target=gather.gather, args=([int(row)],), daemon=True).start()
    time.sleep(0.1)
    report(late=late)
    """
    with engram.FileGather(disk.path, 0, io="pread") as gather:
        row = 9000
        name, offset = place(gather, row)
    disk.set(name, stalls=[(offset, offset + 160)])
    release = threading.Timer(60, disk.set, [name])
    release.start()
    started = time.monotonic()
    try:
        assert child(script, disk.path, io, row, timeout=60)["late"] == 3
        assert time.monotonic() - started < 30
    finally:
        release.cancel()
        disk.set(name)


@pytest.mark.parametrize("io", IO_MODES)
def test_a_file_that_vanishes_from_under_its_table(disk, table, io):
    with engram.FileGather(disk.path, 0, io=io) as gather:
        name, _ = place(gather, 5)
        there = [row for row in (0, 19_000) if place(gather, row)[0] != name]
        disk.set(name, gone=True)
        with pytest.raises(OSError, match=name) as caught:
            gather.gather([5, 6])
        assert caught.value.errno in (errno.ESTALE, errno.EIO, errno.ENOENT)
        assert caught.value.row == 5
        assert right(table, there, gather.gather(there))
        assert not gather.verify(0).ok
        disk.set(name)
        assert right(table, [5, 6], gather.gather([5, 6]))


@pytest.mark.case("I03")
def test_a_user_space_filesystem_is_not_mapped_unless_asked(disk, table):
    with engram.FileGather(disk.path, 0) as gather:
        ids = np.arange(0, gather.num_rows, 11)
        assert right(table, ids, gather.gather(ids))
        assert not any(mappings(file) for file in gather.files)
        state = gather.stats()["io"]
        assert state["filesystems"] == ["fuse"]
        assert "not mapped: fuse" in state["fallbacks"][0]
    with engram.FileGather(disk.path, 0, io="mmap") as gather:
        assert all(mappings(file) for file in gather.files)


@pytest.mark.case("I05")
def test_a_filesystem_that_cannot_be_mapped(disk, table):
    with engram.FileGather(disk.path, 0, io="pread") as gather:
        for file in gather.files:
            disk.set(Path(file).name, direct_io=True)
    with pytest.raises(OSError, match='io="mmap" cannot map the file on fuse') as caught:
        engram.FileGather(disk.path, 0, io="mmap")
    assert caught.value.errno == errno.ENODEV
    assert caught.value.path.startswith(str(disk.path))


@pytest.mark.case("I16")
@pytest.mark.case("I40")
def test_direct_reads_that_fail_although_the_open_did_not(disk, table):
    with engram.FileGather(disk.path, 0, io="pread") as gather:
        for file in gather.files:
            disk.set(Path(file).name, refuse_direct=True)
    with engram.FileGather(disk.path, 0, io="direct") as gather:
        state = gather.stats()["io"]
        assert (state["asked"], state["direct_alignment"]) == ("direct", None)
        assert "direct" not in state["runs"]
        assert "direct I/O refused on fuse (Invalid argument" in state["fallbacks"][-1]
        ids = np.arange(0, gather.num_rows, 13)
        assert right(table, ids, gather.gather(ids))
        disk.log()
        gather.gather(np.array([3]))
        assert not any(direct for *_, direct in disk.log())


@pytest.mark.case("I20")
@pytest.mark.case("I40")
@pytest.mark.parametrize("io", IO_MODES)
def test_no_read_begins_at_the_end_of_the_file(disk, table, io):
    with engram.FileGather(disk.path, 0, io=io) as gather:
        disk.log()
        last = [piece.first_row + piece.rows - 1 for piece in gather.planes[0].pieces]
        assert right(table, last, gather.gather(last))
        log = disk.log()
        assert log
        for name, offset, length, direct in log:
            assert offset < (disk.path / name).stat().st_size
            assert direct == (io == "direct")
            if direct:
                assert offset % 4096 == length % 4096 == 0


def test_a_file_said_to_be_shorter_than_it_was(disk, table):
    with engram.FileGather(disk.path, 0, io="mmap") as gather:
        ids = np.arange(0, gather.num_rows, 50)
        gather.gather(ids)
        name, cut = place(gather, 5000)
        disk.set(name, size=cut)
        before, after = [], []
        for row in ids:
            file, offset = place(gather, row)
            (after if file == name and offset >= cut else before).append(row)
        assert right(table, before, gather.gather(before))
        with pytest.raises(OSError, match="was cut to") as caught:
            gather.gather(after)
        assert (caught.value.errno, caught.value.row) == (errno.EIO, after[0])
        kinds = {problem.kind for problem in gather.verify(0).problems}
        assert "truncated" in kinds


def test_verification_finds_rows_that_rot_and_rows_that_cannot_be_read(small_disk):
    disk = small_disk
    with engram.FileGather(disk.path, io="pread") as gather:
        ids = np.arange(gather.num_rows)
        gather.gather(ids)  # All in the page cache.
        assert gather.verify(50).ok
        name, offset = place(gather, 700)
        disk.set(name, flips=[(offset + 3, offset + 4)], only_direct=True)
        found = gather.verify(None)
        assert found.ways == ("pread", "direct")
        assert found.rows == gather.num_rows
        assert [(problem.kind, problem.row) for problem in found.problems] == [("rotted", 700)]
        assert found.problems[0].offset == offset
        assert "row 700" in str(found)
        assert not found.ok
        disk.set(name, errors=[(offset, offset + 1)])
        found = gather.verify(None)
        assert 700 in {problem.row for problem in found.problems}
        assert {problem.kind for problem in found.problems} == {"unreadable"}
        disk.set(name)
        assert gather.verify(None).ok


def test_every_gathered_row_is_verified_on_demand(disk, table):
    script = """
    directory = sys.argv[1]
    gather = engram.FileGather(directory, 0, io="pread")
    ids = np.arange(5990, 6010)
    try:
        gather.gather(ids)
    except OSError as error:
        report(errno=error.errno, row=error.row, position=error.position, text=str(error))
    else:
        report(text="nothing noticed")
    """
    with engram.FileGather(disk.path, 0, io="pread") as gather:
        gather.gather(np.arange(5990, 6010))
        name, offset = place(gather, 6000)
    disk.set(name, flips=[(offset + 3, offset + 4)], only_direct=True)
    assert child(script, disk.path)["text"] == "nothing noticed"
    seen = child(script, disk.path, env={"ENGRAM_VERIFY": "1"})
    assert (seen["errno"], seen["row"], seen["position"]) == (errno.EIO, 6000, 10)
    assert "ENGRAM_VERIFY" in seen["text"]


@pytest.mark.parametrize("io", UNCACHED)
def test_an_interrupt_while_a_file_is_cut_is_an_interrupt(disk, io):
    """Reads that met the new end are made again; a call that was told to end is not."""

    class Interrupted(Exception):
        pass

    with engram.FileGather(disk.path, 0, io=io) as gather:
        row = 3
        name, offset = place(gather, row)
        length = (disk.path / name).stat().st_size

        def handler(*_):
            disk.set(name, size=length - 100)
            raise Interrupted

        disk.set(name, stalls=[(offset, offset + 160)])
        before = signal.signal(signal.SIGALRM, handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(Interrupted):
                gather.gather([row])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
