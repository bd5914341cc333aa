"""Checks of where the files lie: filesystem, block device, direct I/O."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram.cli.text import format_bytes

from . import facts
from .finding import Finding

_NETWORK = frozenset(
    {
        *("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "ncpfs"),
        *("nfs", "nfs4", "orangefs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs"),
    }
)
_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
_LARGE_READ_AHEAD = 1024
"""KiB; kernels set 128, and storage drivers sometimes thousands."""


@dataclass(frozen=True)
class Mount:
    """A line of `/proc/self/mountinfo`.

    Attributes:
        device: Major and minor number, as files on it show them.
        point: Where it is mounted.
        kind: Type of the filesystem, such as `"ext4"` or `"fuse.sshfs"`.
        source: What is mounted, such as `"/dev/vda"`.
        options: Of the mount and of the filesystem.
    """

    device: str
    point: Path
    kind: str
    source: str
    options: frozenset[str]

    @property
    def is_remote(self) -> bool:
        """Whether a server, or a program, answers for its files."""
        return self.kind in _NETWORK or self.kind.split(".")[0] in {"fuse", "fuseblk"}

    @property
    def is_memory(self) -> bool:
        """Whether its files are nowhere but in memory."""
        return self.kind in _MEMORY


def mounts(mountinfo: str) -> list[Mount]:
    """The mounts in the text of a `mountinfo`."""
    found: list[Mount] = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if len(fields) < 6 or len(rest) < 3:
            continue
        # Blanks in paths are written as octal escapes.
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
        options = frozenset(f"{fields[5]},{rest[2]}".split(","))
        found.append(Mount(fields[2], Path(point), rest[0], rest[1], options))
    return found


def mount_of(path: Path, mountinfo: str) -> Mount | None:
    """The mount that holds `path`; the last where several lie over one another."""
    best: Mount | None = None
    for mount in mounts(mountinfo):
        if path.is_relative_to(mount.point) and (
            best is None or len(mount.point.parts) >= len(best.point.parts)
        ):
            best = mount
    return best


def filesystem(mount: Mount | None) -> Finding:
    """What kind of filesystem the files lie on, and what that means for reading rows."""
    if mount is None:
        return Finding("filesystem", "warning", "unknown", "the kernel does not say", {})
    data: dict[str, Any] = {
        "type": mount.kind,
        "mounted_at": str(mount.point),
        "source": mount.source,
        "remote": mount.is_remote,
    }
    found = f"{mount.kind} on {mount.point}"
    if mount.is_remote:
        return Finding(
            "filesystem",
            "warning",
            f"{found}, answered for by a server or a program",
            "rows are read and never mapped, since a page fault could hang; a copy of the files on "
            "a local disk is faster, warm and cold",
            data,
        )
    if mount.is_memory:
        found += ", in memory: rows are never cold, and never given back"
    return Finding("filesystem", "ok", found, None, data)


@dataclass(frozen=True)
class Device:
    """A block device, as `/sys` describes it.

    Attributes:
        name: Such as `"nvme0n1"`.
        model: What it calls itself, None where it does not.
        read_ahead_kib: What a fault, or a sequential read, may read around it.
        rotational: Whether it says that it has moving parts. Virtual disks often claim so.
        requests: How many may be queued.
        members: Names of the devices below it, for RAID, LVM and encryption.
    """

    name: str
    model: str | None
    read_ahead_kib: int | None
    rotational: bool | None
    requests: int | None
    members: tuple[str, ...]


def device_of(mount: Mount | None, sys: Path = facts.SYS) -> Device | None:
    """The block device below a mount, None where there is none that the kernel names."""
    if mount is None:
        return None
    folder = sys / "dev/block" / mount.device
    if not folder.exists() and mount.source.startswith("/dev/"):
        # Filesystems with several volumes have a number of their own.
        try:
            number = os.stat(mount.source).st_rdev  # noqa: PTH116 - device numbers
        except OSError:
            return None
        folder = sys / "dev/block" / f"{os.major(number)}:{os.minor(number)}"
    if not folder.exists():
        return None
    folder = folder.resolve()
    if (folder / "partition").exists():
        folder = folder.parent
    queue = folder / "queue"
    rotational = facts.number(queue / "rotational")
    try:
        members = tuple(sorted(entry.name for entry in (folder / "slaves").iterdir()))
    except OSError:
        members = ()
    return Device(
        name=folder.name,
        model=facts.text(folder / "device/model"),
        read_ahead_kib=facts.number(queue / "read_ahead_kb"),
        rotational=None if rotational is None else bool(rotational),
        requests=facts.number(queue / "nr_requests"),
        members=members,
    )


def block_device(device: Device | None, mount: Mount | None) -> Finding:
    """What the files lie on, and what a fault would read around a row."""
    if device is None:
        if mount is not None and mount.is_memory:
            return Finding("device", "ok", "memory", None, {})
        kind = "unknown" if mount is None else f"none that the kernel names, below {mount.kind}"
        return Finding("device", "ok", kind, None, {})
    data = {
        "name": device.name,
        "model": device.model,
        "read_ahead_kib": device.read_ahead_kib,
        "rotational": device.rotational,
        "requests": device.requests,
        "members": list(device.members),
    }
    parts = [device.name + (f" ({device.model})" if device.model else "")]
    if device.members:
        parts.append(f"made of {', '.join(device.members)}")
    if device.rotational:
        parts.append("says it has moving parts")
    if device.read_ahead_kib is None:
        return Finding("device", "ok", ", ".join(parts), None, data)
    parts.append(f"read-ahead {format_bytes(device.read_ahead_kib * 1024)}")
    found = ", ".join(parts)
    if device.read_ahead_kib <= _LARGE_READ_AHEAD:
        return Finding("device", "ok", found, None, data)
    advice = (
        'with advice="normal", and in programs that map these files without any advice, a fault '
        f"reads that much for one row; `blockdev --setra 256 /dev/{device.name}` makes it 128 KiB. "
        "engram's own advice keeps it to a page"
    )
    return Finding("device", "warning", found, advice, data)


def direct_io(io: dict[str, Any] | None, refusal: str | None = None) -> Finding:
    """Whether reads can bypass the page cache, and how they must be aligned.

    Args:
        io: `stats()["io"]` of a table opened with `io="direct"`; None if it does not open.
        refusal: Why it does not.
    """
    if io is None:
        return Finding("direct I/O", "warning", f"not to be had: {refusal}", None, {})
    alignment = io["direct_alignment"]
    data = {"alignment": alignment, "runs": io["runs"]}
    if alignment is not None:
        return Finding("direct I/O", "ok", f"aligned to {alignment} bytes", None, data)
    reasons = [text for text in io["fallbacks"] if "direct I/O" in text] or io["fallbacks"]
    return Finding(
        "direct I/O",
        "warning",
        reasons[0] if reasons else "refused",
        'io="direct" reads through the page cache here; nothing else needs it',
        data,
    )
