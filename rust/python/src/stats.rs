//! Counters and latencies as a dictionary.

use engram_core::cache::Cache;
use engram_core::latency::Summary;
use engram_core::reader::Reader;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// A snapshot, taken with the interpreter released.
pub(crate) struct Snapshot {
    asked: &'static str,
    runs: String,
    alignment: Option<u64>,
    filesystems: Vec<&'static str>,
    fallbacks: Vec<String>,
    threads: usize,
    counters: Vec<(&'static str, u64)>,
    latencies: [(&'static str, Summary); 4],
    cache: Vec<(&'static str, u64)>,
    /// Bytes of rows that came from the cache, by plane.
    saved: Vec<(&'static str, u64)>,
}

pub(crate) fn collect(reader: &Reader) -> Snapshot {
    let stats = reader.stats();
    let mode = reader.mode();
    let mut filesystems: Vec<_> = reader
        .files()
        .iter()
        .map(|file| file.filesystem().name)
        .collect();
    filesystems.sort_unstable();
    filesystems.dedup();
    let row_cache = reader.row_cache();
    let cache = row_cache.current();
    let of_cache = |value: fn(&Cache) -> u64| cache.as_deref().map_or(0, value);
    let cached = row_cache.stats();
    let saved: Vec<_> = reader
        .table()
        .planes
        .iter()
        .map(|plane| {
            let bytes = cached.hits.get() * plane.row_bytes() as u64;
            (plane.name().name(), bytes)
        })
        .collect();
    Snapshot {
        asked: mode.asked.name(),
        runs: reader.runs(),
        alignment: reader.direct(),
        filesystems,
        fallbacks: reader.fallbacks(),
        threads: reader.threads(),
        counters: vec![
            ("calls", stats.calls.get()),
            ("errors", stats.errors.get()),
            ("rows", stats.rows.get()),
            ("rows_padded", stats.rows_padded.get()),
            ("rows_resident", stats.rows_resident.get()),
            ("rows_fetched", stats.rows_fetched.get()),
            ("unique_rows_fetched", stats.unique_rows_fetched.get()),
            ("bytes_wanted", stats.bytes_wanted.get()),
            ("bytes_read", stats.bytes_read.get()),
            ("reads", stats.reads.get()),
            ("depth", stats.depth.get()),
            ("major_faults", stats.major_faults.get()),
            ("rows_reread", stats.rows_reread.get()),
            ("pages_probed", stats.pages_probed.get()),
            ("prefetches", stats.prefetches.get()),
            ("prefetches_dropped", stats.prefetches_dropped.get()),
            ("prefetches_failed", stats.prefetches_failed.get()),
            ("rows_prefetched", stats.rows_prefetched.get()),
            ("bytes_trimmed", stats.bytes_trimmed.get()),
        ],
        latencies: [
            ("plan", stats.plan.summary()),
            ("copy", stats.copy.summary()),
            ("fetch", stats.fetch.summary()),
            ("call", stats.call.summary()),
        ],
        cache: vec![
            ("budget_bytes", row_cache.budget()),
            ("index_bytes", of_cache(Cache::index_bytes)),
            ("capacity", of_cache(Cache::capacity)),
            ("rows", of_cache(Cache::len)),
            ("hits", cached.hits.get()),
            ("misses", cached.misses.get()),
            ("insertions", cached.insertions.get()),
            ("evictions", cached.evictions.get()),
            ("admission_refusals", cached.admission_refusals.get()),
            ("waited", cached.waited.get()),
            ("bytes_saved", saved.iter().map(|(_, bytes)| bytes).sum()),
        ],
        saved,
    }
}

impl Snapshot {
    pub(crate) fn into_dict(self, py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        let dict = PyDict::new(py);
        let io = PyDict::new(py);
        io.set_item("asked", self.asked)?;
        io.set_item("runs", self.runs)?;
        io.set_item("direct_alignment", self.alignment)?;
        io.set_item("filesystems", self.filesystems)?;
        io.set_item("fallbacks", self.fallbacks)?;
        dict.set_item("io", io)?;
        dict.set_item("threads", self.threads)?;
        for (name, value) in self.counters {
            dict.set_item(name, value)?;
        }
        let seconds = PyDict::new(py);
        for (name, summary) in self.latencies {
            let item = PyDict::new(py);
            item.set_item("count", summary.count)?;
            item.set_item("mean", summary.mean)?;
            item.set_item("p50", summary.p50)?;
            item.set_item("p90", summary.p90)?;
            item.set_item("p99", summary.p99)?;
            item.set_item("p999", summary.p999)?;
            item.set_item("max", summary.max)?;
            seconds.set_item(name, item)?;
        }
        dict.set_item("seconds", seconds)?;
        let cache = PyDict::new(py);
        for (name, value) in self.cache {
            cache.set_item(name, value)?;
        }
        let saved = PyDict::new(py);
        for (name, value) in self.saved {
            saved.set_item(name, value)?;
        }
        cache.set_item("bytes_saved_by_plane", saved)?;
        dict.set_item("cache", cache)?;
        Ok(dict)
    }
}
