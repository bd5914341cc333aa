//! How often each row of a set was wanted, in one word.
//!
//! Per way four bits: a count from 0 to 7, and above it whether the batch named in the word's highest
//! twelve bits has been counted already. Within a batch a row counts once: a row that a text repeats
//! says no more about other texts than one that it has once.

use super::memory::WAYS;

/// Bits per way.
const BITS: usize = 4;

/// Where counts end.
pub(super) const MOST: u8 = 7;

/// The bit of a way that says that it was counted.
const COUNTED: u64 = 8;

/// Where the number of the batch begins.
const BATCH: usize = BITS * WAYS;

/// All ways' bits that say so.
const ALL_COUNTED: u64 = {
    let mut all = 0;
    let mut way = 0;
    while way < WAYS {
        all |= COUNTED << (BITS * way);
        way += 1;
    }
    all
};

/// A number for a batch, which comes again after 4,096.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch(u64);

impl Batch {
    pub(super) fn new(number: u64) -> Self {
        Self(number << BATCH >> BATCH)
    }
}

/// The counts of one set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Counts(pub(super) u64);

impl Counts {
    /// The count of `way`.
    #[inline]
    pub(super) fn of(self, way: usize) -> u8 {
        let [count, ..] = ((self.0 >> (BITS * way)) & u64::from(MOST)).to_le_bytes();
        count
    }

    /// With another count for `way`, as if no batch had wanted it yet.
    #[inline]
    pub(super) fn with(self, way: usize, count: u8) -> Self {
        let shift = BITS * way;
        Self(self.0 & !(0xF << shift) | u64::from(count.min(MOST)) << shift)
    }

    /// With `way` wanted by `batch`; `None` if that changes nothing.
    #[inline]
    pub(super) fn wanted(self, way: usize, batch: Batch, most: u8) -> Option<Self> {
        let count = self.of(way);
        if count >= most {
            return None;
        }
        let counts = if self.0 >> BATCH == batch.0 {
            self.0
        } else {
            self.0 << (64 - BATCH) >> (64 - BATCH) & !ALL_COUNTED | batch.0 << BATCH
        };
        let shift = BITS * way;
        if counts & COUNTED << shift != 0 {
            return None;
        }
        // No count grows past `MOST`, into the bit above.
        Some(Self((counts + (1 << shift)) | COUNTED << shift))
    }

    /// With `by` off every count, which is at least that much.
    pub(super) fn less(self, by: u8) -> Self {
        (0..WAYS).fold(self, |counts, way| {
            let left = counts.of(way).saturating_sub(by);
            let counted = counts.0 & COUNTED << (BITS * way);
            Self(counts.with(way, left).0 | counted)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against an array of counts and a set of those counted.
        #[test]
        fn agrees_with_an_array(steps in prop::collection::vec((0..WAYS, 0_u8..9, 0_u64..4, 0_u8..3), 0..200)) {
            let mut counts = Counts(0);
            let mut plain = [0_u8; WAYS];
            let mut counted = [false; WAYS];
            let mut last = 0;
            for (way, count, batch, kind) in steps {
                match kind {
                    0 => {
                        counts = counts.with(way, count);
                        plain[way] = count.min(MOST);
                        counted[way] = false;
                    }
                    1 => {
                        let least = *plain.iter().min().unwrap();
                        counts = counts.less(least);
                        for count in &mut plain {
                            *count -= least;
                        }
                    }
                    _ => {
                        let number = batch + 4094;
                        let after = counts.wanted(way, Batch::new(number), MOST);
                        if plain[way] < MOST {
                            if last != number % 4096 {
                                counted = [false; WAYS];
                            }
                            prop_assert_eq!(after.is_some(), !counted[way]);
                            if let Some(after) = after {
                                counts = after;
                                last = number % 4096;
                                plain[way] += 1;
                                counted[way] = true;
                            }
                        } else {
                            prop_assert!(after.is_none());
                        }
                    }
                }
                for (way, &count) in plain.iter().enumerate() {
                    prop_assert_eq!(counts.of(way), count);
                }
            }
        }
    }
}
