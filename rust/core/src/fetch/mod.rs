//! Bringing missing bytes in: many reads in flight, behind one small trait.
//!
//! Reads land in slots that belong to engram and are handed to the caller when complete. After an
//! error, a timeout or an interrupt no further byte reaches the caller, because slots of unfinished
//! reads are never copied anywhere.

pub mod pool;
pub mod unread;
pub mod uring;

use std::sync::Arc;
use std::time::{Duration, Instant};

use self::unread::Unread;
use crate::error::{Error, Result};
use crate::file::OpenFile;
use crate::plan::Read;

/// How long a wait for completions may last before the caller's interrupt check runs again.
pub(crate) const INTERRUPT_PERIOD: Duration = Duration::from_millis(50);

/// Times an "again" from the kernel is answered by trying again before the read is made blocking.
pub(crate) const MAX_RETRIES: u8 = 3;

/// The reads of one gather.
pub struct Batch<'a> {
    /// What to read.
    pub reads: &'a [Read],
    /// The files `Read::file` indexes.
    pub files: &'a [Arc<OpenFile>],
    /// Where each of them ends, for the time of the batch.
    pub ends: &'a [u64],
    /// Use the files' direct descriptors; reads are then aligned.
    pub direct: bool,
    /// Give up at this instant.
    pub deadline: Option<Instant>,
    /// Called now and then while waiting; an error stops the batch.
    pub interrupt: &'a dyn Fn() -> Result<()>,
    /// All of the reads, to be taken one by one where [`Fetch::shares`]; for one call of `fetch`.
    pub unread: &'a Unread,
}

impl Batch<'_> {
    /// Bytes that `read` must deliver: all of it, or up to the end of the file where an aligned
    /// read reaches past it.
    pub fn expected(&self, read: &Read) -> u32 {
        let left = self.ends[read.file as usize].saturating_sub(read.offset);
        u32::try_from(left).map_or(read.len, |left| left.min(read.len))
    }

    /// Looks at the clock; and for an interrupt, where the last look was some time ago. To be
    /// called whether reads arrive or not: a device that keeps up can keep a caller waiting too.
    pub(crate) fn check(&self, checked: &mut Instant, outstanding: usize) -> Result<()> {
        let now = Instant::now();
        if self.deadline.is_some_and(|deadline| now >= deadline) {
            return Err(Error::Timeout {
                message: format!("timed out with {outstanding} reads not complete"),
                place: Box::default(),
            });
        }
        if now.duration_since(*checked) < INTERRUPT_PERIOD {
            return Ok(());
        }
        *checked = now;
        (self.interrupt)()
    }
}

/// What batches cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cost {
    /// Reads the kernel was asked for, retries and remainders included.
    pub reads: u64,
    /// Bytes delivered into slots.
    pub bytes: u64,
    /// Largest number of reads in flight at once.
    pub depth: u64,
}

/// Something that can read many spans at once.
pub trait Fetch {
    /// Completes every read of `batch`, calling `done` with its index and its bytes as each
    /// arrives, in any order. `idle` is useful work to do while reads are in flight; it returns
    /// whether there is more of it. On return with an error some reads may not have been delivered.
    /// What was done is added to `cost`, also then.
    fn fetch(
        &mut self,
        batch: &Batch<'_>,
        done: &mut dyn FnMut(usize, &[u8]),
        idle: &mut dyn FnMut() -> bool,
        cost: &mut Cost,
    ) -> Result<()>;

    /// Whether others may do some of a batch's reads meanwhile, of those they claim.
    fn shares(&self) -> bool {
        false
    }
}

/// What to do with the result of one read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// All expected bytes are in the slot.
    Complete,
    /// Ask for the rest, from this many bytes on.
    Continue(u32),
    /// Ask again.
    Retry,
    /// Ask once more, blocking.
    Block,
    /// The read failed.
    Fail(i32),
    /// The file ended before the expected byte.
    Ended,
}

/// Progress of one read through short results and retries.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Progress {
    pub(crate) expected: u32,
    pub(crate) filled: u32,
    retries: u8,
}

impl Progress {
    pub(crate) fn new(expected: u32) -> Self {
        Self {
            expected,
            filled: 0,
            retries: 0,
        }
    }

    /// Takes a result as the kernel gives it: a byte count, or a negated errno.
    pub(crate) fn advance(&mut self, result: i32) -> Next {
        match result {
            0 => Next::Ended,
            bytes if bytes > 0 => {
                self.filled = self.filled.saturating_add(bytes.unsigned_abs());
                if self.filled >= self.expected {
                    Next::Complete
                } else {
                    Next::Continue(self.filled)
                }
            }
            error => match -error {
                libc::EINTR | libc::EAGAIN if self.retries < MAX_RETRIES => {
                    self.retries += 1;
                    Next::Retry
                }
                libc::EINTR | libc::EAGAIN => Next::Block,
                errno => Next::Fail(errno),
            },
        }
    }
}

/// The error for a read that failed or ended early, `filled` bytes into it.
pub(crate) fn read_error(file: &OpenFile, read: &Read, filled: u32, errno: Option<i32>) -> Error {
    let offset = read.offset + u64::from(filled);
    if errno.is_none() {
        // The look at its size notes that it was cut, unless it only looked so for a moment.
        drop(file.is_whole());
    }
    let doing = if errno.is_some() {
        "cannot read rows".to_owned()
    } else {
        format!(
            "cannot read rows: the file ended early, it had {} bytes when opened",
            file.len()
        )
    };
    Error::os(doing, errno.unwrap_or(libc::EIO), file.path()).at_offset(offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_reads_continue_and_zero_is_an_early_end() {
        let mut progress = Progress::new(100);
        assert_eq!(progress.advance(40), Next::Continue(40));
        assert_eq!(progress.advance(59), Next::Continue(99));
        assert_eq!(progress.advance(1), Next::Complete);
        assert_eq!(Progress::new(100).advance(0), Next::Ended);
    }

    /// I27: both ways to say "again", and one after the other.
    #[test]
    fn again_is_retried_a_bounded_number_of_times_then_blocks() {
        for again in [
            [libc::EAGAIN; 4],
            [libc::EINTR; 4],
            [libc::EINTR, libc::EAGAIN, libc::EINTR, libc::EAGAIN],
        ] {
            let mut progress = Progress::new(10);
            for errno in &again[..usize::from(MAX_RETRIES)] {
                assert_eq!(progress.advance(-errno), Next::Retry);
            }
            assert_eq!(progress.advance(-again[3]), Next::Block);
            assert_eq!(progress.advance(10), Next::Complete);
        }
        assert_eq!(Progress::new(1).advance(-libc::EIO), Next::Fail(libc::EIO));
    }
}
