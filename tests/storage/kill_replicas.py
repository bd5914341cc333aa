"""Kills ranks of a shared table at random moments, and looks for what they leave behind.

    python tests/storage/kill_replicas.py --kills 200

Every round starts the ranks of a server: three replicas, or two replicas of two tensor-parallel
ranks each, which share a table per shard. It kills one of them after a random time, each in turn,
waits for the others to finish or fail, and ends them too. What then lies in /dev/shm, by name or by
bytes in use, must be what lay there before. The last line is a JSON report; the exit code is 1 if
somebody waited in vain or something was left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from checkpoints import make
from replicas import Replicas, run

SHARED_MEMORY = Path("/dev/shm")

SERVERS = {"DP3": (1, 3), "TP2xDP2": (2, 2)}
"""Tensor-parallel ranks and replicas."""


def kill(directory, kills, seed):
    """Does what the module says, and gives the report."""
    info = make(directory / "checkpoint", "qwen-bf16", rows=60_000)
    rng = random.Random(seed)
    before = state()
    servers = {name: Server(directory, info, *sizes) for name, sizes in SERVERS.items()}
    outcomes = Counter()
    killed = {name: Counter() for name in SERVERS}
    killed_while_working = 0
    for turn in range(kills):
        name = list(SERVERS)[turn % len(SERVERS)]
        server = servers[name]
        victim = turn // len(SERVERS) % server.ranks
        with Replicas(server.ranks, directory, "share", **server.arguments) as group:
            group.go()
            time.sleep(rng.uniform(0, server.usual * 0.7))
            killed_while_working += not group.pipes[victim].poll(0)
            group.kill(victim)
            found = group.outcomes(patience=20)
        killed[name][victim] += 1
        outcomes.update(outcome.error or "finished" for outcome in found)
    deadline = time.monotonic() + 5
    while state() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    names, in_use = state()
    return {
        "kills": kills,
        "killed": {name: dict(sorted(victims.items())) for name, victims in killed.items()},
        "killed_while_working": killed_while_working,
        "outcomes": dict(outcomes),
        "hangs": outcomes["hangs"],
        "left_behind": sorted(names - before[0]),
        "bytes_left": in_use - before[1],
        "seed": seed,
    }


class Server:
    """The ranks of a server, and how long they take when nobody disturbs them."""

    def __init__(self, directory, info, tensor, data):
        self.ranks = tensor * data
        places = [
            {
                "timeout": 1.5,
                "tensor_parallel_size": tensor,
                "tensor_parallel_rank": rank % tensor,
                "data_parallel_size": data,
                "data_parallel_rank": rank // tensor,
            }
            for rank in range(self.ranks)
        ]
        self.arguments = {"path": info.directory, "each_topology_too": places, "slow": 0.05}
        for _ in range(2):  # The first also waits for imports.
            began = time.monotonic()
            undisturbed = run(self.ranks, directory, "share", **self.arguments)
            self.usual = time.monotonic() - began
        for outcome in undisturbed:
            assert not outcome.error, outcome.text
            assert outcome.value["placement"] == "shared"


def state():
    """Names in shared memory, and bytes in use."""
    status = os.statvfs(SHARED_MEMORY)
    in_use = (status.f_blocks - status.f_bfree) * status.f_frsize
    names = {path.name for path in SHARED_MEMORY.iterdir()}
    return {name for name in names if "engram" in name}, in_use


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--directory", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        report = kill(Path(directory), arguments.kills, arguments.seed)
    print(json.dumps(report))
    # Whoever else uses /dev/shm may have let go of something meanwhile.
    sys.exit(bool(report["hangs"] or report["left_behind"] or report["bytes_left"] > 0))


if __name__ == "__main__":
    main()
