//! Who does which read of a batch, where threads share one.
//!
//! The thread that waits for reads takes them from the front; helpers, whose reads do not wait, take
//! some from the back and give back those that would have to. What was given back comes first: the
//! attempt may have set the device to work on it.
//!
//! Front and back need not be those of the file. Where helpers take part, groups of reads come in an
//! order that has every part of the file early and late: what is in memory may well be one half of it,
//! and neither should the device wait for that, nor helpers judge by the other.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Reads that stay next to each other, and that a helper takes at a time.
pub const GROUP: u32 = 32;

/// Reads of a batch by number, each to be done by whoever takes it.
#[derive(Debug)]
pub struct Unread {
    /// Those that nobody has taken: the first in the lower half, the end in the upper.
    untaken: AtomicU64,
    returned: Mutex<Vec<u32>>,
    /// How many were returned and not taken again: spares a look at the lock.
    returned_count: AtomicUsize,
    /// Those that are not done.
    left: AtomicUsize,
    /// Whole groups, and how many to go on from one to the next; 1 keeps the order.
    groups: u32,
    stride: u32,
}

fn pack(range: Range<u32>) -> u64 {
    u64::from(range.end) << 32 | u64::from(range.start)
}

fn unpack(both: u64) -> Range<u32> {
    let [start, end] =
        [both & u64::from(u32::MAX), both >> 32].map(|half| u32::try_from(half).unwrap_or(0));
    start..end
}

impl Unread {
    /// All reads of a batch of `count`, in order.
    pub fn new(count: usize) -> Self {
        Self::with_stride(count, |_| 1)
    }

    /// The same in an order that has every part of the batch early and late.
    pub fn spread(count: usize) -> Self {
        // By the golden ratio, any few in a row are spread well; without a common factor each comes
        // once.
        Self::with_stride(count, |groups| {
            let about = u64::from(groups) * 618 / 1000;
            let about = u32::try_from(about).unwrap_or(1).max(1);
            (about..=groups)
                .find(|&stride| common_factor(stride, groups) == 1)
                .unwrap_or(1)
        })
    }

    fn with_stride(count: usize, stride: impl Fn(u32) -> u32) -> Self {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        let groups = count / GROUP;
        Self {
            untaken: AtomicU64::new(pack(0..count)),
            returned: Mutex::default(),
            returned_count: AtomicUsize::new(0),
            left: AtomicUsize::new(count as usize),
            groups,
            stride: stride(groups),
        }
    }

    /// The number of the read at a place of the order.
    fn number(&self, place: u32) -> u32 {
        let group = place / GROUP;
        if self.stride == 1 || group >= self.groups {
            return place;
        }
        let moved = u64::from(group) * u64::from(self.stride) % u64::from(self.groups);
        u32::try_from(moved).unwrap_or(0) * GROUP + place % GROUP
    }

    /// Takes one for the thread that waits.
    pub fn first(&self) -> Option<u32> {
        if self.returned_count.load(Ordering::Acquire) > 0 {
            let mut returned = self.returned.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(index) = returned.pop() {
                self.returned_count.store(returned.len(), Ordering::Release);
                return Some(index);
            }
        }
        let mut taken = self.take(|untaken| untaken.start..(untaken.start + 1).min(untaken.end));
        taken.next().map(|place| self.number(place))
    }

    /// Takes up to `most` for a helper.
    pub fn last(&self, most: u32) -> impl ExactSizeIterator<Item = u32> {
        self.take(|untaken| untaken.end.saturating_sub(most).max(untaken.start)..untaken.end)
            .map(|place| self.number(place))
    }

    /// Takes what `choose` chooses, at one end of what there is.
    fn take(&self, choose: impl Fn(&Range<u32>) -> Range<u32>) -> Range<u32> {
        let mut taken = 0..0;
        // What is taken is read-only data made before the threads were called: nothing is published.
        let _ = self
            .untaken
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |both| {
                let untaken = unpack(both);
                taken = choose(&untaken);
                let rest = if taken.start == untaken.start {
                    taken.end..untaken.end
                } else {
                    untaken.start..taken.start
                };
                (!taken.is_empty()).then(|| pack(rest))
            });
        taken
    }

    /// Leaves reads to the thread that waits after all.
    pub fn give_back(&self, indices: impl IntoIterator<Item = u32>) {
        let mut returned = self.returned.lock().unwrap_or_else(PoisonError::into_inner);
        returned.extend(indices);
        self.returned_count.store(returned.len(), Ordering::Release);
    }

    /// Notes that `count` reads are done.
    pub fn finish(&self, count: usize) {
        // Released, so that whoever sees none left sees what they brought.
        self.left.fetch_sub(count, Ordering::Release);
    }

    /// Reads that are not done, whoever has them.
    pub fn left(&self) -> usize {
        self.left.load(Ordering::Acquire)
    }

    /// Gives out no more once the result is dropped, so that those who help come to an end.
    pub fn closing(&self) -> Closing<'_> {
        Closing(self)
    }
}

/// See [`Unread::closing`].
pub struct Closing<'a>(&'a Unread);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.untaken.store(pack(0..0), Ordering::Relaxed);
    }
}

fn common_factor(one: u32, other: u32) -> u32 {
    if other == 0 {
        one
    } else {
        common_factor(other, one % other)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU8;

    use super::*;

    #[test]
    fn both_ends_meet() {
        let unread = Unread::new(5);
        assert_eq!(unread.first(), Some(0));
        assert!(unread.last(3).eq(2..5));
        unread.give_back([4]);
        unread.finish(3);
        assert_eq!(unread.left(), 2);
        assert_eq!(unread.first(), Some(4), "what was given back comes first");
        assert!(unread.last(3).eq(1..2));
        assert!(unread.first().is_none() && unread.last(3).len() == 0);
        let none = Unread::new(0);
        assert!(none.first().is_none() && none.last(9).len() == 0);
        assert_eq!(none.left(), 0);
    }

    #[test]
    fn a_closed_batch_gives_out_nothing() {
        let unread = Unread::new(100);
        drop(unread.closing());
        assert!(unread.first().is_none() && unread.last(3).len() == 0);
    }

    #[test]
    fn a_spread_order_has_each_read_once_and_every_part_early() {
        for count in (0..300).chain([1024, 4093, 4096, 32_768, 99_999]) {
            let unread = Unread::spread(count);
            let mut order: Vec<u32> = std::iter::from_fn(|| unread.first()).collect();
            if count >= 1024 {
                let early = order[..count / 4].iter();
                let low = early.filter(|&&read| (read as usize) < count / 2).count();
                let half = count / 8;
                assert!(low.abs_diff(half) < count / 16, "{low} of {}", count / 4);
                assert!(order[1] == order[0] + 1, "neighbours stay together");
            }
            order.sort_unstable();
            assert!(order.into_iter().eq(0..u32::try_from(count).unwrap()));
        }
    }

    #[test]
    fn every_read_is_taken_once_or_given_back() {
        for unread in [Unread::new(20_000), Unread::spread(20_000)] {
            share(&unread, 20_000);
        }
    }

    fn share(unread: &Unread, count: usize) {
        let done: Vec<AtomicU8> = (0..count).map(|_| AtomicU8::new(0)).collect();
        std::thread::scope(|scope| {
            for helper in 0..3 {
                let done = &done;
                scope.spawn(move || {
                    loop {
                        let some = unread.last(7 + helper);
                        if some.len() == 0 {
                            return;
                        }
                        let (kept, back): (Vec<u32>, Vec<u32>) =
                            some.partition(|index| index % 3 != 0);
                        for &index in &kept {
                            done[index as usize].fetch_add(1, Ordering::Relaxed);
                        }
                        unread.give_back(back);
                        unread.finish(kept.len());
                    }
                });
            }
            while unread.left() > 0 {
                let Some(index) = unread.first() else {
                    std::thread::yield_now();
                    continue;
                };
                done[index as usize].fetch_add(1, Ordering::Relaxed);
                unread.finish(1);
            }
        });
        assert!(done.iter().all(|done| done.load(Ordering::Relaxed) == 1));
    }
}
