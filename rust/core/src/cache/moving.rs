//! Rows on their way from one cache to another, and memory on its way back.
//!
//! Sets are emptied in the order they lie in, and fill those of the new cache in order. Memory is
//! given back behind the one, index and rows, while the other touches its own for the first time.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use smallvec::SmallVec;

use super::Cache;
use super::memory::{Locked, Memory, WAYS};
use crate::error::Result;

/// Milliseconds after which a lock is taken to be nobody's.
const PATIENCE: usize = 50;

/// Bytes that are moved to another cache between two looks at the interrupt check, about.
const MOVED_AT_ONCE: usize = 4 << 20;

/// Times that memory is given back meanwhile.
const RELEASES: usize = 8;

/// Whether rows are being moved to a cache: the process whose thread moves them, 0 for none.
///
/// In a process that was forked meanwhile nobody does, so nothing is to be waited for there.
#[derive(Debug, Default)]
pub(super) struct Filling(AtomicU32);

impl Filling {
    fn begin(&self) {
        self.0.store(std::process::id(), Ordering::Relaxed);
    }

    fn end(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn is_under_way(&self) -> bool {
        let process = self.0.load(Ordering::Relaxed);
        process != 0 && process == std::process::id()
    }

    /// As a fork in the middle leaves it.
    #[cfg(test)]
    pub(super) fn begun_by_another_process(&self) {
        self.0
            .store(std::process::id().wrapping_add(1), Ordering::Relaxed);
    }
}

impl Cache {
    /// From now on, until rows have been moved to it, others are refused.
    pub(super) fn begin_filling(&self) {
        self.filling.begin();
    }

    /// Moves every row to `new`, as far as they fit there, and gives memory back as it goes, index
    /// and rows: together the two take no more than the larger of them, and some pages. Meanwhile
    /// `new` takes no other rows. Calls that still use this cache find it emptied. `interrupt` is
    /// called now and then; after an error from it the other rows are given up.
    pub(crate) fn move_to(&self, new: &Self, interrupt: &dyn Fn() -> Result<()>) -> Result<()> {
        new.begin_filling();
        let outcome = self.empty(Some(new), interrupt);
        new.filling.end();
        outcome
    }

    /// Gives all rows up and their memory back, whoever still has this cache in use: it takes no
    /// more. `interrupt` is called now and then; its error is returned when that is done.
    pub(crate) fn retire(&self, interrupt: &dyn Fn() -> Result<()>) -> Result<()> {
        self.empty(None, interrupt)
    }

    fn empty(&self, new: Option<&Self>, interrupt: &dyn Fn() -> Result<()>) -> Result<()> {
        self.retired.store(true, Ordering::Relaxed);
        let mut new = new;
        let planes = self.shape.planes();
        let mut row: Vec<Vec<u8>> = planes.iter().map(|plane| vec![0; plane.bytes]).collect();
        let mut outcome = Ok(());
        let mut release = Some(self.memory.release());
        let step = (MOVED_AT_ONCE / Memory::bytes_per_set(&self.shape)).max(1);
        let small_step = step.div_ceil(RELEASES);
        for index in 0..self.sets {
            if let Some(mut set) = self.lock_patiently(index) {
                set.changed(0);
                for way in 0..WAYS {
                    let tag = set.set().tags[way].load(Ordering::Relaxed);
                    if let Some(new) = new.filter(|_| tag != 0) {
                        for (plane, bytes) in row.iter_mut().enumerate() {
                            self.memory.copy_plane(index * WAYS + way, plane, bytes);
                        }
                        let planes: SmallVec<[&[u8]; 3]> = row.iter().map(Vec::as_slice).collect();
                        let count = set.set().counts().of(way);
                        new.keep(self.id(index, tag), &planes, Some(count));
                    }
                    set.set().tags[way].store(0, Ordering::Relaxed);
                }
            } else {
                // Its rows are out of reach, and may be read for as long as this cache lives.
                release = None;
            }
            let (done, last) = (index + 1, index + 1 == self.sets);
            if let Some(release) = release.as_mut()
                && (done.is_multiple_of(small_step) || last)
            {
                release.up_to(done);
            }
            if done.is_multiple_of(step) || last {
                if outcome.is_ok() {
                    outcome = interrupt();
                }
                if outcome.is_err() {
                    new = None;
                }
            }
        }
        outcome
    }

    /// As [`Set::lock`], for one that must have it: only a fork leaves a lock behind.
    ///
    /// [`Set::lock`]: super::memory::Set::lock
    fn lock_patiently(&self, index: usize) -> Option<Locked<'_>> {
        let set = &self.memory.sets()[index];
        for _ in 0..PATIENCE {
            if let Some(locked) = set.lock() {
                return Some(locked);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        None
    }
}
