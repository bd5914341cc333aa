"""Serving text with memory for a sixteenth of the table: a cache of rows, and what else one can do.

"simulated" says how often lookups of the text's rows hit in caches of 64 MiB to 8 GiB under many
policies, the released table's geometry and the second half of the text. A row counts once per chunk
of 4,096 tokens; sizes include what a policy needs beside the rows. "served" runs contenders one
after another, each in a process and a control group of its own with the same memory: prefill in
chunks, then decode steps of 16 requests. Bare direct reads in the same process say what the device
gives meanwhile. "warm" compares rows that are all in the cache of rows with rows that are all in
the page cache.

    python benches/budget.py [--section simulated|served|warm] [--size 47.7GiB] [--memory 1/16]
"""

import argparse
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import engram
import text_trace
from engram.cli.baselines import gathering
from engram.cli.measured import Measurement
from engram.cli.page_cache import bytes_read
from engram.cli.text import format_bytes, parse_size
from engram.cli.timing import interleaved
from support import bare, budget_plot, budgeted, options, simulated
from support.report import Report, markdown

SIZES = tuple(mebibytes << 20 for mebibytes in (64, 128, 256, 512, 1024, 2048, 4096, 8192))
SCANNED = 512 << 20
QUICK_TOKENS = 20_000
POOL = 200_000
"""Distinct rows that the warm batches are drawn from."""
ROUNDS = 400


def main(arguments: list[str] | None = None) -> int:
    made = options.parser(__doc__, seconds=4.0)
    made.set_defaults(ids="text")
    made.add_argument("--section", choices=("all", "simulated", "served", "warm"), default="all")
    made.add_argument("--without-bare", action="store_true", help="skip what needs the bare loops")
    made.add_argument("--cgroup", type=Path, help="make the control groups below this one")
    made.add_argument(
        "--memory", default="1/16", help="for the table: a size, or a share of it such as 1/16"
    )
    made.add_argument("--tokens", type=int, default=4_000_000, help="tokens to prefill")
    made.add_argument("--chunk", type=int, default=4096, help="tokens of a prefill batch")
    made.add_argument("--window", type=int, default=128, help="chunks at the end that count")
    made.add_argument("--steps", type=int, default=2000, help="decode steps")
    made.add_argument("--contenders", type=_contenders, help="such as cache,auto (default: all)")
    made.add_argument(
        "--simulated-tokens", type=int, help="tokens to simulate (default: the whole text)"
    )
    made.add_argument(
        "--policies", choices=("all", "few"), default="all", help="which policies to simulate"
    )
    chosen = options.parsed(made, arguments)
    if chosen.quick:
        chosen.policies = "few"
        chosen.tokens = min(chosen.tokens, QUICK_TOKENS)
        chosen.chunk, chosen.window = min(chosen.chunk, 256), min(chosen.window, 16)
        chosen.steps = min(chosen.steps, 40)
    with_bare = bare.require(without=chosen.without_bare)
    report = Report("budget", chosen)
    info = options.checkpoint(chosen)
    with engram.FileGather(info.directory) as gather:
        report.table(gather)
        report.residency("before", gather)
    trace = text(chosen, report)
    rates: list[simulated.Rates] = []
    found: dict[str, dict] = {}
    if trace is not None and with_bare and chosen.section in ("all", "simulated"):
        rates = simulated_section(chosen, report, trace)
    if trace is not None and chosen.section in ("all", "served"):
        memory = bytes_of(chosen.memory, sum(table.nbytes for table in info.tables))
        found = budgeted.section(chosen, report, info, trace, with_bare, memory)
    if chosen.section in ("all", "warm"):
        warm_section(chosen, report, info)
    if rates or found:
        report.drawing = functools.partial(budget_plot.draw, rates=rates, measured=found)
    return report.finish()


def _contenders(given: str) -> tuple[str, ...]:
    chosen = tuple(given.split(","))
    unknown = set(chosen) - set(budgeted.CONTENDERS)
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown)}: choose from {', '.join(budgeted.CONTENDERS)}"
        )
    return chosen


def bytes_of(memory: str, nbytes: int) -> int:
    """A size, or a share of `nbytes`."""
    if "/" in memory:
        part, whole = memory.split("/")
        return nbytes * int(part) // int(whole)
    return parse_size(memory)


def text(chosen, report: Report) -> text_trace.TextTrace | None:
    """The text, if it can be had."""
    if chosen.section == "warm":
        return None
    try:
        limit = 2 * QUICK_TOKENS if chosen.quick else None
        trace = text_trace.load(chosen.dir, limit=limit, say=report.note)
    except text_trace.Unavailable as error:
        report.note(f"nothing simulated or served: {error}")
        return None
    report.say({"text": str(trace)})
    return trace


def simulated_section(chosen, report: Report, trace: text_trace.TextTrace) -> list[simulated.Rates]:
    """Hit rates by policy and size."""
    row_ids = text_trace.RowIds(trace, text_trace.RELEASED)
    tokens = min(chosen.simulated_tokens or len(trace.tokens), len(trace.tokens))
    # A few thousand rows of a cache are enough to look at, and a table of all ids is not small.
    sample = simulated.Sample(heads=8, rows=8)
    sizes = (SIZES[0], SIZES[4]) if chosen.quick else SIZES
    policies = simulated.SHORT if chosen.policies == "few" else simulated.POLICIES
    row_bytes = 160
    lookups = simulated.Lookups(row_ids, text_trace.RELEASED, sample)
    lookups.add(0, tokens)
    distinct, first = lookups.distinct(), lookups.first()
    half = lookups.batches // 2
    print(
        f"\n## Simulated: the released table, rows of {row_bytes} bytes\n\n"
        f"{tokens:,} tokens in chunks of {simulated.CHUNK:,}; "
        f"{distinct.sum() / tokens / row_ids.heads:.1%} of a chunk's lookups are of distinct rows, "
        f"{first.sum():,} rows in all; one in {sample.factor} is looked at. Hits in percent of the "
        f"distinct rows of each chunk, second half of the text; "
        f"{first[half:].sum() / distinct[half:].sum():.1%} of those nobody asked for before.\n"
    )
    rates = []
    for entry in simulated.rates(lookups, policies, sizes, row_bytes):
        rates.append(entry)
        shown = " ".join(f"{rate:.1f}" for rate in entry.by_bytes.values())
        print(f"- simulated: {entry.policy.name}: {shown}", file=sys.stderr)
    print(
        markdown(
            ["policy", "bytes/row", *map(format_bytes, sizes)],
            [
                [
                    entry.policy.name,
                    f"{entry.policy.index_bytes:.3g}",
                    *(f"{rate:.1f}" for rate in entry.by_bytes.values()),
                ]
                for entry in rates
            ],
        )
    )
    scan_tokens = min(tokens, 8_000_000)
    scanned = simulated.after_scan(
        row_ids, text_trace.RELEASED, sample, scan_tokens, SCANNED, row_bytes, policies
    )
    print(
        f"\nWith {format_bytes(SCANNED)}, in the last eighth of {scan_tokens:,} tokens, without a "
        "scan before it and with one of twice as many rows as fit, each asked for once:\n"
    )
    print(
        markdown(
            ["policy", "without", "with", "lost"],
            [
                [name, f"{without:.1f}", f"{with_scan:.1f}", f"{without - with_scan:.1f}"]
                for name, (without, with_scan) in scanned.items()
            ],
        ),
        flush=True,
    )
    for entry in rates:
        entry.after_scan = scanned[entry.policy.name]
    report.extra["simulated"] = {
        "tokens": tokens,
        "chunk": simulated.CHUNK,
        "row_bytes": row_bytes,
        "distinct_rows": int(first.sum()),
        "first_share_second_half": float(first[half:].sum() / distinct[half:].sum()),
        "scan": {"bytes": SCANNED, "tokens": scan_tokens},
        "policies": [entry.as_json() for entry in rates],
    }
    return rates


def warm_section(chosen, report: Report, info) -> None:
    """Rows that are all in the cache of rows, beside rows that are all in the page cache."""
    table = info.tables[0]
    generator = np.random.default_rng(5)
    pool = np.unique(generator.integers(0, table.rows, min(POOL, table.rows // 4)))
    # Rows share sets by chance: four times the room, so that none has too many.
    budget = 4 * len(pool) * (table.row_bytes + 16)
    engram.drop_cache(info.files)
    with (
        engram.FileGather(info.directory, cache_bytes=budget) as cached,
        engram.FileGather(info.directory) as plain,
    ):
        for part in np.array_split(pool, max(1, len(pool) // 4096)):
            out = np.empty((len(part), table.row_bytes), np.uint8)
            cached.gather(part, out=out)
        for part in np.array_split(pool, max(1, len(pool) // 4096)):
            out = np.empty((len(part), table.row_bytes), np.uint8)
            for gather in (cached, plain, plain):
                gather.gather(part, out=out)
        before = cached.stats()["cache"]

        def batches(rows: int) -> Iterator[np.ndarray]:
            while True:
                yield generator.choice(pool, rows)

        measurements = []
        for rows in chosen.rows:
            results = interleaved(
                [gathering("engram, cache_bytes", cached), gathering("engram", plain)],
                batches(rows),
                lambda wanted: table.expected(wanted)["weight"],
                seconds=chosen.seconds,
                rounds=ROUNDS,
                least=5,
                bytes_read=bytes_read,
            )
            measurements += [
                Measurement("warm", "uniform", rows, method, result)
                for method, result in results.items()
            ]
            report.figure(
                f"all hits, {rows:,} rows: cache of rows / page cache",
                results["engram, cache_bytes"].median / results["engram"].median,
                at_most=1.6,
            )
        report.add(measurements)
        after = cached.stats()["cache"]
        print(f"\n- missed meanwhile: {after['misses'] - before['misses']:,} rows")


if __name__ == "__main__":
    sys.exit(main())
