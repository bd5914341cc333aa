"""A forked child gathers, whatever its parent was doing at that moment."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from checkpoint_support import opened, safetensors, tensor

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

HELP = """
import os, sys, threading, time
import numpy as np
import engram

path, io = sys.argv[1:]
ROWS = 3000
IDS = np.random.default_rng(0).integers(0, ROWS, 5000)

def child(work):
    # Runs `work` in a forked child; says what became of it.
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    for _ in range(6000):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert status == 0, f"the child ended with {status}"
            return
        time.sleep(0.001 if _ < 500 else 0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise SystemExit("the child hangs")
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("fork") / "t.safetensors"
    return safetensors(path, tensor("t", "U8", (3000, 48)))


def run(code, path, io):
    script = HELP + textwrap.dedent(code)
    command = [sys.executable, "-W", "ignore", "-c", script, str(path), io]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_child_gathers_with_its_parents_gather_and_with_its_own(path, io):
    opened(path, "t", io).close()
    run(
        """
        gather = engram.FileGather(path, "t", io=io)
        stored = gather.gather(np.arange(ROWS))

        def work():
            assert np.array_equal(gather.gather(IDS), stored[IDS])
            gather.prefetch(IDS)
            child(lambda: gather.gather(IDS[:10]))
            gather.close()
            with engram.FileGather(path, "t", io=io) as own:
                assert np.array_equal(own.gather(IDS), stored[IDS])

        for _ in range(3):
            assert np.array_equal(gather.gather(IDS), stored[IDS])
            child(work)
        """,
        path,
        io,
    )


def test_a_child_does_not_wait_for_its_parents_calls(path, io):
    opened(path, "t", io).close()
    run(
        """
        gather = engram.FileGather(path, "t", io=io)
        stored = gather.gather(np.arange(ROWS))
        stop = False

        def keep_busy(count):
            while not stop:
                gather.gather(IDS[:count])

        threads = [threading.Thread(target=keep_busy, args=(n,)) for n in (1, 16, 5000)]
        for thread in threads:
            thread.start()

        def work():
            assert np.array_equal(gather.gather(IDS[:20]), stored[IDS[:20]])
            assert gather.stats()["calls"] > 0
            gather.close()

        try:
            for _ in range(25):
                child(work)
        finally:
            stop = True
            for thread in threads:
                thread.join()
        assert np.array_equal(gather.gather(IDS), stored[IDS])
        """,
        path,
        io,
    )


def test_a_child_of_a_callback_may_close(path):
    run(
        """
        gather = engram.FileGather(path, "t", io=io)
        gather.prewarm(progress=lambda *_: child(gather.close))
        assert gather.gather([1]).shape == (1, 48)
        """,
        path,
        "auto",
    )


def test_worker_processes_of_multiprocessing(path):
    run(
        """
        import multiprocessing

        gather = engram.FileGather(path, "t", io=io)
        stored = gather.gather(np.arange(ROWS))

        def rows(seed):
            return gather.gather(np.random.default_rng(seed).integers(0, ROWS, 3000))

        with multiprocessing.get_context("fork").Pool(3) as pool:
            for seed, got in enumerate(pool.map(rows, range(12))):
                ids = np.random.default_rng(seed).integers(0, ROWS, 3000)
                assert np.array_equal(got, stored[ids])
        """,
        path,
        "auto",
    )
