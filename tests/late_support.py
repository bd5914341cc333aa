"""Servers that launch graphs before their rows are there, and a device that is a thread."""

from __future__ import annotations

import queue
import threading
import time

import numpy as np
import pytest
import torch

import engram
from engram import HostBuffer
from engram.graphwait import READY, TAKEN, Word
from stage_support import step

LONG = 20.0
ROOM = 16
"""Tokens that the captured graphs have room for."""


class Fence:
    def __init__(self):
        self.event = threading.Event()

    def done(self):
        return self.event.is_set()


class Graph:
    def __init__(self, device):
        self.device = device
        self.work = []

    def __enter__(self):
        assert self.device.capture is None
        self.device.capture = self.work
        return self

    def __exit__(self, *_):
        self.device.capture = None

    def replay(self):
        for work in self.work:
            self.device.queue.put(work)


class Device:
    """Runs what it is given in order; as a `Copier` and as `GraphWaits`, the way CUDA would.

    Args:
        slow: Seconds by which every copy of a graph is late.
        early: Whether the word is given back before the copy instead of after it, which is wrong.
    """

    name = "thread"

    def __init__(self, slow=0.0, early=False, why_not=None):
        self.slow, self.early, self.why_not = slow, early, why_not
        self.queue = queue.SimpleQueue()
        self.capture = None
        self.log = []
        self.waited = 0
        self.stopped = False
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while (work := self.queue.get()) is not None:
            work()

    def enqueue(self, work):
        self.queue.put(work) if self.capture is None else self.capture.append(work)

    def idle(self, seconds=LONG):
        """Waits until everything is done; whether it is."""
        event = threading.Event()
        self.queue.put(event.set)
        return event.wait(seconds)

    def stop(self):
        self.stopped = True
        self.queue.put(None)
        self.thread.join(LONG)

    # What a copier does.

    def host(self, nbytes, *, pin):
        return HostBuffer(nbytes)

    def capturing(self):
        return self.capture is not None

    def upload(self, copies, zeros, slot):
        fence = Fence()

        def work():
            for target, source in copies:
                target.copy_(source)
            for target in zeros:
                target.zero_()
            fence.event.set()

        self.enqueue(work)
        self.log.append("upload")
        return fence

    def download(self, copies):
        raise AssertionError("tokens are on the host")

    def read(self):
        self.log.append("read")

    def reread(self):
        self.log.append("reread")

    def join(self):
        pass

    # What graphs wait with.

    def refusal(self):
        return self.why_not

    def word(self, memory):
        return Word(memory, memory.address)

    def wait(self, word):
        def work():
            if word.get() != READY:
                self.waited += 1
            while word.get() != READY and not self.stopped:
                time.sleep(1e-4)

        self.capture.append(work)
        if self.early:
            self.capture.append(lambda: word.set(TAKEN))

    def copy(self, copies):
        def work():
            time.sleep(self.slow)
            for target, source in copies:
                target.copy_(source)

        self.capture.append(work)

    def reset(self, word):
        if not self.early:
            self.capture.append(lambda: word.set(TAKEN))


def planes_of(stage):
    """Place of the table, name and bytes `[tokens, row]` of every plane of the fixed buffers."""
    for place in range(len(stage.tables)):
        rows = stage.rows(place)
        names = ["weight"] if isinstance(rows, torch.Tensor) else list(rows.keys())
        for name in names:
            plane = rows if isinstance(rows, torch.Tensor) else rows[name]
            yield (place, name), plane.view(torch.uint8).reshape(len(plane), -1)


class BaseServer:
    """A stage, a late step, and a graph whose forwards keep what they read in `seen`."""

    def __init__(self, opened, **options):
        self.opened = opened
        self.stage = engram.Stage(opened.tables, opened.hashers, max_tokens=64, **options)

    def launch(self):
        self.late.launch(self.replay)

    def run(self, arguments):
        return self.late.run(self.replay, *arguments)

    def right(self, seen, arguments):
        """Whether a forward read the rows of a step, and zeros behind them."""
        owned = int(arguments[1][-1])
        for place in range(len(self.opened.hashers)):
            for name, wanted in self.opened.expected(place, *arguments).items():
                held = seen[place, name][:ROOM]
                if not np.array_equal(held[:owned], wanted) or held[owned:].any():
                    return False
        return True

    def zeros(self, seen):
        return not any(plane[:ROOM].any() for plane in seen.values())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stage.close()


class Server(BaseServer):
    """On a device that is a thread."""

    def __init__(self, opened, device, patience=LONG):
        super().__init__(opened, device="cpu", patience=patience, copier=device)
        self.device = device
        self.late = self.stage.late(ROOM, driver=device)
        self.seen = []
        self.graph = Graph(device)
        with self.graph:
            self.late.wait()
            device.enqueue(self.forward)

    def forward(self):
        self.seen.append({key: plane.numpy().copy() for key, plane in planes_of(self.stage)})

    def replay(self):
        self.graph.replay()

    def idle(self, seconds=LONG):
        return self.device.idle(seconds)


def steps_of(opened, count, first=0):
    """Steps that fit a graph, some of them empty."""
    return [
        step(opened.hashers[0], seed, tokens=(seed * 5) % (ROOM + 1), requests=3)
        for seed in range(first, first + count)
    ]


def check_many_steps(server, count):
    """Every forward reads the rows of its own step, whether or not it had to wait for them."""
    steps = steps_of(server.opened, count)
    assert server.late.waits
    assert server.late.reason is None
    for number, arguments in enumerate(steps):
        server.launch()
        if number % 10 == 0:
            assert not server.idle(0.005), "the device waits"
        assert server.late.pending
        assert server.late.fill(*arguments) == arguments[1][-1] == server.stage.tokens
        assert not server.late.pending
        server.late.finish()
        if number % 2:
            assert server.idle()
    assert server.idle()
    assert len(server.seen) == count
    for seen, arguments in zip(server.seen, steps, strict=True):
        assert server.right(seen, arguments)
    assert server.stage.stats()["steps"] == count


def check_a_step_that_fails(server):
    """Its forward reads zeros, `finish` raises, and the next step works."""
    good, other = steps_of(server.opened, 2, first=3)
    server.run(good)
    server.launch()
    assert server.late.fill([1, -5]) == 0
    assert server.idle(), "the graph goes on"
    with pytest.raises(ValueError, match="-5") as caught:
        server.late.finish()
    assert "ran on rows of zeros" in caught.value.__notes__[0]
    server.late.finish()
    with pytest.raises(ValueError, match=f"17 tokens; at most {ROOM} fit"):
        server.run(step(server.opened.hashers[0], 1, tokens=17))
    server.run(other)
    assert server.idle()
    first, second, third, fourth = server.seen
    assert server.right(first, good)
    assert server.zeros(second)
    assert server.zeros(third)
    assert server.right(fourth, other)
    stats = server.stage.stats()
    assert (stats["steps"], stats["failed"]) == (2, 2)


def check_a_launch_that_nobody_fills(server):
    """It goes on by itself after a while, and is an error."""
    (good,) = steps_of(server.opened, 1, first=3)
    server.run(good)
    server.launch()
    assert server.idle(), "without a call"
    assert server.zeros(server.seen[1])
    with pytest.raises(TimeoutError, match=rf"fill was not called within {server.late.patience} s"):
        server.late.fill(*good)
    server.run(good)
    assert server.idle()
    assert server.right(server.seen[2], good)
