"""Host memory at a fixed address, alive as long as any view of it."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import weakref

import numpy as np
import pytest

import engram
from checkpoint_support import check_error, raises


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 1 << 20])
def test_memory_is_page_aligned_zeroed_and_writable(nbytes):
    buffer = engram.HostBuffer(nbytes)
    assert buffer.nbytes == len(buffer) == nbytes
    assert buffer.address % resource.getpagesize() == 0
    view = memoryview(buffer)
    assert (view.nbytes, view.itemsize, view.readonly, view.c_contiguous) == (
        nbytes,
        1,
        False,
        True,
    )
    array = np.frombuffer(buffer, np.uint8) if nbytes else np.empty(0, np.uint8)
    assert not array.any()
    array[:] = 7
    assert bytes(view) == b"\x07" * nbytes


def test_views_are_of_the_same_memory():
    torch = pytest.importorskip("torch")
    buffer = engram.HostBuffer(64)
    array = np.frombuffer(buffer, np.float32)
    tensor = torch.frombuffer(buffer, dtype=torch.float32)
    assert array.ctypes.data == tensor.data_ptr() == buffer.address
    array[3] = 2.5
    assert tensor[3] == 2.5
    tensor[4] = 1.5
    assert array[4] == 1.5


@pytest.mark.parametrize("kind", ["memoryview", "numpy", "torch"])
def test_memory_lives_as_long_as_any_view(kind):
    buffer = engram.HostBuffer(1 << 16)
    address = buffer.address
    if kind == "memoryview":
        view = memoryview(buffer)[100:200]
    elif kind == "numpy":
        view = np.frombuffer(buffer, np.uint8)[100:200]
    else:
        view = pytest.importorskip("torch").frombuffer(buffer, dtype=__import__("torch").uint8)
        view = view[100:200]
    alive = weakref.ref(buffer)
    del buffer
    gc.collect()
    assert alive() is not None, "a view keeps its memory"
    others = [engram.HostBuffer(1 << 16) for _ in range(20)]
    assert address not in [other.address for other in others]
    view[0] = 9
    assert view[0] == 9
    del view
    gc.collect()
    assert alive() is None, "the memory goes with its last view"


def test_a_gather_keeps_the_memory_it_writes_to(plain):
    with engram.FileGather(plain, "embed.weight") as gather:
        view = memoryview(gather.gather(np.arange(3), out=engram.HostBuffer(84)))
        gc.collect()
        assert bytes(view) == gather.gather(np.arange(3)).tobytes()


def test_the_address_never_moves(plain):
    buffer = engram.HostBuffer(28 * 100)
    address = buffer.address
    with engram.FileGather(plain, "embed.weight") as gather:
        for _ in range(10):
            gather.gather(np.arange(100), out=buffer)
            assert np.frombuffer(buffer, np.uint8).ctypes.data == buffer.address == address


@pytest.mark.parametrize("nbytes", [-1, 2**63, 1.5, "1", None, True])
def test_sizes_that_are_none(nbytes):
    with raises(ValueError, "nbytes"):
        engram.HostBuffer(nbytes)


def test_more_memory_than_there_is():
    with raises(OSError, "cannot allocate") as caught:
        engram.HostBuffer(1 << 60)
    assert caught.value.errno == 12
    assert engram.HostBuffer(8).nbytes == 8


def test_huge_pages_are_a_wish():
    buffer = engram.HostBuffer(4 << 20, huge_pages=True)
    assert isinstance(buffer.huge_pages, bool)
    assert not engram.HostBuffer(4096).huge_pages
    np.frombuffer(buffer, np.uint8)[:] = 1


def test_a_repr_says_how_large_and_where():
    buffer = engram.HostBuffer(100)
    assert "100 bytes" in repr(buffer)
    assert hex(buffer.address) in repr(buffer)
    assert "pinned" not in repr(buffer)


@pytest.mark.case("K03")
def test_pinning_without_an_accelerator_is_refused_and_unpinned_memory_serves(plain):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("CUDA answers here")
    buffer = engram.HostBuffer(28)
    with pytest.raises(RuntimeError, match="no CUDA") as caught:
        buffer.pin()
    check_error(caught.value, RuntimeError)
    assert not buffer.is_pinned
    with engram.FileGather(plain, "embed.weight") as gather:
        gather.gather([4], out=buffer)
        assert np.frombuffer(buffer, np.float32).tobytes() == gather.gather([4]).tobytes()


class FakeRuntime:
    """What a buffer asks of the CUDA runtime; a failed call leaves an error behind, as there."""

    def __init__(self, status):
        self.status = status
        self.registered = []
        self.unregistered = []
        self.left_behind = 0

    def cudaHostRegister(self, address, nbytes, flags):
        assert flags == 0
        self.left_behind = self.status
        if self.status == 0:
            self.registered.append((address, nbytes))
        return self.status

    def cudaHostUnregister(self, address):
        self.unregistered.append(address)
        return 0

    def cudaGetLastError(self):
        code, self.left_behind = self.left_behind, 0
        return code

    def cudaError(self, code):
        return code

    def cudaGetErrorString(self, code):
        return f"reason {code}"


@pytest.fixture
def runtime(monkeypatch):
    torch = pytest.importorskip("torch")

    def install(status):
        fake = FakeRuntime(status)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
        return fake

    return install


def test_pinning_registers_once_and_unregisters_with_the_last_view(runtime):
    fake = runtime(0)
    buffer = engram.HostBuffer(5000)
    address = buffer.address
    assert buffer.pin() is buffer.pin() is buffer
    assert buffer.is_pinned
    assert "pinned" in repr(buffer)
    assert fake.registered == [(address, 5000)]
    view = memoryview(buffer)
    del buffer
    gc.collect()
    assert fake.unregistered == []
    del view
    gc.collect()
    assert fake.unregistered == [address]


@pytest.mark.case("M09")
def test_a_refused_pin_leaves_no_error_behind(runtime):
    fake = runtime(2)
    buffer = engram.HostBuffer(5000)
    with raises(RuntimeError, "5000 bytes", "reason 2"):
        buffer.pin()
    assert fake.left_behind == 0
    assert not buffer.is_pinned
    fake.status = 0
    assert buffer.pin().is_pinned


@pytest.mark.case("M01")
def test_memory_is_what_was_asked_for_rounded_up_to_a_page():
    code = """if True:
        import re, engram, numpy
        def resident():
            text = open("/proc/self/status").read()
            return int(re.search(r"RssAnon:\\s+(\\d+)", text)[1]) * 1024
        before = resident()
        buffer = engram.HostBuffer(65 << 20)
        numpy.frombuffer(buffer, numpy.uint8)[:] = 1
        print(resident() - before)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 65 << 20 <= int(done.stdout) + (1 << 20) < 70 << 20
