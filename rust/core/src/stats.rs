//! Counters and latencies of one reader; cheap enough to stay on.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use hdrhistogram::Histogram;

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

/// Durations in nanoseconds, to two significant digits, from 1 ns to an hour.
#[derive(Debug)]
pub struct Latency(Mutex<Histogram<u64>>);

/// Largest duration told apart from longer ones.
const HOUR_NS: u64 = 3_600_000_000_000;

impl Default for Latency {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(1, HOUR_NS, 2);
        #[expect(
            clippy::expect_used,
            reason = "the bounds are constants, valid by the crate's documentation"
        )]
        Self(Mutex::new(histogram.expect("constant bounds")))
    }
}

impl Latency {
    /// Records one duration. One that comes while another thread records is left out: waiting
    /// would cost more than the sample is worth, and after a fork might never end.
    #[inline]
    pub fn record(&self, duration: Duration) {
        let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(HOUR_NS);
        if let Ok(mut histogram) = self.0.try_lock() {
            histogram.saturating_record(nanoseconds.max(1));
        }
    }

    /// Count, mean, the 50th, 90th, 99th and 99.9th percentile and the maximum, in seconds.
    pub fn summary(&self) -> Summary {
        let histogram = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let seconds = |quantile: f64| {
            Duration::from_nanos(histogram.value_at_quantile(quantile)).as_secs_f64()
        };
        Summary {
            count: histogram.len(),
            mean: histogram.mean() / 1e9,
            p50: seconds(0.5),
            p90: seconds(0.9),
            p99: seconds(0.99),
            p999: seconds(0.999),
            max: Duration::from_nanos(histogram.max()).as_secs_f64(),
        }
    }
}

/// A latency distribution, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// Durations recorded.
    pub count: u64,
    /// Arithmetic mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
    /// Longest.
    pub max: f64,
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
    /// Major faults taken while copying: beliefs that were wrong.
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
