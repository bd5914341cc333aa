"""Measurements of many ways to gather, as JSON values and as tables of text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .text import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .timing import Result

JSON_VERSION = 1

Grid = tuple[list[str], list[list[str]]]
"""Headings, and one list of cells per line."""


@dataclass(frozen=True)
class Measurement:
    """One method on batches of one size in one state of the page cache.

    Attributes:
        state: `"warm"`, `"cold"` or how much was resident, such as `"50% resident"`.
        ids: Where row ids came from: `"uniform"` or `"text"`.
        rows: Rows per call.
        method: The method's name.
        result: What came out.
    """

    state: str
    ids: str
    rows: int
    method: str
    result: Result

    @property
    def median(self) -> float:
        """Median seconds per call."""
        return self.result.median

    def as_json(self) -> dict[str, Any]:
        """JSON values; every key is part of the documents' interface."""
        result = self.result
        calls = len(result.seconds)
        return {
            "state": self.state,
            "ids": self.ids,
            "rows": self.rows,
            "method": self.method,
            "calls": calls,
            "seconds": {
                "median": result.median,
                "p10": result.quantile(0.1),
                "p90": result.quantile(0.9),
                "p99": result.quantile(0.99),
                "min": min(result.seconds),
            },
            "cpu_seconds_per_call": None
            if result.cpu_seconds is None
            else result.cpu_seconds / calls,
            "bytes_read_per_call": None if result.bytes_read is None else result.bytes_read / calls,
            "rows_checked": result.rows,
            "rows_wrong": result.wrong,
        }


def wrong_rows(measurements: Sequence[Measurement]) -> int:
    """Rows that differed from what is stored, over all measurements."""
    return sum(measurement.result.wrong for measurement in measurements)


def groups(measurements: Sequence[Measurement]) -> dict[tuple[str, str], list[Measurement]]:
    """Measurements by state and source of ids, in the order in which they were made."""
    found: dict[tuple[str, str], list[Measurement]] = {}
    for measurement in measurements:
        found.setdefault((measurement.state, measurement.ids), []).append(measurement)
    return found


def medians(measurements: Sequence[Measurement]) -> Grid:
    """Median time per call: a line per method, a column per number of rows."""
    return _grid(measurements, lambda measurement: format_seconds(measurement.median))


def costs(measurements: Sequence[Measurement]) -> Grid:
    """Processor time per call, and bytes read from devices where they were counted."""

    def cell(measurement: Measurement) -> str:
        result = measurement.result
        calls = len(result.seconds)
        parts: list[str] = []
        if result.cpu_seconds is not None:
            parts.append(format_seconds(result.cpu_seconds / calls))
        if result.bytes_read is not None:
            parts.append(format_bytes(result.bytes_read / calls))
        return ", ".join(parts)

    return _grid(measurements, cell)


def _grid(measurements: Sequence[Measurement], cell: Callable[[Measurement], str]) -> Grid:
    sizes = sorted({measurement.rows for measurement in measurements})
    methods = list(dict.fromkeys(measurement.method for measurement in measurements))
    cells = {(entry.method, entry.rows): cell(entry) for entry in measurements}
    headings = ["method", *(f"{size:,} rows" for size in sizes)]
    return headings, [
        [method, *(cells.get((method, size), "") for size in sizes)] for method in methods
    ]
