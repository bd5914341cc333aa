"""What happens to files while they are open: `verify` says it, `reopen` moves on."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from children import right

import engram
from checkpoint_support import checkpoint, raises, safetensors, tensor
from engram import synth


def kinds(found):
    return {problem.kind for problem in found.problems}


def rewrite(path, offset, data):
    """Writes into a file and puts its times back."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("rows", [0, 1, 100, None])
def test_an_untouched_table_is_well(table, io, rows):
    with engram.FileGather(table.directory, 0, io=io) as gather:
        seen = []
        found = gather.verify(rows, progress=lambda *step: seen.append(step))
        count = gather.num_rows if rows is None else rows
        assert found.ok
        assert (found.rows, found.problems, found.more, found.shadowed) == (count, (), 0, ())
        assert seen[0] == (0, count)
        assert seen[-1] == (count, count)
        assert len(set(found.ways)) == 2
        assert str(found).endswith(": ok")


def test_arguments_are_checked(table):
    with engram.FileGather(table.directory, 0) as gather:
        for rows in (-1, 1.5, True, "all"):
            with raises(ValueError, "rows="):
                gather.verify(rows)
        with raises(ValueError, "seed="):
            gather.verify(1, seed=-1)
        with pytest.raises(KeyboardInterrupt):
            gather.verify(None, progress=interrupt)
    with raises(ValueError, "closed"):
        gather.verify()
    with raises(ValueError, "closed"):
        gather.reopen()


def interrupt(done, total):
    if done:
        raise KeyboardInterrupt


def test_all_rows_are_read_again_in_large_pieces(table):
    def reads():
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("syscr:")).split()[1])

    with engram.FileGather(table.directory, 0) as gather:
        gather.prewarm()
        before = reads()
        found = gather.verify(None)
        assert found.ok
        assert found.rows == gather.num_rows
        assert reads() - before < gather.num_rows / 20, "a read per row would take hours"


@pytest.mark.case("I02")
def test_a_file_overwritten_in_place(fresh):
    with engram.FileGather(fresh.directory, 0) as gather:
        path = Path(gather.files[0])
        assert gather.verify(None).ok
        with path.open("r+b") as file:
            file.seek(gather.planes[0].pieces[0].offset)
            file.write(b"new bytes")
        found = gather.verify(0)
        assert [(problem.kind, problem.path) for problem in found.problems] == [
            ("overwritten", str(path))
        ]
        assert "modified in place" in str(found)


@pytest.mark.case("I02")
def test_a_file_overwritten_in_place_whose_times_were_put_back(fresh):
    with engram.FileGather(fresh.directory, 0) as gather:
        piece = gather.planes[0].pieces[0]
        assert gather.verify(None).ok
        rewrite(Path(piece.file), piece.offset + 2 * gather.row_bytes, b"new bytes")
        assert gather.verify(0).ok, "the times tell nothing"
        found = gather.verify(None)
        assert [(problem.kind, problem.row) for problem in found.problems] == [
            ("overwritten", piece.first_row + 2)
        ]


@pytest.mark.case("I02")
def test_a_file_renamed_over_or_unlinked_goes_on_being_served(fresh, io):
    ids = np.arange(0, 15_000, 7)
    with engram.FileGather(fresh.directory, 0, io=io) as gather:
        first, second = map(Path, gather.files)
        copy = first.with_suffix(".copy")
        shutil.copy(first, copy)
        with copy.open("r+b") as file:
            file.seek(-10_000, os.SEEK_END)
            file.write(bytes(10_000))
        copy.rename(first)
        second.unlink()
        assert right(fresh, ids, gather.gather(ids))
        found = gather.verify(0)
        assert [problem.kind for problem in found.problems] == ["replaced", "removed"]


def test_a_file_cut_short(fresh, io):
    with engram.FileGather(fresh.directory, 0, io=io) as gather:
        os.truncate(gather.files[0], 100_000)
        found = gather.verify(2000)
        truncated = [problem for problem in found.problems if problem.kind == "truncated"]
        assert [(problem.path, problem.offset) for problem in truncated] == [
            (gather.files[0], 100_000)
        ]
        assert kinds(found) == {"truncated", "unreadable"}
        assert len(found.problems) == 100
        assert found.more > 0


@pytest.mark.case("F16")
def test_second_copies_are_listed_and_no_problem(tmp_path):
    name = "model.embed_tokens.weight"
    checkpoint(tmp_path / "c", {"model-00001-of-00001.safetensors": [tensor(name, "U8", (50, 16))]})
    safetensors(tmp_path / "c" / "model.safetensors", tensor(name, "U8", (50, 16), seed=9))
    with engram.FileGather(tmp_path / "c", name) as gather:
        found = gather.verify()
        assert found.ok
        assert found.shadowed == ((name, str(tmp_path / "c" / "model.safetensors")),)
        assert "ignored: a second copy" in str(found)


@pytest.fixture
def generations(tmp_path):
    """Two checkpoints of the same tables with other bytes, and other numbers of rows."""
    made = []
    for seed, rows in ((1, 6000), (2, 8000)):
        made.append(synth.write(tmp_path / str(seed), "qwen", dtype="fp8", rows=rows, seed=seed))
    return made


def test_reopening_serves_the_new_files(generations, io):
    old, new = generations
    with engram.FileGather(old.directory, io=io) as gather:
        ids = np.arange(gather.num_rows)
        assert right(old, ids, gather.gather(ids))
        gather.reopen(new.directory)
        assert gather.num_rows > len(ids)
        ids = np.arange(gather.num_rows)
        assert right(new, ids, gather.gather(ids))
        assert gather.stats()["rows"] == len(ids)
        assert all(str(new.directory) in file for file in gather.files)
        # Without a path, the same place again, where files may have been replaced.
        for each in Path(old.directory).iterdir():
            shutil.copy(each, new.directory / (each.name + ".new"))
            (new.directory / (each.name + ".new")).rename(new.directory / each.name)
        gather.reopen()
        ids = np.arange(gather.num_rows)
        assert right(old, ids, gather.gather(ids))
        assert gather.verify().ok


def test_a_reopening_that_fails_leaves_everything_as_it_was(generations, tmp_path, two_planes):
    old, _ = generations
    other = synth.write(tmp_path / "other", "qwen", dtype="bf16", rows=3000)
    with engram.FileGather(old.directory) as gather:
        before = gather.info
        with raises(FileNotFoundError, "nowhere"):
            gather.reopen(tmp_path / "nowhere")
        with raises(ValueError, "another layout", "open a new FileGather"):
            gather.reopen(other.directory)
        with raises(ValueError, before.name):
            gather.reopen(two_planes)
        assert gather.info is before
        ids = np.arange(gather.num_rows)
        assert right(old, ids, gather.gather(ids))


@pytest.mark.parametrize("io", ["auto", "pread"])
def test_a_batch_never_mixes_generations(generations, io):
    ids = np.arange(0, 5500)
    expected = [synth.expected_rows(info, ids)["weight"] for info in generations]
    stop, wrong, served = threading.Event(), [], [0, 0]

    with engram.FileGather(generations[0].directory, io=io) as gather:

        def work():
            while not stop.is_set():
                rows = gather.gather(ids).view(np.uint8)
                same = [(rows == each).all() for each in expected]
                if not any(same):
                    wrong.append(rows)
                served[same.index(True)] += 1

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for turn in range(1, 31):
            gather.reopen(generations[turn % 2].directory)
            # A call that begins now sees the new files.
            assert (gather.gather(ids).view(np.uint8) == expected[turn % 2]).all()
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert all(served)


def test_reopening_leaves_nothing_open(generations):
    def descriptors():
        return sum(str(generations[0].directory.parent) in link for link in links())

    def links():
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                yield str(descriptor.readlink())

    with engram.FileGather(generations[0].directory) as gather:
        opened = descriptors()
        for turn in range(50):
            gather.reopen(generations[turn % 2].directory)
        assert descriptors() == opened == len(gather.files)
    assert descriptors() == 0
