"""Many threads on one gather, closing while rows move, signals, and the interpreter lock."""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest

import engram
from checkpoint_support import opened, raises, raw, safetensors, tensor

ROWS, COLUMNS = 2000, 64


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("threads") / "t.safetensors"
    return safetensors(path, tensor("t", "U8", (ROWS, COLUMNS)), tensor("u", "U8", (ROWS, 9)))


@pytest.fixture(scope="module")
def stored(path):
    with engram.FileGather(path, "t") as gather:
        return gather.gather(np.arange(ROWS))


@pytest.fixture(autouse=True)
def watchdog():
    """A deadlock shows where every thread is, and ends the run."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def eager_switching():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def run(targets):
    """Runs every target in a thread of its own, all at once; raises what they raise."""
    errors = []
    barrier = threading.Barrier(len(targets))

    def call(target):
        barrier.wait()
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def unless_closed(call, *arguments):
    """What the call returns; None when it says that something is closed."""
    try:
        return call(*arguments)
    except ValueError as error:
        if "closed" not in str(error):
            raise
        return None


@pytest.mark.usefixtures("eager_switching")
def test_many_threads_use_one_gather(path, stored, io):
    with opened(path, "t", io) as gather:

        def work(seed):
            generator = np.random.default_rng(seed)
            out = np.empty((3000, COLUMNS), np.uint8)
            for count in (1, 16, 300, 3000) * 3:
                ids = generator.integers(0, ROWS, count)
                assert np.array_equal(gather.gather(ids), stored[ids])
                gather.gather(ids, out=out[:count])
                assert np.array_equal(out[:count], stored[ids])
                with raises(IndexError, row=ROWS, position=0, table="t"):
                    gather.gather([ROWS])
            gather.stats()
            gather.residency()

        run([lambda seed=seed: work(seed) for seed in range(8)])
        assert gather.stats()["calls"] == 8 * 12 * 3


@pytest.mark.usefixtures("eager_switching")
def test_threads_opening_and_closing_their_own(path, stored, io):
    opened(path, "t", io).close()

    def work(seed):
        ids = np.random.default_rng(seed).integers(0, ROWS, 100)
        for _ in range(10):
            with engram.FileGather(path, "t", io=io) as gather:
                assert np.array_equal(gather.gather(ids), stored[ids])

    run([lambda seed=seed: work(seed) for seed in range(6)])


def test_closing_waits_for_running_calls_and_turns_later_ones_away(path, stored, io):
    gather = opened(path, "t", io)
    ids = np.random.default_rng(0).integers(0, ROWS, 20_000)
    counts = {"good": 0, "closed": 0}
    started = threading.Barrier(5)
    closed = threading.Event()

    def work():
        started.wait()
        while True:
            late = closed.is_set()
            rows = unless_closed(gather.gather, ids)
            if rows is None:
                counts["closed"] += 1
                return
            assert not late, "a call that begins after closing is turned away"
            assert np.array_equal(rows, stored[ids])
            counts["good"] += 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    while counts["good"] < 4:
        time.sleep(0.001)
    gather.close()
    closed.set()
    for thread in threads:
        thread.join()
    assert counts["closed"] == 4
    assert gather.closed


def gather_until_closed(tables):
    ids = {name: [1, 2] for name in tables.gathers}
    while unless_closed(tables.gather, ids) is not None:
        pass


@pytest.mark.usefixtures("eager_switching")
def test_closing_many_at_once_while_sets_gather_in_any_order(path):
    for _ in range(30):
        first, second = engram.FileGather(path, "t"), engram.FileGather(path, "u")

        works = [partial(gather_until_closed, engram.TableSet([first, second]))]
        works += [partial(gather_until_closed, engram.TableSet([second, first]))]
        run([*works, first.close, second.close])


def test_closing_from_a_progress_callback(path, stored):
    gather = engram.FileGather(path, "t")
    seen = []

    def progress(_done, _total):
        if seen:
            return
        seen.append(gather.gather([5]))
        gather.close()
        with raises(ValueError, "closed"):
            gather.gather([5])

    assert gather.prewarm(progress=progress) == ROWS * COLUMNS
    assert np.array_equal(seen[0], stored[[5]])
    assert gather.closed


def test_rows_move_without_the_interpreter_lock(path, io):
    interval = sys.getswitchinterval()
    count, stop = [0], threading.Event()

    def tick():
        while not stop.is_set():
            count[0] += 1
            time.sleep(0)  # Gives the lock up.

    ids = np.random.default_rng(0).integers(0, ROWS, 1_000_000)
    out = np.empty((len(ids), COLUMNS), np.uint8)
    with opened(path, "t", io) as gather:
        thread = threading.Thread(target=tick)
        thread.start()
        # Nobody gives the lock up unless asked for it this long: only the gather lets `tick` run.
        sys.setswitchinterval(30)
        try:
            before = count[0]
            gather.gather(ids, out=out)
            progress = count[0] - before
        finally:
            sys.setswitchinterval(interval)
            stop.set()
            thread.join()
    assert progress > 100


class Interrupted(Exception):
    pass


@pytest.fixture
def alarm():
    """Calls a function from a signal handler some milliseconds later."""

    def arm(seconds, handler):
        signal.signal(signal.SIGALRM, lambda *_: handler())
        signal.setitimer(signal.ITIMER_REAL, seconds)

    previous = signal.getsignal(signal.SIGALRM)
    yield arm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
def test_a_signal_handler_ends_a_long_gather(path, stored, io, alarm, first):
    def interrupt():
        raise Interrupted

    ids = np.random.default_rng(0).integers(0, ROWS, 4_000_000)
    out = np.empty((len(ids), COLUMNS), np.uint8)
    with opened(path, "t", io) as gather:
        if not first:
            gather.prewarm()
        alarm(0.005, interrupt)
        with pytest.raises(Interrupted):
            gather.gather(ids, out=out)
        assert np.array_equal(gather.gather(ids[:500]), stored[ids[:500]])


def test_closing_from_a_signal_handler_does_not_wait_for_the_call_it_interrupts(
    path, stored, io, alarm
):
    gather = opened(path, "t", io)
    ids = np.random.default_rng(0).integers(0, ROWS, 500_000)
    out = np.empty((len(ids), COLUMNS), np.uint8)
    closed = []
    alarm(0.002, lambda: (gather.close(), closed.append(True)))
    gather.gather(ids, out=out)
    assert np.array_equal(out[::1000], stored[ids[::1000]])
    while not closed:
        time.sleep(0.001)
    with raises(ValueError, "closed"):
        gather.gather([1])


def test_the_last_reference_may_go_while_rows_are_prefetched(path, stored):
    for _ in range(20):
        gather = engram.FileGather(path, "t")
        gather.prefetch(np.arange(ROWS))
        del gather
    gather = engram.FileGather(path, "t")
    gather.prefetch(np.arange(ROWS))
    gather.close()
    with engram.FileGather(path, "t") as gather:
        assert np.array_equal(gather.gather([3]), stored[[3]])


@pytest.mark.case("I14")
def test_the_number_of_threads_changes_nothing_but_time(path, stored, io):
    ids = np.random.default_rng(1).integers(0, ROWS, 10_000)
    for threads in (1, 2, 32, None):
        with opened(path, "t", io, threads=threads) as gather:
            assert np.array_equal(raw(gather.gather(ids)), stored[ids])
