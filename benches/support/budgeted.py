"""Serving text with little memory: every contender alone, in a control group of the same size."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import engram
from engram.cli.text import format_bytes, format_seconds
from text_trace import RowIds, TextTrace

from . import control_group
from .report import Report, markdown
from .simulated import OPTIMUM, SHORT, Lookups, Policy, Sample

CHILD = Path(__file__).with_name("under_budget.py")
CONTENDERS = {
    "cache": "engram, cache_bytes",
    "auto": "engram, page cache",
    "mmap": "engram, io='mmap'",
    "direct": "engram, io='direct'",
    "bare": "bare io_uring, direct",
}
STARTING = 1 << 30
"""What a child may use until it knows what it needs itself."""
REQUESTS = 16


def text_of(trace: TextTrace, prefill: int, steps: int) -> TextTrace:
    """The first tokens, and behind them those that `REQUESTS` requests decode, one by one."""
    tokens = [trace.tokens[:prefill]]
    starts = [trace.starts[trace.starts < prefill]]
    room = len(trace.tokens) - prefill - steps
    for request in range(REQUESTS):
        first = prefill + request * room // REQUESTS
        starts.append(np.array([sum(map(len, tokens))]))
        tokens.append(trace.tokens[first : first + steps])
    joined = np.concatenate(tokens)
    return TextTrace(joined, np.concatenate([*starts, [len(joined)]]), "", {})


def section(
    chosen, report: Report, info, trace: TextTrace, with_bare: bool, memory: int
) -> dict[str, dict]:
    """Measures, prints and compares; what was found, by contender."""
    prefill = min(chosen.tokens, int(0.9 * len(trace.tokens)))
    prefill -= prefill % chosen.chunk
    window = min(chosen.window, prefill // chosen.chunk // 2)
    steps = min(chosen.steps, (len(trace.tokens) - prefill) // 2)
    print(f"\n## Serving text with {format_bytes(memory)} for the table\n")
    text = text_of(trace, prefill, steps)
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory) / name for name in ("tokens.npy", "starts.npy")]
        np.save(paths[0], text.tokens)
        np.save(paths[1], text.starts)
        task = {
            "checkpoint": str(info.directory),
            "text": [str(path) for path in paths],
            "chunk": chosen.chunk,
            "prefill": prefill,
            "window": window,
            "requests": REQUESTS,
            "steps": steps,
            "memory": memory,
            "bare": with_bare,
        }
        for how in chosen.contenders or CONTENDERS:
            if how == "bare" and not with_bare:
                continue
            engram.drop_cache(info.files)
            try:
                with control_group.limited(STARTING + memory, chosen.cgroup) as group:
                    place = {"group": [str(group.path), group.version]}
                    found[CONTENDERS[how]] = _run({**task, **place, "how": how})
            except control_group.Refused as reason:
                report.note(f"nothing measured under a memory limit, no control group: {reason}")
                return {}
            print(f"- measured: {CONTENDERS[how]}", file=sys.stderr)
    best = best_online(chosen, text, info, prefill, window, memory) if with_bare else {}
    print(
        f"{prefill:,} tokens in chunks of {chosen.chunk:,}, the last {window} chunks count; then "
        f"{steps:,} steps of {REQUESTS} requests, the second half counts. Beside the table's "
        f"share each process may use what it is itself and {format_bytes(16 << 20)}.\n"
    )
    for told in found.values():
        summarise(told)
    print_table(found)
    report.extra["rows_checked"] = sum(told["rows_checked"] for told in found.values())
    report.extra["rows_wrong"] = sum(told["rows_wrong"] for told in found.values())
    report.extra["contenders"] = found
    report.extra["simulated_misses_per_token"] = best
    compare(report, found, best)
    return found


def summarise(told: dict) -> None:
    """Adds what follows from what was counted."""
    told["tokens_per_second"] = told["tokens"] / sum(told["seconds"])
    told["reads_per_token"] = told["stats"]["reads"] / told["tokens"]
    told["cpu_seconds_per_million_rows"] = 1e6 * told["cpu_seconds"] / told["rows"]
    ordered = sorted(told["step_seconds"])
    told["decode"] = {
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    }
    cache = told["stats"].get("cache")
    if cache:
        missed = cache["insertions"] + cache["admission_refusals"]
        told["misses_per_token"] = missed / told["tokens"]


def print_table(found: dict[str, dict]) -> None:
    """One line per contender."""
    headings = [
        "contender",
        "tokens/s",
        "reads/token",
        "read/token",
        "CPU s per million rows",
        "p50 of a step",
        "p99",
        "direct reads/s meanwhile",
    ]
    lines = [
        [
            name,
            f"{told['tokens_per_second']:,.0f}",
            f"{told['reads_per_token']:.2f}",
            format_bytes(told["bytes_read"] / told["tokens"]),
            f"{told['cpu_seconds_per_million_rows']:.2f}",
            format_seconds(told["decode"]["p50"]),
            format_seconds(told["decode"]["p99"]),
            f"{told['direct_reads_per_second'] or 0:,.0f}",
        ]
        for name, told in found.items()
    ]
    print(markdown(headings, lines))
    for name, told in found.items():
        print(
            f"- {name}: {format_bytes(told['used'])} of {format_bytes(told['limit'])} used at the "
            f"end, {format_bytes(told['page_cache'])} of it page cache; "
            f"{format_bytes(told['itself'])} before opening"
        )
    print(flush=True)


def best_online(
    chosen, text: TextTrace, info, prefill: int, window: int, memory: int
) -> dict[str, float]:
    """Misses per token of the simulated policies over the same tokens at the same bytes."""
    sample = Sample(heads=8) if info.tables[0].rows > 1_000_000 else Sample()
    lookups = Lookups(RowIds(text, info.config), info.config, sample, chunk=chosen.chunk)
    lookups.add(0, prefill)
    tokens = window * chosen.chunk
    row_bytes = info.tables[0].row_bytes

    def per_token(policy: Policy) -> float:
        return float(lookups.misses(policy, memory, row_bytes)[-window:].sum()) / tokens

    return {policy.name: per_token(policy) for policy in SHORT}


def compare(report: Report, found: dict[str, dict], simulated: dict[str, float]) -> None:
    """The promises, and what is only printed."""
    lines = [[name, f"{misses:.2f}"] for name, misses in simulated.items()]
    ours = found.get(CONTENDERS["cache"])
    if ours:
        lines.append([CONTENDERS["cache"], f"{ours['misses_per_token']:.2f}"])
    print(markdown(["policy", "misses/token"], lines))
    if not ours:
        return
    online = [misses for name, misses in simulated.items() if name != OPTIMUM.name]
    if online:
        reads = ours["reads_per_token"] / min(online)
        report.figure("reads / best online policy", reads, at_most=1.1)
    rate = ours["direct_reads_per_second"]
    if rate:
        possible = rate / ours["misses_per_token"]
        report.figure(
            "tokens/s / (direct rate / misses per token)",
            ours["tokens_per_second"] / possible,
            at_least=0.9,
        )
    others = {name: told for name, told in found.items() if name != CONTENDERS["cache"]}
    for how, wanted in (("auto", 2.0), ("mmap", 2.0), ("bare", 2.5)):
        told = others.get(CONTENDERS[how])
        if told:
            report.figure(
                f"prefill: tokens/s / {CONTENDERS[how]}",
                ours["tokens_per_second"] / told["tokens_per_second"],
                at_least=wanted,
            )
    for name, told in others.items():
        report.figure(
            f"decode: p50 / {name}", ours["decode"]["p50"] / told["decode"]["p50"], at_most=0.8
        )


def _run(task: dict) -> dict:
    told = subprocess.run(
        [sys.executable, str(CHILD), json.dumps(task)], capture_output=True, text=True, check=False
    )
    if told.returncode:
        sys.exit(
            f"{CHILD.name} ({task['how']}) ended with status {told.returncode}: "
            f"{told.stderr.strip()}"
        )
    return json.loads(told.stdout)
