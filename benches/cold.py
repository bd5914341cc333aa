"""Cold rows: engram in every mode, numpy, torch, a thread pool, bare io_uring loops and fio.

Before every call the page cache of the table's file is dropped, if calls since the last drop may
have left any of the batch resident, and mincore is asked: what it finds is printed as "left". Each
call has ids of its own, but for those of text, of which all methods of a round are given the same:
distinct rows are now more and now fewer there, and figures compare times per distinct row. Methods
take turns in changing order; every row is checked, outside of what is timed. numpy, torch and the
pool read through a mapping with advice for random access, without which each fault reads megabytes;
the line "no advice" shows that.

    python benches/cold.py [--ids uniform|text] [--rows 16,256,4096] [--size 47.7GiB]
"""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace

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
from engram.cli.page_cache import bytes_read
from engram.cli.text import format_bytes
from engram.cli.timing import interleaved
from support import bare, ids, options
from support.kernel import PAGE, FilePages
from support.report import Report

ROUNDS = 400
ALWAYS_DROP_ROWS = 1024
"""Up to this many rows each page of a batch is looked up; above, the whole file is dropped."""
FAULTING_CALLS = 3
UNADVISED_ROWS = 256
UNADVISED_CALLS = 3
FIO = (
    "--name=engram --readonly --rw=randread --bs=4k --ioengine=io_uring --iodepth=64 --numjobs=2 "
    "--direct=1 --time_based --group_reporting --output-format=json"
)


class ColdFile:
    """Makes sure that no page of a batch is in memory.

    Args:
        gather: A table in one file and one piece.
        mappings: Other mappings in this process, whose pages would stay.
    """

    def __init__(self, gather: engram.FileGather, mappings: list[MappedTable]) -> None:
        self._path = gather.files[0]
        self._offset = gather.planes[0].pieces[0].offset
        self._row_bytes = gather.row_bytes
        self._mappings = mappings
        self._pages = FilePages(self._path)
        self.left = 0
        self.drops = 0
        self.drop()

    def drop(self) -> None:
        for mapping in self._mappings:
            mapping.release()
        left = engram.drop_cache(self._path)
        self.left = max(self.left, left)
        self.drops += 1

    def before(self, wanted: np.ndarray) -> None:
        """Drops the file unless every page of the batch is known to be out."""
        if wanted.size > ALWAYS_DROP_ROWS or self._any_resident(wanted):
            self.drop()

    def _any_resident(self, wanted: np.ndarray) -> bool:
        first = (self._offset + wanted * self._row_bytes) // PAGE
        last = (self._offset + (wanted + 1) * self._row_bytes - 1) // PAGE
        spans = zip(first.tolist(), (last - first + 1).tolist(), strict=True)
        return any(self._pages.resident(start, count).any() for start, count in spans)


def main(arguments: list[str] | None = None) -> int:
    made = options.parser(__doc__, seconds=9.0)
    made.add_argument("--without-bare", action="store_true", help="skip the bare io_uring loops")
    made.add_argument("--fio-seconds", type=float, default=4.0, help="0 leaves fio out")
    chosen = options.parsed(made, arguments)
    with_bare = bare.require(without=chosen.without_bare)
    report = Report("cold", chosen)
    info = options.checkpoint(chosen)
    table = info.tables[0]
    with engram.FileGather(info.directory) as gather:
        report.table(gather)
        report.residency("before", gather)
        modes = opened_modes(info.directory, report)
        mapped = MappedTable(gather)
        unadvised = MappedTable(gather, advice="normal")
        cold = ColdFile(gather, [mapped, unadvised])
        report.residency("after dropping", gather)
        compare(chosen, report, table, with_bare, gather, modes, mapped, unadvised, cold, info)
        rate = fio(chosen, gather.files[0])
        if rate is not None:
            report.say({"fio, 4k direct reads, depth 64, 2 jobs": f"{rate:,.0f} reads/s"})
            report.extra["fio_reads_per_second"] = rate
        report.say(
            {
                "left in memory after a drop": f"at most {format_bytes(cold.left)}, "
                f"{cold.drops:,} drops"
            }
        )
        report.residency("after", gather)
        for opened in modes.values():
            opened.close()
    return report.finish()


def opened_modes(directory, report: Report) -> dict[str, engram.FileGather]:
    """The table in every explicit mode that this machine has."""
    modes = {}
    for mode in ("uring", "pread", "mmap", "direct"):
        try:
            opened = engram.FileGather(directory, io=mode)
        except OSError as error:
            report.note(f"io={mode!r} cannot run here: {error}")
            continue
        modes[mode] = opened
        for why in opened.stats()["io"]["fallbacks"]:
            report.note(f"io={mode!r}: {why}")
    return modes


def compare(
    chosen, report, table, with_bare, gather, modes, mapped, unadvised, cold: ColdFile, info
) -> None:
    before = cold.before
    methods = present(
        [
            gathering("engram", gather, before),
            *(gathering(f"engram, io={mode!r}", opened, before) for mode, opened in modes.items()),
            numpy_take("np.take", mapped, before, FAULTING_CALLS),
            torch_select("torch.index_select", mapped, before, FAULTING_CALLS),
            threads_over_map(f"{POOL_THREADS} threads over a map", mapped, before, FAULTING_CALLS),
            advice_then_copy("advice, then copy", gather, mapped, before),
        ]
    )
    direct = modes.get("direct")
    if with_bare:
        methods.append(bare.uring("bare io_uring", gather, direct=False, before=before))
        if direct is not None and direct.stats()["io"]["direct_alignment"]:
            methods.append(bare.uring("bare io_uring, direct", direct, direct=True, before=before))
    methods = [replace(method, work=lambda wanted: len(np.unique(wanted))) for method in methods]
    for name, supply in ids.supplies(chosen, info, report).items():
        measurements = []
        for rows in chosen.rows:
            sized = list(methods)
            if rows <= UNADVISED_ROWS and name == "uniform":
                sized.append(numpy_take("np.take, no advice", unadvised, before, UNADVISED_CALLS))
            most = MostRead(table, gather)
            results = interleaved(
                sized,
                most.watch(supply(rows)),
                lambda wanted: table.expected(wanted)["weight"],
                seconds=chosen.seconds,
                rounds=ROUNDS,
                least=options.least_calls(chosen, rows),
                alike=name == "text",
                bytes_read=bytes_read,
            )
            measurements += [
                Measurement("cold", name, rows, method, result)
                for method, result in results.items()
            ]
            figures(report, name, rows, results, most)
        report.add(measurements)


class MostRead:
    """How much may be read: a page more than a row fills, for each of the rows that differ."""

    def __init__(self, table, gather: engram.FileGather) -> None:
        self._pages = sum(math.ceil(plane.row_bytes / PAGE) + 1 for plane in gather.planes)
        self._unique: list[int] = []

    def watch(self, batches):
        """The same batches, counted."""
        for batch in batches:
            self._unique.append(len(np.unique(batch)))
            yield batch

    @property
    def unique(self) -> float:
        """Mean of the distinct rows per batch."""
        return float(np.mean(self._unique))

    @property
    def pages_per_row(self) -> int:
        """Most pages that may be read for a distinct row."""
        return self._pages


def figures(report: Report, name: str, rows: int, results: dict, most: MostRead) -> None:
    """What is promised of cold rows."""
    label = f"cold, {name} ids, {rows:,} rows"
    for ours, theirs in (
        ("engram", "bare io_uring"),
        ("engram, io='direct'", "bare io_uring, direct"),
    ):
        if ours not in results or theirs not in results:
            continue
        taken, ideal = results[ours].comparable, results[theirs].comparable
        if rows >= 4096:
            report.figure(f"{label}: {theirs} / {ours}", ideal / taken, at_least=0.95)
        elif rows in (16, 256):
            report.figure(f"{label}: {ours} / {theirs}", taken / ideal, at_most=1.15)
    result = results["engram"]
    pages = result.bytes_read / len(result.seconds) / PAGE / most.unique
    report.figure(
        f"{label}: pages read per distinct row",
        pages,
        at_most=most.pages_per_row,
        unit=" pages",
    )


def fio(chosen, path: str) -> float | None:
    """Random reads per second that fio gets from the file; None without fio."""
    seconds = 1 if chosen.quick else chosen.fio_seconds
    if not shutil.which("fio") or chosen.fio_seconds <= 0:
        return None
    told = subprocess.run(
        ["fio", *FIO.split(), f"--filename={path}", f"--runtime={max(1, round(seconds))}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if told.returncode:
        print(f"fio failed: {told.stderr.strip() or told.stdout.strip()}", file=sys.stderr)
        return None
    return sum(job["read"]["iops"] for job in json.loads(told.stdout)["jobs"])


if __name__ == "__main__":
    sys.exit(main())
