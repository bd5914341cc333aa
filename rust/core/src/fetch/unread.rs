//! Who does which read of a batch, where threads share one.
//!
//! The thread that waits for reads takes them from the front; helpers, whose reads do not wait, take
//! some from the back and give back those that would have to. What was given back comes first: the
//! attempt may have set the device to work on it.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

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
    /// All reads of a batch of `count`.
    pub fn new(count: usize) -> Self {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        Self {
            untaken: AtomicU64::new(pack(0..count)),
            returned: Mutex::default(),
            returned_count: AtomicUsize::new(0),
            left: AtomicUsize::new(count as usize),
        }
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
        let taken = self.take(|untaken| untaken.start..(untaken.start + 1).min(untaken.end));
        taken.into_iter().next()
    }

    /// Takes up to `most` for a helper.
    pub fn last(&self, most: u32) -> Range<u32> {
        self.take(|untaken| untaken.end.saturating_sub(most).max(untaken.start)..untaken.end)
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

    /// Gives out no more: those who helped have nothing left to take.
    pub fn close(&self) {
        self.untaken.store(pack(0..0), Ordering::Relaxed);
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
        assert_eq!(unread.last(3), 2..5);
        unread.give_back([4]);
        unread.finish(3);
        assert_eq!(unread.left(), 2);
        assert_eq!(unread.first(), Some(4), "what was given back comes first");
        assert_eq!(unread.last(3), 1..2);
        assert!(unread.first().is_none() && unread.last(3).is_empty());
        let none = Unread::new(0);
        assert!(none.first().is_none() && none.last(9).is_empty());
        assert_eq!(none.left(), 0);
    }

    #[test]
    fn a_closed_batch_gives_out_nothing() {
        let unread = Unread::new(100);
        unread.close();
        assert!(unread.first().is_none() && unread.last(3).is_empty());
    }

    #[test]
    fn every_read_is_taken_once_or_given_back() {
        let count = 20_000;
        let unread = Unread::new(count);
        let done: Vec<AtomicU8> = (0..count).map(|_| AtomicU8::new(0)).collect();
        std::thread::scope(|scope| {
            for helper in 0..3 {
                let (unread, done) = (&unread, &done);
                scope.spawn(move || {
                    loop {
                        let some = unread.last(7 + helper);
                        if some.is_empty() {
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
