//! Counters and latencies of one reader; cheap enough to stay on.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::latency::Latency;

/// A counter that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `amount`.
    #[inline]
    pub fn add(&self, amount: u64) {
        if amount > 0 {
            self.0.fetch_add(amount, Ordering::Relaxed);
        }
    }

    /// Raises the counter to `value` if it is lower.
    pub fn raise(&self, value: u64) {
        self.0.fetch_max(value, Ordering::Relaxed);
    }

    /// The current value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What a reader has done since it was opened.
#[derive(Debug, Default)]
pub struct Stats {
    /// Gathers begun.
    pub calls: Counter,
    /// Gathers that failed.
    pub errors: Counter,
    /// Rows asked for.
    pub rows: Counter,
    /// Rows of zeros for `pad_id`.
    pub rows_padded: Counter,
    /// Row parts (one per plane) copied from memory.
    pub rows_resident: Counter,
    /// Row parts (one per plane) that had to be read.
    pub rows_fetched: Counter,
    /// Distinct row parts among those.
    pub unique_rows_fetched: Counter,
    /// Bytes of the rows asked for.
    pub bytes_wanted: Counter,
    /// Bytes read into slots.
    pub bytes_read: Counter,
    /// Reads issued, remainders and retries included.
    pub reads: Counter,
    /// Most reads in flight at once.
    pub depth: Counter,
    /// Major faults taken while copying: beliefs that were wrong. Those of small batches are not told
    /// from faults of other code, and not counted.
    pub major_faults: Counter,
    /// Row parts read again because the page they were copied from could not be read.
    pub rows_reread: Counter,
    /// Pages whose residency the kernel was asked for.
    pub pages_probed: Counter,
    /// Prefetches begun.
    pub prefetches: Counter,
    /// Prefetches not begun because too many were under way.
    pub prefetches_dropped: Counter,
    /// Prefetches that ended with an error.
    pub prefetches_failed: Counter,
    /// Row parts read ahead.
    pub rows_prefetched: Counter,
    /// Bytes of page tables given back.
    pub bytes_trimmed: Counter,
    /// Time from the call to its plan.
    pub plan: Latency,
    /// Time spent copying from the mapping.
    pub copy: Latency,
    /// Time reads were in flight.
    pub fetch: Latency,
    /// Time of whole calls.
    pub call: Latency,
}
