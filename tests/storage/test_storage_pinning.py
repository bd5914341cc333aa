"""Registering host memory with CUDA, with a runtime that misbehaves as drivers do."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

import engram
from engram.pinning import Pinning

GIB = 1 << 30


class Runtime:
    """A CUDA runtime: registers, refuses, is slow, and keeps its last error until it is read."""

    def __init__(self, largest=None, refuse_after=None, seconds=0.0):
        self.largest = largest
        self.refuse_after = refuse_after
        self.seconds = seconds
        self.registered = {}
        self.calls = []
        self.last_error = 0

    def cudaHostRegister(self, address, nbytes, flags):
        self.calls.append((address, nbytes))
        time.sleep(self.seconds)
        too_large = self.largest is not None and nbytes > self.largest
        too_many = self.refuse_after is not None and len(self.calls) > self.refuse_after
        if too_large or too_many:
            self.last_error = 1
            return 1
        assert flags == 0
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, _):
        return "invalid argument"

    def cudaGetLastError(self):
        error, self.last_error = self.last_error, 0
        return error

    def launch(self):
        """An unrelated call, which reports whatever error nobody has read."""
        if self.cudaGetLastError():
            raise RuntimeError("CUDA error: out of memory")


@pytest.mark.case("M10")
def test_memory_is_registered_in_bounded_segments():
    runtime = Runtime(largest=GIB)
    steps = []
    nbytes = 47 * GIB + 12_345
    pinning = Pinning(1 << 40, nbytes, runtime=runtime, progress=lambda *step: steps.append(step))
    assert len(runtime.calls) == 48
    assert sum(runtime.registered.values()) == nbytes
    assert max(runtime.registered.values()) <= GIB
    starts = sorted(runtime.registered)
    assert starts[0] == 1 << 40
    for start, following in itertools.pairwise(starts):
        assert start + runtime.registered[start] == following
    assert steps[-1] == (nbytes, nbytes)
    pinning.close()
    pinning.close()
    assert runtime.registered == {}


@pytest.mark.case("M10")
@pytest.mark.case("M09")
def test_a_refusal_half_way_takes_everything_back_and_leaves_no_error():
    runtime = Runtime(refuse_after=5)
    with pytest.raises(RuntimeError, match=r"CUDA refused to register 1073741824 bytes") as error:
        Pinning(1 << 40, 10 * GIB, runtime=runtime)
    assert "invalid argument" in str(error.value)
    assert runtime.registered == {}
    runtime.launch()
    runtime.refuse_after = None
    again = Pinning(1 << 40, 10 * GIB, runtime=runtime)
    assert len(runtime.registered) == 10
    again.close()


@pytest.mark.case("M10")
def test_registering_that_takes_too_long_is_given_up():
    runtime = Runtime(seconds=0.05)
    with pytest.raises(RuntimeError, match=r"took over 0\.2 s") as error:
        Pinning(1 << 40, 1000 * GIB, runtime=runtime, time_limit=0.2)
    assert "disk_offload=True" in str(error.value)
    assert len(runtime.calls) < 20
    assert runtime.registered == {}


@pytest.mark.case("M10")
def test_ctrl_c_takes_everything_back():
    runtime = Runtime()

    def stop(done, _):
        if done >= 3 * GIB:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Pinning(1 << 40, 10 * GIB, runtime=runtime, progress=stop)
    assert runtime.registered == {}


def test_buffers_are_registered_once_and_let_go_with_their_memory(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    buffer = engram.HostBuffer(5000)
    assert buffer.pin() is buffer
    assert buffer.pin().is_pinned
    assert runtime.calls == [(buffer.address, 5000)]
    buffer.unpin()
    assert not buffer.is_pinned
    assert runtime.registered == {}
    buffer.pin()
    del buffer
    assert runtime.registered == {}


@pytest.mark.case("M09")
def test_a_refused_table_serves_nothing_and_the_next_works(checkpoint, monkeypatch):
    from engram.storage.hosted import PinnedStorage

    runtime = Runtime(refuse_after=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with engram.FileGather(checkpoint().directory) as gather:
        storage = PinnedStorage(gather.info, device=torch.device("cuda"))
        with pytest.raises(RuntimeError, match="CUDA refused"):
            storage.load(gather)
        with pytest.raises(RuntimeError, match=r"call load\(views\)"):
            storage.lookup([0])
        runtime.launch()
        runtime.refuse_after = None
        storage.load(gather)
        assert storage.stats()["registered"]
        assert len(storage.lookup([0, 1])) == 2
    storage.close()
    assert runtime.registered == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_there_is_no_pinning():
    with pytest.raises(RuntimeError, match="torch finds no CUDA device"):
        engram.HostBuffer(10).pin()
