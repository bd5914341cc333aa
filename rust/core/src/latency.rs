//! A distribution of durations that any number of threads add to without a lock.
//!
//! A lock would be held by some thread at the moment of a fork sooner or later, and every gather of
//! the child would then wait for a thread that it does not have.
//!
//! Durations are counted in the cells of an HDR histogram of two significant digits, of which they are
//! put into one (crate `hdrhistogram`, whose own recorders share counts through a lock) when somebody asks for
//! percentiles: nanoseconds below 128 have a cell each, and every further octave has 128 cells, so a cell is at
//! most 1/128 wide in relation to its values.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hdrhistogram::Histogram;

use crate::words::Words;

const CELL_BITS: u32 = 7;
const CELLS_PER_OCTAVE: u64 = 1 << CELL_BITS;

/// Durations from here on share the last cell: 2^42 ns, more than an hour.
const LONGEST_BITS: u32 = 42;
const CELLS: usize = (((LONGEST_BITS - CELL_BITS + 1) as usize) << CELL_BITS) + 1;

/// Bounds of a histogram of durations: 1, 2 and 5 microseconds, and so on to 10 seconds.
pub const BUCKETS: [Duration; 22] = {
    let mut bounds = [Duration::ZERO; 22];
    let mut decade = 1;
    let mut place = 0;
    while place < bounds.len() {
        let factor = match place % 3 {
            0 => 1,
            1 => 2,
            _ => 5,
        };
        bounds[place] = Duration::from_micros(factor * decade);
        if place % 3 == 2 {
            decade *= 10;
        }
        place += 1;
    }
    bounds
};

/// Durations, to within 1 part in 128, from 1 ns to an hour.
#[derive(Debug)]
pub struct Latency {
    cells: Words,
    nanoseconds: AtomicU64,
    longest: AtomicU64,
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

impl Default for Latency {
    fn default() -> Self {
        Self {
            cells: Words::zeroed(CELLS),
            nanoseconds: AtomicU64::new(0),
            longest: AtomicU64::new(0),
        }
    }
}

/// An HDR histogram with the cells of [`Latency`].
fn empty() -> Histogram<u64> {
    const SIGNIFICANT_DIGITS: u8 = 2;
    Histogram::new_with_bounds(1, 1 << LONGEST_BITS, SIGNIFICANT_DIGITS)
        .unwrap_or_else(|error| unreachable!("constant bounds: {error}"))
}

/// The cell of a duration.
fn cell_of(nanoseconds: u64) -> usize {
    let octave = (nanoseconds | (CELLS_PER_OCTAVE - 1)).ilog2() + 1 - CELL_BITS;
    if octave > LONGEST_BITS - CELL_BITS {
        return CELLS - 1;
    }
    let shift = octave.saturating_sub(1);
    // The leading bit of a value beyond the first octave counts as one octave of cells.
    let cell = u64::from(shift) * CELLS_PER_OCTAVE + (nanoseconds >> shift);
    usize::try_from(cell).unwrap_or(CELLS - 1)
}

/// The longest duration of a cell.
fn end_of(cell: usize) -> u64 {
    let cell = cell as u64;
    let octave = cell / CELLS_PER_OCTAVE;
    let shift = octave.saturating_sub(1);
    let leading = cell - shift * CELLS_PER_OCTAVE;
    ((leading + 1) << shift) - 1
}

impl Latency {
    /// Records one duration.
    #[inline]
    pub fn record(&self, duration: Duration) {
        let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.cells[cell_of(nanoseconds)].fetch_add(1, Ordering::Relaxed);
        self.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
        self.longest.fetch_max(nanoseconds, Ordering::Relaxed);
    }

    /// How many durations are at most as long as each of `bounds`, which ascend; to within the width
    /// of a cell.
    pub fn at_most(&self, bounds: &[Duration]) -> Vec<u64> {
        let mut counts = vec![0; bounds.len()];
        let mut place = 0;
        let mut seen = 0;
        for (cell, count) in self.cells.iter().enumerate() {
            let end = Duration::from_nanos(end_of(cell));
            while place < bounds.len() && bounds[place] < end {
                counts[place] = seen;
                place += 1;
            }
            seen += count.load(Ordering::Relaxed);
        }
        counts[place..].fill(seen);
        counts
    }

    /// Count, mean, the 50th, 90th, 99th and 99.9th percentile and the maximum, in seconds.
    pub fn summary(&self) -> Summary {
        let longest = self.longest.load(Ordering::Relaxed);
        let seconds = |nanoseconds| Duration::from_nanos(nanoseconds).as_secs_f64();
        let mut histogram = empty();
        let mut count = 0;
        for (cell, cell_count) in self.cells.iter().enumerate() {
            let cell_count = cell_count.load(Ordering::Relaxed);
            if cell_count > 0 {
                histogram.saturating_record_n(end_of(cell), cell_count);
                count += cell_count;
            }
        }
        let quantile = |quantile| seconds(histogram.value_at_quantile(quantile).min(longest));
        let total = seconds(self.nanoseconds.load(Ordering::Relaxed));
        #[expect(
            clippy::cast_precision_loss,
            reason = "a mean need not be exact beyond 2^53 durations"
        )]
        let mean = if count == 0 {
            0.0
        } else {
            total / count as f64
        };
        Summary {
            count,
            mean,
            p50: quantile(0.5),
            p90: quantile(0.9),
            p99: quantile(0.99),
            p999: quantile(0.999),
            max: seconds(longest),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn cells_follow_one_another_without_gap_or_overlap() {
        let mut previous = None;
        for cell in 0..CELLS - 1 {
            let start = previous.map_or(0, |end: u64| end + 1);
            let end = end_of(cell);
            assert!(end >= start, "cell {cell}");
            assert_eq!(cell_of(start), cell);
            assert_eq!(cell_of(end), cell);
            assert!(
                (end - start) * CELLS_PER_OCTAVE <= start,
                "cell {cell} is narrow"
            );
            previous = Some(end);
        }
        assert_eq!(previous, Some((1 << LONGEST_BITS) - 1));
        for beyond in [1 << LONGEST_BITS, u64::MAX] {
            assert_eq!(cell_of(beyond), CELLS - 1);
        }
    }

    #[test]
    fn nothing_recorded_is_all_zeros() {
        let summary = Latency::default().summary();
        assert_eq!(summary.count, 0);
        for value in [summary.mean, summary.p50, summary.p999, summary.max] {
            assert_eq!(value.to_bits(), 0.0_f64.to_bits());
        }
    }

    proptest! {
        #[test]
        fn counts_below_bounds_are_those_of_the_durations(
            durations in prop::collection::vec(0_u64..20_000_000_000, 0..200),
        ) {
            let latency = Latency::default();
            for &nanoseconds in &durations {
                latency.record(Duration::from_nanos(nanoseconds));
            }
            let bounds: Vec<_> = BUCKETS.to_vec();
            for (bound, count) in bounds.iter().zip(latency.at_most(&bounds)) {
                let bound = u64::try_from(bound.as_nanos()).unwrap();
                let exact = |most: u64| durations.iter().filter(|&&each| each <= most).count() as u64;
                // A duration in the cell that the bound cuts may be left out.
                prop_assert!(count <= exact(bound));
                prop_assert!(count >= exact(bound - bound / CELLS_PER_OCTAVE - 1));
            }
        }

        #[test]
        fn quantiles_are_those_of_the_sorted_durations(
            mut durations in prop::collection::vec(0_u64..4_000_000_000_000, 1..300),
        ) {
            let latency = Latency::default();
            for &nanoseconds in &durations {
                latency.record(Duration::from_nanos(nanoseconds));
            }
            durations.sort_unstable();
            let summary = latency.summary();
            prop_assert_eq!(summary.count, durations.len() as u64);
            let seconds = |nanoseconds| Duration::from_nanos(nanoseconds).as_secs_f64();
            let last = durations[durations.len() - 1];
            prop_assert_eq!(summary.max.to_bits(), seconds(last).to_bits());
            for (thousandths, found) in [
                (500, summary.p50), (900, summary.p90), (990, summary.p99), (999, summary.p999),
            ] {
                let place = (durations.len() * thousandths).div_ceil(1000).max(1) - 1;
                let exact = seconds(durations[place]);
                prop_assert!(exact <= found && found <= exact * (1.0 + 1.0 / 128.0) + 1e-9);
            }
        }
    }
}
