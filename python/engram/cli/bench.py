"""`engram bench`: every way to read rows, beside numpy and torch, on a checkpoint of one's own."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer
from rich.table import Table

import engram
from engram import _engram

from .baselines import (
    POOL_THREADS,
    MappedTable,
    StoredRows,
    advice_then_copy,
    gathering,
    numpy_take,
    present,
    threads_over_map,
    torch_select,
)
from .budgets import TEXT, HitRates, hit_rates
from .checkpoint import chosen_tables
from .errors import Failed, describe, reported
from .machine import file_system, kernel, memory, processor
from .measured import JSON_VERSION, Measurement, groups, medians, wrong_rows
from .page_cache import PageCache, bytes_read
from .parameters import CheckpointPath, given_path, wrong
from .plot import draw, require_writable
from .text import format_bytes, output, plural, status
from .timing import Method, interleaved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray
    from rich.console import Console

    Ids = NDArray[np.int64]

ROWS = "16,48,256,768,4096,32768"
_MODES: tuple[Literal["uring", "pread", "mmap", "direct"], ...] = (
    "uring",
    "pread",
    "mmap",
    "direct",
)
_SHARES = (0.25, 0.5, 0.75)
_WARM_ROWS = 1 << 18
"""Rows that warm batches are drawn from: their pages, a gigabyte, are far more than any processor
caches, and can be read in seconds whatever the size of the table."""
_CHUNK = 1 << 15
_ROUNDS = 2000
_OTHERS = 7
"""Outputs beside those of the modes: engram's own choice, twice in part, four ways that are not
engram's, and what one of these keeps meanwhile."""
_SHOWN = 60
_LEAST = 3


def bench(
    path: CheckpointPath,
    *,
    table: Annotated[
        str | None, typer.Option(help="Table name, or its place in layer order.")
    ] = None,
    rows: Annotated[str, typer.Option(help="Rows per call, separated by commas.")] = ROWS,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="About how long to measure each state and size.")
    ] = 3.0,
    warm_only: Annotated[
        bool, typer.Option("--warm-only", help="Leave the page cache alone: no cold rows.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    plot_file: Annotated[
        Path | None,
        typer.Option(
            "--plot", parser=given_path, metavar="PATH", help="Draw the measurements as a PNG."
        ),
    ] = None,
) -> None:
    """Time every way to read rows of a table: warm, cold, and with a part of the rows resident.

    Ids are uniform over the table, every call has new ones, methods take turns, and every row is
    compared with plain reads of the same bytes. In the end a made-up text goes through caches of
    rows of several budgets, and hit rates are told. Except with --warm-only the page cache of the
    checkpoint's files is dropped again and again, and cold afterwards: do not run this beside a
    server that reads them.

    Two things are left to the scripts in `benches/` of the sources, since they need what is not
    installed with engram: ids of real text, which need a tokenizer and its text, and bare loops of
    copies and of io_uring, which need a build with the feature `bench`.
    """
    with reported():
        sizes = _parse_rows(rows)
        if plot_file is not None:
            require_writable(plot_file)
        name = None if table is None else chosen_tables(path, table)[0].name
        with _Bench(path, name) as run:
            run.require_room(sizes[-1])
            console = output(quiet=as_json)
            header = run.header()
            for label, value in header.items():
                console.print(f"{label:<13}{value}")
            run.warm(sizes, seconds)
            if warm_only:
                run.notes.append("the page cache was left alone; nothing cold was measured")
            else:
                console.print(
                    f"page cache   of {plural(len(run.gather.files), 'file')} "
                    f"({format_bytes(run.gather.nbytes)} of rows) is dropped again and again; "
                    "--warm-only leaves it alone"
                )
                run.cold(sizes, seconds)
                for share in _SHARES:
                    run.partly_resident(share, sizes, seconds)
            run.budgets(seconds)
            _show(run, console)
            if as_json:
                document: dict[str, Any] = {
                    "version": JSON_VERSION,
                    "path": os.fspath(path),
                    "table": run.gather.info.name,
                    "machine": header,
                    "notes": run.notes,
                    "measurements": [entry.as_json() for entry in run.measurements],
                    "hit_rates": run.rates.as_json(),
                }
                print(json.dumps(document, indent=2))
            if plot_file is not None:
                title = f"{run.gather.info.name}\n{header['processor']}, {header['file system']}"
                draw(plot_file, run.measurements, title, run.rates.entries)
            wrong = run.wrong
        if wrong:
            raise Failed(f"{plural(wrong, 'gathered row')} had wrong bytes")


def _parse_rows(text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 1:
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise wrong("--rows", f"must be numbers of at least 1 such as 16,256,4096, not {shown!r}")
    return sizes


@dataclass
class _Bench:
    """One table, opened in every way, and what was measured on it."""

    path: Path
    table: str | int | None
    measurements: list[Measurement] = field(default_factory=lambda: [])
    notes: list[str] = field(default_factory=lambda: [])
    rates: HitRates = field(default_factory=lambda: HitRates(0, 0, ()))

    def __enter__(self) -> _Bench:
        self.gather = engram.FileGather(self.path, self.table)
        if self.gather.num_rows == 0:
            raise Failed(f"table {self.gather.info.name!r} has no rows")
        self.mapped = MappedTable(self.gather)
        self.stored = StoredRows(self.gather)
        self.cache = PageCache(self.gather, self.mapped.release)
        self.generator = np.random.default_rng(0)
        self.modes: dict[str, engram.FileGather] = {}
        for mode in _MODES:
            try:
                opened = engram.FileGather(self.path, self.table, io=mode)
            except OSError as error:
                self.notes.append(f"io={mode!r} cannot run here: {describe(error)}")
                continue
            self.modes[mode] = opened
            self.notes += [f"io={mode!r}: {why}" for why in opened.stats()["io"]["fallbacks"]]
        if torch_select("", self.mapped) is None:
            single = self.mapped.single is not None
            self.notes.append(
                "torch.index_select is not compared: "
                + ("torch is not installed" if single else "the table is not one array in one file")
            )
        self.notes.append(
            f"np.take, torch, {POOL_THREADS} threads and the copy after advice read from a mapping "
            "with advice for random access: without it every fault of a cold page may read "
            "megabytes around it"
        )
        return self

    def __exit__(self, *_: object) -> None:
        for opened in (self.gather, *self.modes.values()):
            opened.close()
        self.stored.close()

    def require_room(self, rows: int) -> None:
        """Refuses batches whose results, one for each way to read, memory has no room for.

        Raises:
            Failed: Says how many rows it has room for.
        """
        room, _ = _engram.memory_bytes()
        # The right rows, and numpy's comparison with them, beside each way's own output.
        outputs = len(_MODES) + _OTHERS + 2
        most = room // (outputs * (self.gather.row_bytes + np.dtype(np.int64).itemsize))
        if rows > most:
            raise Failed(
                f"--rows {rows}: memory has room for calls of {most:,} rows of "
                f"{plural(self.gather.row_bytes, 'byte')} at most"
            )

    def header(self) -> dict[str, str]:
        """What a figure depends on besides the code."""
        info = self.gather.info
        total = memory()
        share = self.gather.residency().share
        return {
            "processor": processor(),
            "memory": "unknown" if total is None else format_bytes(total),
            "kernel": kernel(),
            "file system": file_system(Path(info.files[0])),
            "engram": f"{engram.__version__}, reads through {self.gather.stats()['io']['runs']}",
            "table": f"{info.name}, {plural(info.rows, 'row')} of "
            f"{plural(info.row_bytes, 'byte')}, {format_bytes(info.bytes)} in "
            f"{plural(len(info.files), 'file')}",
            "in memory": "unknown" if share is None else f"{share:.1%} before",
        }

    def warm(self, sizes: list[int], seconds: float) -> None:
        """Rows whose pages are in memory and mapped."""
        if self.gather.num_rows <= _WARM_ROWS:
            pool = np.arange(self.gather.num_rows)
        else:
            pool = self.generator.integers(0, self.gather.num_rows, _WARM_ROWS)
        scratch = np.empty((_CHUNK, self.gather.row_bytes), np.uint8)
        with status().status("reading the rows to be warm"):
            # Twice: the first time reads what is missing, the second maps it.
            for _ in range(2):
                for start in range(0, len(pool), _CHUNK):
                    ids = pool[start : start + _CHUNK]
                    out = scratch[: len(ids)]
                    self.gather.gather(ids, out=out)
                    self.mapped.take(ids, out)
                    if "mmap" in self.modes:
                        self.modes["mmap"].gather(ids, out=out)
        self._measure(
            "warm",
            sizes,
            seconds,
            lambda rows: pool[self.generator.integers(0, len(pool), rows)],
            lambda _: None,
        )

    def cold(self, sizes: list[int], seconds: float) -> None:
        """Rows of which hardly any page is in memory."""
        self._measure("cold", sizes, seconds, self._uniform, self.cache.cold)

    def partly_resident(self, share: float, sizes: list[int], seconds: float) -> None:
        """Batches of which a share is in memory, without engram knowing which."""

        def prepare(ids: Ids) -> None:
            self.cache.partly_resident(ids, share, self.stored.expected, self.generator)

        def missing_only(rows: int) -> list[Method]:
            missing = rows - round(share * rows)
            if missing == 0:
                return []
            batches = _endless(self._uniform, missing)
            name = "engram, only the missing rows"
            method = gathering(name, self.gather, self.cache.cold)
            return [replace(method, batches=batches)]

        state = f"{share:.0%} resident"
        self._measure(state, sizes, seconds, self._uniform, prepare, missing_only)

    def budgets(self, seconds: float) -> None:
        """What caches of rows find of a text, by their budgets."""
        with status().status("a text through caches of rows"):
            info = self.gather.info
            self.rates = hit_rates(self.path, info, self.stored.expected, seconds=seconds)
        self.notes += self.rates.notes

    @property
    def wrong(self) -> int:
        """Rows that differed from what is stored."""
        return wrong_rows(self.measurements) + sum(rate.wrong for rate in self.rates.entries)

    def _uniform(self, rows: int) -> Ids:
        return self.generator.integers(0, self.gather.num_rows, rows)

    def _measure(
        self,
        state: str,
        sizes: list[int],
        seconds: float,
        draw_ids: Callable[[int], Ids],
        before: Callable[[Ids], object],
        more: Callable[[int], list[Method]] = lambda _: [],
    ) -> None:
        shared = present(
            [
                gathering("engram", self.gather, before),
                *(
                    gathering(f"engram, io={mode!r}", opened, before)
                    for mode, opened in self.modes.items()
                ),
                numpy_take("np.take", self.mapped, before),
                torch_select("torch.index_select", self.mapped, before),
                threads_over_map(f"{POOL_THREADS} threads over a map", self.mapped, before),
                advice_then_copy("advice, then copy", self.gather, self.mapped, before),
            ]
        )
        for rows in sizes:
            with status().status(f"{state}: {plural(rows, 'row')} per call"):
                results = interleaved(
                    [shared[0], *more(rows), *shared[1:]],
                    _endless(draw_ids, rows),
                    self.stored.expected,
                    seconds=seconds,
                    rounds=_ROUNDS,
                    least=_LEAST,
                    bytes_read=None if state == "warm" else bytes_read,
                )
            self.measurements += [
                Measurement(state, "uniform", rows, name, result)
                for name, result in results.items()
            ]


def _endless(draw_ids: Callable[[int], Ids], rows: int) -> Iterator[Ids]:
    while True:
        yield draw_ids(rows)


def _show(run: _Bench, console: Console) -> None:
    for (state, _), group in groups(run.measurements).items():
        headings, lines = medians(group)
        table = Table(title=f"\n{state}: median time per call", title_justify="left")
        table.title_style = ""
        for place, heading in enumerate(headings):
            table.add_column(heading, justify="right" if place else "left", no_wrap=True)
        for line in lines:
            table.add_row(*line)
        # Figures are worth more than a tidy right edge: never cut them to a narrow terminal.
        console.print(table, width=160, crop=False)
    _show_rates(run.rates, console)
    for note in run.notes:
        console.print(f"note         {note}")
    if run.cache.drops:
        console.print(
            f"page cache   dropped {plural(run.cache.drops, 'time')}, at most "
            f"{format_bytes(run.cache.left_bytes)} left"
        )
    share = run.gather.residency().share
    console.print(f"in memory    {'unknown' if share is None else f'{share:.1%}'} after")
    checked = sum(entry.result.rows for entry in run.measurements)
    checked += sum(entry.checked for entry in run.rates.entries)
    console.print(f"checked      {plural(checked, 'gathered row')}, {run.wrong:,} wrong")


def _show_rates(rates: HitRates, console: Console) -> None:
    table = Table(
        title=f"\ncache_bytes: hits in the second half of {rates.tokens:,} tokens ({TEXT})",
        title_justify="left",
    )
    table.title_style = ""
    for heading in ("budget", "rows it holds", "of those wanted", "hits"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rate in rates.entries:
        held = min(1.0, rate.capacity / rates.distinct)
        table.add_row(
            format_bytes(rate.cache_bytes), f"{rate.capacity:,}", f"{held:.0%}", f"{rate.share:.1%}"
        )
    console.print(table, width=160, crop=False)
