"""The thread that lets graphs go on: it outlives failures, and no fork carries it over."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch")

from engram import _notices, late

TESTS = Path(__file__).parent


class Looked:
    """Something that waits, and counts how often it was looked after."""

    patience = 0.01

    def __init__(self, times=3):
        self.times = times
        self.enough = threading.Event()
        self.given_back = False

    def look(self, now):
        self.times -= 1
        if self.times <= 0:
            self.enough.set()

    def give_back(self, seconds):
        assert seconds <= self.patience
        self.given_back = True


class Broken(Looked):
    def look(self, now):
        raise ZeroDivisionError("no look")

    def give_back(self, seconds):
        raise ZeroDivisionError("nor this")


def test_one_that_fails_leaves_no_other_waiting(caplog, monkeypatch):
    monkeypatch.setattr(_notices, "_said", set())
    watched = [Broken(), Looked(), Broken(), Looked(), Broken()]
    with caplog.at_level(logging.WARNING, "engram"):
        try:
            for one in watched:
                late._watch.add(one)
            assert all(one.enough.wait(20) for one in watched[1::2])
            late._watch.release()
        finally:
            for one in watched:
                late._watch.discard(one)
    assert all(one.given_back for one in watched[1::2])
    said = " ".join(record.message for record in caplog.records)
    assert "ZeroDivisionError('no look')" in said
    assert "ZeroDivisionError('nor this')" in said


FORKED = """
import os, sys, threading, time
sys.path.insert(0, sys.argv[1])

from engram import late, synth
from late_support import Device, Server, steps_of
from stage_support import SIZES, Opened
from test_late_watch import Looked

opened = Opened(synth.write(sys.argv[2], "qwen", **SIZES["qwen"]), "qwen")
device = Device()
server = Server(opened, device)
(good,) = steps_of(opened, 1, first=3)
server.run(good)
server.launch()
assert not device.idle(0.01), "a graph waits at the fork"

held, release = threading.Event(), threading.Event()

def hold():
    with late._watch._lock, server.late._state, server.late._filling:
        held.set()
        release.wait(60)

threading.Thread(target=hold, daemon=True).start()
assert held.wait(20)
child = os.fork()
if child == 0:
    if sys.argv[3] == "exit":
        sys.exit(7)
    own = Looked()
    late._watch.add(own)
    assert own.enough.wait(20), "a thread of its own"
    late._watch.discard(own)
    assert server.late not in late._watch
    server.stage.close()
    sys.exit(7)
release.set()
begun, done = time.monotonic(), 0
# A child that waited for its parent's device would take five seconds.
while not done and time.monotonic() - begun < 4:
    done, status = os.waitpid(child, os.WNOHANG)
    time.sleep(0.01)
if not done:
    os.kill(child, 9)
    os.waitpid(child, 0)
    raise SystemExit("the child hangs")
assert os.waitstatus_to_exitcode(status) == 7, status
assert server.late in late._watch
server.stage.close()
assert device.idle()
assert server.right(server.seen[0], good)
assert server.zeros(server.seen[1]), "the parent's graph was the parent's to serve"
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("how", ["exit", "close"])
def test_a_child_has_nothing_to_look_after(tmp_path, how):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, str(TESTS), str(tmp_path / "c"), how],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
