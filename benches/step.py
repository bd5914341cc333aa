"""A decode step on the host: hash and gather into the slot, beside the warm gather of its rows.

64 requests of one token each, so 1,024 rows of 160 bytes (Qwen's FP8 table). The gather is given
its row ids and its output; the step is given tokens and contexts, and fills a slot of a `Stage`;
`prepare` adds all that a step does besides: the slot's turn, the copy to the fixed buffer (on the
CPU here) and the zeros behind it. Every row is in memory and was touched before; calls take turns,
each on tokens of its own; every row is checked once.

    python benches/step.py [--size 256MiB] [--tokens 64] [--rounds 400]
"""

import os
import statistics
import sys
import time
import tracemalloc

import numpy as np
import torch

import engram
from engram.cli.machine import kernel, processor
from support import options

TARGET = 1.3
STEPS = 32
"""Different steps: enough to keep rows out of the processor's nearest caches."""


class Step:
    """One step's arguments, the row ids they stand for, and where the gather puts rows."""

    def __init__(self, h, gather, tokens: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.tokens = random.integers(0, h.vocab_size, tokens, dtype=np.int32)
        self.starts = np.arange(tokens + 1, dtype=np.int32)
        self.context = random.integers(0, h.vocab_size, (tokens, h.context_len), dtype=np.int32)
        self.ids = h.ids(self.tokens, self.starts, self.context)
        self.out = np.zeros((*self.ids.shape, gather.row_bytes), np.uint8)


def median_seconds(ways, steps, rounds: int) -> dict[str, float]:
    """Median of each way; ways take turns within a round, steps from call to call."""
    seconds = {name: [] for name in ways}
    for turn in range(rounds):
        names = list(ways)
        names = names[turn % len(names) :] + names[: turn % len(names)]
        for place, name in enumerate(names):
            step = steps[(turn * len(names) + place) % len(steps)]
            run = ways[name]
            started = time.perf_counter()
            run(step)
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in seconds.items()}


def allocations(run, steps) -> tuple[int, int]:
    """Bytes that a step keeps, and the most it holds in passing, on Python's and numpy's side."""
    for step in steps:
        run(step)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for step in steps:
            run(step)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return max(after - before, 0) // len(steps), peak - before


def main(arguments: list[str] | None = None) -> int:
    made = options.parser(__doc__, seconds=0.0)
    made.set_defaults(size="256MiB")
    made.add_argument("--tokens", type=int, default=64, help="requests of one token each")
    made.add_argument("--rounds", type=int, default=400, help="calls of each way")
    chosen = options.parsed(made, arguments)
    rounds = min(chosen.rounds, 20) if chosen.quick else chosen.rounds
    torch.set_num_threads(1)
    info = options.checkpoint(chosen)
    h = engram.hasher(info.directory, 0)
    with engram.FileGather(info.directory, 0) as gather:
        gather.prewarm()
        steps = [Step(h, gather, chosen.tokens, seed) for seed in range(STEPS)]
        with engram.Stage(gather, h, max_tokens=chosen.tokens, device="cpu") as stage:
            slot = stage._slots[0]
            ways = {
                "gather of the same rows": lambda step: gather.gather(step.ids, step.out),
                "hash and gather into the slot": lambda step: slot.native.run(
                    step.tokens, step.starts, step.context
                ),
                "prepare": lambda step: stage.prepare(step.tokens, step.starts, step.context),
            }
            for step in steps:
                for run in ways.values():
                    run(step)
                held = stage.rows().view(torch.uint8).reshape(step.out.shape).numpy()
                assert np.array_equal(held, step.out), "a staged row differs"
                assert np.array_equal(slot.planes[0][0].reshape(step.out.shape), step.out)
            medians = median_seconds(ways, steps, rounds)
            kept, passing = allocations(ways["prepare"], steps)
    rows = steps[0].ids.size
    base = medians["gather of the same rows"]
    print(f"{processor()}, {os.cpu_count()} cores, {kernel()}, load {os.getloadavg()[0]:.1f}")
    print(f"{rows} rows of {gather.row_bytes} bytes, {chosen.tokens} tokens, {rounds} rounds")
    for name, seconds in medians.items():
        print(f"{name:<32}{seconds * 1e6:>9.1f} us{seconds / base:>7.2f}x")
    print(f"kept per step: {kept} bytes; held in passing: {passing} bytes of small Python objects")
    ratio = medians["hash and gather into the slot"] / base
    print(f"target: at most {TARGET}x: {'ok' if ratio <= TARGET else 'MISSED'} ({ratio:.2f}x)")
    return 1 if chosen.strict and ratio > TARGET else 0


if __name__ == "__main__":
    sys.exit(main())
