"""Host memory at a fixed address."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Self

from engram import _engram
from engram._arguments import whole_number
from engram._errors import placed
from engram.pinning import Pinning

if TYPE_CHECKING:
    from collections.abc import Callable


class HostBuffer(_engram.HostBuffer):
    """Page-aligned, zeroed host memory that never moves, exported through the buffer protocol.

    `numpy.frombuffer(buffer, dtype=...)` and `torch.frombuffer(buffer, dtype=...)` give writable
    views; the memory lives as long as any view of it.

    Args:
        nbytes: Bytes to allocate; exactly as many are used, rounded up to a page by the kernel.
        huge_pages: Advise the kernel to use huge pages; the memory is then rounded up to one of
            those. A refusal is no error: `huge_pages` of the buffer says whether the advice was
            taken.
        fd: Descriptor of a file of at least `nbytes` bytes to map, shared with others who map it,
            instead of private memory. It may be closed afterwards.

    Attributes:
        nbytes: Bytes asked for.
        capacity: Bytes that the memory really has.
        address: Address of the first byte, a multiple of the page size.
    """

    _pinning: Pinning | None = None

    def __new__(
        cls,
        nbytes: int,
        huge_pages: bool = False,  # noqa: FBT001, FBT002
        *,
        fd: int | None = None,
    ) -> Self:
        """Allocates.

        Raises:
            ValueError: `nbytes` is negative or no integer.
            OSError: The kernel refused, with its errno.
        """
        return super().__new__(cls, whole_number("nbytes", nbytes, least=0), huge_pages, fd=fd)

    def pin(self, progress: Callable[[int, int], Any] | None = None) -> HostBuffer:
        """Registers the memory with CUDA, so that devices read it and copies can overlap work.

        It is registered in segments; one that fails undoes the ones before.

        Args:
            progress: Called with `(bytes_done, bytes_total)` after each segment.

        Returns:
            The buffer itself.

        Raises:
            RuntimeError: torch has no CUDA here, or the driver refused, with its reason, or took
                too long.
        """
        if self._pinning is None and self.nbytes > 0:
            self._pinning = Pinning(self.address, self.capacity, progress=progress)
            weakref.finalize(self, self._pinning.close)
        return self

    def unpin(self) -> None:
        """Takes the registration back. Devices must have finished with the memory."""
        if self._pinning is not None:
            self._pinning.close()
            self._pinning = None

    def device_address(self) -> int:
        """Where the current device finds the first byte of pinned memory.

        Raises:
            RuntimeError: The memory is not pinned, or CUDA does not know it.
        """
        if self._pinning is None:
            raise placed(RuntimeError("only pinned memory has an address on the device"))
        return self._pinning.device_address()

    @property
    def is_pinned(self) -> bool:
        """Whether the memory is registered with CUDA."""
        return self._pinning is not None

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
