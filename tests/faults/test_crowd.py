"""Many threads, forks at every moment, exits with work under way, and nothing left open."""

from __future__ import annotations

import sysconfig
import threading
import time

import numpy as np
import pytest
from children import child, right

import engram

OPEN = """
directory = sys.argv[1]
info = synth.load(directory)
"""


def test_sixteen_threads_with_batches_of_every_size(table, io):
    wrong, counts = [], []
    until = time.monotonic() + 0.7
    with (
        engram.FileGather(table.directory, 0, io=io) as gather,
        engram.FileGather(table.directory, 1, io=io) as other,
    ):

        def work(seed):
            random = np.random.default_rng(seed)
            count = 0
            while time.monotonic() < until:
                place = int(random.integers(2))
                size = int(random.choice([0, 1, 16, 300, 3000]))
                ids = random.integers(0, gather.num_rows, size)
                if seed == 0 and random.integers(8) == 0:
                    engram.drop_cache(gather.files)
                if not right(table, ids, (gather, other)[place].gather(ids), place):
                    wrong.append((seed, count))
                count += 1
            counts.append(count)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert len(counts) == 16


FORK = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Forking with threads is what this is about.
state, io = sys.argv[2:]
ids = np.arange(0, 19_000, 5)
gather = engram.FileGather(directory, 0, io=io)
stop = threading.Event()
def work():
    while not stop.is_set():
        assert right(info, ids, gather.gather(ids))
threads = []
if state != "unused":
    engram.drop_cache(gather.files)
    gather.gather(ids)
if state == "gathering":
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
codes = []
for turn in range(5):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if turn % 2:
                engram.drop_cache(gather.files)
            served = right(info, ids, gather.gather(ids))
            fresh = engram.FileGather(directory, 1, io=io)
            served = served and right(info, ids, fresh.gather(ids), 1)
            if turn == 3:
                gather.close()
            code = 0 if served else 2
        finally:
            os._exit(code)
    until = time.monotonic() + 30
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done or time.monotonic() > until:
            break
        time.sleep(0.01)
    codes.append(os.waitstatus_to_exitcode(status) if done else "hangs")
stop.set()
for thread in threads:
    thread.join()
report(codes=codes, served=right(info, ids, gather.gather(ids)))
"""


@pytest.mark.parametrize("io", ["auto", "pread", "direct"])
@pytest.mark.parametrize("state", ["unused", "used", "gathering"])
def test_forks(table, state, io):
    seen = child(FORK, table.directory, state, io, before=OPEN)
    assert seen["codes"] == [0] * 5
    assert seen["served"]


@pytest.mark.parametrize("io", ["auto", "pread", "uring"])
def test_an_exit_with_gathers_under_way(table, io):
    script = """
    gather = engram.FileGather(directory, 0, io=sys.argv[2])
    def work():
        while True:
            engram.drop_cache(gather.files)
            gather.gather(np.arange(gather.num_rows))
            gather.prefetch(np.arange(gather.num_rows))
    for _ in range(4):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(0.3)
    report()
    """
    child(script, table.directory, io, before=OPEN, timeout=30)


def test_ten_thousand_opens_and_closes_leak_nothing(table):
    script = """
    def state():
        return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")),
                sum(1 for _ in open("/proc/self/maps"))]
    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * 4096
    seen, sizes = [], []
    for turn in range(10_001):
        with engram.FileGather(directory, turn % 2, io="auto" if turn % 3 else "pread") as gather:
            if turn % 100 == 0:
                gather.gather(np.arange(50))
        if turn in (1000, 5000, 10_000):
            seen.append(state())
            sizes.append(resident())
    report(seen=seen, sizes=sizes)
    """
    seen = child(script, table.directory, before=OPEN, timeout=300)
    descriptors, threads, maps = zip(*seen["seen"], strict=True)
    assert len(set(descriptors)) == 1
    assert max(threads) - min(threads) <= 32
    assert maps[2] <= maps[0] + 2 * (threads[2] - threads[0]) + 12
    assert seen["sizes"][2] - seen["sizes"][0] < 4 << 20


INTERRUPT = """
import signal
gather = engram.FileGather(directory, 0, io=sys.argv[2])
ids = np.random.default_rng(0).integers(0, gather.num_rows, 6_000_000)
out = np.empty((len(ids), gather.row_bytes), np.uint8)
out[::16] = 1  # Its pages are there.
gather.prewarm()
main = threading.main_thread().ident
times = []
for _ in range(5):
    sent = []
    def send():
        sent.append(time.monotonic())
        signal.pthread_kill(main, signal.SIGINT)
    timer = threading.Timer(0.05, send)
    timer.start()
    try:
        while True:
            gather.gather(ids, out)
    except KeyboardInterrupt:
        times.append(time.monotonic() - sent[0])
    timer.join()
report(times=times, served=right(info, ids[:99], gather.gather(ids[:99])))
"""


def test_ctrl_c_ends_a_long_gather_within_a_tenth_of_a_second(table, io):
    seen = child(INTERRUPT, table.directory, io, before=OPEN)
    # Of five, so that a machine that was busy elsewhere for a moment does not decide.
    assert sorted(seen["times"])[1] < 0.1, seen["times"]
    assert seen["served"]


def test_subinterpreters_are_refused(table):
    """With an ImportError, and without harm to the interpreter that has the module."""
    script = """
    import importlib.util
    interpreters = next(
        (importlib.import_module(name) for name in ("_interpreters", "_xxsubinterpreters")
         if importlib.util.find_spec(name)), None)
    if interpreters is None:
        report(skip="this Python has no subinterpreters")
        sys.exit()
    gather = engram.FileGather(directory, 0)
    other = interpreters.create()
    try:
        said = interpreters.run_string(
            other, f"import sys; sys.path[:] = {sys.path!r}; import engram")
        said = str(said)  # Newer interpreters return what older ones raise.
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    interpreters.destroy(other)
    ids = np.arange(0, 19_000, 5)
    report(said=said, served=right(info, ids, gather.gather(ids)))
    """
    seen = child(script, table.directory, before=OPEN)
    if "skip" in seen:
        pytest.skip(seen["skip"])
    assert "ImportError" in seen["said"], seen["said"]
    assert "interpreter" in seen["said"]
    assert seen["served"]


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"),
    reason="this Python is no free-threaded build, and none can be installed from here",
)
def test_on_a_free_threaded_build_the_lock_is_back(table):
    """The module does not claim to do without it, so the interpreter turns it on at the import."""
    script = """
    ids = np.arange(0, 19_000, 5)
    gather = engram.FileGather(directory, 0)
    report(locked=sys._is_gil_enabled(), served=right(info, ids, gather.gather(ids)))
    """
    seen = child(script, table.directory, before=OPEN)
    assert seen["locked"]
    assert seen["served"]
