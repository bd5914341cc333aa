"""What a decode step costs, by where its rows come from."""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

import engram

TOKENS = 64
AIM = 50e-6
"""Seconds by which a stage may take longer than a look-up in a pinned table."""

STAGE = "stage: ids and gather on the host, one copy"
PINNED = "pinned table: ids on the device, rows read in place"
CAPTURED = "pinned table: the same out of a captured graph, unchecked"


def median_seconds(directory, device, rounds=300):
    """Median seconds of each way, and the rows of each, `[1024, row_bytes]` on the host."""
    device = torch.device(device)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    h = engram.hasher(directory, 0)
    random = np.random.default_rng(1)
    tokens = random.integers(0, h.vocab_size, TOKENS, dtype=np.int32)
    starts = np.arange(TOKENS + 1, dtype=np.int32)
    context = random.integers(0, h.vocab_size, (TOKENS, h.context_len), dtype=np.int32)
    on_device = [torch.from_numpy(value.astype(np.int64)).to(device) for value in (tokens, context)]
    host_ids = torch.from_numpy(h.ids(tokens, starts, context)).reshape(-1)
    ids = host_ids.to(device)
    found = {}
    with (
        engram.FileGather(directory, 0) as gather,
        engram.open_storage({}, gather, device=device) as pinned,
        engram.open_storage({"cpu_offload": False}, gather, device=device) as placed,
        engram.Stage(gather, h, max_tokens=TOKENS, device=device) as stage,
    ):
        gather.prewarm()
        out = torch.empty(len(ids), gather.row_bytes, dtype=torch.uint8, device=device)
        fixed = stage.rows().view(torch.uint8).reshape(len(ids), -1)
        ways = {
            STAGE: (lambda: stage.prepare(tokens, starts, context), fixed),
            PINNED: (lambda: pinned.lookup(ids, out), out),
            "pinned table: ids copied to the device first": (
                lambda: pinned.lookup(host_ids.to(device), out),
                out,
            ),
            "table on the device": (lambda: placed.lookup(ids, out), out),
            "stage: tokens and contexts on the device": (
                lambda: stage.prepare(on_device[0], starts, on_device[1]),
                fixed,
            ),
        }
        if device.type == "cuda":
            ways[CAPTURED] = (captured(lambda: pinned.lookup(ids, out)).replay, out)
        for name, (run, rows) in ways.items():
            rows.zero_()
            times = []
            for _ in range(rounds):
                synchronize()
                started = time.perf_counter()
                run()
                synchronize()
                times.append(time.perf_counter() - started)
            found[name] = (statistics.median(times), rows.cpu().numpy().copy())
    return found


def captured(run):
    """A graph of what `run` enqueues."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def excess(found):
    """Seconds by which the stage takes longer than the look-up at its barest, in a graph."""
    return found[STAGE][0] - found.get(CAPTURED, found[PINNED])[0]


def report(found):
    """Lines for a person, the aim among them."""
    lines = [f"{name:<60}{seconds * 1e6:9.1f} us" for name, (seconds, _) in found.items()]
    more = excess(found)
    verdict = "ok" if more <= AIM else "MISSED"
    return [
        *lines,
        f"aim: at most {AIM * 1e6:.0f} us above the pinned table: {verdict} ({more * 1e6:+.1f} us)",
    ]
