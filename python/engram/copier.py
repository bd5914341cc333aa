"""Copies between pinned host slots and fixed device buffers, and the events that order them.

`Stage` decides what is copied and when memory may be used again; a `Copier` does it. Tests replace
it by one that copies late, which is how ordering faults show without a device.
"""

from __future__ import annotations

import ctypes
import time
import warnings
from typing import TYPE_CHECKING, Any, Protocol

import torch

from engram._errors import placed
from engram.buffer import HostBuffer

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Copier", "CudaCopier", "Fence", "HostCopier", "copier_for", "wait_for"]

Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Targets and sources."""

_SPIN_SECONDS = 0.002
"""How long a fence is asked without a pause: a sleep costs more than most copies take."""


class Fence(Protocol):
    """A point in the order of copies."""

    def done(self) -> bool:
        """Whether everything before it has happened."""
        ...


class Copier(Protocol):
    """How a `Stage` moves bytes."""

    @property
    def name(self) -> str:
        """What it copies with, for messages and statistics."""
        ...

    def host(self, nbytes: int, *, pin: bool | None) -> HostBuffer:
        """Host memory that copies can start from."""
        ...

    def capturing(self) -> bool:
        """Whether the calling thread's stream is being captured into a graph."""
        ...

    def upload(self, copies: Copies, zeros: Sequence[torch.Tensor], slot: int) -> Fence:
        """Starts copies to the device, after everything that reads the targets now.

        Work that the caller enqueues afterwards sees them done. `zeros` are filled with zeros.

        Returns:
            Done once the sources may be written to again. One slot has one fence at a time.
        """
        ...

    def download(self, copies: Copies) -> Fence:
        """Starts copies from the device, after the work that the caller has enqueued."""
        ...

    def read(self) -> None:
        """Notes that what the caller has enqueued so far was the last to read the targets."""
        ...

    def reread(self) -> None:
        """Takes `read` back: what the caller has enqueued since uses the targets again."""
        ...

    def join(self) -> None:
        """Makes the caller's current stream wait for the copies under way."""
        ...


class _Done:
    def done(self) -> bool:
        return True


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies between host tensors of one dtype and shape.

    Not `copy_`, which shares large copies among threads that a forked child does not have.
    """
    if target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)


class HostCopier:
    """Copies at once, between host memory and tensors on the CPU."""

    name = "host"

    def host(self, nbytes: int, *, pin: bool | None) -> HostBuffer:
        """Pageable memory.

        Raises:
            RuntimeError: Pinned memory was asked for.
        """
        if pin:
            raise RuntimeError(
                "pin=True: memory is pinned for copies to a CUDA device, and the stage's device is "
                "the CPU; leave pin away"
            )
        return HostBuffer(nbytes)

    def capturing(self) -> bool:
        """Never."""
        return False

    def upload(self, copies: Copies, zeros: Sequence[torch.Tensor], slot: int) -> Fence:
        """Copies before it returns."""
        for target, source in copies:
            _copy(target, source)
        for target in zeros:
            if target.is_contiguous():
                ctypes.memset(target.data_ptr(), 0, target.nbytes)
            else:
                target.zero_()
        return _DONE

    def download(self, copies: Copies) -> Fence:
        """Copies before it returns."""
        for target, source in copies:
            _copy(target, source)
        return _DONE

    def read(self) -> None:
        """Nothing to note: reads happen in the order they are written in."""

    def reread(self) -> None:
        """Nothing to take back."""

    def join(self) -> None:
        """Nothing is under way."""


_DONE = _Done()


class _Event:
    """A fence that is recorded again for every use, so that a step makes none."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event()

    def done(self) -> bool:
        return bool(self.event.query())


class CudaCopier:
    """Copies on a stream of its own.

    Uploads wait for what the caller's stream has been given to do when they start (or, after
    `read`, for what it had then), because that may still read the fixed buffers; the caller's
    stream waits for the uploads.

    Args:
        device: The CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._uploads: dict[int, _Event] = {}
        self._last_upload: _Event | None = None
        self._download = _Event()
        self._read = _Event()
        self._was_read = False
        self.name = f"copy stream of {device}"

    def host(self, nbytes: int, *, pin: bool | None) -> HostBuffer:
        """Pinned memory; pageable with a warning where the driver refuses and `pin` is None.

        Raises:
            RuntimeError: The driver refused to pin, and `pin` is True.
        """
        buffer = HostBuffer(nbytes)
        if pin is False:
            return buffer
        try:
            with torch.cuda.device(self._device):
                buffer.pin()
        except RuntimeError as error:
            if pin:
                raise
            warnings.warn(f"staging copies from pageable memory: {error}", stacklevel=3)
        return buffer

    def capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def upload(self, copies: Copies, zeros: Sequence[torch.Tensor], slot: int) -> Fence:
        """Starts copies on the copy stream; the current stream waits for them."""
        current = torch.cuda.current_stream(self._device)
        if self._was_read:
            self._stream.wait_event(self._read.event)
            self._was_read = False
        else:
            self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            for target in zeros:
                target.zero_()
        fence = self._uploads.get(slot)
        if fence is None:
            fence = self._uploads[slot] = _Event()
        fence.event.record(self._stream)
        current.wait_event(fence.event)
        self._last_upload = fence
        return fence

    def download(self, copies: Copies) -> Fence:
        """Starts copies on the current stream."""
        for target, source in copies:
            target.copy_(source, non_blocking=True)
        self._download.event.record(torch.cuda.current_stream(self._device))
        return self._download

    def read(self) -> None:
        """Records an event on the current stream."""
        self._read.event.record(torch.cuda.current_stream(self._device))
        self._was_read = True

    def reread(self) -> None:
        """The next upload waits for all work of the current stream again."""
        self._was_read = False

    def join(self) -> None:
        """Makes the current stream wait for the last upload."""
        if self._last_upload is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last_upload.event)


def copier_for(device: torch.device) -> Copier:
    """The copier of a device.

    Raises:
        ValueError: Neither a CUDA device nor the CPU.
    """
    if device.type == "cuda":
        return CudaCopier(device)
    if device.type == "cpu":
        return HostCopier()
    raise placed(ValueError(f"device {device}: a stage copies to a CUDA device or to the CPU"))


def wait_for(fence: Fence, seconds: float, what: str) -> None:
    """Waits for a fence, never for ever.

    Raises:
        TimeoutError: It was not done after `seconds`; names what was waited for.
    """
    if fence.done():
        return
    start = time.monotonic()
    pause: Any = 0.0
    while not fence.done():
        passed = time.monotonic() - start
        if passed >= seconds:
            raise placed(
                TimeoutError(
                    f"{what} is not done after {seconds:g} s: the device hangs, or waits for work "
                    "that this thread would enqueue next"
                )
            )
        if passed > _SPIN_SECONDS:
            pause = min(max(pause * 2, 2e-5), 1e-3)
            time.sleep(pause)
