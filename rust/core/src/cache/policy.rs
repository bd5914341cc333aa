//! Which row gives way to a new one.

use super::counts;
use super::memory::{Locked, WAYS};

/// How a set chooses among its rows. The choice was made by measurement: see `DESIGN.md`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// The clock: a row that was wanted since the hand passed is passed over once.
    Clock,
    /// The row that was wanted by the fewest batches. What it was wanted by is taken off everybody's
    /// count, and the new row begins with none: a scan replaces its own rows, and rows that are
    /// wanted no more are found out at the rate at which others come in.
    Counted,
}

impl Policy {
    /// Where counts end.
    #[inline]
    pub(super) fn most(self) -> u8 {
        match self {
            Self::Clock => 1,
            Self::Counted => counts::MOST,
        }
    }

    /// The way that gives way to a new row.
    pub(super) fn victim(self, locked: &Locked<'_>) -> usize {
        let set = locked.set();
        match self {
            Self::Clock => {
                let mut counts = set.counts();
                let ways = (0..=WAYS).map(|step| (locked.hand() + step) % WAYS);
                let mut victim = locked.hand();
                for way in ways {
                    victim = way;
                    if counts.of(way) == 0 {
                        break;
                    }
                    counts = counts.with(way, 0);
                }
                set.set_counts(counts);
                victim
            }
            Self::Counted => {
                let (way, least) = least(locked);
                if least > 0 {
                    set.set_counts(set.counts().less(least));
                }
                way
            }
        }
    }
}

/// The way with the smallest count, the first from the hand on among equals, and that count.
pub(super) fn least(locked: &Locked<'_>) -> (usize, u8) {
    let counts = locked.set().counts();
    let mut least = (locked.hand(), u8::MAX);
    for step in 0..WAYS {
        let way = (locked.hand() + step) % WAYS;
        if counts.of(way) < least.1 {
            least = (way, counts.of(way));
        }
    }
    least
}
