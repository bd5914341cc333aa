"""Times several ways of doing the same gather, taking turns, with every result checked."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

_SLOT_BYTES = 32 << 20
_SLOTS = 64


@dataclass(frozen=True)
class Method:
    """One way to gather rows.

    Attributes:
        name: Shown above its column.
        prepare: Turns int64 ids of any shape into what `run` takes; not timed.
        run: Gathers into a uint8 array of shape `[*ids.shape, row_bytes]`; timed.
    """

    name: str
    prepare: Callable[[NDArray[np.int64], NDArray[np.uint8]], Any]
    run: Callable[[Any], object]


@dataclass
class Result:
    """What one method did with batches of one size.

    Attributes:
        seconds: Duration of each call.
        rows: Rows gathered and checked.
        wrong: How many of them differed from what they should be.
    """

    seconds: list[float] = field(default_factory=lambda: [])
    rows: int = 0
    wrong: int = 0

    @property
    def median(self) -> float:
        """Median seconds per call."""
        return statistics.median(self.seconds)


def interleaved(
    methods: Sequence[Method],
    batches: Iterator[NDArray[np.int64]],
    expected: Callable[[NDArray[np.int64]], NDArray[np.uint8]],
    *,
    seconds: float,
    rounds: int,
) -> dict[str, Result]:
    """Runs the methods in turn, in rotating order, each call on ids that none has just read.

    Results are kept in slots and checked between rounds, outside of what is timed.

    Args:
        methods: What to compare.
        batches: Row ids, an endless supply of one shape.
        expected: The right rows for some ids.
        seconds: Stop after about this long.
        rounds: Stop after this many rounds.
    """
    results = {method.name: Result() for method in methods}
    first = next(batches)
    shape = expected(first).shape
    slot_count = max(1, min(_SLOTS, _SLOT_BYTES // max(1, int(np.prod(shape)))))
    slots = {
        method.name: [np.zeros(shape, np.uint8) for _ in range(slot_count)] for method in methods
    }
    deadline = time.perf_counter() + seconds
    pending: list[tuple[Result, NDArray[np.int64], NDArray[np.uint8]]] = []
    for turn in range(rounds):
        shift = turn % len(methods)
        for method in (*methods[shift:], *methods[:shift]):
            ids = next(batches)
            out = slots[method.name][turn % slot_count]
            prepared = method.prepare(ids, out)
            begin = time.perf_counter()
            method.run(prepared)
            results[method.name].seconds.append(time.perf_counter() - begin)
            pending.append((results[method.name], ids, out))
        over = time.perf_counter() > deadline or turn == rounds - 1
        if over or (turn + 1) % slot_count == 0:
            for result, ids, out in pending:
                right = (out == expected(ids)).all(axis=-1)
                result.rows += right.size
                result.wrong += int(right.size - np.count_nonzero(right))
            pending.clear()
        if over:
            break
    return results
