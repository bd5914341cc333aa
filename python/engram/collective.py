"""Collectives of torch.distributed with a time limit, and errors that say who is missing.

A rank that dies closes its connections, which its group notices at once. A rank that stays away is
noticed by the time limit. Ranks that share no group with it would wait for their own peers, which
gave up: so whoever gives up leaves a note in the store that all ranks share, and whoever waits
looks for one, every second.
"""

from __future__ import annotations

import datetime
import math
import re
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Collective", "carried"]

distributed: Any = dist

_PATIENCE = 2.0
"""Seconds that ranks which gave up waiting take to find out who else did."""

_SLICE = 1.0
"""Seconds after which a waiting rank asks whether a peer gave up elsewhere."""


class Collective:
    """What look-ups over several ranks share: the step count, the limit, the errors.

    Args:
        what: Names the exchange in messages.
        row_bytes: Bytes of a row.
        timeout: Seconds to wait for other ranks; None waits as long as the group does.
        groups: Every group that a step uses, None where there is none.
    """

    def __init__(
        self, what: str, row_bytes: int, timeout: float | None, groups: tuple[Any, ...]
    ) -> None:
        self.row_bytes = row_bytes
        self.steps = 0
        self.rows_read = 0
        self.what = what
        self._timeout = timeout
        self.broken: str | None = None
        self._all_groups = groups

    def stats(self) -> dict[str, int]:
        """Steps so far, and the rows and bytes that this rank read for them.

        On a device, rows that were read to keep shapes fixed and then wiped count too.
        """
        return {
            "steps": self.steps,
            "rows_read": self.rows_read,
            "bytes_read": self.rows_read * self.row_bytes,
        }

    def begin_step(self) -> None:
        """Counts a step, if the groups still work.

        Raises:
            RuntimeError: They stopped working in an earlier step.
        """
        if self.broken is not None:
            raise RuntimeError(
                f"{self.what} stopped working earlier, and its groups with it: make new ones "
                f"({self.broken})"
            )
        self.steps += 1

    def run(self, doing: str, group: Any, launch: Callable[[], Any], *, on_host: bool) -> None:
        """Launches a collective and waits for it, on the host for at most the time limit.

        On a device the wait is the stream's, and torch's own watchdog keeps the time.

        Args:
            doing: What the collective is for, in messages.
            group: The group it runs in.
            launch: Starts it, asynchronously, and gives its work handle.
            on_host: Whether its tensors lie in host memory.

        Raises:
            TimeoutError: Other ranks did not come in time.
            RuntimeError: A rank died, or gave up waiting.
        """
        place = f"step {self.steps} of {self.what}, {doing}"
        try:
            work = launch()
            if on_host:
                self._wait(work, group)
            else:
                work.wait()
        except RuntimeError as error:
            if re.search(r"tim(ed|e) ?out", str(error), re.IGNORECASE) is None:
                self.broken = f"{place}: another rank died, or gave up waiting ({error})"
                self._give_up(group)
                raise RuntimeError(self.broken) from error
            self.broken = (
                f"{place}: waited {_limit(self._timeout)} for other ranks"
                f"{self._missing(group)}; every rank must call on every step, also with no tokens"
            )
            self._give_up(group)
            raise TimeoutError(self.broken) from error

    def _wait(self, work: Any, group: Any) -> None:
        """Waits in slices: a peer that lost contact in another group will not come to this one."""
        limit = math.inf if self._timeout is None else self._timeout
        deadline = time.monotonic() + limit
        while True:
            patience = min(_SLICE, max(0.001, deadline - time.monotonic()))
            try:
                work.wait(datetime.timedelta(seconds=patience))
            except RuntimeError:
                if work.is_completed():
                    # Done after all, or failed for good: this returns or says why.
                    work.wait()
                    return
                if time.monotonic() >= deadline:
                    raise
                reason = _peek(f"{_name(group)}/gave up")
                if reason:
                    raise RuntimeError(f"a peer gave up: {reason}") from None
            else:
                return

    def _give_up(self, group: Any) -> None:
        """Tells this rank's other groups, whose members would wait for it in vain."""
        for other in self._all_groups:
            if other is not None and other is not group:
                _post(f"{_name(other)}/gave up", f"rank {distributed.get_rank()}, {self.broken}")

    def _missing(self, group: Any) -> str:
        """Names the ranks that are not waiting here too, as far as can be found out.

        Ranks that time out say so in the process group's key-value store, which costs nothing while
        all is well; whoever has not said so within a moment is the one all others wait for.
        """
        step = f"{_name(group)}/{self.steps}"
        if not _post(f"{step}/{distributed.get_rank()}", "waiting"):
            return ""
        absent: list[int] = distributed.get_process_group_ranks(group)
        deadline = time.monotonic() + _PATIENCE
        while len(absent) > 1 and time.monotonic() < deadline:
            time.sleep(_PATIENCE / 50)
            absent = [rank for rank in absent if not _peek(f"{step}/{rank}")]
        return f" (ranks that did not come: {', '.join(map(str, absent))})" if absent else ""


def carried(tensor: Any, group: Any) -> Any:
    """A tensor where a group's backend takes it: itself, or a copy on the other side.

    NCCL takes tensors on devices alone, and what gloo does with those differs by collective; ids
    may be on either side all the same.
    """
    backends = _backends(group)
    if backends is None:
        return tensor
    if tensor.device.type == "cpu":
        if "cpu" in backends or "cuda" not in backends:
            return tensor
        return tensor.to(_current_device())
    if backends.get(tensor.device.type, "gloo") == "gloo" and "cpu" in backends:
        return tensor.cpu()
    return tensor


def _current_device() -> Any:
    cuda: Any = torch.cuda
    return torch.device("cuda", cuda.current_device())


def _backends(group: Any) -> dict[str, str] | None:
    """The backend of a group by device type; None where torch does not say."""
    try:
        described = str(distributed.get_backend_config(group))
    except (AssertionError, RuntimeError, TypeError, ValueError):
        return None
    if described == "nccl":
        return {"cuda": "nccl"}
    pairs = [part.partition(":") for part in described.split(",") if ":" in part]
    return {kind: backend for kind, _, backend in pairs} or None


def _name(group: Any) -> str:
    return f"engram/{distributed.distributed_c10d._get_process_group_name(group)}"


def _post(key: str, text: str) -> bool:
    """Leaves a note in the store that all ranks share; False where that cannot be done."""
    try:
        distributed.distributed_c10d._get_default_store().set(key, text)
    except (RuntimeError, ValueError, OSError):
        return False
    return True


def _peek(key: str) -> str:
    """A note that was left in the store, or nothing."""
    try:
        store = distributed.distributed_c10d._get_default_store()
        return store.get(key).decode() if store.check([key]) else ""
    except (RuntimeError, ValueError, OSError):
        return ""


def _limit(timeout: float | None) -> str:
    return "as long as the process group allows" if timeout is None else f"{timeout:g} s"
