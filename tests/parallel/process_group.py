"""A few real processes in one gloo group, kept for many checks.

Each runs functions of `exchange_worker` by name; an exception comes back as an `Outcome`, so a test
states for every rank what it must get.
"""

from __future__ import annotations

import multiprocessing
import time
from typing import NamedTuple

import numpy as np

TABLE = (1, 101, 16)
"""The usual table: seed, rows, row bytes."""


def table_of(seed, num_rows, row_bytes):
    """The bytes of a table, the same in every process."""
    return np.random.default_rng(seed).integers(0, 256, (num_rows, row_bytes), dtype=np.uint8)


class Outcome(NamedTuple):
    """What one rank got from a call: a value, or the type and text of an exception."""

    value: object = None
    error: str = ""
    text: str = ""
    attributes: dict[str, object] | None = None


class Processes:
    """`size` processes that form the default group; rank `r` is `processes[r]`."""

    def __init__(self, size, directory):
        # A server that has imported torch already gives a process in milliseconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "ml_dtypes"])
        self.size = size
        self.processes = []
        self.pipes = []
        from exchange_worker import serve

        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, size, str(directory / "rendezvous"), there), daemon=True
            )
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)

    def run(self, name, ranks=None, called=None, patience=30.0, **arguments):
        """Calls `name` on all processes at once, and gives the outcomes of `ranks`.

        An argument called `each_...` is a list with one entry per member of `ranks`, passed without
        the prefix (None to the other processes, which only help to make groups).

        Args:
            name: A function of `exchange_worker`; it is told `ranks`.
            ranks: The global ranks that take part; all by default.
            called: The processes to call, where some are gone.
            patience: Seconds after which a silent process counts as hanging.
            arguments: Passed on.
        """
        ranks = list(range(self.size)) if ranks is None else list(ranks)
        called = list(range(self.size)) if called is None else list(called)
        for rank in called:
            given = {"ranks": ranks}
            for key, value in arguments.items():
                if key.startswith("each_"):
                    given[key[5:]] = value[ranks.index(rank)] if rank in ranks else None
                else:
                    given[key] = value
            self.pipes[rank].send((name, given))
        deadline = time.monotonic() + patience
        outcomes = {}
        for rank in called:
            pipe = self.pipes[rank]
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise AssertionError(f"rank {rank} hangs in {name}")
                outcomes[rank] = pipe.recv()
            except (EOFError, ConnectionResetError):
                outcomes[rank] = Outcome(error="died")
        return [outcomes[rank] for rank in ranks if rank in outcomes]

    def close(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def values(outcomes):
    """The values of outcomes that must all be successes."""
    for rank, outcome in enumerate(outcomes):
        assert not outcome.error, f"rank {rank}: {outcome.error}: {outcome.text}"
    return [outcome.value for outcome in outcomes]


def ids_for(seed, *shape, pad=0.1):
    """Random ids of the usual table, some of them padding."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, TABLE[1], shape)
    return np.where(rng.random(shape) < pad, -1, ids)


def reference(ids, table=TABLE):
    """The unsharded look-up."""
    rows = table_of(*table)[np.maximum(ids, 0)]
    rows[ids == -1] = 0
    return rows


def per_rank(tensor, data, each_replica):
    """One entry per rank of what the tensor-parallel ranks of a replica share."""
    assert len(each_replica) == data
    return [steps for steps in each_replica for _ in range(tensor)]


def check(outcomes, each_steps):
    """Every rank got the unsharded look-up's bytes; gives the counts of each rank."""
    stats = []
    for (results, counts), steps in zip(values(outcomes), each_steps, strict=True):
        for rows, ids in zip(results, steps, strict=True):
            assert isinstance(rows, np.ndarray), rows
            assert rows.dtype == np.uint8
            np.testing.assert_array_equal(rows, reference(ids))
        stats.append(counts)
    return stats
