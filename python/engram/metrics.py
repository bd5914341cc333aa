"""What open tables have done, for Prometheus; needs `engram-gather[metrics]`.

    from prometheus_client import REGISTRY
    from engram.metrics import PrometheusCollector

    REGISTRY.register(PrometheusCollector(gather))

Every metric has the label `table`. Counters never go down, whatever is closed or opened again.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engram.gather import FileGather
from engram.table_set import TableSet

try:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
    )
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'engram.metrics needs {error.name}: pip install "engram-gather[metrics]"', name=error.name
    ) from None

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Metric

__all__ = ["PrometheusCollector"]

_COUNTERS = {
    "calls": ("engram_calls", "Gathers begun."),
    "errors": ("engram_errors", "Gathers that failed."),
    "rows": ("engram_rows", "Rows asked for."),
    "rows_padded": ("engram_rows_padded", "Rows of zeros for a pad id."),
    "rows_resident": ("engram_rows_resident", "Row parts, one per plane, copied from memory."),
    "rows_fetched": ("engram_rows_fetched", "Row parts, one per plane, that had to be read."),
    "unique_rows_fetched": ("engram_unique_rows_fetched", "Distinct row parts among those read."),
    "bytes_wanted": ("engram_wanted_bytes", "Bytes of the rows asked for."),
    "bytes_read": ("engram_read_bytes", "Bytes read, from devices or the page cache."),
    "reads": ("engram_reads", "Reads issued."),
    "major_faults": ("engram_major_faults", "Major faults taken while copying 1,024 rows or more."),
    "rows_reread": ("engram_rows_reread", "Row parts read again because their page was lost."),
    "pages_probed": ("engram_pages_probed", "Pages whose residency the kernel was asked for."),
    "prefetches": ("engram_prefetches", "Prefetches begun."),
    "prefetches_dropped": ("engram_prefetches_dropped", "Prefetches not begun: too many ran."),
    "prefetches_failed": ("engram_prefetches_failed", "Prefetches that ended with an error."),
    "rows_prefetched": ("engram_rows_prefetched", "Row parts read ahead."),
    "bytes_trimmed": ("engram_trimmed_bytes", "Bytes of page tables given back."),
}
"""Keys of `stats()`, and what they are called here; counters end in `_total` there."""

_CACHE_COUNTERS = {
    "hits": ("engram_cache_hits", "Rows found in the cache of rows."),
    "misses": ("engram_cache_misses", "Rows not found there."),
    "evictions": ("engram_cache_evictions", "Rows that gave way to others."),
    "admission_refusals": ("engram_cache_admission_refusals", "Rows not worth keeping."),
    "bytes_saved": ("engram_cache_saved_bytes", "Bytes that did not have to be read."),
}
"""The same for `stats()["cache"]`, where there is one."""

_CACHE_GAUGES = {
    "rows": ("engram_cache_rows", "Rows in the cache of rows."),
    "budget_bytes": ("engram_cache_budget_bytes", "Bytes it may hold."),
}

_PHASES = {
    "call": ("engram_call_seconds", "Time of whole gathers."),
    "plan": ("engram_plan_seconds", "Time from the call to its plan of reads."),
    "copy": ("engram_copy_seconds", "Time spent copying from the mapping."),
    "fetch": ("engram_fetch_seconds", "Time reads were in flight."),
}


@dataclass
class _Histogram:
    """Durations: how many up to each bound, how many in all, and their sum."""

    buckets: dict[float, int] = field(default_factory=lambda: {})
    count: int = 0
    total: float = 0.0

    def add(self, other: _Histogram) -> None:
        for bound, count in other.buckets.items():
            self.buckets[bound] = self.buckets.get(bound, 0) + count
        self.count += other.count
        self.total += other.total


@dataclass
class _Totals:
    """What has been counted, by key; grows only."""

    counters: dict[str, int] = field(default_factory=lambda: {})
    cache: dict[str, int] = field(default_factory=lambda: {})
    phases: dict[str, _Histogram] = field(default_factory=lambda: {})

    def add(self, other: _Totals) -> None:
        for own, others in ((self.counters, other.counters), (self.cache, other.cache)):
            for name, count in others.items():
                own[name] = own.get(name, 0) + count
        for name, histogram in other.phases.items():
            self.phases.setdefault(name, _Histogram()).add(histogram)

    @classmethod
    def of(cls, stats: dict[str, Any]) -> _Totals:
        cache: dict[str, Any] = stats.get("cache") or {}
        phases: dict[str, _Histogram] = {}
        for name, summary in stats["seconds"].items():
            if name in _PHASES:
                buckets = dict(summary["buckets"])
                # Counted one after the other, while gathers go on.
                count = max(summary["count"], *buckets.values())
                phases[name] = _Histogram(buckets, count, summary["count"] * summary["mean"])
        return cls(
            {name: stats[name] for name in _COUNTERS if name in stats},
            {name: cache[name] for name in _CACHE_COUNTERS if name in cache},
            phases,
        )


@dataclass
class _Watched:
    """A table, and what of it must not be forgotten.

    Attributes:
        table: The label.
        gather: The table, for as long as others hold it.
        before: What it had counted when it was opened again, which sets its counters to zero.
        last: What it had counted when it was last asked.
    """

    table: str
    gather: weakref.ref[FileGather]
    before: _Totals = field(default_factory=_Totals)
    last: _Totals = field(default_factory=_Totals)

    def ask(self) -> tuple[FileGather, dict[str, Any]] | None:
        """The table and its statistics; None where it is closed or gone."""
        gather = self.gather()
        if gather is None:
            return None
        try:
            stats = gather.stats()
        except ValueError:
            return None
        now = _Totals.of(stats)
        if any(now.counters.get(key, 0) < count for key, count in self.last.counters.items()):
            self.before.add(self.last)
        self.last = now
        return gather, stats


class PrometheusCollector(Collector):
    """Collects the statistics of open tables whenever Prometheus asks.

    Tables are held weakly: one that is closed or no longer used leaves, and what it had counted
    when it was last asked stays in the counters. Tables of one name are added up.

    Args:
        *tables: What to collect from; more can be added later.
    """

    def __init__(self, *tables: FileGather | TableSet) -> None:
        self._lock = threading.Lock()
        self._watched: list[_Watched] = []
        self._gone: dict[str, _Totals] = {}
        for table in tables:
            self.add(table)

    def add(self, table: FileGather | TableSet, name: str | None = None) -> None:
        """Collects from one more table, or from every table of a set.

        Args:
            table: An open table or set; one that is there already is not counted twice.
            name: The label, instead of the table's name. For a single table.

        Raises:
            TypeError: Neither a table nor a set.
            ValueError: A name for a set of tables.
        """
        if isinstance(table, TableSet):
            if name is not None:
                raise ValueError(f"name={name!r}: the tables of a set go by their own names")
            gathers = table.gathers
        elif isinstance(table, FileGather):  # pyright: ignore[reportUnnecessaryIsInstance]
            gathers = {table.info.name if name is None else name: table}
        else:
            raise TypeError(f"expected a FileGather or TableSet, got {type(table).__name__}")
        with self._lock:
            known = [watched.gather() for watched in self._watched]
            for label, gather in gathers.items():
                if not any(gather is each for each in known):
                    self._watched.append(_Watched(label, weakref.ref(gather)))

    def describe(self) -> Iterable[Metric]:
        """The metrics there may be, without asking any table."""
        return _Families().metrics()

    def collect(self) -> Iterable[Metric]:
        """Asks every table; may be called from any thread."""
        families = _Families()
        with self._lock:
            totals: dict[str, _Totals] = {}
            here: list[_Watched] = []
            for watched in self._watched:
                asked = watched.ask()
                if asked is None:
                    gone = self._gone.setdefault(watched.table, _Totals())
                    gone.add(watched.before)
                    gone.add(watched.last)
                    continue
                here.append(watched)
                families.gauges(watched.table, *asked)
                total = totals.setdefault(watched.table, _Totals())
                total.add(watched.before)
                total.add(watched.last)
            self._watched = here
            for table, gone in self._gone.items():
                totals.setdefault(table, _Totals()).add(gone)
        for table, total in totals.items():
            families.totals(table, total)
        return families.metrics()


class _Families:
    """The metrics of one answer."""

    def __init__(self) -> None:
        label = ["table"]
        self._counters = {
            key: CounterMetricFamily(name, text, labels=label)
            for key, (name, text) in _COUNTERS.items()
        }
        self._cache = {
            key: CounterMetricFamily(name, text, labels=label)
            for key, (name, text) in _CACHE_COUNTERS.items()
        }
        self._phases = {
            key: HistogramMetricFamily(name, text, labels=label)
            for key, (name, text) in _PHASES.items()
        }
        self._sums = {
            key: GaugeMetricFamily(name, text, labels=label)
            for key, (name, text) in {
                "open": ("engram_tables_open", "Open tables of this name."),
                "rows": ("engram_table_rows", "Rows in the table."),
                "bytes": ("engram_table_bytes", "Bytes of the table."),
                "fallbacks": ("engram_fallbacks", "Ways of reading that were given up."),
                "depth": ("engram_reads_in_flight_max", "Most reads that were in flight at once."),
                **{f"cache {name}": made for name, made in _CACHE_GAUGES.items()},
            }.items()
        }
        self._io = InfoMetricFamily("engram_io", "How rows are read.", labels=label)
        self._values: dict[str, dict[str, float]] = {key: {} for key in self._sums}
        self._said: set[tuple[str, str, str]] = set()

    def gauges(self, table: str, gather: FileGather, stats: dict[str, Any]) -> None:
        """Adds what is the case now with one table."""
        cache: dict[str, Any] = stats.get("cache") or {}
        added = {
            "open": 1,
            "fallbacks": len(stats["io"]["fallbacks"]),
            **{f"cache {name}": cache[name] for name in _CACHE_GAUGES if name in cache},
        }
        largest = {"rows": gather.num_rows, "bytes": gather.nbytes, "depth": stats["depth"]}
        for key, value in added.items():
            self._values[key][table] = self._values[key].get(table, 0) + value
        for key, value in largest.items():
            self._values[key][table] = max(self._values[key].get(table, 0), value)
        io = (table, stats["io"]["asked"], stats["io"]["runs"])
        if io not in self._said:
            self._said.add(io)
            self._io.add_metric([table], {"asked": io[1], "runs": io[2]})

    def totals(self, table: str, totals: _Totals) -> None:
        """Adds what has been counted of the tables of one name."""
        for families, counts in (
            (self._counters, totals.counters),
            (self._cache, totals.cache),
        ):
            for key, count in counts.items():
                families[key].add_metric([table], count)
        for key, histogram in totals.phases.items():
            buckets = [(str(bound), count) for bound, count in sorted(histogram.buckets.items())]
            self._phases[key].add_metric(
                [table], [*buckets, ("+Inf", histogram.count)], histogram.total
            )

    def metrics(self) -> list[Metric]:
        """All of them, those without a value too."""
        for key, values in self._values.items():
            for table, value in values.items():
                self._sums[key].add_metric([table], value)
        return [
            *self._counters.values(),
            *self._cache.values(),
            *self._phases.values(),
            *self._sums.values(),
            self._io,
        ]
