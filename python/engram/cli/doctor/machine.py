"""Checks of the machine and of what it lets this process do. Each is a function of facts."""

from __future__ import annotations

import errno
import os
import platform
import resource
from typing import TYPE_CHECKING

from engram import _engram
from engram.cli.text import format_bytes, plural
from engram.storage.numa import memory_nodes

from . import facts
from .finding import Finding

if TYPE_CHECKING:
    from pathlib import Path

LEAST_SHARED = 1 << 30
"""Bytes of `/dev/shm` below which no table of released size fits: containers get 64 MiB."""

_RING_MEMORY = 1 << 20
_RINGS_UNACCOUNTED = (5, 12)
"""Kernels from here on charge rings to memory, not to the limit of locked memory."""

_NEEDS = (
    ((5, 11), "io_uring as engram needs it"),
    ((5, 14), "filling page tables while prewarming"),
    ((6, 1), "the alignment that direct reads need"),
)


def kernel(system: str, release: str) -> Finding:
    """Whether the kernel has what engram uses, and what does without it."""
    found = f"{system} {release}"
    data = {"system": system, "release": release}
    if system != "Linux":
        return Finding(
            "kernel",
            "warning",
            found,
            "engram is made for Linux: here threads read, and nothing is known of the page cache",
            data,
        )
    version = facts.release_number(release)
    lacking = [what for since, what in _NEEDS if version < since]
    if not lacking:
        return Finding("kernel", "ok", found, None, data)
    advice = (
        f"this kernel lacks {' and '.join(lacking)}; engram works without, more slowly. "
        "Linux 6.1 or later has all of it"
    )
    return Finding("kernel", "warning", found, advice, data)


def rings(refusal: int | None, disabled: int | None, seccomp: int | None, release: str) -> Finding:
    """Whether io_uring can be used, and who forbids it.

    Args:
        refusal: The kernel's error number, None where it gives a ring.
        disabled: The setting `kernel.io_uring_disabled`, None where there is none.
        seccomp: As in `facts.Process`.
        release: Of the kernel.
    """
    data = {"errno": refusal, "io_uring_disabled": disabled, "seccomp": seccomp}
    if refusal is None:
        return Finding("io_uring", "ok", "available", None, data)
    said = os.strerror(refusal)
    filtered = (
        "a seccomp filter is set on this process: allow io_uring_setup, io_uring_enter and "
        "io_uring_register in the container's profile"
    )
    match refusal:
        case errno.EPERM | errno.EACCES if disabled:
            who = "only to members of kernel.io_uring_group and CAP_SYS_ADMIN"
            advice = (
                f"kernel.io_uring_disabled is {disabled}, which allows it "
                f"{who if disabled == 1 else 'to nobody'}: "
                "`sysctl kernel.io_uring_disabled=0` allows it"
            )
        case errno.EPERM | errno.EACCES if seccomp:
            advice = filtered
        case errno.EPERM | errno.EACCES:
            advice = "a security module forbids it (look for io_uring in `dmesg` or the audit log)"
        case errno.ENOSYS if seccomp and facts.release_number(release) >= (5, 11):
            advice = f"this kernel should have it, but {filtered}"
        case errno.ENOSYS:
            advice = f"Linux {release} has no io_uring, or one older than 5.11"
        case errno.ENOMEM:
            advice = "raise the limit of locked memory (`ulimit -l`), or of the control group"
        case errno.EMFILE | errno.ENFILE:
            advice = "raise the number of files that may be open (`ulimit -n`)"
        case _:
            advice = "engram asks for nothing special: report this with the kernel's release"
    return Finding(
        "io_uring",
        "warning",
        f"refused: {said}; threads read instead, 32 at a time",
        advice,
        data,
    )


def locked_memory(soft: int | None, release: str, *, may_lock: bool) -> Finding:
    """Whether the limit of locked memory leaves room for rings."""
    data = {"bytes": soft}
    found = "unlimited" if soft is None else format_bytes(soft)
    if soft is None or may_lock or facts.release_number(release) >= _RINGS_UNACCOUNTED:
        why = "" if soft is None else ", which nothing here counts against"
        return Finding("locked memory", "ok", found + why, None, data)
    if soft >= _RING_MEMORY:
        return Finding("locked memory", "ok", found, None, data)
    return Finding(
        "locked memory",
        "warning",
        found,
        f"kernels before 5.12 count rings against it: allow at least "
        f"{format_bytes(_RING_MEMORY)} (`ulimit -l`)",
        data,
    )


def open_files(soft: int | None, hard: int | None, needed: int | None = None) -> Finding:
    """Whether as many files may be open as the tables lie in.

    Args:
        soft: The limit, None for none.
        hard: How far this process may raise it.
        needed: Files of the tables, where there are any.
    """
    data = {"soft": soft, "hard": hard, "needed": needed}
    found = "unlimited" if soft is None else f"{soft:,} may be open"
    if needed is not None:
        found += f"; the tables lie in {plural(needed, 'file')}"
    # Others of the process have files open too: a server some hundred.
    if soft is None or soft >= 256 + 2 * (needed or 0):
        return Finding("open files", "ok", found, None, data)
    enough = f"raise the limit, for example `ulimit -n {max(1024, 2 * (needed or 0) + 1024)}`"
    if needed is not None and soft < needed:
        return Finding("open files", "problem", found, f"{enough}: the tables do not open", data)
    return Finding("open files", "warning", found, enough, data)


def shared_memory(total: int | None, free: int | None, needed: int | None = None) -> Finding:
    """Whether replicas can share tables through `/dev/shm`.

    Args:
        total: Bytes it may hold, None where there is none.
        free: Bytes that are free.
        needed: Bytes of the tables, where there are any.
    """
    data = {"bytes": total, "free": free, "needed": needed}
    enlarge = (
        "dp_shared_memory needs it, nothing else does: `docker run --shm-size=...` or "
        "`--ipc=host`; in Kubernetes an emptyDir with medium: Memory"
    )
    if total is None or free is None:
        return Finding("/dev/shm", "warning", "not there", enlarge, data)
    found = f"{format_bytes(total)}, {format_bytes(free)} free"
    if needed is not None and needed > free:
        return Finding(
            "/dev/shm", "warning", f"{found}; the tables take {format_bytes(needed)}", enlarge, data
        )
    verdict = "ok" if total >= LEAST_SHARED or needed is not None else "warning"
    return Finding("/dev/shm", verdict, found, None if verdict == "ok" else enlarge, data)


def huge_pages(enabled: str | None, shared: str | None) -> Finding:
    """Whether `use_thp` gets huge pages.

    Args:
        enabled: The setting for private memory, such as `always [madvise] never`.
        shared: The one for shared memory.
    """
    choice = facts.chosen(enabled)
    data = {"enabled": choice, "shmem_enabled": facts.chosen(shared)}
    if choice is None:
        found, advice = "not in this kernel", "use_thp=True has no effect here"
    elif choice == "never":
        found = "never"
        advice = (
            "use_thp=True has no effect here; "
            "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled` allows it"
        )
    else:
        return Finding("huge pages", "ok", f"{choice}, where asked for (use_thp)", None, data)
    return Finding("huge pages", "warning", found, advice, data)


def memory(total: int | None, limit: int, available: int, needed: int | None = None) -> Finding:
    """How much of the tables can stay in memory.

    Args:
        total: Bytes of the machine.
        limit: Bytes this process could ever use, control groups considered.
        available: Bytes it may use now without anything being killed or swapped.
        needed: Bytes of the tables, where there are any.
    """
    data = {"total": total, "limit": limit, "available": available, "needed": needed}
    limited = total is None or limit < total
    found = f"{format_bytes(available)} usable"
    if total is not None:
        found += f" of {format_bytes(limit if limited else total)}"
    if limited:
        found += " (a control group's limit"
        found += ")" if total is None else f"; the machine has {format_bytes(total)})"
    if needed is None or needed <= available:
        if needed is not None:
            found += f"; the tables take {format_bytes(needed)}"
        return Finding("memory", "ok", found, None, data)
    share = available / needed
    advice = (
        "the rest is read from the device again and again; more memory"
        + (" for the control group" if limited else "")
        + " makes the difference, see the estimate"
    )
    found += f"; {share:.0%} of the tables' {format_bytes(needed)} can stay in memory"
    return Finding("memory", "warning", found, advice, data)


def numa(nodes: list[int], mine: list[int], reclaim: int | None) -> Finding:
    """How memory is divided among nodes.

    Args:
        nodes: Memory nodes of the machine.
        mine: Those with cores this process may run on.
        reclaim: The setting `vm.zone_reclaim_mode`.
    """
    data = {"nodes": nodes, "usable": mine, "zone_reclaim_mode": reclaim}
    if len(nodes) < 2:
        return Finding("memory nodes", "ok", "one", None, data)
    found = f"{len(nodes)}, this process runs on {', '.join(map(str, mine)) or 'an unknown one'}"
    if reclaim:
        return Finding(
            "memory nodes",
            "warning",
            found,
            f"vm.zone_reclaim_mode is {reclaim}: cached rows are dropped while other nodes have "
            "memory to spare; `sysctl vm.zone_reclaim_mode=0`",
            data,
        )
    if len(mine) > 1:
        return Finding(
            "memory nodes",
            "warning",
            found,
            "rows of another node take longer: bind each server to the node of its device "
            "(`numactl --cpunodebind=N --membind=N`), or give open_storage numa=N",
            data,
        )
    return Finding("memory nodes", "ok", found, None, data)


def nodes_of_cores(nodes: list[int], sys: Path = facts.SYS) -> list[int]:
    """Those of `nodes` with cores this process may run on."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    mine = os.sched_getaffinity(0)
    found: list[int] = []
    for node in nodes:
        listed = facts.text(sys / f"devices/system/node/node{node}/cpulist") or ""
        cores: set[int] = set()
        for part in filter(None, listed.split(",")):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
        if cores & mine:
            found.append(node)
    return found


def checks(needed: int | None = None, files: int | None = None) -> list[Finding]:
    """All checks of this machine.

    Args:
        needed: Bytes of the tables, where there are any.
        files: Files they lie in.
    """
    release = platform.release()
    me = facts.process()
    available, limit = _engram.memory_bytes()
    nodes = memory_nodes()
    shm: tuple[int | None, int | None] = (None, None)
    try:
        status = os.statvfs("/dev/shm")
        shm = (status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)
    except OSError:
        pass
    thp = facts.SYS / "kernel/mm/transparent_hugepage"
    return [
        kernel(platform.system(), release),
        rings(
            _engram.ring_refusal(),
            facts.number(facts.PROC / "sys/kernel/io_uring_disabled"),
            me.seccomp,
            release,
        ),
        locked_memory(facts.limit(resource.RLIMIT_MEMLOCK)[0], release, may_lock=me.may_lock),
        open_files(*facts.limit(resource.RLIMIT_NOFILE), needed=files),
        memory(facts.memory_total(), limit, available, needed),
        shared_memory(*shm, needed=needed),
        huge_pages(facts.text(thp / "enabled"), facts.text(thp / "shmem_enabled")),
        numa(
            nodes,
            nodes_of_cores(nodes),
            facts.number(facts.PROC / "sys/vm/zone_reclaim_mode"),
        ),
    ]
