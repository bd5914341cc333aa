"""Replicas of a server that share one copy of a table in host memory.

    engram synth tiny/ --rows 20000
    python examples/replicas.py tiny/ --replicas 2

Starts the replicas as processes, lets each open the table, compares what they look up with the rows
in the files, and prints where the table is and how much memory it takes in all.
"""

import argparse
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any


def serve(path: str, rank: int, replicas: int, meeting: str, answers: Any) -> None:
    """One replica: opens the table with the others, and looks rows up."""
    import numpy as np
    import torch.distributed as dist

    import engram

    topology = {
        "data_parallel_size": replicas,
        "data_parallel_rank": rank,
        # Where torch.distributed is initialised over all replicas, its own store is used.
        "store": dist.FileStore(meeting, replicas),
    }
    config = engram.EngramConfig(dp_shared_memory=True)
    with engram.open_storage(config, (path, 0), parallel=topology, device="cpu") as table:
        ids = np.random.default_rng(rank).integers(0, table.num_rows, 1000)
        rows = np.empty((len(ids), table.row_bytes), np.uint8)
        wanted = np.empty_like(rows)
        table.lookup(ids, rows)
        with engram.FileGather(path, 0) as files:
            files.gather(ids, out=wanted)
        answers.put((rank, table.placement, dict(table.nbytes), bool((rows == wanted).all())))


def main() -> int:
    """Starts the replicas and prints what they found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", help="checkpoint directory")
    parser.add_argument("--replicas", type=int, default=2)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "store")
        processes = [
            context.Process(
                target=serve, args=(arguments.path, rank, arguments.replicas, meeting, answers)
            )
            for rank in range(arguments.replicas)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        return 1
    found = sorted(answers.get() for _ in processes)
    for rank, placement, nbytes, right in found:
        print(
            f"replica {rank}: {placement}, {nbytes}, rows {'as in the files' if right else 'WRONG'}"
        )
    return int(not all(right for *_, right in found))


if __name__ == "__main__":
    sys.exit(main())
