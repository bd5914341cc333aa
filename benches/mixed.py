"""Rows of which some are in memory, and rows under a memory limit.

A random quarter, half and three quarters of the pages of the table's file, in clusters of four, are
read through another descriptor; mincore says what that came to. Uniform ids are drawn such that
exactly that share of a batch is of rows in those pages; with ids from text the share is what the
text makes of it, and all methods of a round are given the same batch. What a call has read is
dropped after it; what is resident stays, and stays mapped by those who map it. "engram" has known
the pages for a while: it asked the kernel for the table's residency and has copied a row of each.
"engram, just opened" is a new `FileGather` for each call, opening not counted, under another name
of the file, since objects that read the same file share what they know of it. numpy, torch and a
pool of threads read through a mapping with advice for random access; io='direct' reads every row
from the device. The time to beat is that of reading the missing rows alone: "engram, only missing"
and "bare io_uring, only missing". Figures compare times per distinct missing row, of which batches
of text have now more and now fewer.

The second part runs in a control group that may use a tenth of the table's size, page cache
included: batches of engram and of a bare loop of direct reads in turn, once the group is full. The
third compares advice on the mapping where memory is short.

    python benches/mixed.py [--section resident|limit|advice|memory] [--ids uniform|text]
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

import engram
from engram.cli.baselines import (
    POOL_THREADS,
    MappedTable,
    advice_then_copy,
    numpy_take,
    present,
    threads_over_map,
    torch_select,
)
from engram.cli.measured import Measurement
from engram.cli.page_cache import bytes_read
from engram.cli.timing import Method, Result, interleaved
from support import bare, ids, options, pressure
from support.partly_resident import PartlyResident, linked
from support.report import Report

SHARES = (0.25, 0.5, 0.75)
PROMISED_ROWS = 4096
"""From this many rows on there are figures to reach."""
ROUNDS = 200
FAULTING_CALLS = 3
MOST_FAULTS = 16_384
SECTIONS = ("resident", "limit", "advice", "memory")
MODES = ("uring", "pread", "mmap", "direct")
CANDIDATES = 1 << 16
MOST_CHANGED = 0.005
TRIES = 1000


def main(arguments: list[str] | None = None) -> int:
    made = options.parser(__doc__, seconds=2.0)
    made.add_argument("--section", choices=("all", *SECTIONS), default="all")
    made.add_argument("--without-bare", action="store_true", help="skip the bare io_uring loops")
    made.add_argument("--cgroup", type=Path, help="make the limited control group below this one")
    made.add_argument(
        "--limited-rows", type=int, default=768, help="rows per batch under the limit"
    )
    made.add_argument("--limited-batches", type=int, default=1000, help="how many of those")
    chosen = options.parsed(made, arguments)
    with_bare = bare.require(without=chosen.without_bare)
    report = Report("mixed", chosen)
    info = options.checkpoint(chosen)
    with engram.FileGather(info.directory) as gather:
        report.table(gather)
        report.residency("before", gather)
    if chosen.section in ("all", "resident"):
        resident_section(chosen, report, info, with_bare)
    if chosen.section in ("all", "limit"):
        pressure.limited_section(chosen, report, info, with_bare)
    if chosen.section in ("all", "advice"):
        pressure.advice_section(chosen, report, info)
    if chosen.section in ("all", "memory"):
        pressure.memory_section(chosen, report, info)
    return report.finish()


def resident_section(chosen, report: Report, info, with_bare: bool) -> None:
    """A quarter, half and three quarters resident, one after another."""
    sources = ids.supplies(chosen, info, report)
    state = PartlyResident(info)
    for share in SHARES:
        for name, supply in sources.items():
            state.make(share)
            with Known(info, state, report) as known:
                for rows in chosen.rows:
                    measure(chosen, report, known, share, rows, name, supply, with_bare)
                report.add(known.measurements)
            changes = state.changes()
            report.say(
                {
                    f"{share:.0%} resident, {name} ids": f"{state.told.mean():.2%} of pages, of "
                    f"which {changes['gone']:.2%} are gone; of {state.dropped:,} that were read "
                    f"and dropped {changes['left']:.2%} are left"
                }
            )
            if max(changes.values()) > MOST_CHANGED:
                report.note("the page cache was not what it should have been: figures are void")


class Known:
    """A gather that has known for a while what is resident, and what it is measured against."""

    def __init__(self, info, state: PartlyResident, report: Report) -> None:
        self.info = info
        self.state = state
        self.report = report
        self.measurements: list[Measurement] = []

    def __enter__(self) -> "Known":
        # Objects that read one file under one name share its mapping and what is known of it.
        self._names = {name: linked(self.info.directory) for name in ("missing", "fresh", "mmap")}
        self.opened: dict[str, engram.FileGather] = {}
        for name in ("engram", "missing", *MODES):
            try:
                self._open(name)
            except OSError as error:
                self.report.note(f"io={name!r} cannot run here: {error}")
        self.gather = self.opened["engram"]
        self.gather.residency()
        self.mapped = MappedTable(self.gather)
        self._touch()
        return self

    def _open(self, name: str) -> engram.FileGather:
        at = self._names[name].name if name in self._names else self.info.directory
        mode = name if name in MODES else "auto"
        self.opened[name] = engram.FileGather(at, io=mode)
        return self.opened[name]

    def __exit__(self, *_: object) -> None:
        self.mapped.release()
        for opened in self.opened.values():
            opened.close()
        for name in self._names.values():
            name.cleanup()

    def _touch(self) -> None:
        """Copies one row of each resident page, so that it is mapped, in every mapping."""
        state, table = self.state, self.info.tables[0]
        rows = state.first_rows(np.flatnonzero(state.told))
        rows = rows[state.are_resident(rows)]
        out = np.empty((1 << 15, table.row_bytes), np.uint8)
        for at in range(0, len(rows), len(out)):
            part = rows[at : at + len(out)]
            self.gather.gather(part, out=out[: len(part)])
            self.mapped.take(part, out[: len(part)])
            if "mmap" in self.opened:
                self.opened["mmap"].gather(part, out=out[: len(part)])

    def methods(self, faulting_calls: int, *, with_bare: bool) -> list[Method]:
        """All that is compared. What a method has read is dropped after each of its calls."""
        mapped = [
            numpy_take("np.take", self.mapped, most=faulting_calls),
            torch_select("torch.index_select", self.mapped, most=faulting_calls),
            threads_over_map(
                f"{POOL_THREADS} threads over a map", self.mapped, most=faulting_calls
            ),
            advice_then_copy("advice, then copy", self.gather, self.mapped),
        ]
        found = [
            self._undone(self._gathering("engram", "engram")),
            self._undone(self._only_missing(self._gathering("engram", "missing")), "missing"),
            self._undone(self._just_opened(), "fresh"),
            *(
                self._undone(self._gathering(f"engram, io={mode!r}", mode), mode)
                for mode in MODES
                if mode in self.opened
            ),
            *(self._undone(method, "mapped") for method in present(mapped)),
        ]
        if with_bare:
            ideal = bare.uring("bare io_uring", self.gather, direct=False)
            found.append(self._undone(self._only_missing(ideal), "none"))
        return found

    def _gathering(self, title: str, name: str) -> Method:
        """A gather by an object that may be another one at the next call."""
        return Method(
            title,
            lambda wanted, out: (self.opened[name], wanted, out),
            lambda call: call[0].gather(call[1], out=call[2]),
        )

    def _only_missing(self, method: Method) -> Method:
        """Of the same batches just the distinct rows that are not in memory."""
        return replace(method, name=f"{method.name}, only missing", select=self.state.missing)

    def _just_opened(self) -> Method:
        """A gather by an object that was opened a moment ago and knows nothing of any page."""
        return replace(
            self._gathering("engram, just opened", "fresh"),
            prepare=lambda wanted, out: (self._open("fresh"), wanted, out),
        )

    def _undone(self, method: Method, holder: str = "engram") -> Method:
        """The same, followed by dropping what it has read.

        Args:
            method: A way to gather.
            holder: Who may have mapped that, and may take it for resident.
        """

        def after(wanted: np.ndarray) -> None:
            pages = self.state.pages_read(wanted)
            if holder == "mapped":
                self.mapped.release(pages)
            elif holder == "fresh":
                self.opened.pop("fresh").close()
            elif holder in self.opened and bare.available():
                bare.forget(self.opened[holder], pages)
            elif holder == "mmap":
                self.opened.pop("mmap").close()
                self._open("mmap")
            self.state.drop(pages)
            if holder in ("engram", "missing") and not bare.available():
                self.opened[holder].residency()

        return replace(method, after=after, work=lambda wanted: len(self.state.missing(wanted)))


def measure(
    chosen: argparse.Namespace,
    report: Report,
    known: Known,
    share: float,
    rows: int,
    name: str,
    supply: ids.Supply,
    with_bare: bool,
) -> None:
    """One size of batch in one state."""
    state = known.state
    missing = rows - round(share * rows)
    if missing == 0:
        report.note(f"{share:.0%} resident, {rows:,} rows: none would be missing")
        return
    batches = (
        composed(state, rows, missing) if name == "uniform" else with_missing(state, supply(rows))
    )
    table = known.info.tables[0]
    results = interleaved(
        known.methods(max(1, min(FAULTING_CALLS, MOST_FAULTS // missing)), with_bare=with_bare),
        batches,
        lambda wanted: table.expected(wanted)["weight"],
        seconds=chosen.seconds,
        rounds=ROUNDS,
        least=options.least_calls(chosen, rows),
        alike=name == "text",
        bytes_read=bytes_read,
    )
    label = f"{share:.0%} resident"
    known.measurements += [
        Measurement(label, name, rows, method, result) for method, result in results.items()
    ]
    if rows >= PROMISED_ROWS:
        figures(report, f"{label}, {name} ids, {rows:,} rows", results)


def figures(report: Report, label: str, results: dict[str, Result]) -> None:
    """What is promised of batches that are resident in part, by time per distinct missing row."""
    for cold in ("engram, only missing", "bare io_uring, only missing"):
        if cold in results:
            ideal = results[cold].comparable
            ratio = results["engram"].comparable / ideal
            report.figure(f"{label}: engram / {cold}", ratio, at_most=1.1)
            ratio = results["engram, just opened"].comparable / ideal
            report.figure(f"{label}: just opened / {cold}", ratio, at_most=1.15)


def composed(state: PartlyResident, rows: int, missing: int) -> Iterator[np.ndarray]:
    """Uniform ids of which exactly `missing` are of rows that are not in memory."""
    generator = np.random.default_rng(rows * 31 + missing)

    def pick(count: int, which) -> np.ndarray:
        found = [np.empty(0, np.int64)]
        for _ in range(TRIES):
            if sum(map(len, found)) >= count:
                return np.concatenate(found)[:count]
            candidates = generator.integers(0, state.rows, CANDIDATES)
            found.append(candidates[which(candidates)])
        sys.exit(f"{rows:,} rows are too many for a table of {state.rows:,}: use a larger --size")

    while True:
        parts = [pick(missing, state.are_missing), pick(rows - missing, state.are_resident)]
        yield generator.permutation(np.concatenate(parts))


def with_missing(state: PartlyResident, batches: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Those batches of which at least one row is not in memory."""
    without = 0
    for batch in batches:
        if len(state.missing(batch)):
            without = 0
            yield batch
        elif (without := without + 1) == TRIES:
            sys.exit("hardly any row of the text is missing: use a larger --size")


if __name__ == "__main__":
    sys.exit(main())
