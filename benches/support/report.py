"""What a benchmark prints and writes: where it ran, what came out, and which figures were met."""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import engram
from engram.cli.errors import Failed
from engram.cli.machine import file_system, kernel, memory, processor
from engram.cli.measured import JSON_VERSION, Measurement, costs, groups, medians, wrong_rows
from engram.cli.plot import draw
from engram.cli.text import format_bytes

from .options import CHECKOUT

PAGE_CACHE_MODES = tuple(f"engram, io={mode!r}" for mode in ("uring", "pread", "mmap"))
"""Explicit ways through the page cache: none may be much better than the automatic one."""

RESULTS = CHECKOUT / "benches" / "results"


@dataclass(frozen=True)
class Figure:
    """A promise in numbers."""

    name: str
    value: float
    limit: float
    at_most: bool
    unit: str

    @property
    def met(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def cells(self) -> list[str]:
        wanted = f"{'at most' if self.at_most else 'at least'} {self.limit:g}{self.unit}"
        return [self.name, f"{self.value:.3g}{self.unit}", wanted, "ok" if self.met else "MISSED"]


def markdown(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table that reads well as text and as Markdown; all columns but the first to the right."""
    cells = [list(headings), *(list(line) for line in lines)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(headings))]

    def joined(line: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [
        ("-" * (width - 1) + ":") if column else "-" * width for column, width in enumerate(widths)
    ]
    return "\n".join([joined(cells[0]), joined(rule), *(joined(line) for line in cells[1:])])


class Report:
    """Collects and prints.

    Args:
        script: Name of the benchmark.
        options: Its command line.
    """

    def __init__(self, script: str, options: argparse.Namespace) -> None:
        self._script = script
        self._options = options
        self.measurements: list[Measurement] = []
        self.figures: list[Figure] = []
        self.extra: dict = {}
        self.drawing: Callable[[Path, str], None] | None = None
        """Draws the plot instead of the usual one, to a path and under a title."""
        self._header: dict[str, str] = {}
        self._notes: list[str] = []
        print(f"# {script}\n")
        self.say(
            {
                "machine": processor(),
                "memory": format_bytes(memory() or 0),
                "kernel": kernel(),
                "load": f"{os.getloadavg()[0]:.1f} processes in the last minute",
                "versions": versions(),
            }
        )

    def say(self, facts: dict[str, str]) -> None:
        """Adds to what the run depended on."""
        self._header |= facts
        for label, value in facts.items():
            print(f"- {label}: {value}", flush=True)

    def note(self, text: str) -> None:
        """Says something a reader of the figures must know."""
        self._notes.append(text)
        print(f"- note: {text}", flush=True)

    def table(self, gather: engram.FileGather) -> None:
        """Says which table is read."""
        io = gather.stats()["io"]
        size = f"{format_bytes(gather.nbytes)} in {len(gather.files)} file(s)"
        self.say(
            {
                "table": f"{gather.num_rows:,} rows of {gather.row_bytes} bytes "
                f"({gather.encoding}), {size}",
                "file system": file_system(Path(gather.files[0])),
                "engram": f"io={io['asked']} runs {io['runs']}, {gather.stats()['threads']} threads"
                + "".join(f"; {why}" for why in io["fallbacks"]),
            }
        )

    def residency(self, label: str, gather: engram.FileGather) -> float | None:
        """Says how much of the table is in memory, by the kernel's answer."""
        share = gather.residency().share
        text = "unknown" if share is None else f"{share:.2%}"
        self.say({f"resident {label}": text})
        return share

    def add(self, measurements: Sequence[Measurement]) -> None:
        """Keeps measurements and prints them, one group after another."""
        self.measurements += measurements
        for (state, ids), group in groups(measurements).items():
            print(f"\n## {state}, {ids} ids\n\nMedian time per call:\n")
            print(markdown(*medians(group)))
            counted = any(entry.result.bytes_read is not None for entry in group)
            read = ", bytes read from the device" if counted else ""
            print(f"\nProcessor time{read} per call:\n")
            print(markdown(*costs(group)), flush=True)
            self._best_mode(f"{state}, {ids} ids", group)

    def _best_mode(self, label: str, group: Sequence[Measurement]) -> None:
        cells = {(entry.method, entry.rows): entry.result.comparable for entry in group}
        ratios = [
            (cells["engram", rows] / cells[method, rows], rows, method)
            for method, rows in cells
            if method in PAGE_CACHE_MODES and ("engram", rows) in cells
        ]
        if ratios:
            ratio, rows, method = max(ratios)
            self.figure(
                f"{label}, worst cell: engram / {method}, {rows:,} rows", ratio, at_most=1.1
            )

    def figure(
        self,
        name: str,
        value: float,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        unit: str = "x",
    ) -> None:
        """Notes a promise and what was measured."""
        limit = at_most if at_most is not None else at_least
        assert limit is not None
        self.figures.append(Figure(name, value, limit, at_most is not None, unit))

    def finish(self) -> int:
        """Prints the figures, writes JSON and plot; the exit status."""
        if self.figures:
            print("\n## Figures\n")
            lines = [figure.cells() for figure in self.figures]
            print(markdown(["figure", "measured", "wanted", ""], lines))
        checked = sum(entry.result.rows for entry in self.measurements)
        wrong = wrong_rows(self.measurements) + self.extra.get("rows_wrong", 0)
        checked += self.extra.get("rows_checked", 0)
        print(f"\n{checked:,} rows checked, {wrong:,} wrong")
        json_path = self._options.json or RESULTS / f"{self._script}.json"
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(self._document(), indent=2) + "\n")
        print(f"written: {json_path}")
        plot_path = self._options.plot or RESULTS / f"{self._script}.png"
        if self.measurements or self.drawing is not None:
            title = (
                f"{self._script}: {self._header['machine']}, {self._header.get('file system', '')}"
            )
            plot_path.parent.mkdir(parents=True, exist_ok=True)
            try:
                if self.drawing is not None:
                    self.drawing(plot_path, title)
                else:
                    draw(plot_path, self.measurements, title)
            except Failed as reason:
                print(f"no plot: {reason}")
            else:
                print(f"written: {plot_path}")
        missed = [figure for figure in self.figures if not figure.met]
        if missed:
            print(f"{len(missed)} of {len(self.figures)} figures missed")
        return int(bool(wrong) or (self._options.strict and bool(missed)))

    def _document(self) -> dict:
        return {
            "version": JSON_VERSION,
            "script": self._script,
            "machine": self._header,
            "notes": self._notes,
            "measurements": [entry.as_json() for entry in self.measurements],
            "figures": [
                {
                    "name": figure.name,
                    "value": figure.value,
                    "limit": figure.limit,
                    "at_most": figure.at_most,
                    "met": figure.met,
                }
                for figure in self.figures
            ],
            **self.extra,
        }


def versions() -> str:
    """Versions of everything that is compared."""
    found = [f"engram {engram.__version__}", f"python {platform.python_version()}"]
    for name in ("numpy", "torch", "safetensors"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    if shutil.which("fio"):
        told = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=False)
        found.append(told.stdout.strip())
    return ", ".join(found)
