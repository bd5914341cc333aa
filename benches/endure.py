"""A cache of rows at work for hours: is its budget kept, and is every row right?

A few threads gather at a modest pace from a table that their memory cannot hold, in a control group
with room for the budget and little else; half of the ids are asked for again and again, half are
any. Now and then the budget is halved and given back. What the process has beside the budget is
looked at all the while and printed once a minute; too much, a wrong row or an error is status 1.

    python benches/endure.py [--seconds 7200] [--budget 256MiB] [--threads 2] [--pause 0.2]
"""

import argparse
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np

import engram
from engram.cli.text import format_bytes, parse_size
from support import options
from support.control_group import Refused, limited
from support.kernel import memory_of_process

BESIDE_ONE = 6 << 20
"""Bytes beside the budget for one call, as documented."""

BESIDE_NEXT = 4 << 20
"""The same for each further call at the same time."""

SIZES = (16, 48, 768, 4096)
HOT_ROWS = 1_000_000
ROOM = 64 << 20
"""Bytes of page cache and code that the group has room for beside what is documented."""


class Work:
    """What the threads share."""

    def __init__(self, gather: engram.FileGather, table, until: float) -> None:
        self.gather = gather
        self.table = table
        self.until = until
        self.counts: Counter[str] = Counter()
        self.failures: list[Exception] = []
        self.lock = threading.Lock()
        self.hot = np.random.default_rng(0).integers(0, gather.num_rows, HOT_ROWS)

    def run(self, seed: int, pause: float) -> None:
        try:
            self.gather_until(seed, pause)
        except Exception as error:
            self.failures.append(error)

    def gather_until(self, seed: int, pause: float) -> None:
        generator = np.random.default_rng(seed)
        while time.monotonic() < self.until:
            count = int(generator.choice(SIZES))
            ids = generator.integers(0, self.gather.num_rows, count)
            again = generator.random(count) < 0.5
            # Low places of the list come up far more often than high ones.
            places = (HOT_ROWS * generator.random(count) ** 3).astype(np.int64)
            ids[again] = self.hot[places[again]]
            rows = self.gather.gather(ids).view(np.uint8).reshape(count, -1)
            right = (rows == self.table.expected(ids)["weight"]).all(axis=1)
            with self.lock:
                self.counts["rows"] += count
                self.counts["wrong"] += count - int(np.count_nonzero(right))
            time.sleep(pause)


def main(arguments: list[str] | None = None) -> int:
    made = options.parser(__doc__, seconds=7200.0)
    made.add_argument("--budget", type=parse_size, default=256 << 20)
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--pause", type=float, default=0.2, help="seconds between a thread's calls")
    made.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parsed(made, arguments)
    info = options.checkpoint(chosen)
    allowed = BESIDE_ONE + (chosen.threads - 1) * BESIDE_NEXT
    if chosen.inside:
        return endure(chosen, info, allowed)
    command = [sys.executable, *sys.argv, "--inside"]
    limit = memory_of_process()["resident"] + chosen.budget + allowed + ROOM
    try:
        with limited(limit) as group:
            print(f"in a control group of {format_bytes(limit)}", flush=True)
            return subprocess.run(command, preexec_fn=group.join, check=False).returncode
    except Refused as error:
        print(f"without a control group: {error}", flush=True)
        return endure(chosen, info, allowed)


def endure(chosen: argparse.Namespace, info, allowed: int) -> int:
    table = info.tables[0]
    until = time.monotonic() + chosen.seconds
    with engram.FileGather(info.directory) as gather:
        work = Work(gather, table, until)
        # What checking a batch of the largest size takes is the script's own.
        table.expected(np.arange(max(SIZES)))
        before = memory_of_process()["anonymous"]
        gather.resize(chosen.budget)
        threads = [
            threading.Thread(target=work.run, args=(seed, chosen.pause))
            for seed in range(chosen.threads)
        ]
        for thread in threads:
            thread.start()
        most, said, halved = 0, 0.0, time.monotonic()
        while any(thread.is_alive() for thread in threads):
            beside = memory_of_process()["anonymous"] - before - chosen.budget
            most = max(most, beside)
            now = time.monotonic()
            if now - said > 60:
                said = now
                cache = gather.stats()["cache"]
                print(
                    f"{until - now:6.0f} s left: {format_bytes(max(beside, 0))} beside the budget, "
                    f"most {format_bytes(max(most, 0))}; {cache['rows']:,} rows, "
                    f"{cache['hits']:,} hits, {cache['misses']:,} misses, "
                    f"{cache['evictions']:,} evictions; {dict(work.counts)}",
                    flush=True,
                )
            if now - halved > 300:
                halved = now
                gather.resize(chosen.budget // 2)
                gather.resize(chosen.budget)
                with work.lock:
                    work.counts["resizes"] += 2
            time.sleep(0.5)
    print(f"most beside the budget: {format_bytes(max(most, 0))}, allowed {format_bytes(allowed)}")
    print(f"{work.counts['rows']:,} rows checked, {work.counts['wrong']:,} wrong")
    for error in work.failures:
        print(f"a thread ended with {type(error).__name__}: {error}")
    return int(most > allowed or work.counts["wrong"] > 0 or bool(work.failures))


if __name__ == "__main__":
    sys.exit(main())
