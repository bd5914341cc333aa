"""Runs tests/gpu/test_late_cuda.py where there is no CUDA, on a device that is a thread.

    python tests/thread_cuda.py [pytest's arguments] [--then other arguments ...]

What it shows is that the tests themselves run and would notice a wrong row. Whether a device does
what is asked of it, only a device can show.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from engram import staging
from late_support import Device, Graph


class Event:
    def __init__(self, device):
        self.device = device
        self.happened = threading.Event()

    def record(self):
        self.device.queue.put(self.happened.set)

    def query(self):
        return self.happened.is_set()


def play(device):
    """Puts `device` in the place of CUDA."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    torch.cuda.is_available = lambda: True
    torch.cuda.Stream = torch.cuda.current_stream = lambda: stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.CUDAGraph = lambda: Graph(device)
    torch.cuda.graph = lambda graph: graph
    torch.cuda.Event = lambda: Event(device)
    made, late, copy = staging.Stage.__init__, staging.Stage.late, torch.Tensor.copy_

    @functools.wraps(made)
    def on_the_thread(self, *arguments, **options):
        made(self, *arguments, **{**options, "device": "cpu", "copier": device})

    staging.Stage.__init__ = on_the_thread
    staging.Stage.late = lambda self, tokens=None: late(self, tokens, driver=device)

    def copy_(target, source, non_blocking=False):
        if threading.current_thread() is device.thread:
            return copy(target, source)
        device.enqueue(lambda: copy(target, source))
        return target

    torch.Tensor.copy_ = copy_


def run(arguments):
    """One run of pytest on a device of its own, which is wrong with `--wrong`."""
    play(Device(early="--wrong" in arguments))
    arguments = [argument for argument in arguments if argument != "--wrong"]
    return pytest.main(["-q", "-p", "no:cacheprovider", *arguments])


def main(arguments):
    """Every run in a process of its own, forked: torch is imported once for all."""
    worst = 0
    for _, group in itertools.groupby(arguments, "--then".__ne__):
        given = list(group)
        if given == ["--then"]:
            continue
        child = os.fork()
        if child == 0:
            status = int(run(given))
            sys.stdout.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(f"status {status}", flush=True)
        worst = max(worst, abs(status))
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
