//! Which row gives way to a new one.

use std::sync::atomic::Ordering;

use super::memory::{Locked, WAYS};

/// How a set chooses among its rows. The choice was made by measurement: see `DESIGN.md`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// The clock: a row that was wanted since the hand passed is passed over once.
    Clock,
    /// The row that was wanted by the fewest batches. Whatever it was wanted by is taken off
    /// everybody's count, and the new row begins with none: a scan replaces its own rows, and
    /// a row that is wanted no more is found out at the rate at which others come in.
    Counted,
}

impl Policy {
    /// Where counts end.
    #[inline]
    pub(super) fn most(self) -> u8 {
        match self {
            Self::Clock => 1,
            Self::Counted => 7,
        }
    }

    /// The way that gives way to a new row.
    pub(super) fn victim(self, set: &Locked<'_>) -> usize {
        let counts = &set.set().counts;
        let ways = (0..WAYS).map(|step| (set.hand() + step) % WAYS);
        match self {
            Self::Clock => {
                for way in ways {
                    if counts[way].load(Ordering::Relaxed) == 0 {
                        return way;
                    }
                    counts[way].store(0, Ordering::Relaxed);
                }
                set.hand()
            }
            Self::Counted => {
                let (way, least) = least(set);
                if least > 0 {
                    for count in counts {
                        let left = count.load(Ordering::Relaxed).saturating_sub(least);
                        count.store(left, Ordering::Relaxed);
                    }
                }
                way
            }
        }
    }
}

/// The way with the smallest count, the first from the hand on among equals, and that count.
pub(super) fn least(set: &Locked<'_>) -> (usize, u8) {
    let counts = &set.set().counts;
    let mut least = (0, u8::MAX);
    for step in 0..WAYS {
        let way = (set.hand() + step) % WAYS;
        let count = counts[way].load(Ordering::Relaxed);
        if count < least.1 {
            least = (way, count);
        }
    }
    least
}
