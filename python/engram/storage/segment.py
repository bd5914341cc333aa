"""Memory that several processes of a machine map, and that leaves nothing behind.

A segment is a file in `/dev/shm` that never has a name: whoever creates it keeps it open, the
others open it through that process's entry in `/proc`, and the kernel frees it when the last of
them has ended, however that happened. Since nothing has a name, there is nothing to clean up, to
mistake for one's own, or to find left over from an earlier run.

```
| rows, plane after plane | up to a page | header page: magic, token, size, progress, state |
```

Space is reserved before the memory is used: without that, a `/dev/shm` that is too small accepts
any size and kills whoever first touches a page it does not have.

The writer holds a record lock for as long as it fills the segment. Record locks belong to a process
and go when it ends, so a reader that can take the lock knows that nobody is writing any more.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import struct
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram.buffer import HostBuffer
from engram.storage import numa, preflight

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

__all__ = ["SHARED_MEMORY", "Segment"]

SHARED_MEMORY = Path("/dev/shm")
"""Where shared memory lives."""

RESERVE_BYTES = 256 << 20
"""Bytes reserved in one call."""

_MAGIC = b"ENGRAM\x00\x01"
_HEADER = struct.Struct("<8s16sQ")
_PROGRESS = struct.Struct("<Q")
_STATE = struct.Struct("<BH")
_FILLING, _READY, _FAILED = range(3)
_LONGEST_MESSAGE = 2000
_PAUSE = 0.005


class Segment:
    """Shared memory as one process has it: the file, open, and its mapping.

    Attributes:
        buffer: The memory.
        token: Random bytes in the header that tell this segment from any other.
    """

    def __init__(self, fd: int, nbytes: int, token: bytes) -> None:
        self._fd = fd
        self._nbytes = nbytes
        self._header = _in_pages(nbytes)
        self.token = token
        self.buffer = HostBuffer(nbytes, fd=fd)

    @classmethod
    def create(
        cls,
        needs: preflight.Needs,
        nodes: list[int],
        progress: Callable[[int, int], Any] | None = None,
    ) -> Self:
        """Makes a segment of `needs.own` bytes, reserved, and takes the writer's lock.

        Args:
            needs: What the table takes.
            nodes: Memory nodes its pages come from.
            progress: Called with bytes reserved and bytes in all.

        Raises:
            OSError: There is no shared memory, or not enough; nothing is left of what was tried.
            MemoryError: The machine has not enough memory.
        """
        directory = SHARED_MEMORY
        shortage = preflight.describe_shared_memory(
            needs, preflight.shared_memory_now(directory), directory
        )
        if shortage is not None:
            raise OSError(errno.ENOSPC, shortage, str(directory))
        preflight.require_host_memory(needs)
        total = _in_pages(needs.own) + _page()
        fd = _nameless(directory)
        segment = None
        try:
            os.ftruncate(fd, total)
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            segment = cls(fd, needs.own, secrets.token_bytes(16))
            # Reserving allocates the pages, so where they go has to be said first.
            numa.place(segment.buffer, nodes)
            for start in range(0, total, RESERVE_BYTES):
                length = min(RESERVE_BYTES, total - start)
                os.posix_fallocate(fd, start, length)
                if progress is not None:
                    progress(start + length, total)
            header = _HEADER.pack(_MAGIC, segment.token, needs.own)
            os.pwrite(fd, header, segment._header)
        except OSError as error:
            os.close(fd)
            # The mapping keeps a descriptor, and the error's traceback would keep the mapping.
            segment = None
            if error.errno != errno.ENOSPC:
                raise
            memory = preflight.shared_memory_now(directory)
            # Somebody else took the space meanwhile.
            shortage = preflight.describe_shared_memory(
                needs, memory._replace(available=0), directory
            )
            raise OSError(errno.ENOSPC, shortage, str(directory)) from error
        except BaseException:
            os.close(fd)
            raise
        return segment

    @property
    def offer(self) -> dict[str, Any]:
        """What another process needs to attach."""
        return {"pid": os.getpid(), "fd": self._fd, "token": self.token.hex()}

    @classmethod
    def attach(cls, offer: dict[str, Any], nbytes: int) -> Self:
        """Maps the segment that another process offers.

        Raises:
            OSError: It cannot be opened: that process has ended, or is out of sight.
            ValueError: What was opened is not that segment, or others may write to it.
        """
        pid, number = offer["pid"], offer["fd"]
        if type(pid) is not int or type(number) is not int:
            # Anything else might lead out of /proc.
            raise ValueError(f"process {pid!r} with file {number!r} is no offer of a segment")
        fd = os.open(
            f"/proc/{pid}/fd/{number}",
            os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK,
        )
        try:
            _require_private(fd, pid)
            token = bytes.fromhex(offer["token"])
            found = os.pread(fd, _HEADER.size, _in_pages(nbytes))
            if found != _HEADER.pack(_MAGIC, token, nbytes):
                raise ValueError(
                    f"file {number} of process {pid} is not the segment it offered; "
                    "the processes do not see the same machine"
                )
            return cls(fd, nbytes, token)
        except BaseException:
            os.close(fd)
            raise

    def report(self, done: int) -> None:
        """Tells readers how many bytes have been filled."""
        os.pwrite(self._fd, _PROGRESS.pack(done), self._header + _HEADER.size)

    def set_ready(self) -> None:
        """Tells readers that all rows are there."""
        self._set_state(_READY, "")

    def set_failed(self, reason: str) -> None:
        """Tells readers that there will be no rows."""
        self._set_state(_FAILED, reason)

    def wait_ready(self, timeout: float) -> None:
        """Waits until the writer is through.

        Args:
            timeout: Seconds without progress after which to give up.

        Raises:
            RuntimeError: The writer died or failed; its own error says why.
            TimeoutError: It makes no progress.
        """
        seen, since = -1, time.monotonic()
        while True:
            state, message = self._state()
            alive = state != _FILLING or self._writer_lives()
            if not alive:
                # It may have finished, and let go, between the two questions.
                state, message = self._state()
            if state == _READY:
                return
            if state == _FAILED:
                raise RuntimeError(f"the replica that loads the shared table failed: {message}")
            if not alive:
                raise RuntimeError("the replica that was loading the shared table died")
            done = self._done()
            if done != seen:
                seen, since = done, time.monotonic()
            elif time.monotonic() - since > timeout:
                raise TimeoutError(
                    f"the replica that loads the shared table has made no progress for "
                    f"{timeout:g} s, after {done} of {self._nbytes} bytes"
                )
            time.sleep(_PAUSE)

    def close_file(self) -> None:
        """Closes the file; the memory stays as long as `buffer` does."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _set_state(self, state: int, message: str) -> None:
        text = message.encode()[:_LONGEST_MESSAGE]
        at = self._header + _HEADER.size + _PROGRESS.size
        os.pwrite(self._fd, text, at + _STATE.size)
        # Last, so that whoever reads the state finds everything before it in place.
        os.pwrite(self._fd, _STATE.pack(state, len(text)), at)

    def _state(self) -> tuple[int, str]:
        at = self._header + _HEADER.size + _PROGRESS.size
        state, length = _STATE.unpack(os.pread(self._fd, _STATE.size, at))
        return state, os.pread(self._fd, length, at + _STATE.size).decode(errors="replace")

    def _done(self) -> int:
        at = self._header + _HEADER.size
        done: int = _PROGRESS.unpack(os.pread(self._fd, _PROGRESS.size, at))[0]
        return done

    def _writer_lives(self) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.lockf(self._fd, fcntl.LOCK_UN)
        return False


def _require_private(fd: int, pid: int) -> None:
    """Refuses what is no file, or whose bytes other users may change."""
    status = os.fstat(fd)
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or mode & 0o077:
        raise ValueError(
            f"what process {pid} offers is not a file of this user alone (owner "
            f"{status.st_uid}, mode {mode:o}); it is not a segment"
        )


def _nameless(directory: Path) -> int:
    """A file of this user alone that has no name and ends with its last descriptor or mapping."""
    flags = getattr(os, "O_TMPFILE", 0)
    if flags:
        try:
            return os.open(directory, flags | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
    fd, name = tempfile.mkstemp(prefix="engram-", dir=directory)
    Path(name).unlink()
    return fd


def _page() -> int:
    return os.sysconf("SC_PAGE_SIZE")


def _in_pages(nbytes: int) -> int:
    """`nbytes`, rounded up to whole pages."""
    return -(-nbytes // _page()) * _page()
