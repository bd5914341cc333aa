"""Rows of which some are in memory, and rows under a memory limit.

A random quarter, half and three quarters of the pages of the table's file, in clusters of four, are
read through another descriptor; mincore says what that came to. Batches hold exactly that share of
rows from those pages. "engram" has known the pages for a while: it asked the kernel for the table's
residency and has copied a row of each. "engram, just opened" is a new `FileGather` for each call,
opening not counted. numpy, torch and a pool of threads read through a mapping with advice for
random access; io='direct' reads every row from the device. The time to beat is that of reading the
missing rows alone: "engram, only missing" and "bare io_uring, only missing"; it is compared per
distinct missing row, of which each call's are counted. With ids from text the share is what the
text makes of it.

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
    gathering,
    numpy_take,
    present,
    threads_over_map,
    torch_select,
)
from engram.cli.measured import Measurement
from engram.cli.page_cache import bytes_read
from engram.cli.timing import Method, Result, interleaved
from support import bare, ids, options, pressure
from support.kernel import PAGE, FilePages, drop_pages, make_resident
from support.report import Report

SHARES = (0.25, 0.5, 0.75)
PROMISED_ROWS = 4096
"""From this many rows on there are figures to reach."""
RESTORED_ROWS = 256
"""From this many rows of text on the page cache is brought back before every call."""
ROUNDS = 200
REREADING_CALLS, REREAD_ROWS = 12, 1 << 16
"""Modes that read resident rows again read about so many, in so many calls at least."""
FAULTING_CALLS = 3
MOST_FAULTS = 16_384
SECTIONS = ("resident", "limit", "advice", "memory")
MODES = ("uring", "pread", "mmap", "direct")
CANDIDATES = 1 << 16
CLUSTER = 4
"""Pages that are resident or missing together: single ones would take four times as long to read,
and a batch of random rows meets hardly any two of a cluster."""
MOST_LOST = 0.005
TRIES = 1000
PROBES = 8
"""Batches of text looked at to tell how many rows of one are missing."""
DRIFT = 0.1
"""Share of all pages that calls may have read before what they read is dropped again."""


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
            after = state.pages.resident()
            report.say(
                {
                    f"{share:.0%} resident, {name} ids": f"{state.begun:.2%} of pages before, "
                    f"{after.mean():.2%} after"
                }
            )
            lost = (state.told & ~after).sum() / max(1, state.told.sum())
            if lost > MOST_LOST:
                report.note(
                    f"{lost:.1%} of the pages that were to stay were evicted meanwhile, by memory "
                    "pressure or by others: figures of this state are void"
                )


class PartlyResident:
    """Which pages of the table's file are in memory, and which were when a share was set up."""

    def __init__(self, info) -> None:
        piece = info.tables[0].planes[0].pieces[0]
        self.path = info.files[0]
        self.pages = FilePages(self.path)
        self.rows = piece.rows
        self._offset = piece.offset
        self._row_bytes = info.tables[0].row_bytes
        self._order = np.random.default_rng(1).permutation(-(-self.pages.count // CLUSTER))
        engram.drop_cache(self.path)
        self.now = self.pages.resident()
        self.told = self.now.copy()
        self.begun = 0.0

    def make(self, share: float) -> None:
        """Makes this share of the pages resident, and no other."""
        clusters = np.zeros(len(self._order), bool)
        clusters[self._order[: round(share * len(clusters))]] = True
        wanted = np.repeat(clusters, CLUSTER)[: self.pages.count]
        resident = self.pages.resident()
        # Earlier batches read more than was chosen; a share must not depend on them.
        drop_pages(self.path, np.flatnonzero(resident & ~wanted))
        make_resident(self.path, np.flatnonzero(wanted & ~resident))
        self.now = self.pages.resident()
        if (self.now != wanted).mean() > 0.01:
            sys.exit(f"cannot keep {share:.0%} of {self.path} in memory: is memory short?")
        self.told = self.now.copy()
        self.begun = float(self.now.mean())

    def spans(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First and last page of each row; a row of these tables touches two at most."""
        first = (self._offset + wanted * self._row_bytes) // PAGE
        return first, (self._offset + (wanted + 1) * self._row_bytes - 1) // PAGE

    def first_rows(self, pages: np.ndarray) -> np.ndarray:
        """The first row that begins in each page, of the pages that have one."""
        rows = -((self._offset - pages * PAGE) // self._row_bytes)
        return rows[(rows >= 0) & (rows < self.rows)]

    def are_resident(self, wanted: np.ndarray) -> np.ndarray:
        """Rows all of whose pages were in memory when the share was set up."""
        first, last = self.spans(wanted)
        return self.told[first] & self.told[last]

    def are_missing(self, wanted: np.ndarray) -> np.ndarray:
        """Rows of which no page is in memory."""
        first, last = self.spans(wanted)
        return ~(self.now[first] | self.now[last])

    def note_read(self, wanted: np.ndarray) -> int:
        """Remembers that a call makes the pages of these rows resident; how many rows are not."""
        missing = len(np.unique(wanted[~self._all_now(wanted)]))
        for pages in self.spans(wanted):
            self.now[pages] = True
        return missing

    def _all_now(self, wanted: np.ndarray) -> np.ndarray:
        first, last = self.spans(wanted)
        return self.now[first] & self.now[last]

    @property
    def has_drifted(self) -> bool:
        """Whether calls have made many more pages resident than were chosen."""
        return bool(self.now.mean() - self.begun > DRIFT)

    def restore(self) -> None:
        """Drops what calls have read since the share was set up."""
        drop_pages(self.path, np.flatnonzero(self.pages.resident() & ~self.told))
        self.now = self.pages.resident()


class Known:
    """A gather that has known for a while what is resident, and what was measured with it."""

    def __init__(self, info, state: PartlyResident, report: Report) -> None:
        self.info = info
        self.state = state
        self.report = report
        self.measurements: list[Measurement] = []

    def __enter__(self) -> "Known":
        directory = self.info.directory
        self.gather = engram.FileGather(directory)
        self.modes: dict[str, engram.FileGather] = {}
        for mode in MODES:
            try:
                self.modes[mode] = engram.FileGather(directory, io=mode)
            except OSError as error:
                self.report.note(f"io={mode!r} cannot run here: {error}")
        self.mapped = MappedTable(self.gather)
        self.gather.residency()
        self._touch()
        self.fresh: engram.FileGather | None = None
        return self

    def restore(self, *, always: bool = False) -> None:
        """Brings the page cache back to the share that was set up, where it has drifted from it."""
        if not always and not self.state.has_drifted:
            return
        # Pages that some mapping holds cannot be dropped.
        self.mapped.release()
        mapped = self.modes.get("mmap")
        if mapped is not None:
            mapped.close()
        self.state.restore()
        if mapped is not None:
            self.modes["mmap"] = engram.FileGather(self.info.directory, io="mmap")
        self.gather.residency()

    def __exit__(self, *_: object) -> None:
        self.mapped.release()
        for opened in (self.gather, self.fresh, *self.modes.values()):
            if opened is not None:
                opened.close()

    def _touch(self) -> None:
        """Copies one row of each resident page, so that those pages are mapped."""
        state, table = self.state, self.info.tables[0]
        rows = state.first_rows(np.flatnonzero(state.told))
        rows = rows[state.are_resident(rows)]
        out = np.empty((1 << 15, table.row_bytes), np.uint8)
        for at in range(0, len(rows), len(out)):
            part = rows[at : at + len(out)]
            self.gather.gather(part, out=out[: len(part)])

    def reopened(self) -> engram.FileGather:
        """A gather that knows nothing yet."""
        if self.fresh is not None:
            self.fresh.close()
        self.fresh = engram.FileGather(self.info.directory)
        return self.fresh


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
    if name == "uniform":
        missing = rows - round(share * rows)
        batches = composed(known, rows, missing)
        missing_batches = composed(known, missing, missing)
    else:
        batches = restored(known, supply(rows), always=rows >= RESTORED_ROWS)
        probes = [next(batches) for _ in range(PROBES)]
        distinct = [len(np.unique(probe[state.are_missing(probe)])) for probe in probes]
        missing = int(np.median(distinct))
        missing_batches = from_text(known, supply(rows), missing)
    if missing == 0:
        report.note(f"{share:.0%} resident, {name} ids, {rows:,} rows: none is missing")
        return

    def noted(method: Method, own=None, most: int | None = None) -> Method:
        """The same method; how many of its rows are missing is counted right before it runs."""
        return replace(method, work=state.note_read, batches=own, most=most)

    rereading = max(REREADING_CALLS, REREAD_ROWS // rows)
    faulting_calls = max(1, min(FAULTING_CALLS, MOST_FAULTS // missing))
    mapped = [
        numpy_take("np.take", known.mapped),
        torch_select("torch.index_select", known.mapped),
        threads_over_map(f"{POOL_THREADS} threads over a map", known.mapped),
        advice_then_copy("advice, then copy", known.gather, known.mapped),
    ]
    methods = [
        noted(gathering("engram", known.gather)),
        noted(gathering("engram, only missing", known.gather), missing_batches),
        noted(just_opened(known)),
        # Direct reads leave the page cache as it is.
        *(
            by_mode(known, mode)
            if mode == "direct"
            else noted(by_mode(known, mode), most=rereading)
            for mode in known.modes
        ),
        *(noted(method, most=faulting_calls) for method in present(mapped)),
    ]
    if with_bare:
        ideal = bare.uring("bare io_uring, only missing", known.gather, direct=False)
        methods.append(noted(ideal, missing_batches))
    table = known.info.tables[0]
    results = interleaved(
        methods,
        batches,
        lambda wanted: table.expected(wanted)["weight"],
        seconds=chosen.seconds,
        rounds=ROUNDS,
        least=options.least_calls(chosen, rows),
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


def composed(known: Known, rows: int, missing: int) -> Iterator[np.ndarray]:
    """Uniform ids of which exactly `missing` are of rows that are not in memory."""
    state = known.state
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
        known.restore()
        parts = [pick(missing, state.are_missing), pick(rows - missing, state.are_resident)]
        yield generator.permutation(np.concatenate(parts))


def restored(known: Known, batches: Iterator[np.ndarray], *, always: bool) -> Iterator[np.ndarray]:
    """The same batches, the page cache brought back before each where it has drifted.

    Text asks for the same rows again, which others have read in the meantime: they are resident and
    engram does not know it. For batches that differ enough by it the cache is brought back always.
    """
    for batch in batches:
        known.restore(always=always)
        yield batch


def from_text(known: Known, batches: Iterator[np.ndarray], missing: int) -> Iterator[np.ndarray]:
    """Just the distinct ids of text whose rows are not in memory, `missing` at a time."""
    state = known.state
    left = np.empty(0, np.int64)
    while True:
        known.restore()
        left = left[state.are_missing(left)]
        for _ in range(TRIES):
            if len(left) >= missing:
                break
            batch = next(batches)
            left = bare.distinct(np.concatenate([left, batch[state.are_missing(batch)]]))
        else:
            sys.exit(f"the text has no {missing:,} missing rows left: use a larger --size")
        yield left[:missing]
        left = left[missing:]


def just_opened(known: Known) -> Method:
    """A gather by an object that was opened a moment ago and knows nothing of the page cache."""
    return Method(
        "engram, just opened",
        lambda wanted, out: (known.reopened(), wanted, out),
        lambda call: call[0].gather(call[1], out=call[2]),
    )


def by_mode(known: Known, mode: str) -> Method:
    """One explicit way to read; the object may change between calls."""
    return Method(
        f"engram, io={mode!r}",
        lambda wanted, out: (known.modes[mode], wanted, out),
        lambda call: call[0].gather(call[1], out=call[2]),
    )


if __name__ == "__main__":
    sys.exit(main())
