"""Whether a table fits, computed and said before anything is allocated."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, NamedTuple

from engram import _engram

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "Needs",
    "describe_shared_memory",
    "memory_now",
    "require_device_memory",
    "require_host_memory",
    "shared_memory_now",
]


_logger = logging.getLogger(__name__)


class Memory(NamedTuple):
    """Bytes of host memory."""

    available: int
    """May be used now without anything being killed or swapped."""
    limit: int
    """All there could ever be: the machine's, or less where a control group's limit is lower."""


class Needs(NamedTuple):
    """What a table will take on this machine."""

    table: str
    placement: str
    own: int
    """Bytes that this rank allocates."""
    ranks: int
    """Ranks of this machine that allocate as much."""

    @property
    def total(self) -> int:
        """Bytes on this machine."""
        return self.own * self.ranks


def memory_now() -> Memory:
    """Host memory as the kernel and the control groups have it."""
    return Memory(*_engram.memory_bytes())


def require_host_memory(needs: Needs, memory: Memory | None = None) -> None:
    """Refuses a table that host memory cannot hold.

    The parts of all ranks together must fit what there could ever be: each alone may fit and the
    sum have them killed one by one. This rank's own part must fit what is available now.

    Raises:
        MemoryError: It does not; the message holds the numbers.
    """
    memory = memory_now() if memory is None else memory
    _logger.info(
        "table %r (%s): %d bytes for this rank, %d for %d ranks on this machine; %d available",
        needs.table,
        needs.placement,
        needs.own,
        needs.total,
        needs.ranks,
        memory.available,
    )
    if needs.total > memory.limit or needs.own > memory.available:
        raise MemoryError(
            f"not enough host memory for table {needs.table!r} ({needs.placement}):\n"
            + _numbers(
                {
                    "needed by this rank": needs.own,
                    f"needed by {needs.ranks} ranks on this machine": needs.total,
                    "limit of memory": memory.limit,
                    "available now": memory.available,
                }
            )
            + "\nShard the table over more ranks, raise the limit, or serve rows from the files: "
            "disk_offload=True"
        )


def require_device_memory(needs: Needs, free: int, total: int) -> None:
    """Refuses a table that the device cannot hold.

    Raises:
        MemoryError: It does not fit; the message holds the numbers.
    """
    if needs.own > free:
        raise MemoryError(
            f"not enough device memory for table {needs.table!r}:\n"
            + _numbers(
                {
                    "needed by this rank": needs.own,
                    "free on the device": free,
                    "memory of the device": total,
                }
            )
            + "\nKeep the table in host memory (cpu_offload=True) or in its files "
            "(disk_offload=True)"
        )


def shared_memory_now(directory: Path) -> Memory:
    """Bytes of the file system that shared memory lives on.

    Raises:
        OSError: There is no such directory.
    """
    status = os.statvfs(directory)
    return Memory(status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize)


def describe_shared_memory(needs: Needs, memory: Memory, directory: Path) -> str | None:
    """Why shared memory cannot hold a table, with the numbers; None if it can."""
    if needs.own <= memory.available and needs.total <= memory.limit:
        return None
    return (
        f"{directory} cannot hold table {needs.table!r}:\n"
        + _numbers(
            {
                "needed by this shard": needs.own,
                f"needed by {needs.ranks} shards on this machine": needs.total,
                f"size of {directory}": memory.limit,
                "available now": memory.available,
            }
        )
        + "\nEnlarge it: docker run --shm-size=... or --ipc=host; in Kubernetes an emptyDir with "
        "medium: Memory"
    )


def _numbers(values: dict[str, int]) -> str:
    width = max(map(len, values))
    return "\n".join(f"  {name:<{width}}  {_bytes(value)}" for name, value in values.items())


def _bytes(value: int) -> str:
    if value >= 1 << 62:
        return "unlimited"
    return f"{value:>16,} bytes ({value / 2**30:.2f} GiB)"
