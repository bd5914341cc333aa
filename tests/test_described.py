"""What a `FileGather` says of its table, whenever it is first asked."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import engram
from engram import synth
from engram.table import TableInfo


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return synth.write(tmp_path_factory.mktemp("described"), "qwen", rows=5000, files=3).directory


def test_what_was_closed_unasked_goes_on_being_described(path):
    gather = engram.FileGather(path)
    gather.close()
    gather.close()
    with engram.FileGather(path) as other:
        assert gather.info == other.info
    assert "closed" in repr(gather)


def test_files_are_named_alike_however_the_path_is_written(path):
    with engram.FileGather(path) as gather:
        files = gather.files
    for odd in (f"{path.parent}//{path.name}", f"{path.parent}/./{path.name}/"):
        with engram.FileGather(odd) as gather:
            assert gather.files == files


def test_a_description_begun_before_a_reopening_is_not_kept(path, tmp_path, monkeypatch):
    longer = synth.write(tmp_path, "qwen", rows=9000).directory
    begun, go_on = threading.Event(), threading.Event()
    from_native = TableInfo.from_native

    def slowly(description):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert go_on.wait(20)
        return from_native(description)

    gather = engram.FileGather(path)
    monkeypatch.setattr(TableInfo, "from_native", slowly)
    reader = threading.Thread(target=lambda: gather.info)
    reader.start()
    assert begun.wait(20)
    timer = threading.Timer(0.1, go_on.set)
    timer.start()
    gather.reopen(longer)
    reader.join()
    with engram.FileGather(longer) as other:
        assert gather.num_rows == other.num_rows
        assert gather.files == other.files
    gather.close()


def test_faults_of_a_prewarm_are_not_taken_for_faults_of_copies(path):
    with engram.FileGather(path) as gather:
        gather.gather(np.arange(100))
        engram.drop_cache(gather.files)
        gather.prewarm()
        for seed in range(200):
            ids = np.random.default_rng(seed).integers(0, gather.num_rows, 300)
            gather.gather(ids)
        assert gather.stats()["major_faults"] == 0
