"""Warm rows, and opening: engram beside numpy, torch, safetensors and a bare copy loop.

Every page of the table is read afresh, in memory and mapped before anything is timed, for engram by
`prewarm`, for numpy and torch by MADV_POPULATE_READ on their mapping: the first touch of a page
costs more than the copy of a row. numpy and torch read plain arrays over a mapping. Each call has
ids of its own; methods take turns in changing order; every row is checked, outside of what is
timed.

    python benches/warm.py [--section rows|open] [--ids uniform|text] [--rows 16,256,4096]
"""

import importlib
import sys

import numpy as np

import engram
from engram.cli.baselines import (
    POOL_THREADS,
    MappedTable,
    advice_then_copy,
    gathering,
    numpy_take,
    present,
    threads_over_map,
    torch_select,
)
from engram.cli.measured import Measurement
from engram.cli.text import format_bytes
from engram.cli.timing import Method, interleaved
from support import bare, ids, opening, options
from support.kernel import memory_of_process
from support.report import Report

ROUNDS = 20_000
LEAST = 5
SLICED_ROWS = 256
SLICED_CALLS = 400
POOL_CALLS = 400
PAGE_CACHE_MODES = ("uring", "pread", "mmap")


def main(arguments: list[str] | None = None) -> int:
    made = options.parser(__doc__, seconds=5.0)
    made.add_argument("--section", choices=("all", "rows", "open"), default="all")
    made.add_argument("--without-bare", action="store_true", help="skip the bare copy loop")
    chosen = options.parsed(made, arguments)
    report = Report("warm", chosen)
    if chosen.section in ("all", "rows"):
        rows_section(chosen, report)
    if chosen.section in ("all", "open"):
        opening.section(chosen, report)
    return report.finish()


def rows_section(chosen, report: Report) -> None:
    with_bare = bare.require(without=chosen.without_bare)
    info = options.checkpoint(chosen)
    table = info.tables[0]
    with engram.FileGather(info.directory) as gather:
        report.table(gather)
        report.residency("before", gather)
        modes = {mode: engram.FileGather(info.directory, io=mode) for mode in PAGE_CACHE_MODES}
        # Pages that were written or read piece by piece are small and would stay so.
        kept = engram.drop_cache(gather.files)
        if kept:
            report.note(
                f"{format_bytes(kept)} of the table stayed in memory and is not read afresh"
            )
        large = [memory_of_process()["large"]]
        warmed = gather.prewarm()
        large.append(memory_of_process()["large"])
        mapped = MappedTable(gather, advice="normal")
        mapped.populate()
        large.append(memory_of_process()["large"])
        ours, theirs = (format_bytes(size) for size in np.diff(large).tolist())
        report.say(
            {"mapped by 2 MiB at a time": f"{ours} for engram, {theirs} for numpy and torch"}
        )
        modes["mmap"].prewarm()
        if warmed < gather.nbytes:
            report.note(f"memory allows only {format_bytes(warmed)} of the table to be resident")
        methods = present(
            [
                gathering("engram", gather),
                numpy_take("np.take", mapped),
                torch_select("torch.index_select", mapped),
                *(gathering(f"engram, io={mode!r}", opened) for mode, opened in modes.items()),
                threads_over_map(f"{POOL_THREADS} threads over a map", mapped, most=POOL_CALLS),
                advice_then_copy("advice, then copy", gather, mapped),
            ]
        )
        for name, supply in ids.supplies(chosen, info, report).items():
            measurements = []
            for rows in chosen.rows:
                sized = list(methods)
                if rows <= SLICED_ROWS:
                    sized += present([sliced(table, info.files[0])])
                if with_bare:
                    sized.append(bare.copy(gather, rows))
                results = interleaved(
                    sized,
                    supply(rows),
                    lambda wanted: table.expected(wanted)["weight"],
                    seconds=chosen.seconds,
                    rounds=ROUNDS,
                    least=LEAST,
                )
                measurements += [
                    Measurement("warm", name, rows, method, result)
                    for method, result in results.items()
                ]
                figures(report, name, rows, {key: value.median for key, value in results.items()})
            report.add(measurements)
        report.residency("after", gather)
        report.say({"read by engram since opening": format_bytes(gather.stats()["bytes_read"])})
        for opened in modes.values():
            opened.close()


def sliced(table, path) -> Method | None:
    """`safe_open(...).get_slice(name)[row]`, row by row: what safetensors itself offers."""
    try:
        torch = importlib.import_module("torch")
        safetensors = importlib.import_module("safetensors")
    except ImportError:
        return None
    handle = safetensors.safe_open(path, framework="pt")
    tensor = handle.get_slice(table.planes[0].pieces[0].tensor)

    def run(call) -> None:
        for row, target in call:
            target[...] = tensor[row : row + 1].view(torch.uint8)

    def prepare(wanted, out):
        targets = torch.from_numpy(out).split(1)
        return list(zip(wanted.tolist(), targets, strict=True))

    return Method("safe_open get_slice", prepare, run, most=SLICED_CALLS)


def figures(report: Report, name: str, rows: int, medians: dict[str, float]) -> None:
    """What is promised of warm rows."""
    ours = medians["engram"]
    label = f"warm, {name} ids, {rows:,} rows"
    ratio = ours / medians["np.take"]
    limits = {16: 1.3, 256: 1.0}
    if rows in limits or rows >= 4096:
        report.figure(f"{label}: engram / np.take", ratio, at_most=limits.get(rows, 0.6))
    if rows >= 4096 and "bare copy loop" in medians:
        report.figure(
            f"{label}: bare copy loop / engram", medians["bare copy loop"] / ours, at_least=0.85
        )
    if rows >= 256:
        report.figure(
            f"{label}: advice, then copy / engram", medians["advice, then copy"] / ours, at_least=10
        )


if __name__ == "__main__":
    sys.exit(main())
