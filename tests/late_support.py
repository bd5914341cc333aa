"""A device that is a thread: one stream of work, graphs, and words that it waits for."""

from __future__ import annotations

import queue
import threading
import time

from engram import HostBuffer
from engram.graphwait import READY, TAKEN, Word

LONG = 20.0


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
