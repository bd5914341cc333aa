"""Where a figure was measured: processor, kernel, file system."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def processor() -> str:
    """Processor model and the number of cores this process may use."""
    model = platform.processor() or platform.machine()
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
        model = found[1] if found else model
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores usable"


def load() -> str:
    """Processes that wanted a core during the last minute: what else ran while this measured."""
    try:
        return f"{os.getloadavg()[0]:.1f} over the last minute"
    except OSError:
        return "unknown"


def kernel() -> str:
    """Kernel name and release."""
    return f"{platform.system()} {platform.release()}"


def memory() -> int | None:
    """Bytes of physical memory, None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Type of the file system that holds `path`, and where it is mounted."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return "unknown"
    resolved = path.resolve()
    best, kind = Path(), "unknown"
    for line in lines:
        fields = line.split()
        # Blanks in mount points are written as octal escapes.
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[1]))
        if resolved.is_relative_to(point) and len(point.parts) >= len(best.parts):
            best, kind = point, fields[2]
    return f"{kind} on {best}" if kind != "unknown" else kind
