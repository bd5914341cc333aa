"""What places other than files fall back from is logged, with `event` and its fields."""

from __future__ import annotations

import errno
import logging

import pytest

import engram
from engram import _notices
from engram.storage import hugepages, numa

ALONE = {"data_parallel_size": 2, "data_parallel_rank": 0}
"""A replica without any way to the other."""


@pytest.fixture
def log(caplog, monkeypatch):
    """Fallbacks that are logged, as if nothing had been said in this process before."""
    monkeypatch.setattr(_notices, "_said", set())
    monkeypatch.setattr(numa, "_warned", set())
    caplog.set_level(logging.INFO, logger="engram")

    def fallbacks():
        found = [record for record in caplog.records if getattr(record, "event", "") == "fallback"]
        assert all((each.name, each.levelno) == ("engram", logging.WARNING) for each in found)
        return found

    return fallbacks


def test_a_copy_of_ones_own_instead_of_a_shared_one(checkpoint, log):
    with pytest.warns(UserWarning, match="cannot reach one another"):
        storage = engram.open_storage({}, checkpoint().directory, parallel=ALONE)
    with storage:
        (record,) = [each for each in log() if "not shared" in each.fallback]
        assert record.table == storage.info.name
        assert "cannot reach one another" in record.fallback
        assert record.getMessage() == record.fallback


def test_ordinary_pages_instead_of_huge_ones(log, monkeypatch):
    monkeypatch.setattr(hugepages, "coverage", lambda _: 0.5)
    buffer = engram.HostBuffer(4096)
    with pytest.warns(UserWarning, match="use_thp: 50%"):
        hugepages.report(buffer, "no room")
    (record,) = log()
    assert "use_thp: 50% of the table is in huge pages" in record.fallback
    monkeypatch.setattr(hugepages, "coverage", lambda _: 1.0)
    hugepages.report(buffer, None)
    assert len(log()) == 1


def test_any_memory_node_instead_of_the_one_that_was_chosen(log):
    class Refused:
        def place(self, nodes, interleave):
            raise OSError(errno.EPERM, "Operation not permitted")

    with pytest.warns(UserWarning, match="mbind"):
        assert not numa.place(Refused(), [1])
    assert not numa.place(Refused(), [1])
    (record,) = log()
    assert "node 1 was refused: mbind: Operation not permitted" in record.fallback
