"""Graphs that wait on the device for a word in host memory.

A captured graph repeats the same commands with the same values, so the word is a turnstile: the
graph waits until it is 1, copies the rows that are there then, and puts it back to 0 itself, which
tells the host that the rows have been fetched and that their memory is its own again.

The host sets the word with a plain store and calls nothing of CUDA meanwhile: a call that waits for
the device, which waits for the word, would end in a deadlock. Copies are part of the graph for the
same reason.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from typing import TYPE_CHECKING, Any, Protocol

import torch

from engram.buffer import HostBuffer

if TYPE_CHECKING:
    from engram.copier import Copies

__all__ = ["CudaWaits", "GraphWaits", "NoWaits", "Word", "waits_for"]

READY = 1
"""The rows are there, or the step has failed."""

TAKEN = 0
"""The graph has fetched them, or nothing was ever there."""

OLDEST_DRIVER = 12000
"""CUDA 12.0: graphs hold memory operations, and every such driver has them switched on."""

_TRIAL_SECONDS = 5.0
_cuda: Any = torch.cuda


class Word:
    """Four bytes of host memory that host and device take turns to change.

    Args:
        memory: Memory of its own; the word is at its beginning.
        address: Where the device finds it.
    """

    def __init__(self, memory: HostBuffer, address: int) -> None:
        self.memory = memory
        self.address = address

    def get(self) -> int:
        """The value now."""
        return self.memory.load_word(0)

    def set(self, value: int) -> None:
        """Sets the value; whoever sees it sees everything written before."""
        self.memory.store_word(0, value)


class GraphWaits(Protocol):
    """How captured commands wait for a word: `wait`, `copy` and `reset` are called in a capture."""

    def refusal(self) -> str | None:
        """Why graphs cannot wait here; None where they can."""
        ...

    def word(self, memory: HostBuffer) -> Word:
        """A word in pinned memory, where the device finds it."""
        ...

    def wait(self, word: Word) -> None:
        """Nothing that is captured after this runs before the word is `READY`."""
        ...

    def copy(self, copies: Copies) -> None:
        """Copies from pinned host memory to the device."""
        ...

    def reset(self, word: Word) -> None:
        """The word becomes `TAKEN` when everything captured before is done."""
        ...


class NoWaits:
    """Where graphs cannot wait.

    Args:
        why: What `refusal` says.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def refusal(self) -> str | None:
        """The reason."""
        return self._why

    def word(self, memory: HostBuffer) -> Word:
        """Never called."""
        raise AssertionError

    def wait(self, word: Word) -> None:
        """Never called."""
        raise AssertionError

    def copy(self, copies: Copies) -> None:
        """Never called."""
        raise AssertionError

    def reset(self, word: Word) -> None:
        """Never called."""
        raise AssertionError


class CudaWaits:
    """Stream memory operations of the CUDA driver, through the package `cuda-bindings`.

    Args:
        device: The CUDA device.
        bindings: Replaces `cuda.bindings.driver`; for tests.
    """

    def __init__(self, device: torch.device, *, bindings: Any = None) -> None:
        self._device = device
        self._driver = bindings

    def refusal(self) -> str | None:
        """Asks the package, the driver and the device, then tries it on a graph of its own."""
        if getattr(torch.version, "hip", None) is not None:
            return "ROCm is not CUDA"
        if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
            return "CUDA_LAUNCH_BLOCKING is set, so a launch waits for its graph"
        # Every instance calls the driver, also one whose answer another has found.
        if self._driver is None:
            try:
                self._driver = importlib.import_module("cuda.bindings.driver")
            except ImportError:
                return "the package cuda-bindings is not installed"
        key = (self._device.index, self._driver)
        if key not in _refusals:
            _refusals[key] = self._asked()
        return _refusals[key]

    def word(self, memory: HostBuffer) -> Word:
        """A word at the beginning of pinned memory.

        Raises:
            RuntimeError: The driver does not know the memory.
        """
        with _cuda.device(self._device):
            address = self._call("cuMemHostGetDevicePointer", memory.address, 0)
        return Word(memory, int(address))

    def wait(self, word: Word) -> None:
        """Adds a wait to the current stream."""
        flags = int(self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
        self._call("cuStreamWaitValue32", self._stream(), word.address, READY, flags)

    def copy(self, copies: Copies) -> None:
        """Adds copies to the current stream."""
        for target, source in copies:
            target.copy_(source, non_blocking=True)

    def reset(self, word: Word) -> None:
        """Adds a write to the current stream, behind a barrier for what went before."""
        flags = int(self._driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
        self._call("cuStreamWriteValue32", self._stream(), word.address, TAKEN, flags)

    def _stream(self) -> int:
        return _cuda.current_stream(self._device).cuda_stream

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *values = getattr(self._driver, name)(*arguments)
        if int(status) != 0:
            raise RuntimeError(f"the CUDA driver refused {name}: {getattr(status, 'name', status)}")
        return values[0] if values else None

    def _asked(self) -> str | None:
        try:
            _cuda.init()
            version = int(self._call("cuDriverGetVersion"))
            if version < OLDEST_DRIVER:
                return f"the driver is of CUDA {version // 1000}.{version % 1000 // 10}, not 12.0"
            attributes = self._driver.CUdevice_attribute
            asked = attributes.CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR
            handle = self._call("cuDeviceGet", self._device.index)
            if not int(self._call("cuDeviceGetAttribute", asked, handle)):
                return f"{self._device} has no stream memory operations"
            return self._tried()
        except Exception as error:
            return str(error)

    def _tried(self) -> str | None:
        """Replays a graph whose wait is over before it begins, so that nothing can hang."""
        memory = HostBuffer(4).pin()
        word = self.word(memory)
        word.set(READY)
        with _cuda.device(self._device):
            graph, side, done = _cuda.CUDAGraph(), _cuda.Stream(self._device), _cuda.Event()
            with _cuda.stream(side):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self.wait(word)
                    self.reset(word)
                except BaseException:
                    with contextlib.suppress(Exception):
                        graph.capture_end()
                    raise
                graph.capture_end()
                graph.replay()
                done.record(side)
        begun = time.monotonic()
        while not done.query():
            if time.monotonic() - begun > _TRIAL_SECONDS:
                # The device may still read the word: neither goes.
                _abandoned.append((memory, graph))
                return f"a graph that should not have waited did not end on {self._device}"
            time.sleep(1e-4)
        return None if word.get() == TAKEN else f"{self._device} did not write to host memory"


_refusals: dict[tuple[int, Any], str | None] = {}
"""By device and driver: asking takes a while, and the answer does not change."""

_abandoned: list[Any] = []


def waits_for(device: torch.device) -> GraphWaits:
    """How graphs of a device wait."""
    if device.type == "cuda":
        return CudaWaits(device)
    return NoWaits("the stage is on the CPU, where there are no graphs")
