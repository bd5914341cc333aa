"""Kills replicas of a shared table at random moments, and looks for what they leave behind.

    python tests/storage/kill_replicas.py --kills 200

Every round starts three replicas, kills one of them after a random time, waits for the others to
finish or fail, and ends them too. What then lies in /dev/shm, by name or by bytes in use, must be
what lay there before. The last line is a JSON report.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from checkpoints import make
from replicas import Replicas, run

SHARED_MEMORY = Path("/dev/shm")


def kill(directory, kills, seed, replicas=3):
    """Does what the module says, and gives the report."""
    info = make(directory / "checkpoint", "qwen-bf16", rows=60_000)
    rng = random.Random(seed)
    before = state()
    arguments = {"path": info.directory, "topology_too": {"timeout": 1.5}, "slow": 0.05}
    began = time.monotonic()
    run(replicas, directory, "share", **arguments)
    began = time.monotonic()
    run(replicas, directory, "share", **arguments)
    usual = time.monotonic() - began
    outcomes = Counter()
    killed_while_working = 0
    for _ in range(kills):
        victim = rng.randrange(replicas)
        with Replicas(replicas, directory, "share", **arguments) as group:
            group.go()
            time.sleep(rng.uniform(0, usual * 0.7))
            killed_while_working += not group.pipes[victim].poll(0)
            group.kill(victim)
            found = group.outcomes(patience=20)
        outcomes.update(outcome.error or "finished" for outcome in found)
    deadline = time.monotonic() + 5
    while state() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    names, in_use = state()
    return {
        "kills": kills,
        "killed_while_working": killed_while_working,
        "outcomes": dict(outcomes),
        "hangs": outcomes["hangs"],
        "left_behind": sorted(names - before[0]),
        "bytes_left": in_use - before[1],
        "seed": seed,
    }


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
        print(json.dumps(kill(Path(directory), arguments.kills, arguments.seed)))


if __name__ == "__main__":
    main()
