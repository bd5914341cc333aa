//! How many things of one process are under way.
//!
//! Counted without a lock, which a thread might hold at the moment of a fork; the count names its
//! process, so that a forked child does not wait for what only its parent has running.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const COUNT_BITS: u32 = 32;

/// The count in the low half, its process in the high half.
#[derive(Debug, Default)]
pub(crate) struct InFlight(Arc<AtomicU64>);

/// One thing under way, until it is dropped.
#[derive(Debug)]
pub(crate) struct Flight {
    count: Arc<AtomicU64>,
    process: u32,
}

fn of_process(value: u64, process: u32) -> bool {
    value >> COUNT_BITS == u64::from(process)
}

impl InFlight {
    /// Counts one more.
    pub(crate) fn begin(&self) -> Flight {
        let process = std::process::id();
        let one_more = |value| {
            Some(if of_process(value, process) {
                value + 1
            } else {
                (u64::from(process) << COUNT_BITS) | 1
            })
        };
        // The closure never declines, so this cannot fail.
        let before = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        debug_assert!(before.is_ok());
        Flight {
            count: Arc::clone(&self.0),
            process,
        }
    }

    /// How many of this process are under way.
    pub(crate) fn count(&self) -> u64 {
        let value = self.0.load(Ordering::Acquire);
        if of_process(value, std::process::id()) {
            value & u64::from(u32::MAX)
        } else {
            0
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            self.count.fetch_sub(1, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_what_is_under_way() {
        let flights = InFlight::default();
        assert_eq!(flights.count(), 0);
        let first = flights.begin();
        let second = flights.begin();
        assert_eq!(flights.count(), 2);
        drop(first);
        assert_eq!(flights.count(), 1);
        drop(second);
        assert_eq!(flights.count(), 0);
    }

    #[test]
    fn what_another_process_has_under_way_does_not_count() {
        let flights = InFlight::default();
        let parents = (u64::from(std::process::id() ^ 1) << COUNT_BITS) | 7;
        flights.0.store(parents, Ordering::Relaxed);
        assert_eq!(flights.count(), 0);
        let own = flights.begin();
        assert_eq!(flights.count(), 1);
        drop(own);
        assert_eq!(flights.count(), 0);
    }
}
