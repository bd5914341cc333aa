"""How fast rows come: from the device at random, and from memory."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engram import _engram
from engram.cli.text import format_seconds

from .finding import Finding

if TYPE_CHECKING:
    from numpy.typing import NDArray

    import engram

DEPTHS = (1, 16, 128)
"""Reads in flight: a row at a time, a decode step, a long prompt."""

_SHARES = (0.3, 0.3, 0.4)
_WARM_ROWS = 1 << 15
_WARM_SECONDS = 1.0
_FEW = 2_000
_SLOW = 20_000


@dataclass(frozen=True)
class Point:
    """Random reads with so many in flight.

    Attributes:
        depth: Reads in flight that were asked for.
        reached: That there really were: where io_uring is refused a read takes a thread, and there
            are 32.
        per_second: Reads completed per second.
    """

    depth: int
    reached: int
    per_second: float


@dataclass(frozen=True)
class Rates:
    """Random reads of one table's rows.

    Attributes:
        points: A rate per depth, ascending.
        direct: Whether they bypassed the page cache, and so measured the device.
        runs: How they were read, such as `"uring-direct"`.
        read_seconds: Median time of one read with nothing else in flight.
    """

    points: tuple[Point, ...]
    direct: bool
    runs: str
    read_seconds: float

    def per_second(self, depth: float) -> float:
        """Reads per second with so many in flight: between the measured ones, on a log scale."""
        depth = min(max(depth, self.points[0].depth), self.points[-1].depth)
        for low, high in zip(self.points, self.points[1:], strict=False):
            if depth <= high.depth:
                share = math.log(depth / low.depth) / math.log(high.depth / low.depth)
                return low.per_second * (high.per_second / low.per_second) ** share
        return self.points[-1].per_second

    def seconds(self, reads: int) -> float:
        """Time for so many reads, given to the device at once."""
        return reads / self.per_second(min(reads, DEPTHS[-1])) if reads else 0.0


def measure(reader: _engram.Reader, seconds: float) -> Rates:
    """Reads rows at random for about `seconds`, at every depth.

    Args:
        reader: A table opened with `io="direct"`, so that the device is measured whatever the page
            cache holds; where that is refused, reads go through the page cache, and are counted
            as such.
        seconds: In all.

    Raises:
        OSError: A read failed.
        ValueError: The table has no rows.
    """
    seed = time.time_ns()
    points: list[Point] = []
    median = 0.0
    for place, (depth, share) in enumerate(zip(DEPTHS, _SHARES, strict=True)):
        seen = _engram.random_reads(reader, depth, share * seconds, seed + place)
        # A device that completes nothing in this time completes less than one.
        reads = max(seen["reads"], 1)
        points.append(Point(depth, int(seen["depth"]), reads / max(seen["seconds"], 1e-9)))
        if depth == 1:
            median = float(seen["gap_p50"]) or seen["seconds"] / reads
    io = reader.stats()["io"]
    return Rates(tuple(points), io["direct_alignment"] is not None, io["runs"], median)


def random_reads(rates: Rates, *, in_memory: bool = False) -> Finding:
    """Whether random reads are fast enough to serve rows from the device.

    Args:
        rates: What was measured.
        in_memory: The files are nowhere but in memory.
    """
    data: dict[str, Any] = {
        "per_second": {str(point.depth): round(point.per_second) for point in rates.points},
        "in_flight": {str(point.depth): point.reached for point in rates.points},
        "read_seconds": rates.read_seconds,
        "direct": rates.direct,
        "runs": rates.runs,
    }
    rows = ", ".join(f"{point.per_second:,.0f}/s at {point.depth}" for point in rates.points)
    found = f"{rows} in flight; one takes {format_seconds(rates.read_seconds)}"
    if not rates.direct:
        found += "; through the page cache, so what is cached counts as read"
        return Finding("random reads", "ok" if in_memory else "warning", found, None, data)
    best = rates.points[-1].per_second
    if in_memory or best >= _SLOW:
        return Finding("random reads", "ok", found, None, data)
    if best >= _FEW:
        advice = (
            "a volume with a cap on its operations per second, or busy; raise the cap, or keep the "
            "tables in memory (`engram prewarm`)"
        )
        return Finding("random reads", "warning", found, advice, data)
    advice = (
        "that is a hard disk's rate, or a throttled volume's: serve from memory "
        "(`engram prewarm`, enough memory for the tables), or copy the files to flash"
    )
    return Finding("random reads", "problem", found, advice, data)


@dataclass(frozen=True)
class Warm:
    """Gathers of rows whose pages are in memory.

    Attributes:
        rows: Different rows that were gathered.
        step_seconds: Median time of a gather of one token's rows.
        row_seconds: Time per row in large gathers.
    """

    rows: int
    step_seconds: float
    row_seconds: float


def measure_warm(
    gather: engram.FileGather, rows_per_token: int, seconds: float = _WARM_SECONDS
) -> Warm:
    """Brings some rows into memory, as many as come within half of `seconds`, and times gathers.

    Raises:
        OSError: A read failed.
    """
    generator = np.random.default_rng(time.time_ns())
    pool = generator.integers(0, gather.num_rows, _WARM_ROWS)
    out = np.empty((4096, gather.row_bytes), np.uint8)
    end = time.perf_counter() + seconds / 2
    known = 0
    # In small pieces at first: a slow device brings few rows in this time.
    for size in (64, 192, 768, 3072, *(4096,) * 7):
        gather.gather(pool[known : known + size], out=out[:size])
        known += size
        if time.perf_counter() > end:
            break
    pool = pool[:known]
    large = min(known, len(out))
    gather.gather(pool[:large], out=out[:large])
    times = _times(gather, pool, large, out, seconds / 4)
    small = max(1, min(rows_per_token, large))
    steps = _times(gather, pool, small, out, seconds / 4)
    return Warm(
        known,
        step_seconds=statistics.median(steps) * (rows_per_token / small),
        row_seconds=statistics.median(times) / large,
    )


def _times(
    gather: engram.FileGather,
    pool: NDArray[np.int64],
    rows: int,
    out: NDArray[np.uint8],
    seconds: float,
) -> list[float]:
    """Durations of gathers of some of the rows in `pool`, other ones each time."""
    taken: list[float] = []
    end = time.perf_counter() + seconds
    at = 0
    while not taken or time.perf_counter() < end:
        at = at + rows if at + 2 * rows <= len(pool) else 0
        ids = pool[at : at + rows]
        begin = time.perf_counter()
        gather.gather(ids, out=out[:rows])
        taken.append(time.perf_counter() - begin)
    return taken
