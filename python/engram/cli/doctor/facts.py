"""What the kernel says of itself and of this process. Nothing is judged here."""

from __future__ import annotations

import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
SYS = Path("/sys")

_CAP_IPC_LOCK = 14


def text(path: Path) -> str | None:
    """The stripped text of a small file, None where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def number(path: Path) -> int | None:
    """The number in a small file, None where there is none."""
    found = text(path)
    try:
        return None if found is None else int(found)
    except ValueError:
        return None


def release_number(release: str) -> tuple[int, int]:
    """Major and minor number of a kernel release such as `6.18.44-generic`; (0, 0) if unknown."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


@dataclass(frozen=True)
class Process:
    """What `/proc/self/status` says of who this process is.

    Attributes:
        seccomp: 0 without a filter, 2 with one, None where the kernel does not say.
        capabilities: The effective ones, a bit each.
    """

    seccomp: int | None
    capabilities: int

    @property
    def may_lock(self) -> bool:
        """Whether limits of locked memory do not apply."""
        return bool(self.capabilities >> _CAP_IPC_LOCK & 1)


def process(proc: Path = PROC) -> Process:
    """This process, by `/proc/self/status`."""
    lines = (text(proc / "self/status") or "").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    seccomp = fields.get("Seccomp", "").strip()
    return Process(
        int(seccomp) if seccomp.isdecimal() else None,
        int(fields.get("CapEff", "0").strip() or "0", 16),
    )


def memory_total(proc: Path = PROC) -> int | None:
    """Bytes of the machine's memory."""
    found = re.search(r"^MemTotal:\s*(\d+) kB$", text(proc / "meminfo") or "", re.M)
    return int(found[1]) * 1024 if found else None


def chosen(setting: str | None) -> str | None:
    """The choice in a setting such as `always [madvise] never`."""
    found = re.search(r"\[([^\]]*)\]", setting or "")
    return found[1] if found else setting


def limit(which: int) -> tuple[int | None, int | None]:
    """Soft and hard limit of a resource, None for unlimited."""
    return (
        *(
            None if value == resource.RLIM_INFINITY else value
            for value in resource.getrlimit(which)
        ),
    )  # pyright: ignore[reportReturnType]


def usable_cores() -> int | None:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()
