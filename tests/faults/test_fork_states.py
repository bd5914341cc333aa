"""Forks while a thread of the parent holds something, or is in the middle of a call."""

from __future__ import annotations

import pytest
from children import child

from engram import synth

FORKS = """
import itertools, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Forking with threads is what this is about.
directory = sys.argv[1]
info = synth.load(directory)
ids = np.arange(0, 19_000, 5)
stop = threading.Event()
failed = []

def keep(work):
    def run():
        while not stop.is_set():
            try:
                work()
            except BaseException as error:
                failed.append(repr(error))
                raise
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread

def forked(work, seconds=20):
    # What becomes of a child that does `work`: its exit code, or "hangs".
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 2
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(code)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return "hangs"

def outcomes(work, threads, times=15):
    codes = []
    for turn in range(times):
        time.sleep(0.003 * (turn % 5))
        codes.append(forked(work))
        if codes[-1] != 0:
            break
    stop.set()
    for thread in threads:
        thread.join(20)
    report(codes=codes, failed=failed)
"""


def all_well(seen):
    assert seen["failed"] == []
    assert set(seen["codes"]) == {0}, seen["codes"]


def test_while_mappings_are_trimmed(tmp_path):
    """With a cap this low, threads give page tables back all the time."""
    script = """
    gather = engram.FileGather(directory, 0, max_mapped_bytes=1 << 20)
    gather.prewarm(1 << 20)
    random = np.random.default_rng(0)
    batches = [random.integers(0, gather.num_rows, 3000) for _ in range(8)]
    def work():
        for batch in batches:
            gather.gather(batch)
    def in_child():
        return all(right(info, batch, gather.gather(batch)) for batch in batches)
    outcomes(in_child, [keep(work) for _ in range(4)])
    """
    info = synth.write(tmp_path / "c", "qwen", dtype="fp8", rows=600_000)
    all_well(child(script, info.directory, before=FORKS, timeout=300))


def test_while_files_are_opened_and_closed(table):
    """Opening registers files and mappings, which the child has to do as well."""
    script = """
    def work():
        engram.FileGather(directory, 0).close()
    def in_child():
        with engram.FileGather(directory, 0) as gather:
            engram.drop_cache(gather.files)
            served = right(info, ids, gather.gather(ids))
        return served
    outcomes(in_child, [keep(work) for _ in range(4)])
    """
    all_well(child(script, table.directory, before=FORKS, timeout=300))


def test_while_rows_are_verified_and_direct_reads_are_proved(table):
    script = """
    gather = engram.FileGather(directory, 0)
    def work():
        gather.verify(300)
        with engram.FileGather(directory, 0, io="direct") as direct:
            direct.gather(ids[:50])
    def in_child():
        with engram.FileGather(directory, 0, io="direct") as direct:
            served = right(info, ids, direct.gather(ids))
        return served and gather.verify(300).ok and gather.stats()["calls"] >= 0
    outcomes(in_child, [keep(work) for _ in range(3)])
    """
    all_well(child(script, table.directory, before=FORKS, timeout=300))


def test_while_tickets_are_on_their_way(table):
    script = """
    gather = engram.FileGather(directory, 0)
    def work():
        tickets = [gather.submit(ids) for _ in range(6)]
        for ticket in tickets:
            ticket.wait()
    left = [gather.submit(ids) for _ in range(4)]
    def in_child():
        for ticket in left:
            try:
                ticket.wait(5)
                return False
            except ValueError as error:
                if "submit it again" not in str(error):
                    raise
            ticket.cancel()
        return right(info, ids, gather.submit(ids).wait())
    outcomes(in_child, [keep(work) for _ in range(3)])
    """
    all_well(child(script, table.directory, before=FORKS, timeout=300))


def test_while_cached_rows_are_moved(tmp_path):
    """The child has a half-full cache, which nobody there is filling any more."""
    script = """
    gather = engram.FileGather(directory, 0, io="pread", cache_bytes="24MiB")
    for start in range(0, 120_000, 20_000):
        gather.gather(np.arange(start, start + 20_000))
    sizes = itertools.cycle([25 << 20, 24 << 20])
    fresh = np.arange(200_000, 202_000)
    def hits():
        before = gather.stats()["cache"]["hits"]
        served = right(info, fresh, gather.gather(fresh))
        return (gather.stats()["cache"]["hits"] - before) * served
    def in_child():
        hits()
        if hits() < 1000:
            return False
        gather.resize(next(sizes))
        gather.resize(next(sizes))
        return hits() > 1000
    outcomes(in_child, [keep(lambda: gather.resize(next(sizes)))])
    """
    info = synth.write(tmp_path / "c", "qwen", dtype="fp8", rows=400_000)
    all_well(child(script, info.directory, before=FORKS, timeout=300))


def test_while_a_stage_is_prepared_and_a_storage_loads(table):
    script = """
    import torch
    from engram import EngramConfig, open_storage
    hashers = {name: engram.hasher(directory, name) for name in (0, 1)}
    gathers = engram.TableSet(directory)
    stage = engram.Stage(gathers, list(hashers.values()), max_tokens=64, device="cpu")
    tokens = np.arange(1, 60)
    starts = np.array([0, len(tokens)], np.int32)
    context = np.full((1, hashers[0].context_len), hashers[0].filler)
    def step():
        stage.prepare(tokens, starts, context)
        return bytes(np.asarray(stage.rows(0).view(torch.uint8)).tobytes())
    expected = step()
    storage = open_storage(EngramConfig(cpu_offload=True), (directory, 0))
    def work():
        step()
        storage.lookup(ids)
        open_storage(EngramConfig(cpu_offload=True), (directory, 0)).close()
    def in_child():
        own = open_storage(EngramConfig(cpu_offload=True), (directory, 0))
        served = right(info, ids, own.lookup(ids)) and right(info, ids, storage.lookup(ids))
        own.close()
        storage.close()
        return served and step() == expected
    outcomes(in_child, [keep(work)])
    """
    all_well(child(script, table.directory, before=FORKS, timeout=300))


@pytest.mark.parametrize("cache_bytes", [0, 300_000])
@pytest.mark.parametrize("io", ["auto", "mmap", "pread", "uring", "direct"])
def test_inside_a_gather_by_a_signal_handler_that_returns(table, io, cache_bytes):
    """The child comes back into the middle of a call whose threads and reads are the parent's."""
    script = """
    import signal
    gather = engram.FileGather(directory, 0, io=sys.argv[2], cache_bytes=int(sys.argv[3]))
    many = np.random.default_rng(0).integers(0, gather.num_rows, 800_000)
    out = np.empty((len(many), gather.row_bytes), np.uint8)
    gather.gather(ids)
    pids = []
    def handler(*_):
        pid = os.fork()
        if pid == 0:
            pids.clear()
            signal.alarm(30)
        pids.append(pid)
    parent = os.getpid()
    signal.signal(signal.SIGUSR1, handler)
    def interrupt():
        time.sleep(0.08)
        os.kill(parent, signal.SIGUSR1)
    helper = threading.Thread(target=interrupt)
    helper.start()
    code = 0
    try:
        engram.drop_cache(gather.files)
        while not pids:
            gather.gather(many, out)
    except ValueError as error:
        code = 0 if "forked while this call was running" in str(error) else 4
    if os.getpid() != parent:
        try:
            # As if nothing had happened, and with all threads and rings new.
            served = right(info, ids, gather.gather(ids))
            engram.drop_cache(gather.files)
            served = served and right(info, ids, gather.gather(ids))
            gather.close()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(code if served else 2)
    helper.join()
    code = os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1])
    report(codes=[code], failed=failed, served=right(info, many, out))
    """
    seen = child(script, table.directory, io, cache_bytes, before=FORKS, timeout=120)
    all_well(seen)
    assert seen["served"], "the parent's call ends as if nothing had happened"


def test_inside_a_progress_callback_that_returns(table):
    script = """
    gather = engram.FileGather(directory, 0)
    parent = os.getpid()
    pids = []
    def progress(done, total):
        if done and not pids:
            pids.append(os.fork())
    try:
        gather.verify(None, progress=progress)
        code = 0
    except ValueError as error:
        code = 0 if "forked while this call was running" in str(error) else 4
    if os.getpid() != parent:
        os._exit(code if right(info, ids, gather.gather(ids)) else 2)
    report(codes=[os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1])], failed=failed)
    """
    all_well(child(script, table.directory, before=FORKS, timeout=120))
