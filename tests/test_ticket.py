"""Tickets: rows that arrive later, errors that stay with their ticket, memory that stays put."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest
from safetensors.numpy import save_file

import engram
from engram import synth

ROWS, COLUMNS = 4000, 24
LONG = 200_000
"""Ids of a gather that takes a while."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    rows = np.random.default_rng(1).integers(0, 256, (ROWS, COLUMNS)).astype(np.uint8)
    path = tmp_path_factory.mktemp("ticket") / "a.safetensors"
    save_file({"rows": rows}, path)
    return path, rows


@pytest.fixture
def table(stored):
    with engram.FileGather(stored[0], "rows") as gather:
        yield gather


def busy(table, count=8):
    """Tickets that keep every worker of the process at work for a moment."""
    ids = np.random.default_rng(2).integers(0, ROWS, LONG)
    return [table.submit(ids) for _ in range(count)]


def test_rows_are_those_of_gather(table, stored):
    ids = np.random.default_rng(3).integers(0, ROWS, (5, 7))
    ticket = table.submit(ids)
    rows = ticket.wait(10)
    assert np.array_equal(rows, stored[1][ids])
    assert rows.dtype == table.dtype
    assert ticket.wait() is rows
    assert ticket.done()
    rows[0, 0] = 0  # the caller's own, writable


@pytest.mark.parametrize("ids", [[], [[], []], 7, [3]])
@pytest.mark.case("D13")
def test_shapes_follow_the_ids(table, stored, ids):
    rows = table.submit(ids).wait(10)
    assert rows.shape == (*np.shape(ids), COLUMNS)
    assert np.array_equal(rows, stored[1][np.array(ids, int)])


def test_torch_ids_give_torch_rows(table, stored):
    torch = pytest.importorskip("torch")
    ids = torch.tensor([[1, 2], [3, 1]])
    rows = table.submit(ids).wait(10)
    assert isinstance(rows, torch.Tensor)
    assert np.array_equal(rows.numpy(), stored[1][ids.numpy()])
    assert table.submit(torch.zeros(0, dtype=torch.int64)).wait(10).shape == (0, COLUMNS)


def test_out_is_filled_by_the_wait_and_only_then(table, stored):
    ids = np.arange(50)
    out = np.full((50, COLUMNS), 9, np.uint8)
    ticket = table.submit(ids, out)
    while not ticket.done():
        time.sleep(0.001)
    assert (out == 9).all(), "rows that have arrived are not in out before somebody waits"
    ids[:] = 0  # copied when submitted
    assert ticket.wait() is out
    assert np.array_equal(out, stored[1][:50])
    assert ticket.wait() is out


def test_tables_of_several_planes_and_sets(tmp_path):
    info = synth.write(
        tmp_path / "c", "deepseek", rows=10_000, config={"engram_head_dim": 64, "hidden_size": 16}
    )
    with engram.TableSet(info.directory) as tables:
        names = list(tables.gathers)
        ids = {names[1]: np.array([[1, 2], [8999, 1]]), names[0]: np.array([3])}
        expected = tables.gather(ids)
        rows = tables.submit(ids).wait(10)
        assert list(rows) == list(ids)
        for name in ids:
            for plane in expected[name].keys():  # noqa: SIM118 - Rows is no mapping
                assert np.array_equal(
                    rows[name][plane].view(np.uint8), expected[name][plane].view(np.uint8)
                )
        gather = tables.gathers[names[0]]
        buffer = engram.HostBuffer(gather.planes.nbytes(1))
        given = tables.submit({names[0]: [3]}, {names[0]: buffer}).wait(10)
        assert given[names[0]] is buffer
        assert bytes(buffer)[: gather.planes[0].row_bytes] == (expected[names[0]].weight.tobytes())
        with pytest.raises(ValueError, match="give all of a ticket or none"):
            tables.submit(ids, {names[0]: buffer})
        with pytest.raises(ValueError, match="no table 'x'"):
            tables.submit({"x": [1]})
        assert tables.submit({}).wait(10) == {}


def test_pad_id_gives_zeros(table, stored):
    rows = table.submit([-1, 5], pad_id=-1).wait(10)
    assert not rows[0].any()
    assert np.array_equal(rows[1], stored[1][5])


def test_an_error_belongs_to_its_ticket(table, stored):
    bad, good = table.submit([1, ROWS]), table.submit([1])
    assert np.array_equal(good.wait(10), stored[1][[1]])
    for _ in range(2):
        with pytest.raises(IndexError, match=f"row id {ROWS} at position 1") as caught:
            bad.wait(10)
        assert caught.value.position == 1
    assert bad.done()


def test_arguments_are_refused_when_submitted(table):
    with pytest.raises(TypeError, match="integers"):
        table.submit([1.5])
    with pytest.raises(ValueError, match="shape"):
        table.submit([1], np.empty((2, COLUMNS), np.uint8))
    with pytest.raises(ValueError, match="number of seconds"):
        table.submit([1], deadline=-1)
    with pytest.raises(ValueError, match="number of seconds"):
        table.submit([1]).wait(float("nan"))


def test_cancelled_tickets_leave_out_alone(table):
    crowd = busy(table)
    memory = bytearray(b"\x09" * (3 * COLUMNS))
    ticket = table.submit([1, 2, 3], np.frombuffer(memory, np.uint8).reshape(3, COLUMNS))
    assert ticket.cancel()
    assert not ticket.cancel()
    assert ticket.done()
    with pytest.raises(CancelledError):
        ticket.wait()
    for other in crowd:
        other.cancel()
    assert memory == b"\x09" * (3 * COLUMNS)
    gc.collect()
    memory.clear()  # no longer exported


def test_out_stays_exported_until_the_ticket_has_ended(table):
    crowd = busy(table)
    out = bytearray(COLUMNS)
    view = np.frombuffer(out, np.uint8).reshape(1, COLUMNS)
    ticket = table.submit([1], view)
    del view
    gc.collect()
    with pytest.raises(BufferError):
        out.clear()
    ticket.wait(60)
    out_rows = bytes(out)
    assert any(out_rows)
    del ticket, crowd
    gc.collect()
    out.clear()


def test_a_wait_that_runs_out_leaves_the_ticket_alive(table, stored):
    crowd = busy(table)
    ids = np.zeros(LONG, np.int64)
    out = np.full((LONG, COLUMNS), 9, np.uint8)
    ticket = table.submit(ids, out)
    with pytest.raises(TimeoutError, match="goes on"):
        ticket.wait(0)
    assert (out == 9).all()
    for other in crowd:
        other.cancel()
    ticket.wait(60)
    assert (out == stored[1][0]).all()


def test_a_deadline_ends_the_ticket(table):
    ticket = table.submit([1], deadline=0)
    with pytest.raises(TimeoutError, match="deadline"):
        ticket.wait(10)
    assert len(table.submit([1], deadline=60).wait(10)) == 1


def test_urgent_tickets_overtake_long_ones(table):
    crowd = busy(table, 16)
    start = time.perf_counter()
    table.submit([1, 2, 3], deadline=30).wait(60)
    assert not crowd[-1].done(), f"sixteen long gathers in {time.perf_counter() - start:.3f} s"
    for ticket in crowd:
        ticket.cancel()


def test_closing_serves_tickets_in_flight(stored):
    table = engram.FileGather(stored[0], "rows")
    tickets = [table.submit(np.full(50_000, row)) for row in range(12)]
    table.close()
    for row, ticket in enumerate(tickets):
        assert ticket.done()
        assert (ticket.wait(0) == stored[1][row]).all()
    with pytest.raises(ValueError, match="closed"):
        table.submit([1])


def test_dropping_tickets_is_safe(stored):
    for _ in range(20):
        table = engram.FileGather(stored[0], "rows")
        out = np.full((1000, COLUMNS), 9, np.uint8)
        for _ in range(10):
            table.submit(np.arange(1000), out)
        table.close()
        assert (out == 9).all()


def test_many_threads_share_tickets(table, stored):
    ids = np.random.default_rng(4).integers(0, ROWS, (40, 300))
    outs = np.zeros((40, 300, COLUMNS), np.uint8)
    tickets = [table.submit(row, out) for row, out in zip(ids, outs, strict=True)]
    failures = []

    def wait_for_all():
        for place, ticket in enumerate(tickets):
            if not np.array_equal(ticket.wait(60), stored[1][ids[place]]):
                failures.append(place)

    threads = [threading.Thread(target=wait_for_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


def test_a_signal_ends_the_wait(table):
    crowd = busy(table)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGUSR1))

    def wait_until_interrupted():
        waiting = table.submit(np.zeros(LONG, np.int64))
        for _ in range(1000):
            waiting.wait(60)
            waiting = table.submit(np.zeros(LONG, np.int64))

    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            wait_until_interrupted()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    for other in crowd:
        other.cancel()


SCRIPT = """
import sys, numpy as np, engram
table = engram.FileGather(sys.argv[1], "rows")
ids = np.zeros(400_000, np.int64)
out = np.empty((ids.size, 24), np.uint8)
tickets = [table.submit(ids) for _ in range(6)] + [table.submit(ids, out) for _ in range(3)]
{}
print("done")
"""


@pytest.mark.parametrize(
    "last",
    ["", "import os, signal; tickets = None", "keep = sys.modules.setdefault('kept', tickets)"],
)
def test_the_interpreter_exits_with_tickets_in_flight(stored, last):
    result = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", SCRIPT.format(last), str(stored[0])],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


FORK = """
if True:
    import os
    child = os.fork()
    if child == 0:
        try:
            tickets[0].wait(5)
        except ValueError as error:
            assert "fork" in str(error)
            assert not tickets[0].cancel()
            assert table.submit([1, 2]).wait(20).shape == (2, 24)
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def test_a_forked_child_says_why_and_works(stored):
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT.format(FORK), str(stored[0])],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")
