"""What is said through `logging`, and when: never by a handler of signals, never by a worker."""

from __future__ import annotations

import errno
import json
import logging
import threading
from pathlib import Path

import numpy as np
import pytest
from children import SYSCALLS, child

import engram
from engram import _notices, synth


@pytest.fixture
def log(caplog, monkeypatch):
    """Records of the logger, as if nothing had been said in this process before."""
    monkeypatch.setattr(_notices, "_said", set())
    caplog.set_level(logging.DEBUG, logger="engram")

    def of(event):
        found = [record for record in caplog.records if getattr(record, "event", None) == event]
        assert all(record.name == "engram" for record in found)
        return found

    return of


def test_opening_is_logged(table, log):
    with engram.FileGather(table.directory, 0) as gather:
        (record,) = log("open")
        assert record.levelno == logging.INFO
        assert record.table == gather.info.name
        assert record.path == str(table.directory)
        assert (record.rows, record.row_bytes) == (gather.num_rows, gather.row_bytes)
        assert record.files == len(gather.files)
        assert record.io == gather.stats()["io"]["runs"]
        assert record.fallbacks == gather.stats()["io"]["fallbacks"]
        assert str(gather.num_rows) in record.getMessage()
        gather.reopen()
        assert len(log("open")) == 2
        gather.gather(np.arange(100))
        assert len(log("open")) == 2
    assert log("fault") == []


def test_nothing_is_made_of_records_that_nobody_wants(table, caplog, monkeypatch):
    caplog.set_level(logging.WARNING, logger="engram")
    made = []
    monkeypatch.setattr(logging.Logger, "makeRecord", lambda *_: made.append(1))
    with engram.FileGather(table.directory, 0) as gather:
        gather.gather(np.arange(100))
    assert made == []


def test_a_lost_page_is_logged_by_the_call_that_met_it(disk, log):
    with engram.FileGather(disk.path, 0, io="mmap") as gather:
        (piece, *_) = gather.planes[0].pieces
        disk.set(Path(piece.file).name, errors=[(piece.offset, piece.offset + 1)])
        caller = threading.get_ident()
        with pytest.raises(OSError, match="Input/output error"):
            gather.gather([piece.first_row])
        lost, failed = log("fault")
        assert lost.levelno == logging.WARNING
        assert lost.table == failed.table == gather.info.name
        assert lost.rows_reread >= 1
        assert failed.levelno == logging.INFO
        assert failed.errno == errno.EIO
        assert failed.row == piece.first_row
        assert failed.path == piece.file
        (fallback,) = log("fallback")
        assert fallback.levelno == logging.WARNING
        assert "a part of the mapping" in fallback.fallback
        assert {record.thread for record in (lost, failed, fallback)} == {caller}
        rows = gather.stats()["rows_reread"]
        assert lost.rows_reread == rows
        # The page is known to be lost now, so nothing new has happened to it.
        with pytest.raises(OSError, match="Input/output error"):
            gather.gather([piece.first_row])
        assert len(log("fallback")) == 1


@pytest.mark.parametrize("way", ["gather", "set", "ticket"])
def test_a_failed_read_is_logged_with_its_place(disk, log, way):
    with engram.TableSet(disk.path) as tables:
        name, gather = next(iter(tables.gathers.items()))
        (piece, *_) = gather.planes[0].pieces
        disk.set(Path(piece.file).name, errors=[(piece.offset, piece.offset + 1)])
        row = piece.first_row
        call = {
            "gather": lambda: gather.gather([row]),
            "set": lambda: tables.gather({name: [row]}),
            "ticket": lambda: gather.submit([row]).wait(),
        }[way]
        with pytest.raises(OSError, match="Input/output error"):
            call()
        record = log("fault")[-1]
        assert (record.table, record.row, record.errno) == (name, row, errno.EIO)
        assert record.offset is not None


def test_errors_of_callers_are_no_faults(table, log):
    with engram.FileGather(table.directory, 0) as gather:
        with pytest.raises(IndexError):
            gather.gather([-1])
        engram.drop_cache(gather.files)
        with pytest.raises(TimeoutError):
            gather.gather(np.arange(19_000), timeout=0)
    assert log("fault") == []


def test_giving_page_tables_back_is_logged_now_and_then(tmp_path, log, monkeypatch):
    info = synth.write(tmp_path / "c", "qwen", dtype="fp8", rows=400_000)
    now = [0.0]
    monkeypatch.setattr(_notices.time, "monotonic", lambda: now[0])
    generator = np.random.default_rng(0)

    def some(gather):
        before = gather.stats()["bytes_trimmed"]
        for _ in range(400):
            gather.gather(generator.integers(0, gather.num_rows, 256))
            if gather.stats()["bytes_trimmed"] > before:
                return

    with engram.FileGather(info.directory, max_mapped_bytes=4 << 20) as gather:
        some(gather)
        some(gather)
        (first,) = log("trim")
        assert first.levelno == logging.DEBUG
        now[0] = 2.0
        some(gather)
        _, second = log("trim")
        total = gather.stats()["bytes_trimmed"]
        assert first.bytes_trimmed + second.bytes_trimmed == total > 0


def test_growth_survives_a_reopening():
    assert _notices._growth(3, 10) == 7
    assert _notices._growth(10, 3) == 3, "the counters began anew"


@pytest.mark.skipif(not SYSCALLS, reason="system call numbers of this machine are not known here")
def test_records_are_ready_for_a_formatter_of_json(table):
    script = """
    import logging

    class Lines(logging.Formatter):
        def format(self, record):
            names = ("event", "table", "fallback", "io")
            fields = {name: getattr(record, name, None) for name in names}
            return json.dumps({"level": record.levelname, **fields})

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines())
    logging.getLogger("engram").addHandler(handler)
    logging.getLogger("engram").setLevel(logging.INFO)
    refuse("io_uring_setup", 1)
    for _ in range(3):
        engram.FileGather(sys.argv[1], 0).close()
    report()
    """
    seen = child(script, table.directory)
    lines = [json.loads(line) for line in seen["stderr"].splitlines()]
    assert [line["event"] for line in lines] == ["open", "fallback", "open", "open"]
    assert lines[1]["level"] == "WARNING"
    assert lines[1]["table"] == table.tables[0].name
    assert "io_uring refused" in lines[1]["fallback"]
    assert lines[0]["io"] == "mmap+pread"
