"""Caches of rows on paper: what each policy would miss of a text, at equal memory."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from engram import _engram
from engram.hashing import QwenHash
from text_trace import RowIds

CHUNK = 4096
"""Tokens of a batch; a row counts once per batch."""
_AT_ONCE = 64


@dataclass(frozen=True)
class Policy:
    """A policy, and what it needs beside the rows.

    Attributes:
        name: Shown.
        settings: How the simulation calls it; None for the optimum.
        index_bytes: Bytes per row: 4 for its id and 6 to find it by that (a hash table of 4-byte
            slots, two thirds full; none in sets, which are searched), 4 per link of a list, 1 for
            counters, 2 for a sketch of frequencies, 4 for the name of a row that left.
    """

    name: str
    settings: str | None
    index_bytes: float


OPTIMUM = Policy("optimum", None, 0)
LRU = Policy("LRU", "lru", 18)
OURS = Policy("13-way sets, as in engram", "set:ways=13,bits=3", 64 / 13)
POLICIES = (
    OPTIMUM,
    LRU,
    Policy("LRU, filter", "lru:filter=1", 20),
    Policy("CLOCK", "clock", 11),
    Policy("CLOCK, 2 bits", "clock:bits=2", 11),
    Policy("CLOCK, filter", "clock:filter=1", 13),
    Policy("SIEVE", "sieve", 19),
    Policy("SIEVE, filter", "sieve:filter=1", 21),
    Policy("S3-FIFO", "s3fifo", 19),
    Policy("S3-FIFO, one hit promotes", "s3fifo:promote=1", 19),
    Policy("S3-FIFO, filter", "s3fifo:filter=1", 21),
    Policy("W-TinyLFU", "wtinylfu", 21),
    Policy("W-TinyLFU, window of 10%", "wtinylfu:window=10", 21),
    Policy("13-way sets, LRU", "set:ways=13,bits=0", 6),
    Policy("13-way sets, SRRIP", "set:ways=13,bits=2,insert=1,max=1", 64 / 13),
    Policy("13-way sets, filter", "set:ways=13,bits=3,filter=1", 64 / 13 + 2),
    OURS,
    Policy("32-way sets", "set:ways=32,bits=3", 5),
    Policy("13-way sets, ghosts", "set:ways=13,bits=3,ghosts=8,fingerprint=16", 64 / 13 + 16 / 13),
)
S3_FIFO = tuple(
    policy
    for policy in POLICIES
    if policy.name.startswith("S3-FIFO") and "filter" not in policy.name
)
SHORT = (OPTIMUM, LRU, *S3_FIFO, OURS, POLICIES[-1])
"""Those that a comparison cannot do without."""


@dataclass(frozen=True)
class Sample:
    """Which lookups stand for all.

    All heads of an order behave alike, and ids are hashes, so a cache of a fraction of the rows,
    asked for that fraction, hits as often.

    Attributes:
        heads: One of so many heads of an order.
        rows: One of so many rows of a head.
    """

    heads: int = 1
    rows: int = 1

    @property
    def factor(self) -> int:
        """How many lookups each stands for."""
        return self.heads * self.rows


class Lookups:
    """Lookups of consecutive tokens in batches.

    Args:
        row_ids: Where ids come from.
        config: Of the table that they are folded onto.
        sample: Which of them are looked at.
        spare: Rows that no text asks for, for a scan.
    """

    def __init__(
        self, row_ids: RowIds, config: dict, sample: Sample, *, chunk: int = CHUNK, spare: int = 0
    ) -> None:
        table = QwenHash(config)
        self._row_ids = row_ids
        self._sample = sample
        self._heads = np.arange(0, table.heads, sample.heads)
        self._offsets = np.array(table.head_offsets, np.int64)[self._heads]
        sizes = -(-np.array(table.head_sizes, np.int64)[self._heads] // sample.rows)
        self._compact = np.concatenate([[0], np.cumsum(sizes)])
        self._chunk = chunk
        self._spare = spare
        self._trace = _engram.BenchTrace(int(self._compact[-1]) + spare // sample.factor)
        self.tokens = 0

    def add(self, first: int, last: int) -> None:
        """Appends the tokens `first..last`."""
        step = self._chunk * _AT_ONCE
        for at in range(first, last, step):
            ids = self._row_ids.folded(at, min(at + step, last))[:, self._heads] - self._offsets
            left_out = ids % self._sample.rows != 0
            ids = ids // self._sample.rows + self._compact[:-1]
            ids[left_out] = -1
            self._trace.append(ids.reshape(-1), self._lookups_per_batch)
        self.tokens += last - first

    @property
    def _lookups_per_batch(self) -> int:
        return self._chunk * len(self._heads)

    def scan(self) -> None:
        """Appends every spare row, once."""
        first, count = int(self._compact[-1]), self._spare // self._sample.factor
        self._trace.append(np.arange(first, first + count), self._lookups_per_batch)

    @property
    def batches(self) -> int:
        """Number of batches so far."""
        return len(self._trace.lookups())

    def distinct(self) -> np.ndarray:
        """Distinct rows of each batch, those that are not looked at estimated."""
        return np.array(self._trace.lookups()) * self._sample.factor

    def first(self) -> np.ndarray:
        """How many of them nobody asked for before."""
        return np.array(self._trace.first()) * self._sample.factor

    def misses(self, policy: Policy, nbytes: int, row_bytes: int) -> np.ndarray:
        """Misses of each batch with a cache of so many bytes, the index included."""
        rows = int(nbytes / (row_bytes + policy.index_bytes)) // self._sample.factor
        rows = max(1, rows)
        if policy.settings is None:
            counted = self._trace.optimum(rows)
        else:
            counted = self._trace.misses(policy.settings, rows)
        return np.array(counted) * self._sample.factor


@dataclass
class Rates:
    """Hits of one policy, in percent of the distinct rows of a batch.

    Attributes:
        policy: Whose.
        by_bytes: Size of the cache to rate.
        after_scan: Of a part of the text, without and with a scan before it; None if not looked at.
    """

    policy: Policy
    by_bytes: dict[int, float] = field(default_factory=dict)
    after_scan: tuple[float, float] | None = None

    def as_json(self) -> dict:
        """JSON values."""
        return {
            "name": self.policy.name,
            "settings": self.policy.settings,
            "index_bytes": self.policy.index_bytes,
            "hits_by_bytes": self.by_bytes,
            "without_and_with_scan": self.after_scan,
        }


def rates(
    lookups: Lookups, policies: tuple[Policy, ...], sizes: tuple[int, ...], row_bytes: int
) -> Iterator[Rates]:
    """Hit rates in the second half of a text, the first having filled the cache."""
    half = lookups.batches // 2
    asked = lookups.distinct()[half:].sum()
    for policy in policies:
        found = Rates(policy)
        for nbytes in sizes:
            missed = lookups.misses(policy, nbytes, row_bytes)[half:].sum()
            found.by_bytes[nbytes] = 100 * (1 - float(missed / asked))
        yield found


def after_scan(
    row_ids: RowIds,
    config: dict,
    sample: Sample,
    tokens: int,
    nbytes: int,
    row_bytes: int,
    policies: tuple[Policy, ...],
) -> dict[str, tuple[float, float]]:
    """Hit rates of an eighth of a text, without and with a scan before it.

    The scan asks for twice as many rows as the cache can hold, each once.
    """
    scanned = 2 * nbytes // row_bytes
    begin = tokens - tokens // 8
    found: dict[str, list[float]] = {policy.name: [] for policy in policies}
    for with_scan in (False, True):
        lookups = Lookups(row_ids, config, sample, spare=scanned)
        lookups.add(0, begin)
        if with_scan:
            lookups.scan()
        before = lookups.batches
        lookups.add(begin, tokens)
        asked = lookups.distinct()[before:].sum()
        for policy in policies:
            missed = lookups.misses(policy, nbytes, row_bytes)[before:].sum()
            found[policy.name].append(100 * (1 - float(missed / asked)))
    return {name: (without, with_scan) for name, (without, with_scan) in found.items()}
