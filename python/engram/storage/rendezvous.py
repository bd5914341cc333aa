"""A few processes of one server that agree on something, and notice who is missing."""

from __future__ import annotations

import json
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engram.storage.topology import Topology

__all__ = ["Rendezvous", "identity", "store_of"]

_distributed: Any = dist
_PAUSE = 0.005


def store_of(topology: Topology) -> Any:
    """A store that all replicas of the server reach; None where none is known.

    torch's default store does, if the default process group has a rank for every replica: servers
    that run each replica in a process group of its own have to pass one.
    """
    if topology.store is not None:
        return topology.store
    if not _distributed.is_available() or not _distributed.is_initialized():
        return None
    ranks = (
        topology.tensor_parallel_size
        * topology.pipeline_parallel_size
        * topology.data_parallel_size
    )
    if _distributed.get_world_size() < ranks:
        return None
    return _distributed.distributed_c10d._get_default_store()


def identity() -> dict[str, Any]:
    """Which process this is, for others on the machine to recognise."""
    return {
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "processes": _link("/proc/self/ns/pid"),
        "user": os.geteuid(),
    }


class Rendezvous:
    """Notes that `size` processes leave for one another in a store.

    Args:
        store: A torch.distributed store.
        name: What they meet for; the same everywhere.
        rank: This process, from 0.
        size: How many there are.
        timeout: Seconds to wait for any note.
    """

    def __init__(self, store: Any, name: str, rank: int, size: int, timeout: float) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._prefix = ""
        self._identities: list[dict[str, Any]] = []

    def meet(self, note: dict[str, Any]) -> list[dict[str, Any]]:
        """Leaves a note under this process's identity and collects everybody's.

        From then on a process of the same machine that dies is noticed at once, not at the time
        limit.

        An attempt that fails anywhere may be repeated, by any of them and any number of times: each
        attempt of a process has a ticket of its own. Process 0 calls a meeting of the tickets that
        it sees, and another if one of them is replaced before all have answered.

        Args:
            note: What to say; `host` names the machine.

        Raises:
            TimeoutError: Some did not come; they are named.
            RuntimeError: The store is gone.
        """
        ticket = secrets.token_hex(8)
        self._put(self._hello(self._rank), [ticket, {**identity(), **note}])
        notes = self._gathered(ticket)
        # Those who open the table once more would take it for one that still waits.
        self._put(self._hello(self._rank), None)
        if len({(note["host"], note["processes"]) for note in notes}) == 1:
            self._identities = notes
        return notes

    def _gathered(self, ticket: str) -> list[dict[str, Any]]:
        """The notes of a meeting that everybody has come to."""
        call = f"engram/{self._name}/call/{ticket}"
        called: list[str] = []
        notes: list[dict[str, Any]] = []
        deadline = time.monotonic() + self._timeout
        pause = _PAUSE
        while True:
            if self._rank == 0:
                hellos = [self._get(self._hello(rank)) for rank in range(self._size)]
                if None not in hellos and [hello[0] for hello in hellos] != called:
                    called = [hello[0] for hello in hellos]
                    notes = [hello[1] for hello in hellos]
                    number = secrets.token_hex(8)
                    for other in called:
                        self._put(f"engram/{self._name}/call/{other}", [number, notes])
            answer = self._get(call)
            if answer is not None:
                number, notes = answer
                prefix = f"engram/{self._name}/{number}"
                if prefix != self._prefix:
                    self._prefix = prefix
                    self.post("here", "here")
                if all(self._is_there("here", rank) for rank in range(self._size)):
                    return notes
            if time.monotonic() >= deadline:
                raise self._too_late("hello", self._absent(answered=answer is not None))
            time.sleep(pause)
            pause = min(0.1, pause * 1.5)

    def _absent(self, *, answered: bool) -> list[int]:
        """Who has not come to a meeting; process 0 where everybody seems to be there."""
        everybody = range(self._size)
        if answered:
            return [rank for rank in everybody if not self._is_there("here", rank)]
        return [rank for rank in everybody if self._get(self._hello(rank)) is None]

    def _hello(self, rank: int) -> str:
        return f"engram/{self._name}/hello/{rank}"

    def _too_late(self, step: str, missing: Sequence[int]) -> TimeoutError:
        return TimeoutError(
            f"{self._name}: waited {self._timeout:g} s for replica "
            f"{', '.join(map(str, missing)) or 0} ({step}); every replica must open the same "
            "tables in the same order"
        )

    def exchange(self, step: str, note: Any) -> list[Any]:
        """Leaves a note for this step, and collects everybody's.

        Raises:
            TimeoutError: Some did not come; they are named.
            RuntimeError: One died, or the store is gone.
        """
        self.post(step, note)
        everybody = range(self._size)
        return [self._await(step, rank, everybody) for rank in everybody]

    def post(self, step: str, note: Any) -> None:
        """Leaves a note for this step."""
        self._put(self._key(step, self._rank), note)

    def read(self, step: str, rank: int) -> Any:
        """Another process's note for this step, once it is there.

        Raises:
            TimeoutError: It did not come.
            RuntimeError: That process died, or the store is gone.
        """
        return self._await(step, rank, [rank])

    def _await(self, step: str, rank: int, expected: Sequence[int]) -> Any:
        key = self._key(step, rank)
        deadline = time.monotonic() + self._timeout
        pause = _PAUSE
        while not self._is_there(step, rank):
            if self._is_dead(rank) and not self._is_there(step, rank):
                raise RuntimeError(f"{self._name}: replica {rank} died ({step})")
            if time.monotonic() >= deadline:
                missing = [other for other in expected if not self._is_there(step, other)]
                raise self._too_late(step, missing or [rank])
            time.sleep(pause)
            pause = min(0.1, pause * 1.5)
        return self._get(key)

    def _is_there(self, step: str, rank: int) -> bool:
        return self._ask(lambda: self._store.check([self._key(step, rank)]))

    def _put(self, key: str, value: Any) -> None:
        self._ask(lambda: self._store.set(key, json.dumps(value)))

    def _get(self, key: str) -> Any:
        """What was left under a key; None if nothing was."""
        if not self._ask(lambda: self._store.check([key])):
            return None
        return json.loads(self._ask(lambda: self._store.get(key)))

    def _key(self, step: str, rank: int) -> str:
        return f"{self._prefix}/{step}/{rank}"

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except (RuntimeError, OSError, ValueError) as error:
            raise RuntimeError(
                f"{self._name}: the store that the replicas share does not answer; the process "
                f"that keeps it may have died ({error})"
            ) from error

    def _is_dead(self, rank: int) -> bool:
        if not self._identities or rank == self._rank:
            return False
        known = self._identities[rank]
        return _started(known["pid"]) != known["started"]


def _started(pid: int) -> str | None:
    """When a process started, which tells it from later ones of its number; None if it ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # A zombie still has an entry: it ended, but its parent has not asked for the outcome yet.
    return None if fields[0] in "ZX" else fields[19]


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
