//! Wanted spans -> reads and copies. Pure data: deterministic, no descriptor, no clock.
//!
//! ```text
//! sort wants by (file, offset)
//! for each want in order:
//!     if it starts in a unit the current read touches, or in the next one, and the read stays
//!     below the limit: widen the read
//!     else: start a new read
//!     note the copy: which bytes of that read go to which place
//! ```
//!
//! A unit is what one read costs anyway: a page through the page cache, a block with direct I/O.
//! Duplicate rows sort next to each other and so become one read with several copies; rows that
//! share a page become one read; in a full-size table almost nothing else merges, which the sort
//! (0.1 ms for 4,096 rows, against 30 ms for reading them) does not change.

use std::ops::Range;

/// A row of one plane that has to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Want {
    /// Index of the file in the gather's list.
    pub file: u32,
    /// Bytes to read.
    pub len: u32,
    /// Offset of the first of them.
    pub offset: u64,
    /// Index of the lane (one plane of one table of the request) it belongs to.
    pub lane: u32,
    /// Position of the row in that lane's output.
    pub position: u32,
}

/// One contiguous read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Read {
    /// Index of the file in the gather's list.
    pub file: u32,
    /// Bytes to read.
    pub len: u32,
    /// Offset of the first of them.
    pub offset: u64,
    /// The copies this read feeds, as a range of [`Plan::copies`].
    pub copies: Range<u32>,
}

/// Bytes of a read that go to one place of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copy {
    /// Lane of the output.
    pub lane: u32,
    /// Position in that lane.
    pub position: u32,
    /// First byte inside the read.
    pub within: u32,
    /// Bytes.
    pub len: u32,
}

/// When neighbouring wants become one read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Coalesce {
    /// What one read costs anyway, in bytes; a power of two.
    pub unit: u64,
    /// Whether reads must start and end on units (direct I/O).
    pub aligned: bool,
    /// No read grows beyond this many bytes by merging.
    pub limit: u64,
}

impl Coalesce {
    /// Reads through the page cache: whole pages are fetched whatever is asked for.
    pub fn page_cache() -> Self {
        Self {
            unit: rustix::param::page_size() as u64,
            aligned: false,
            limit: 32 << 10,
        }
    }

    /// Direct I/O with the given block alignment.
    pub fn direct(alignment: u64) -> Self {
        Self {
            unit: alignment,
            aligned: true,
            limit: 32 << 10,
        }
    }
}

impl Coalesce {
    /// The same for many rows in the order of the file: reading on costs less than another read.
    #[must_use]
    pub fn in_order(self) -> Self {
        Self {
            unit: self.unit.max(8 << 10),
            ..self
        }
    }
}

/// The reads of one gather, in file order, and where their bytes go.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Reads, by file and offset.
    pub reads: Vec<Read>,
    /// Copies, grouped by read.
    pub copies: Vec<Copy>,
    /// Distinct rows among the wants.
    pub unique: u64,
}

/// Wants that are sorted, or looked at, between two calls of a check: a few milliseconds of work.
pub const AT_ONCE: usize = 1 << 16;

/// Wants per part of a large plan that are looked at to say where the part ends.
const SAMPLES: usize = 64;

/// What wants are sorted by.
fn order(want: &Want) -> (u32, u64, u32, u32) {
    (want.file, want.offset, want.lane, want.position)
}

/// Sorts many wants part by part. `check` is called between; an error from it ends the work.
fn sorted<E>(wants: Vec<Want>, check: &mut dyn FnMut() -> Result<(), E>) -> Result<Vec<Want>, E> {
    let sample = wants.iter().step_by(AT_ONCE / SAMPLES);
    let mut sample: Vec<_> = sample.map(order).collect();
    sample.sort_unstable();
    let ends: Vec<_> = sample.into_iter().step_by(SAMPLES).skip(1).collect();
    let mut parts: Vec<_> = (0..=ends.len())
        .map(|_| Vec::with_capacity(AT_ONCE))
        .collect();
    for some in wants.chunks(AT_ONCE) {
        for want in some {
            let part = ends.partition_point(|end| *end <= order(want));
            parts[part].push(*want);
        }
        check()?;
    }
    let mut sorted = wants;
    sorted.clear();
    for mut part in parts {
        part.sort_unstable_by_key(order);
        sorted.append(&mut part);
        check()?;
    }
    Ok(sorted)
}

impl Plan {
    /// Plans `wants` (reordered in place).
    pub fn new(wants: &mut [Want], rule: Coalesce) -> Self {
        wants.sort_unstable_by_key(order);
        let never = &mut || Ok::<_, std::convert::Infallible>(());
        let Ok(plan) = Self::of_sorted(wants, rule, never);
        plan
    }

    /// The same for any number of wants: `check` is called every [`AT_ONCE`] of them, and an error
    /// from it ends the work.
    pub fn checked<E>(
        mut wants: Vec<Want>,
        rule: Coalesce,
        check: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<Self, E> {
        if wants.len() <= AT_ONCE {
            return Ok(Self::new(&mut wants, rule));
        }
        Self::of_sorted(&sorted(wants, check)?, rule, check)
    }

    fn of_sorted<E>(
        wants: &[Want],
        rule: Coalesce,
        check: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<Self, E> {
        debug_assert!(rule.unit.is_power_of_two());
        let mut plan = Self {
            copies: Vec::with_capacity(wants.len()),
            ..Self::default()
        };
        // End of the current read in whole bytes; the read's own `len` follows from it.
        let mut current: Option<(u32, Range<u64>, u32)> = None;
        let mut previous = None;
        for (index, want) in wants.iter().enumerate() {
            if index % AT_ONCE == AT_ONCE - 1 {
                check()?;
            }
            if previous != Some((want.file, want.offset)) {
                plan.unique += 1;
                previous = Some((want.file, want.offset));
            }
            let bytes = rule.round(want.offset..want.offset + u64::from(want.len));
            let copy_at = u32::try_from(plan.copies.len()).unwrap_or(u32::MAX);
            let joined = match &current {
                Some((file, read, _)) if *file == want.file && rule.merges(read, &bytes) => {
                    Some(read.start..read.end.max(bytes.end))
                }
                _ => None,
            };
            if let (Some(joined), Some((_, read, _))) = (joined, &mut current) {
                *read = joined;
            } else {
                plan.finish(current.take());
                current = Some((want.file, bytes, copy_at));
            }
            let start = current.as_ref().map_or(0, |(_, read, _)| read.start);
            plan.copies.push(Copy {
                lane: want.lane,
                position: want.position,
                within: u32::try_from(want.offset - start).unwrap_or(u32::MAX),
                len: want.len,
            });
        }
        plan.finish(current);
        Ok(plan)
    }

    fn finish(&mut self, read: Option<(u32, Range<u64>, u32)>) {
        if let Some((file, bytes, first_copy)) = read {
            self.reads.push(Read {
                file,
                len: u32::try_from(bytes.end - bytes.start).unwrap_or(u32::MAX),
                offset: bytes.start,
                copies: first_copy..u32::try_from(self.copies.len()).unwrap_or(u32::MAX),
            });
        }
    }

    /// The copies fed by `read`.
    pub fn copies_of(&self, read: &Read) -> &[Copy] {
        &self.copies[read.copies.start as usize..read.copies.end as usize]
    }

    /// Bytes all reads together ask for.
    pub fn bytes(&self) -> u64 {
        self.reads.iter().map(|read| u64::from(read.len)).sum()
    }
}

impl Coalesce {
    fn round(self, bytes: Range<u64>) -> Range<u64> {
        if self.aligned {
            bytes.start & !(self.unit - 1)..bytes.end.next_multiple_of(self.unit)
        } else {
            bytes
        }
    }

    /// Whether `next`, which starts at or after `read` does, belongs to the same read.
    fn merges(self, read: &Range<u64>, next: &Range<u64>) -> bool {
        if next.end <= read.end {
            return true;
        }
        let last_unit = (read.end - 1) / self.unit;
        next.start / self.unit <= last_unit + 1 && next.end - read.start <= self.limit
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn want(file: u32, offset: u64, len: u32, position: u32) -> Want {
        Want {
            file,
            len,
            offset,
            lane: 0,
            position,
        }
    }

    const PAGES: Coalesce = Coalesce {
        unit: 4096,
        aligned: false,
        limit: 32 << 10,
    };

    #[test]
    fn a_large_plan_is_the_one_it_would_be_at_once_and_can_be_ended() {
        let mut random = 7_u64;
        let mut wants = Vec::new();
        for position in 0..3 * 65_536 + 5 {
            random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            // A third of them the same, the others in a few thousand places of three files.
            let place = if position % 3 == 0 { 0 } else { random >> 52 };
            let file = u32::try_from(random >> 40 & 3).unwrap();
            wants.push(want(file, place * 160, 160, position));
        }
        let mut calls = 0;
        let mut count = || {
            calls += 1;
            Ok::<_, ()>(())
        };
        let plan = Plan::checked(wants.clone(), PAGES, &mut count).unwrap();
        assert_eq!(plan, Plan::new(&mut wants.clone(), PAGES));
        assert!(calls > 9, "{calls}");
        for last in 1..=calls {
            let mut calls = 0;
            let mut stop = || {
                calls += 1;
                if calls == last { Err(calls) } else { Ok(()) }
            };
            let outcome = Plan::checked(wants.clone(), PAGES, &mut stop);
            assert_eq!(outcome, Err(last));
        }
    }

    #[test]
    fn duplicates_are_one_read_and_several_copies() {
        let mut wants = [
            want(0, 100, 8, 0),
            want(0, 90_000, 8, 1),
            want(0, 100, 8, 2),
        ];
        let plan = Plan::new(&mut wants, PAGES);
        assert_eq!(plan.unique, 2);
        assert_eq!(plan.reads.len(), 2);
        assert_eq!(
            plan.reads[0],
            Read {
                file: 0,
                len: 8,
                offset: 100,
                copies: 0..2
            }
        );
        assert_eq!(
            plan.copies_of(&plan.reads[0])
                .iter()
                .map(|copy| copy.position)
                .collect::<Vec<_>>(),
            [0, 2]
        );
    }

    #[test]
    fn rows_of_one_page_share_a_read_and_far_rows_do_not() {
        let mut wants = [
            want(0, 4096, 100, 0),
            want(0, 8000, 100, 1),
            want(0, 20_000, 100, 2),
        ];
        let plan = Plan::new(&mut wants, PAGES);
        assert_eq!(plan.reads.len(), 2);
        assert_eq!((plan.reads[0].offset, plan.reads[0].len), (4096, 4004));
    }

    #[test]
    fn files_are_never_merged() {
        let mut wants = [want(1, 100, 8, 0), want(0, 100, 8, 1)];
        let plan = Plan::new(&mut wants, PAGES);
        assert_eq!(
            plan.reads.iter().map(|read| read.file).collect::<Vec<_>>(),
            [0, 1]
        );
    }

    #[test]
    fn direct_reads_start_and_end_on_blocks() {
        let mut wants = [want(0, 511, 2, 0)];
        let plan = Plan::new(&mut wants, Coalesce::direct(512));
        assert_eq!((plan.reads[0].offset, plan.reads[0].len), (0, 1024));
        assert_eq!(plan.copies[0].within, 511);
    }

    #[test]
    fn no_wants_no_reads() {
        assert_eq!(Plan::new(&mut [], PAGES), Plan::default());
    }

    proptest! {
        #[test]
        fn every_want_is_copied_once_from_bytes_that_are_read(
            spans in prop::collection::vec((0_u32..3, 0_u64..200_000, 1_u32..9000), 0..60),
            aligned in any::<bool>(),
            shift in 9_u32..13,
        ) {
            let rule = Coalesce { unit: 1 << shift, aligned, limit: 32 << 10 };
            let wants: Vec<Want> = spans.iter().zip(0..).map(|(&(file, offset, len), position)| {
                want(file, offset, len, position)
            }).collect();
            let plan = Plan::new(&mut wants.clone(), rule);
            let mut seen = vec![0; wants.len()];
            for read in &plan.reads {
                if aligned {
                    prop_assert_eq!(read.offset % rule.unit, 0);
                    prop_assert_eq!(u64::from(read.len) % rule.unit, 0);
                }
                prop_assert!(!read.copies.is_empty());
                for copy in plan.copies_of(read) {
                    let want = wants[copy.position as usize];
                    seen[copy.position as usize] += 1;
                    prop_assert_eq!(want.file, read.file);
                    prop_assert_eq!(want.len, copy.len);
                    prop_assert_eq!(want.offset, read.offset + u64::from(copy.within));
                    prop_assert!(copy.within + copy.len <= read.len);
                }
            }
            prop_assert!(seen.iter().all(|&count| count == 1));
            // Merging never reads a unit that no want touches, except to bridge nothing: adjacent
            // units only.
            let mut units: std::collections::BTreeSet<(u32, u64)> = std::collections::BTreeSet::new();
            for want in &wants {
                let end = want.offset + u64::from(want.len) - 1;
                units.extend((want.offset / rule.unit..=end / rule.unit).map(|unit| (want.file, unit)));
            }
            for read in &plan.reads {
                let end = read.offset + u64::from(read.len) - 1;
                for unit in read.offset / rule.unit..=end / rule.unit {
                    prop_assert!(units.contains(&(read.file, unit)));
                }
            }
        }
    }
}
