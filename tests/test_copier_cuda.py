"""In which order the CUDA copier asks the device for what, by a device that writes it down."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import engram  # noqa: E402
from engram import synth  # noqa: E402
from engram.copier import CudaCopier  # noqa: E402
from stage_support import SIZES, Opened, step  # noqa: E402


class Cuda:
    """As much of `torch.cuda` as a copier uses; whatever is asked of it is in `log`."""

    def __init__(self):
        self.log = []
        self.streams = ["current"]
        self.events = 0

    def Stream(self, device):
        return Stream(self, "copies")

    def current_stream(self, device=None):
        return Stream(self, self.streams[-1])

    @contextlib.contextmanager
    def stream(self, stream):
        self.streams.append(stream.name)
        yield
        self.streams.pop()

    def Event(self):
        self.events += 1
        return Event(self, self.events)

    def is_current_stream_capturing(self):
        return False

    def device(self, device):
        return contextlib.nullcontext()


class Stream:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def wait_stream(self, other):
        self.cuda.log.append((self.name, "waits for all of", other.name))

    def wait_event(self, event):
        self.cuda.log.append((self.name, "waits for", event.number))


class Event:
    def __init__(self, cuda, number):
        self.cuda, self.number = cuda, number

    def record(self, stream):
        self.cuda.log.append((stream.name, "records", self.number))

    def query(self):
        return True


@pytest.fixture
def cuda(monkeypatch):
    made = Cuda()
    for name in (
        "Stream",
        "current_stream",
        "stream",
        "Event",
        "is_current_stream_capturing",
        "device",
    ):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(engram.HostBuffer, "pin", lambda self, progress=None: self)
    original = torch.Tensor.copy_

    def copy_(target, source, non_blocking=False):
        made.log.append((made.streams[-1], "copies", non_blocking))
        return original(target, getattr(source, "real_values", source))

    zero = torch.Tensor.zero_

    def zero_(target):
        made.log.append((made.streams[-1], "zeros"))
        return zero(target)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(torch.Tensor, "zero_", zero_)
    return made


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    info = synth.write(tmp_path_factory.mktemp("copier") / "q", "qwen", **SIZES["qwen"])
    found = Opened(info, "qwen")
    yield found
    found.tables.close()


def staged(qwen):
    copier = CudaCopier(torch.device("cuda", 0))
    return engram.Stage(qwen.tables, qwen.hashers, max_tokens=64, device="cpu", copier=copier)


UPLOAD = [
    ("copies", "waits for all of", "current"),
    ("copies", "copies", True),
    ("copies", "copies", True),
    ("copies", "records", 3),
    ("current", "waits for", 3),
]
"""One copy per table, behind all readers, in front of whatever the caller enqueues next."""


def numbered(log, event):
    return [(*entry[:-1], event) if entry[-1] == 3 else entry for entry in log]


@pytest.mark.case("R02")
def test_a_step_is_one_copy_per_table_between_readers(cuda, qwen):
    with staged(qwen) as stage:
        stage.prepare(*step(qwen.hashers[0], 1))
        assert cuda.log == UPLOAD
        cuda.log.clear()
        stage.prepare(*step(qwen.hashers[0], 2))
        assert cuda.log == numbered(UPLOAD, 4), "the other slot has an event of its own"
        cuda.log.clear()
        stage.prepare(*step(qwen.hashers[0], 3, tokens=7))
        zeros = [("copies", "zeros")] * 2
        assert cuda.log == [*UPLOAD[:3], *zeros, *UPLOAD[3:]], "events are used again"


@pytest.mark.case("R02")
def test_readers_that_are_named_are_all_that_is_waited_for(cuda, qwen):
    with staged(qwen) as stage:
        stage.prepare(*step(qwen.hashers[0], 1))
        cuda.log.clear()
        stage.release()
        stage.prepare(*step(qwen.hashers[0], 2))
        assert cuda.log == [
            ("current", "records", 2),
            ("copies", "waits for", 2),
            *numbered(UPLOAD, 4)[1:],
        ]
        cuda.log.clear()
        stage.release()
        stage._copier.reread()
        stage.prepare(*step(qwen.hashers[0], 3))
        assert cuda.log == [("current", "records", 2), *UPLOAD]
        cuda.log.clear()
        stage.join()
        assert cuda.log == [("current", "waits for", 3)]


def test_tokens_on_the_device_cost_one_copy_and_one_event(cuda, qwen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", None)
    tokens, starts, context = step(qwen.hashers[0], 1)
    away = torch.empty(len(tokens), dtype=torch.int64, device="meta")
    away.real_values = torch.from_numpy(tokens)
    with staged(qwen) as stage:
        stage.prepare(away, starts, context)
        assert cuda.log == [("current", "copies", True), ("current", "records", 1), *UPLOAD]
        held = stage.rows(0).view(torch.uint8).reshape(64, -1).numpy()[: len(tokens)]
        wanted = qwen.expected(0, tokens, starts, context)["weight"]
        assert np.array_equal(held, wanted)
