"""Host memory registered with CUDA: in segments, with a way back from every failure.

A driver may refuse one huge registration, or take hours for it. Segments show progress, end at a
time limit, and can be taken back one by one.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any

from engram._errors import placed

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Pinning"]

SEGMENT_BYTES = 1 << 30
TIME_LIMIT = 600.0
"""Seconds after which registering is given up; a page takes well under a microsecond."""

# With one address space for host and devices: mapped there, and usable from every context.
_DEFAULT = 0


class Pinning:
    """A range of host memory, registered with CUDA for as long as this object is not closed.

    Args:
        address: First byte, a multiple of the page size.
        nbytes: Bytes to register.
        runtime: What torch calls `cudart`; None asks torch.
        segment_bytes: Most bytes registered in one call.
        time_limit: Seconds after which to give up.
        progress: Called with `(bytes_done, bytes_total)` after each segment.

    Raises:
        RuntimeError: torch has no CUDA here, the driver refused, or the time limit passed. Nothing
            is left registered, and no error is left in the runtime for the next call to report.
    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        *,
        runtime: Any = None,
        segment_bytes: int = SEGMENT_BYTES,
        time_limit: float = TIME_LIMIT,
        progress: Callable[[int, int], Any] | None = None,
    ) -> None:
        self._runtime = _runtime() if runtime is None else runtime
        self._address = address
        self._segments: list[int] = []
        begun = time.monotonic()
        done = 0
        try:
            while done < nbytes:
                length = min(segment_bytes, nbytes - done)
                self._register(address + done, length, nbytes)
                done += length
                if progress is not None:
                    progress(done, nbytes)
                if done < nbytes and time.monotonic() - begun > time_limit:
                    raise placed(
                        RuntimeError(
                            f"registering host memory with CUDA took over {time_limit:g} s for "
                            f"{done} of {nbytes} bytes, so it was given up; use disk_offload=True, "
                            "or cpu_offload=False to keep the table on the device"
                        )
                    )
        except BaseException:
            self.close()
            raise

    def _register(self, address: int, length: int, nbytes: int) -> None:
        status = int(self._runtime.cudaHostRegister(address, length, _DEFAULT))
        if status == 0:
            self._segments.append(address)
            return
        reason = _reason(self._runtime, status)
        # The failure stays in the runtime until it is read; left there, the next unrelated kernel
        # launch would report it.
        clear_last_error(self._runtime)
        raise placed(
            RuntimeError(
                f"CUDA refused to register {length} bytes of host memory ({nbytes} in all): "
                f"{reason}. Some drivers count it to the limit of locked memory (`ulimit -l`)"
            )
        )

    def device_address(self) -> int:
        """Where the current device finds the first byte.

        With one address space for host and devices that is the host's own address; CUDA is asked
        all the same, where anything here can ask it.

        Raises:
            RuntimeError: CUDA does not know the memory, or scatters its segments.
        """
        ask = getattr(self._runtime, "cudaHostGetDevicePointer", None) or _native_device_pointer()
        if ask is None:
            return self._address
        found: list[int] = []
        for segment in self._segments:
            status, there = ask(segment, 0)
            if int(status) != 0:
                reason = _reason(self._runtime, int(status))
                clear_last_error(self._runtime)
                raise placed(
                    RuntimeError(
                        f"CUDA gives no device pointer to registered host memory: {reason}"
                    )
                )
            found.append(int(there) - segment)
        if len(set(found)) > 1:
            raise placed(
                RuntimeError(
                    "CUDA maps the segments of registered host memory apart from one another; use "
                    "disk_offload=True, or cpu_offload=False to keep the table on the device"
                )
            )
        return self._address + (found[0] if found else 0)

    def close(self) -> None:
        """Takes every registration back; does nothing the second time."""
        while self._segments:
            if int(self._runtime.cudaHostUnregister(self._segments.pop())) != 0:
                clear_last_error(self._runtime)


def clear_last_error(runtime: Any) -> None:
    """Reads, and so clears, the last error of the calling thread."""
    read = getattr(runtime, "cudaGetLastError", None)
    read = _native_last_error() if read is None else read
    if read is not None:
        read()


def _runtime() -> Any:
    import torch

    cuda: Any = torch.cuda
    if not cuda.is_available():
        raise placed(RuntimeError("cannot pin host memory: torch finds no CUDA device here"))
    return cuda.cudart()


def _reason(runtime: Any, status: int) -> str:
    describe = getattr(runtime, "cudaGetErrorString", None)
    if describe is None:
        return f"error {status}"
    code = getattr(runtime, "cudaError", int)(status)
    return f"{describe(code)} (error {status})"


def _native_last_error() -> Any:
    return _native("cudaGetLastError", "hipGetLastError")


def _native_device_pointer() -> Callable[[int, int], tuple[int, int]] | None:
    function = _native("cudaHostGetDevicePointer", "hipHostGetDevicePointer")
    if function is None:
        return None

    def ask(address: int, flags: int) -> tuple[int, int]:
        there = ctypes.c_void_p()
        status = function(ctypes.byref(there), ctypes.c_void_p(address), ctypes.c_uint(flags))
        return status, there.value or 0

    return ask


def _native(cuda: str, hip: str) -> Any:
    """A function of the runtime library that torch has loaded; torch itself does not offer it."""
    try:
        with open("/proc/self/maps") as maps:  # noqa: PTH123 - pathlib costs an import
            mapped = maps.read().splitlines()
    except OSError:
        return None
    for line in mapped:
        path = line.split(maxsplit=5)[-1]
        name = path.rpartition("/")[2]
        for library, function in (("libcudart.so", cuda), ("libamdhip64.so", hip)):
            if name.startswith(library):
                return getattr(ctypes.CDLL(path), function, None)
    return None
