"""A control group with a memory limit, made for one process and removed again."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class Refused(Exception):
    """No group can be made here; says why."""


@dataclass(frozen=True)
class Group:
    """A group with a limit.

    Attributes:
        path: Its directory.
        version: 1 or 2.
    """

    path: Path
    version: int

    def join(self) -> None:
        """Moves the calling process in; what it allocates and reads from now on counts."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def set_limit(self, nbytes: int) -> None:
        """Lets the group use this much memory, page cache included."""
        name = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
        (self.path / name).write_text(str(nbytes))

    def used(self) -> int:
        """Bytes charged to the group, page cache included."""
        name = "memory.current" if self.version == 2 else "memory.usage_in_bytes"
        return int((self.path / name).read_text())

    def page_cache(self) -> int:
        """Bytes of page cache among them."""
        return self._counted("file", "total_cache")

    def not_to_be_evicted(self) -> int:
        """Bytes among them that the group cannot run without: memory, and files mapped to run."""
        return self.used() - self.page_cache() + self._counted("file_mapped", "total_mapped_file")

    def _counted(self, in_version_2: str, in_version_1: str) -> int:
        lines = (self.path / "memory.stat").read_text().splitlines()
        fields = dict(line.split(" ", 1) for line in lines)
        return int(fields[in_version_2 if self.version == 2 else in_version_1])


@contextmanager
def limited(nbytes: int, parent: Path | None = None) -> Iterator[Group]:
    """A new group that may use this much memory.

    Args:
        nbytes: Limit, page cache included.
        parent: Make it below this directory; None for where this process is.

    Raises:
        Refused: The kernel or its administrator does not let this process make one.
    """
    reasons = []
    for candidate, version in _parents(parent):
        group = Group(candidate / f"engram-bench-{os.getpid()}", version)
        try:
            group.path.mkdir()
        except OSError as error:
            reasons.append(f"{candidate}: {error.strerror}")
            continue
        try:
            group.set_limit(nbytes)
        except OSError as error:
            _remove(group.path)
            reasons.append(f"{candidate}: {error.strerror}")
            continue
        try:
            yield group
        finally:
            _remove(group.path)
        return
    raise Refused("; ".join(reasons) or f"no control groups for memory below {ROOT}")


def _parents(parent: Path | None) -> Iterator[tuple[Path, int]]:
    if parent is not None:
        yield parent, 2 if (parent / "cgroup.controllers").exists() else 1
        return
    try:
        membership = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in membership:
        _, controllers, group = line.split(":", 2)
        if controllers == "memory" or "memory" in controllers.split(","):
            yield ROOT / "memory" / group.lstrip("/"), 1
        elif not controllers:
            # A group that holds processes cannot give its children limits, but its parents can.
            own = ROOT / group.lstrip("/")
            for candidate in (own, *own.parents):
                control = candidate / "cgroup.subtree_control"
                if control.exists() and "memory" in control.read_text().split():
                    yield candidate, 2
                if candidate == ROOT:
                    break


def _remove(path: Path) -> None:
    # The kernel takes a moment to notice that a group's last process has ended.
    for _ in range(50):
        try:
            path.rmdir()
        except OSError:
            time.sleep(0.1)
        else:
            return
    path.rmdir()
