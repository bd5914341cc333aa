"""Threads, memory and descriptors that run out while engram works."""

from __future__ import annotations

import pytest
from children import SYSCALLS, child

GATHER = """
directory = sys.argv[1]
info = synth.load(directory)
ids = np.arange(0, 19_000, 7)

def served(gather):
    return all(right(info, ids, gather.gather(ids)) for _ in range(2))
"""


@pytest.mark.skipif(not SYSCALLS, reason="system call numbers of this machine are not known here")
def test_no_thread_can_be_started_any_more(table):
    """Callers meet the refusal while others' jobs come and go; whoever is not refused is served."""
    script = """
    gather = engram.FileGather(directory, 0, io="direct")
    other = engram.FileGather(directory, 0, io="uring")
    few = np.arange(0, 19_000, 5000)
    counts = {"served": 0, "refused": 0, "others": 0, "stuck": 0}
    begin, stop = threading.Event(), threading.Event()

    def submit():
        begin.wait()
        while not stop.is_set():
            try:
                ticket = gather.submit(few)
                ticket.wait(5)
                counts["served"] += 1
            except TimeoutError:
                counts["stuck"] += 1
            except OSError as refused:
                known = "cannot start a reading thread" in str(refused)
                counts["refused" if known else "others"] += 1

    def prefetch():
        random = np.random.default_rng(0)
        begin.wait()
        while not stop.is_set():
            try:
                other.prefetch(random.integers(0, other.num_rows, 4))
            except OSError:
                pass

    submit_threads = [threading.Thread(target=submit, daemon=True) for _ in range(2)]
    threads = [threading.Thread(target=prefetch, daemon=True), *submit_threads]
    for thread in threads:
        thread.start()
    gather.submit(few).wait()
    for name in ("clone", "clone3"):
        refuse(name, 11)
    begin.set()  # With one reading thread for all of them.
    time.sleep(float(sys.argv[2]))
    stop.set()
    for thread in threads:
        thread.join(20)
    report(**counts, after=[right(info, [1, 2, 3], ticket.wait(5))
                            for ticket in [gather.submit([1, 2, 3]) for _ in range(5)]])
    """
    seen = child(script, table.directory, 2.5, before=GATHER)
    assert seen["served"] > 10
    assert (seen["stuck"], seen["others"]) == (0, 0)
    assert seen["after"] == [True] * 5
