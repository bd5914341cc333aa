"""How much of what a text asks for a cache of rows finds, by its budget."""

from __future__ import annotations

import contextlib
import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

import engram

from .hashes import table_hasher
from .text import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from engram.hashing import NgramHash

    Ids = NDArray[np.int64]

CHUNK = 512
"""Tokens of a gather: a part of a prompt, as servers cut them."""

TEXT = "made up: phrases of 8 tokens, repeated by Zipf's law"

_PHRASES = 1 << 15
_PHRASE = 8
_PARTS = (16, 8, 4, 2, 1)
"""Budgets, as parts of what all rows that the text wants would take."""

_INDEX_BYTES = 5
_LEAST, _MOST = 8, 128


@dataclass(frozen=True)
class HitRate:
    """What a cache of one budget found.

    Attributes:
        cache_bytes: Its budget.
        capacity: Rows it has room for.
        rows: Rows looked up in the second half of the text, repeats counted.
        hits: How many of them it had.
        checked: Rows compared with what is stored, over the whole text.
        wrong: How many of them differed.
    """

    cache_bytes: int
    capacity: int
    rows: int
    hits: int
    checked: int
    wrong: int

    @property
    def share(self) -> float:
        """Hits among the rows looked up, from 0 to 1."""
        return self.hits / self.rows if self.rows else 0.0

    def as_json(self) -> dict[str, Any]:
        """JSON values; every key is part of the command's interface."""
        return {
            "cache_bytes": self.cache_bytes,
            "capacity": self.capacity,
            "rows": self.rows,
            "hits": self.hits,
            "hit_rate": self.share,
            "rows_checked": self.checked,
            "rows_wrong": self.wrong,
        }


@dataclass(frozen=True)
class HitRates:
    """Hit rates of several budgets on one text.

    Attributes:
        tokens: Length of the text.
        distinct: Distinct rows that it wants.
        entries: One for each budget, the smallest first.
        notes: What a reader must know.
    """

    tokens: int
    distinct: int
    entries: tuple[HitRate, ...]
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """JSON values; every key is part of the command's interface."""
        return {
            "text": TEXT,
            "chunk_tokens": CHUNK,
            "tokens": self.tokens,
            "distinct_rows": self.distinct,
            "budgets": [entry.as_json() for entry in self.entries],
        }


def phrases(vocabulary: int, generator: np.random.Generator) -> Iterator[Ids]:
    """An endless text, chunk by chunk, about as repetitive as real ones.

    Tokens that follow one another by chance share no n-grams. So whole phrases are repeated, the
    one of rank r in proportion to 1/r; in a chunk of 4,096 tokens about two of five are repeats.

    Args:
        vocabulary: Tokens `0..vocabulary - 1` occur.
        generator: Chooses.

    Yields:
        int64 `[CHUNK]`.
    """
    book = generator.integers(0, vocabulary, (_PHRASES, _PHRASE))
    weights = 1.0 / np.arange(1, _PHRASES + 1)
    ends = np.cumsum(weights / weights.sum())
    while True:
        ranks = np.searchsorted(ends, generator.random(CHUNK // _PHRASE))
        yield book[np.minimum(ranks, _PHRASES - 1)].reshape(-1)


def row_ids(
    path: Path, info: engram.TableInfo, generator: np.random.Generator
) -> tuple[Iterator[Ids], str | None]:
    """Row ids of such a text, `[CHUNK, heads]` at a time; and why they are not hashed, if not."""
    try:
        hasher = table_hasher(path, info)
    except (OSError, ValueError, ImportError) as error:
        why = f"tokens stand for rows, as it is not known how they are hashed: {error}"
        return _plain(info, generator), why
    if hasher is None:
        return _plain(info, generator), None
    if hasher.num_rows > info.rows:
        why = f"tokens stand for rows: {hasher.num_rows:,} are hashed to, {info.rows:,} are stored"
        return _plain(info, generator), why
    return _hashed(hasher, generator), None


def _plain(info: engram.TableInfo, generator: np.random.Generator) -> Iterator[Ids]:
    return (chunk[:, None] for chunk in phrases(info.rows, generator))


def _hashed(hasher: NgramHash, generator: np.random.Generator) -> Iterator[Ids]:
    reach = hasher.context_len
    context = None
    for chunk in phrases(hasher.vocab_size, generator):
        yield hasher.ids(chunk, context=context)
        context = chunk[None, len(chunk) - reach :] if reach else None


def hit_rates(
    path: Path,
    info: engram.TableInfo,
    expected: Callable[[Ids], NDArray[np.uint8]],
    *,
    seconds: float,
    seed: int = 0,
) -> HitRates:
    """Runs one text through caches of several budgets side by side, each empty at first.

    Args:
        path: The checkpoint.
        info: One of its tables.
        expected: The right rows for some ids.
        seconds: About how long a cache that finds nothing may take.
        seed: Of the text.
    """
    ids, why = row_ids(path, info, np.random.default_rng(seed))
    notes = [] if why is None else [why]
    first = next(ids)
    with engram.FileGather(path, info.name) as gather:
        started = time.perf_counter()
        gather.gather(first)
        expected(first)
        once = time.perf_counter() - started
    count = int(min(_MOST, max(_LEAST, seconds / max(once, 1e-6))))
    chunks = [first, *itertools.islice(ids, count - 1)]
    distinct = len(np.unique(np.concatenate(chunks)))
    whole = distinct * (info.row_bytes + _INDEX_BYTES)
    with contextlib.ExitStack() as stack:
        caches: list[_Cache] = []
        for budget in dict.fromkeys(max(1, whole // part) for part in _PARTS):
            try:
                gather = engram.FileGather(path, info.name, cache_bytes=budget)
            except ValueError as refused:
                notes.append(f"no cache of {format_bytes(budget)}: {refused}")
                continue
            caches.append(_Cache(budget, stack.enter_context(gather)))
        # One comparison serves them all: reading the right rows takes longer than gathering them.
        out = np.empty((*first.shape, info.row_bytes), np.uint8)
        for place, wanted in enumerate(chunks):
            right = expected(wanted)
            for cache in caches:
                if place == count // 2:
                    cache.before = cache.gather.stats()["cache"]
                cache.gather.gather(wanted, out=out)
                cache.compare(out, right)
        entries = tuple(cache.found() for cache in caches)
    return HitRates(count * CHUNK, distinct, entries, tuple(notes))


@dataclass
class _Cache:
    """A table behind a cache of one budget, and what it has been found to hold and get wrong."""

    budget: int
    gather: engram.FileGather
    before: dict[str, Any] = field(default_factory=lambda: {})
    checked: int = 0
    wrong: int = 0

    def compare(self, rows: NDArray[np.uint8], expected: NDArray[np.uint8]) -> None:
        right = (rows == expected).all(axis=-1)
        self.checked += right.size
        self.wrong += int(right.size - np.count_nonzero(right))

    def found(self) -> HitRate:
        after = self.gather.stats()["cache"]
        hits = after["hits"] - self.before["hits"]
        rows = hits + after["misses"] - self.before["misses"]
        return HitRate(self.budget, after["capacity"], rows, hits, self.checked, self.wrong)
