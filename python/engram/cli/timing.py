"""Times several ways of doing the same gather, taking turns, with every result checked."""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

_SLOT_BYTES = 32 << 20
_SLOTS = 64
_UNWRITTEN = 0xA5
_Turn = TypeVar("_Turn")


@dataclass(frozen=True)
class Method:
    """One way to gather rows.

    Attributes:
        name: Shown above its column.
        prepare: Turns int64 ids of any shape into what `run` takes; not timed.
        run: Gathers into a uint8 array of shape `[*ids.shape, row_bytes]`; timed.
        before: Called with the ids right before `run`, such as to drop the page cache; not timed.
        after: Called with the ids right after `run`, such as to undo what it did; not timed.
        batches: Ids of its own, where it is to do other work than the rest.
        select: Those of some ids that it is given, where that are not all.
        work: How much there is to do for some ids, where batches of one size differ in that, such
            as the rows that are missing; called right before `before`, not timed.
        most: Runs at most this often; for methods that take long.
        own_clock: `run` returns the seconds that count.
        delivers: Whether rows arrive; those of a bare read loop do not, and cannot be checked.
        lingers: Threads of its own go on running for a while after a call, as those of OpenMP do.
            What follows waits for them, a tenth of a second at most: they would take the
            processors it needs.
    """

    name: str
    prepare: Callable[[NDArray[np.int64], NDArray[np.uint8]], Any]
    run: Callable[[Any], object]
    before: Callable[[NDArray[np.int64]], object] | None = None
    after: Callable[[NDArray[np.int64]], object] | None = None
    batches: Iterator[NDArray[np.int64]] | None = None
    select: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None
    work: Callable[[NDArray[np.int64]], int] | None = None
    most: int | None = None
    own_clock: bool = False
    delivers: bool = True
    lingers: bool = False


@dataclass
class Result:
    """What one method did with batches of one size.

    Attributes:
        seconds: Duration of each call.
        work: How much each call had to do, where that was counted.
        cpu_seconds: Processor time of all threads of this process during the calls, together; None
            where a method that keeps its own time does more than what it times.
        bytes_read: Bytes read from devices during the calls, together; None where not counted.
        rows: Rows gathered and checked.
        wrong: How many of them differed from what they should be.
    """

    seconds: list[float] = field(default_factory=lambda: [])
    work: list[int] = field(default_factory=lambda: [])
    cpu_seconds: float | None = None
    bytes_read: int | None = None
    rows: int = 0
    wrong: int = 0

    @property
    def median(self) -> float:
        """Median seconds per call."""
        return statistics.median(self.seconds)

    @property
    def comparable(self) -> float:
        """Median seconds per call, or by what calls had to do where that was counted."""
        if not self.work:
            return self.median
        pairs = zip(self.seconds, self.work, strict=True)
        return statistics.median(seconds / max(1, work) for seconds, work in pairs)

    def quantile(self, share: float) -> float:
        """Seconds that `share` of the calls, from 0 to 1, took at most."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class _Lane:
    """A method, its result so far, and where its rows go."""

    method: Method
    result: Result
    slots: list[NDArray[np.uint8]]


def shuffled(entries: Sequence[_Turn], turn: int) -> list[_Turn]:
    """The entries in an order of the turn's own, so that none always follows the same one.

    What a method leaves in caches and queues would otherwise fall on its successor alone.
    """
    order = list(entries)
    random.Random(turn).shuffle(order)
    return order


def interleaved(
    methods: Sequence[Method],
    batches: Iterator[NDArray[np.int64]],
    expected: Callable[[NDArray[np.int64]], NDArray[np.uint8]],
    *,
    seconds: float,
    rounds: int,
    least: int = 1,
    alike: bool = False,
    bytes_read: Callable[[], int] | None = None,
) -> dict[str, Result]:
    """Runs the methods in turn, in changing order, each call on ids that none has just read.

    Results are kept in slots and checked between rounds, outside of what is timed.

    Args:
        methods: What to compare.
        batches: Row ids, an endless supply of one shape.
        expected: The right rows for some ids.
        seconds: Stop after about this long.
        rounds: Stop after this many rounds.
        least: But not before this many.
        alike: All methods of a round are given the same ids instead: batches that differ in what
            there is to do then favour none. For methods that leave nothing behind, such as a page
            cache that holds what they read.
        bytes_read: Counter of the bytes this process has read from devices. Asking costs some
            microseconds and cold caches, so it is for calls that take longer.
    """
    lanes: list[_Lane] = []
    common = next(batches)
    for method in methods:
        first = common if method.batches is None else next(method.batches)
        # Written once, so that no call pays for the first touch of its own output.
        shape = expected(first).shape
        count = max(1, min(_SLOTS, rounds, _SLOT_BYTES // max(1, int(np.prod(shape)))))
        slots = [np.full(shape, _UNWRITTEN, np.uint8) for _ in range(count)]
        lanes.append(_Lane(method, Result(bytes_read=None if bytes_read is None else 0), slots))
    slot_count = min(len(lane.slots) for lane in lanes)
    deadline = time.perf_counter() + seconds
    pending: list[tuple[Result, NDArray[np.int64], NDArray[np.uint8]]] = []
    for turn in range(rounds):
        if alike:
            common = next(batches)
        for lane in shuffled(lanes, turn):
            method, result = lane.method, lane.result
            if method.most is not None and turn >= method.most:
                continue
            if method.batches is not None:
                ids = next(method.batches)
            else:
                ids = common if alike else next(batches)
            if method.select is not None:
                ids = method.select(ids)
            out = lane.slots[turn % slot_count][: len(ids)]
            _call(method, result, ids, out, bytes_read)
            if method.lingers:
                deadline += _wait_for_other_threads()
            if method.delivers:
                pending.append((result, ids, out))
        over = turn == rounds - 1 or (time.perf_counter() > deadline and turn + 1 >= least)
        if over or (turn + 1) % slot_count == 0:
            _check(pending, expected)
            pending.clear()
        if over:
            break
    return {lane.method.name: lane.result for lane in lanes}


def _check(
    pending: Sequence[tuple[Result, NDArray[np.int64], NDArray[np.uint8]]],
    expected: Callable[[NDArray[np.int64]], NDArray[np.uint8]],
) -> None:
    told: tuple[NDArray[np.int64] | None, Any] = (None, None)
    for result, ids, out in pending:
        if told[0] is not ids:
            told = ids, expected(ids)
        right = (out == told[1]).all(axis=-1)
        result.rows += right.size
        result.wrong += int(right.size - np.count_nonzero(right))


def _call(
    method: Method,
    result: Result,
    ids: NDArray[np.int64],
    out: NDArray[np.uint8],
    bytes_read: Callable[[], int] | None,
) -> None:
    prepared = method.prepare(ids, out)
    if method.work is not None:
        result.work.append(method.work(ids))
    if method.before is not None:
        method.before(ids)
    read = 0 if bytes_read is None else bytes_read()
    cpu = time.process_time()
    begin = time.perf_counter()
    told = method.run(prepared)
    elapsed = time.perf_counter() - begin
    if not method.own_clock:
        result.cpu_seconds = (result.cpu_seconds or 0.0) + time.process_time() - cpu
    if bytes_read is not None:
        result.bytes_read = (result.bytes_read or 0) + bytes_read() - read
    result.seconds.append(told if method.own_clock and isinstance(told, float) else elapsed)
    if method.after is not None:
        method.after(ids)


def _wait_for_other_threads() -> float:
    """Waits, a tenth of a second at most, until no other thread of this process is running.

    Returns:
        The seconds that took.
    """
    own = str(threading.get_native_id())
    begin = time.perf_counter()
    while any(_runs(task) for task in _threads() if task.name != own):
        if time.perf_counter() > begin + 0.1:
            break
        time.sleep(0.001)
    return time.perf_counter() - begin


def _threads() -> list[os.DirEntry[str]]:
    try:
        with os.scandir("/proc/self/task") as tasks:
            return list(tasks)
    except OSError:
        return []


def _runs(task: os.DirEntry[str]) -> bool:
    try:
        # The state follows the name, which is in brackets and may hold any character.
        told = Path(task.path, "stat").read_text("ascii", "replace")
        return told.rpartition(")")[2].split()[0] == "R"
    except OSError:
        return False
