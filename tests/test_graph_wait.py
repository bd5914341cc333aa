"""How CUDA graphs are made to wait, and every reason for which they are not."""

from __future__ import annotations

import contextlib
import re
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import engram  # noqa: E402
from engram import graphwait  # noqa: E402
from engram.graphwait import READY, TAKEN, CudaWaits, NoWaits, waits_for  # noqa: E402

DEVICE = torch.device("cuda", 0)
OFFSET = 1 << 40
"""Between the host's address of pinned memory and the device's, on the machine of these tests."""
STREAM = 0x5EED


class Status(int):
    name = "CUDA_ERROR_NOT_SUPPORTED"


class Bindings:
    """`cuda.bindings.driver` of a machine, as far as it is used; records what is called."""

    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR=123)
    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_EQ=1)
    CUstreamWriteValue_flags = SimpleNamespace(CU_STREAM_WRITE_VALUE_DEFAULT=0)

    def __init__(self, version=13_020, attribute=1, refuses=None):
        self.version, self.attribute, self.refuses = version, attribute, refuses
        self.called = []

    def answer(self, name, *values):
        if self.refuses == name:
            return (Status(801), *values)
        return (0, *values)

    def cuDriverGetVersion(self):
        return self.answer("cuDriverGetVersion", self.version)

    def cuDeviceGet(self, ordinal):
        return self.answer("cuDeviceGet", 70 + ordinal)

    def cuDeviceGetAttribute(self, attribute, device):
        assert (attribute, device) == (123, 70)
        return self.answer("cuDeviceGetAttribute", self.attribute)

    def cuMemHostGetDevicePointer(self, address, flags):
        assert flags == 0
        return self.answer("cuMemHostGetDevicePointer", address + OFFSET)

    def cuStreamWaitValue32(self, stream, address, value, flags):
        self.called.append(("wait", stream, address, value, flags))
        return self.answer("cuStreamWaitValue32")

    def cuStreamWriteValue32(self, stream, address, value, flags):
        self.called.append(("write", stream, address, value, flags))
        return self.answer("cuStreamWriteValue32")


class Cuda:
    """`torch.cuda` with one device, which does what the bindings were told between two marks."""

    def __init__(self, bindings, hangs=False, ignores=False):
        self.bindings, self.hangs, self.ignores = bindings, hangs, ignores
        self.capturing = False
        self.log = []

    def init(self):
        self.log.append("init")

    def device(self, device):
        return contextlib.nullcontext()

    stream = device

    def Stream(self, device):
        return SimpleNamespace(cuda_stream=STREAM)

    def current_stream(self, device):
        return SimpleNamespace(cuda_stream=STREAM)

    def Event(self):
        return SimpleNamespace(record=lambda stream: None, query=lambda: not self.hangs)

    def CUDAGraph(self):
        def begin(capture_error_mode):
            assert capture_error_mode == "thread_local"
            self.capturing = True

        def end():
            assert self.capturing
            self.capturing = False

        def replay():
            assert not self.capturing
            self.log.append("replay")
            for kind, _, address, value, _ in self.bindings.called:
                memory = MEMORY[address - OFFSET]
                if kind == "wait":
                    assert memory.load_word(0) == value, "the trial's wait is over beforehand"
                elif not self.ignores:
                    memory.store_word(0, value)

        return SimpleNamespace(capture_begin=begin, capture_end=end, replay=replay)


MEMORY = {}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Sets a machine up, where asked for; nothing is remembered from one test to the next."""
    monkeypatch.setattr(graphwait, "_refusals", {})
    monkeypatch.setattr(graphwait, "_TRIAL_SECONDS", 0.05)

    def pin(self, progress=None):
        MEMORY[self.address] = self
        return self

    monkeypatch.setattr(engram.HostBuffer, "pin", pin)

    def made(bindings, **options):
        cuda = Cuda(bindings, **options)
        monkeypatch.setattr(graphwait, "_cuda", cuda)
        return CudaWaits(DEVICE, bindings=bindings), cuda

    return made


def test_a_graph_that_can_wait_is_tried_once(machine):
    bindings = Bindings()
    waits, cuda = machine(bindings)
    assert waits.refusal() is None
    assert waits.refusal() is None
    assert cuda.log == ["init", "replay"]
    (wait, write) = bindings.called
    assert wait[0::3] == ("wait", READY)
    assert wait[4] == 1, "until it is equal"
    assert write[0::3] == ("write", TAKEN)
    assert wait[1] == write[1] == STREAM
    assert wait[2] == write[2] >= OFFSET, "the address is the device's"


def test_every_stage_finds_the_driver_that_was_tried_once(machine, monkeypatch):
    """A process makes late steps again and again, each with waits of its own."""
    bindings = Bindings()
    _, cuda = machine(bindings)
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, name, bindings)
    memory = engram.HostBuffer(4).pin()
    for _ in range(2):
        waits = waits_for(DEVICE)
        assert waits.refusal() is None
        word = waits.word(memory)
        assert word.address == memory.address + OFFSET
        waits.wait(word)
        waits.reset(word)
    assert cuda.log == ["init", "replay"]
    assert [kind for kind, *_ in bindings.called] == ["wait", "write"] * 3


@pytest.mark.parametrize(
    ("bindings", "options", "reason"),
    [
        ({"version": 11_080}, {}, r"the driver is of CUDA 11\.8, not 12\.0"),
        ({"attribute": 0}, {}, "cuda:0 has no stream memory operations"),
        ({"refuses": "cuDriverGetVersion"}, {}, "refused cuDriverGetVersion: CUDA_ERROR_NOT_SUP"),
        ({"refuses": "cuMemHostGetDevicePointer"}, {}, "refused cuMemHostGetDevicePointer"),
        ({"refuses": "cuStreamWaitValue32"}, {}, "refused cuStreamWaitValue32"),
        ({"refuses": "cuStreamWriteValue32"}, {}, "refused cuStreamWriteValue32"),
        ({}, {"hangs": True}, "did not end on cuda:0"),
        ({}, {"ignores": True}, "cuda:0 did not write to host memory"),
    ],
)
def test_every_reason_is_said(machine, bindings, options, reason):
    waits, cuda = machine(Bindings(**bindings), **options)
    found = waits.refusal()
    assert found is not None
    assert re.search(reason, found)
    assert not cuda.capturing, "no capture is left open"


def test_without_the_package_the_reason_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    assert CudaWaits(DEVICE).refusal() == "the package cuda-bindings is not installed"


def test_on_rocm_there_is_nothing_to_ask(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert CudaWaits(DEVICE).refusal() == "ROCm is not CUDA"


def test_launches_that_wait_for_their_graph_would_wait_for_ever(machine, monkeypatch):
    waits, cuda = machine(Bindings())
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert "CUDA_LAUNCH_BLOCKING is set" in waits.refusal()
    assert not cuda.log


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu tries it on the device")
def test_without_a_device_there_is_a_reason_and_no_exception():
    assert CudaWaits(DEVICE).refusal()


def test_devices_without_graphs():
    waits = waits_for(torch.device("cpu"))
    assert isinstance(waits, NoWaits)
    assert "no graphs" in waits.refusal()
    assert isinstance(waits_for(DEVICE), CudaWaits)


def test_the_package_has_what_is_called():
    driver = pytest.importorskip("cuda.bindings.driver")
    for holder in ("CUdevice_attribute", "CUstreamWaitValue_flags", "CUstreamWriteValue_flags"):
        for name, value in vars(getattr(Bindings, holder)).items():
            assert int(getattr(getattr(driver, holder), name)) == value
    parameters = {
        "cuDriverGetVersion": 0,
        "cuDeviceGet": 1,
        "cuDeviceGetAttribute": 2,
        "cuMemHostGetDevicePointer": 2,
        "cuStreamWaitValue32": 4,
        "cuStreamWriteValue32": 4,
    }
    for name, count in parameters.items():
        signature = getattr(driver, name).__doc__.splitlines()[0]
        inside = re.fullmatch(rf"{name}\((.*)\)", signature)[1]
        assert len(list(filter(None, inside.split(",")))) == count, signature


def test_words_are_four_bytes_at_multiples_of_four():
    buffer = engram.HostBuffer(8)
    buffer.store_word(4, 2**32 - 1)
    assert buffer.load_word(4) == 2**32 - 1
    assert bytes(buffer) == bytes(4) + b"\xff" * 4
    for offset in (1, 6, 4096 * 4):
        with pytest.raises(ValueError, match="multiple of four"):
            buffer.load_word(offset)
    with pytest.raises(OverflowError):
        buffer.store_word(0, 2**32)
