"""Host memory at a fixed address."""

from __future__ import annotations

import weakref
from typing import Any, Self, cast

from engram import _engram
from engram._arguments import whole_number
from engram._errors import placed


class HostBuffer(_engram.HostBuffer):
    """Page-aligned, zeroed host memory that never moves, exported through the buffer protocol.

    `numpy.frombuffer(buffer, dtype=...)` and `torch.frombuffer(buffer, dtype=...)` give writable
    views; the memory lives as long as any view of it.

    Args:
        nbytes: Bytes to allocate; exactly as many are used, rounded up to a page by the kernel.
        huge_pages: Advise the kernel to use huge pages. A refusal is no error: `huge_pages` of the
            buffer says whether the advice was taken.

    Attributes:
        nbytes: Bytes asked for.
        address: Address of the first byte, a multiple of the page size.
    """

    _unregister: weakref.finalize[Any, Any] | None = None

    def __new__(cls, nbytes: int, huge_pages: bool = False) -> Self:  # noqa: FBT001, FBT002
        """Allocates.

        Raises:
            ValueError: `nbytes` is negative or no integer.
            OSError: The kernel refused, with its errno.
        """
        return super().__new__(cls, whole_number("nbytes", nbytes, least=0), huge_pages)

    def pin(self) -> HostBuffer:
        """Registers the memory with CUDA, so that copies from it to a device can overlap work.

        Returns:
            The buffer itself.

        Raises:
            RuntimeError: torch has no CUDA here, or the driver refused, with its reason.
        """
        if self._unregister is not None or self.nbytes == 0:
            return self
        import torch

        if not torch.cuda.is_available():
            raise placed(RuntimeError("cannot pin host memory: torch finds no CUDA device here"))
        runtime = cast("Any", torch.cuda.cudart())
        status = int(runtime.cudaHostRegister(self.address, self.nbytes, 0))
        if status != 0:
            # The failure is sticky in the runtime until read; left there, it would be reported by
            # the next unrelated kernel launch.
            reason = runtime.cudaGetErrorString(runtime.cudaError(status))
            _clear_last_error(runtime)
            raise placed(RuntimeError(f"CUDA refused to pin {self.nbytes} bytes: {reason}"))
        self._unregister = weakref.finalize(self, runtime.cudaHostUnregister, self.address)
        return self

    @property
    def is_pinned(self) -> bool:
        """Whether the memory is registered with CUDA."""
        return self._unregister is not None

    def __reduce__(self) -> Any:
        """Refuses to be pickled or copied.

        Raises:
            TypeError: Always.
        """
        raise placed(
            TypeError("a HostBuffer is memory at one address: copy the bytes of a view instead")
        )

    def __repr__(self) -> str:
        pinned = ", pinned" if self.is_pinned else ""
        return f"<engram.HostBuffer of {self.nbytes} bytes at {self.address:#x}{pinned}>"


def _clear_last_error(runtime: Any) -> None:
    read = getattr(runtime, "cudaGetLastError", None)
    if read is not None:
        read()
