"""Which memory node a table's pages come from. Decided before the first page is touched.

Pages of a table that is registered with a driver are never moved afterwards: moving hundreds of
gigabytes of registered memory blocks a server for minutes. All of this is best effort, and where
it cannot be done a table works just as well, only slower for some.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from engram._notices import notify

if TYPE_CHECKING:
    from engram.buffer import HostBuffer

__all__ = ["Numa", "choose_node", "memory_nodes", "place"]

Numa = Literal["auto"] | int | None

SYSTEM = Path("/sys")
"""Where the kernel describes the machine."""

_warned: set[str] = set()


def memory_nodes() -> list[int]:
    """Numbers of the machine's memory nodes; empty where the kernel does not say."""
    return _numbers(SYSTEM / "devices/system/node/has_memory") or _numbers(
        SYSTEM / "devices/system/node/online"
    )


def choose_node(numa: Numa, device: Any = None) -> int | None:
    """The memory node a table belongs to.

    Args:
        numa: A node; `"auto"` for that of the device, else that of the CPUs this process may use,
            if they all belong to one; None for none in particular.
        device: A torch device, or None.

    Returns:
        The node; None where there is nothing to choose (one node, or no reason for any).

    Raises:
        ValueError: No such node; the nodes are listed.
    """
    nodes = memory_nodes()
    if numa is None:
        return None
    if isinstance(numa, int) and not isinstance(numa, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        if nodes and numa not in nodes:
            raise ValueError(f"numa={numa}: this machine has memory nodes {nodes}")
        return numa
    if numa != "auto":
        raise ValueError(f'numa must be "auto", a node number or None, got {numa!r}')
    if len(nodes) < 2:
        return None
    node = _node_of_device(device)
    return _node_of_cpus(nodes) if node is None else node


def place(buffer: HostBuffer, nodes: list[int]) -> bool:
    """Sets where pages of `buffer` come from, before any is touched; in turn from several nodes.

    A refusal is reported once per process, with the call and what would allow it.

    Returns:
        Whether the kernel agreed.
    """
    if not nodes:
        return False
    try:
        buffer.place(nodes, len(nodes) > 1)
    except (OSError, MemoryError) as error:
        words = error.strerror if isinstance(error, OSError) else None
        _warn_once(
            f"memory placement on node {', '.join(map(str, nodes))} was refused: mbind: "
            f"{words or error}. In a container, the capability CAP_SYS_NICE or a seccomp "
            "profile that allows mbind permits it; the table is served from wherever its pages "
            "land"
        )
        return False
    return True


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        notify(message)
        warnings.warn(message, UserWarning, stacklevel=2)


def _node_of_device(device: Any) -> int | None:
    if device is None or device.type != "cuda":
        return None
    import torch

    cuda: Any = torch.cuda
    try:
        properties = cuda.get_device_properties(device)
        address = (
            f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
            f"{properties.pci_device_id:02x}.0"
        )
        node = int((SYSTEM / f"bus/pci/devices/{address}/numa_node").read_text())
    except (OSError, ValueError, AttributeError, RuntimeError):
        return None
    return node if node >= 0 else None


def _node_of_cpus(nodes: list[int]) -> int | None:
    allowed = os.sched_getaffinity(0)
    for node in nodes:
        cpus = _numbers(SYSTEM / f"devices/system/node/node{node}/cpulist")
        if allowed <= set(cpus):
            return node
    return None


def _numbers(path: Path) -> list[int]:
    """The numbers in a list such as `0-3,8`."""
    try:
        text = path.read_text().strip()
        numbers: list[int] = []
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            numbers.extend(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return []
    return numbers
