//! Where the bytes of reads go, and reads that do not wait for a device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use smallvec::SmallVec;

use super::account;
use super::fill::Way;
use super::{Control, Lane, Report};
use crate::buffer;
use crate::error::Result;
use crate::fetch::unread::{GROUP, Unread};
use crate::file::OpenFile;
use crate::plan::{Plan, Read};

/// Reads that do not wait between two looks at the clock, and copies of what they bring.
const READS_PER_CHECK: usize = 256;
const COPIES_PER_CHECK: usize = 1 << 14;

/// Helpers stay while at least one in this many reads of one of them finds its pages in memory: to try
/// is a wasted microsecond where they are not.
const STAYS: usize = 4;

/// The reads of one round and the places they feed.
#[derive(Clone, Copy)]
pub(super) struct Scatter<'r> {
    pub(super) lanes: &'r [Lane<'r>],
    pub(super) plan: &'r Plan,
    pub(super) files: &'r [Arc<OpenFile>],
    pub(super) way: Way,
}

/// What was read without waiting.
#[derive(Debug, Default)]
pub(super) struct Helped {
    reads: AtomicU64,
    bytes: AtomicU64,
    /// Hardly anything is in memory: helpers need not go on.
    in_vain: AtomicBool,
}

impl Helped {
    fn count(&self, scatter: &Scatter<'_>, read: &Read) {
        account::served(scatter, read, read.len as usize);
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(u64::from(read.len), Ordering::Relaxed);
    }

    pub(super) fn add_to(&self, report: &mut Report) {
        report.reads += self.reads.load(Ordering::Relaxed);
        report.bytes_read += self.bytes.load(Ordering::Relaxed);
    }
}

/// Helpers that came.
#[cfg(test)]
pub(super) static CAME: AtomicU64 = AtomicU64::new(0);

/// What came of a read that did not wait.
enum Tried {
    Served,
    /// Some of its pages are not in memory.
    Missing,
    /// The system or the filesystem has no such reads.
    Refused,
}

impl Scatter<'_> {
    /// Scatters the bytes of one read, and notes that its pages are in memory now.
    pub(super) fn deliver(&self, read: &Read, bytes: &[u8]) {
        let file = &self.files[read.file as usize];
        for copy in self.plan.copies_of(read) {
            let within = copy.within as usize;
            let row = &bytes[within..within + copy.len as usize];
            let lane = &self.lanes[copy.lane as usize];
            lane.sink.write(copy.position as usize, row);
            let end = read.offset + u64::from(copy.within + copy.len);
            // Others may be served a kept row at once, before this call looks at the sizes.
            if let Some(keeper) = lane.keeper
                && file
                    .is_whole()
                    .is_ok_and(|whole| whole || end <= file.end())
            {
                keeper.arrived(copy.position, row);
            }
        }
        if self.way.alignment.is_none() && file.map().is_ok() {
            let residency = file.residency();
            residency.set(residency.pages_of(read.offset, u64::from(read.len)));
        }
    }

    /// Bytes of the longest read.
    fn longest(&self) -> usize {
        let lengths = self.plan.reads.iter().map(|read| read.len as usize);
        lengths.max().unwrap_or(0)
    }

    /// Reads what the page cache holds, into a slot that is long enough, and delivers it.
    fn try_read(&self, read: &Read, slot: &mut [u8]) -> Tried {
        let slot = &mut slot[..read.len as usize];
        match self.files[read.file as usize].read_cached_at(slot, read.offset) {
            Ok(bytes) if bytes == slot.len() => {
                self.deliver(read, slot);
                Tried::Served
            }
            Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS)) => {
                Tried::Refused
            }
            _ => Tried::Missing,
        }
    }

    /// Serves what the page cache holds before any thread is woken that waits; `left` is the rest.
    pub(super) fn read_cached(
        &self,
        control: &Control<'_>,
        helped: &Helped,
        left: &mut Vec<Read>,
        mut checked: Instant,
    ) -> Result<()> {
        let mut slot = buffer::scratch(self.longest())?;
        let mut refused = false;
        let mut copies = 0;
        for (index, read) in self.plan.reads.iter().enumerate() {
            if refused {
                left.push(read.clone());
                continue;
            }
            if index % READS_PER_CHECK == 0 || copies >= COPIES_PER_CHECK {
                control.check(&mut checked)?;
                copies = 0;
            }
            copies += read.copies.len();
            match self.try_read(read, &mut slot) {
                Tried::Served => helped.count(self, read),
                Tried::Missing => left.push(read.clone()),
                Tried::Refused => {
                    refused = true;
                    left.push(read.clone());
                }
            }
        }
        Ok(())
    }

    /// Serves what the page cache holds while another thread waits for what it does not.
    pub(super) fn help(&self, unread: &Unread, helped: &Helped) {
        #[cfg(test)]
        CAME.fetch_add(1, Ordering::Relaxed);
        let Ok(mut slot) = buffer::scratch(self.longest()) else {
            return;
        };
        let (mut tried, mut served) = (0, 0);
        while !helped.in_vain.load(Ordering::Relaxed) {
            let mut chunk = Chunk::take(unread);
            if chunk.rest.is_empty() {
                return;
            }
            tried += chunk.rest.len();
            while let Some(&index) = chunk.rest.last() {
                let read = &self.plan.reads[index as usize];
                match self.try_read(read, &mut slot) {
                    Tried::Served => {
                        helped.count(self, read);
                        chunk.served += 1;
                    }
                    Tried::Missing => chunk.missing.push(index),
                    Tried::Refused => {
                        helped.in_vain.store(true, Ordering::Relaxed);
                        return;
                    }
                }
                chunk.rest.pop();
            }
            served += chunk.served;
            if served * STAYS < tried {
                helped.in_vain.store(true, Ordering::Relaxed);
            }
        }
    }
}

/// Reads that a helper has taken. What it has not done when it lets go of them, also by a panic, is
/// left to the thread that waits.
struct Chunk<'u> {
    unread: &'u Unread,
    /// Not tried yet, the next one last.
    rest: SmallVec<[u32; GROUP as usize]>,
    missing: SmallVec<[u32; GROUP as usize]>,
    served: usize,
}

impl<'u> Chunk<'u> {
    fn take(unread: &'u Unread) -> Self {
        let mut rest: SmallVec<_> = unread.last(GROUP).collect();
        rest.reverse();
        Self {
            unread,
            rest,
            missing: SmallVec::new(),
            served: 0,
        }
    }
}

impl Drop for Chunk<'_> {
    fn drop(&mut self) {
        let missing = self.missing.drain(..).chain(self.rest.drain(..));
        self.unread.give_back(missing);
        self.unread.finish(self.served);
    }
}
