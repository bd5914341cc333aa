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
        self.shift = lambda address: 0

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

    def cudaHostGetDevicePointer(self, address, flags):
        assert flags == 0
        if address not in self.registered:
            self.last_error = 1
            return 1, 0
        return 0, address + self.shift(address)

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


def test_the_address_on_the_device_is_the_one_that_cuda_gives():
    runtime = Runtime()
    pinning = Pinning(1 << 40, 3 * GIB, runtime=runtime)
    assert pinning.device_address() == 1 << 40
    runtime.shift = lambda address: 1 << 44
    assert pinning.device_address() == (1 << 40) + (1 << 44)
    runtime.shift = lambda address: address & GIB
    with pytest.raises(RuntimeError, match="apart from one another"):
        pinning.device_address()
    runtime.registered.clear()
    with pytest.raises(RuntimeError, match=r"gives no device pointer.*invalid argument"):
        pinning.device_address()
    runtime.launch()


def test_where_nothing_can_ask_the_host_s_address_is_used(monkeypatch):
    from engram import pinning

    class Silent:
        def cudaHostRegister(self, address, nbytes, flags):
            return 0

        def cudaHostUnregister(self, address):
            return 0

    monkeypatch.setattr(pinning, "_native_device_pointer", lambda: None)
    assert Pinning(1 << 40, GIB, runtime=Silent()).device_address() == 1 << 40
    monkeypatch.setattr(pinning, "_native_device_pointer", lambda: lambda at, flags: (0, at + 64))
    assert Pinning(1 << 40, GIB, runtime=Silent()).device_address() == (1 << 40) + 64
    with pytest.raises(RuntimeError, match="only pinned memory"):
        engram.HostBuffer(10).device_address()


def test_the_kernel_is_given_the_address_on_the_device(checkpoint, monkeypatch):
    import sys
    import types

    from engram.storage.hosted import PinnedStorage

    runtime = Runtime()
    runtime.shift = lambda address: 1 << 44
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    given = []
    kernel = types.SimpleNamespace(copy_rows=lambda address, *_: given.append(address))
    monkeypatch.setitem(sys.modules, "engram.storage.kernel", kernel)
    with engram.FileGather(checkpoint("deepseek-fp8").directory, 0) as gather:
        storage = PinnedStorage(gather.info, device=torch.device("cuda"))
        storage.load(gather)
    storage._lookup_on_device(torch.tensor([0, 1]), None, None)
    start = storage._buffer.address + (1 << 44)
    offsets = [plane.offset(storage.num_rows) for plane in storage.planes]
    assert given == [start + offset for offset in offsets]
    storage.close()


MEMLOCK = """
import ctypes, resource
import torch
from engram.storage.hosted import PinnedStorage

class Runtime:
    # Registers like a driver that accounts what it pins to the limit of locked memory.
    def __init__(self):
        self.registered = {}
        self.last_error = 0

    def cudaHostRegister(self, address, nbytes, flags):
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        unlimited = limit == resource.RLIM_INFINITY
        if not unlimited and sum(self.registered.values()) + nbytes > limit:
            self.last_error = 2
            return 2
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):
        del self.registered[address]
        return 0

    def cudaHostGetDevicePointer(self, address, flags):
        return 0, address

    def cudaGetErrorString(self, _):
        return "out of memory"

    def cudaGetLastError(self):
        error, self.last_error = self.last_error, 0
        return error

runtime = Runtime()
torch.cuda.is_available = lambda: True
torch.cuda.cudart = lambda: runtime
hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, hard))
table = engram.synth.load(arguments["path"]).tables[0]
with engram.FileGather(arguments["path"]) as gather:
    storage = PinnedStorage(gather.info, device=torch.device("cuda"))
    text = ""
    try:
        storage.load(gather)
    except RuntimeError as error:
        text = str(error)
        named = error.table
    left = len(runtime.registered)
    unread = runtime.last_error
    # On the host alone no memory is registered, and the limit does not matter.
    with engram.open_storage({}, gather, device="cpu") as host:
        ids = some_ids(host.num_rows, 1000)
        check_rows(host.lookup(ids), table, ids)
    raised = hard == resource.RLIM_INFINITY or hard > table.nbytes + 4096
    if raised:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
        storage.load(gather)
        check_rows(storage.lookup(ids), table, ids)
report(text=text, table=named, left=left, unread=unread, raised=raised,
       registered=storage.stats()["registered"], now=sum(runtime.registered.values()))
"""


@pytest.mark.case("M09")
def test_a_limit_on_locked_memory_is_an_error_where_memory_is_registered(large):
    from child import run

    found = run(MEMLOCK, path=str(large.directory))
    assert "CUDA refused to register" in found["text"]
    assert "out of memory" in found["text"]
    assert "ulimit -l" in found["text"]
    assert found["table"] == large.tables[0].name
    assert found["left"] == 0, "nothing stays registered"
    assert found["unread"] == 0, "no error is left for the next call"
    assert found["registered"] is found["raised"]
    if found["raised"]:
        assert found["now"] >= large.tables[0].nbytes
