//! Reads through an `io_uring`: one thread, many reads in flight.
//!
//! ```text
//! while reads are not all complete:
//!     give every free slot the next read
//!     enter the kernel: hand over what is new, wait for some completions (or, while the caller
//!         has copying to do, wait for none and copy a little)
//!     for each completion: complete -> deliver and free the slot; short -> ask for the rest;
//!         "again" -> ask again, then read blocking; error -> stop
//! ```
//!
//! Four things depart from the plain loop. Reads are handed over a few at a time, so that the device
//! works on the first while the rest is prepared. Waiting asks for a fraction of what is in flight
//! rather than one, which saves system calls and keeps the device's queue nearly full. A batch that stops
//! early leaves its ring to a background thread, which waits for the stragglers before the slots
//! they write to are used again. Rings are kept for the next batch: making one costs as much as
//! reading a dozen rows.
#![expect(
    unsafe_code,
    reason = "submission entries hold raw addresses of slots the ring owns"
)]

use std::io;
use std::mem::ManuallyDrop;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::{Batch, Cost, Fetch, INTERRUPT_PERIOD, Next, Progress, read_error};
use crate::buffer::HostBuffer;
use crate::error::{Error, Result};
use crate::system::Queue;
use crate::threads::{self, PerProcess};

/// Reads in flight; random-read rates of flash stop growing about here.
pub const DEPTH: u32 = 128;

/// Slots together take at most this much memory, unless one read alone needs more.
const SLOT_MEMORY: usize = 16 << 20;

/// Of the reads in flight, the share to wait for in one system call is one in this many.
const WAIT_SHARE: usize = 8;

/// Reads handed over in one system call while at most [`SHALLOW`] are in flight. The kernel keeps
/// more than two back from the device until the last of them is prepared, which an idle device
/// waits for: 16 reads that miss take a fifth longer when they are handed over together.
const PAIR: usize = 2;
const SHALLOW: usize = 32;

/// Reads handed over in one system call when the device has work.
const GROUP: usize = 16;

#[derive(Debug, Clone, Copy)]
struct Slot {
    read: u32,
    progress: Progress,
}

/// A ring, its slots, and what is in flight.
pub struct Ring {
    queue: Queue,
    /// Leaked rather than freed while the kernel may still write to it.
    memory: ManuallyDrop<HostBuffer>,
    slot_bytes: usize,
    slots: Vec<Slot>,
    free: Vec<u32>,
    in_flight: usize,
    generation: u32,
    /// The process that made it; in a forked child its memory is not mapped.
    process: u32,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Ring")
            .field("fd", &self.queue.raw_fd())
            .field("in_flight", &self.in_flight)
            .finish_non_exhaustive()
    }
}

impl Ring {
    /// Makes a ring, or gives the kernel's reason why there can be none.
    pub fn new() -> io::Result<Self> {
        let queue = Queue::new(DEPTH)?;
        let memory =
            HostBuffer::new(1, false).map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))?;
        Ok(Self {
            queue,
            memory: ManuallyDrop::new(memory),
            slot_bytes: 0,
            slots: Vec::new(),
            free: Vec::new(),
            in_flight: 0,
            generation: 0,
            process: std::process::id(),
        })
    }

    /// Refuses to go on in a child that was forked in the middle of a batch.
    fn require_own_process(&self) -> Result<()> {
        if self.process == std::process::id() {
            Ok(())
        } else {
            Err(Error::forked())
        }
    }

    /// Makes room for reads of up to `bytes` bytes each, aligned to whole pages for direct reads;
    /// nothing may be in flight.
    fn prepare(&mut self, bytes: usize, direct: bool) -> Result<()> {
        assert_eq!(
            self.in_flight, 0,
            "slots are exchanged only while the kernel writes to none"
        );
        // A ring serves readers of every kind in turn, so the slots it has may be long enough for
        // this batch and yet begin at addresses that direct reads refuse.
        let alignment = if direct {
            rustix::param::page_size()
        } else {
            64
        };
        let stride = bytes.next_multiple_of(alignment).max(alignment);
        if stride > self.slot_bytes
            || !self.slot_bytes.is_multiple_of(alignment)
            || self.slots.is_empty()
        {
            let depth = (SLOT_MEMORY / stride).clamp(1, DEPTH as usize);
            let memory = HostBuffer::new(depth * stride, false)?;
            let old = std::mem::replace(&mut self.memory, ManuallyDrop::new(memory));
            drop(ManuallyDrop::into_inner(old));
            self.slot_bytes = stride;
            self.slots = vec![
                Slot {
                    read: 0,
                    progress: Progress::new(0)
                };
                depth
            ];
        }
        self.free = (0..u32::try_from(self.slots.len()).unwrap_or(DEPTH))
            .rev()
            .collect();
        self.generation = self.generation.wrapping_add(1);
        Ok(())
    }

    fn slot_address(&self, slot: u32) -> *mut u8 {
        self.memory
            .address()
            .wrapping_add(slot as usize * self.slot_bytes)
    }

    /// Queues the part of a slot's read that has not arrived.
    fn push(&mut self, slot: u32, batch: &Batch<'_>) {
        let Slot { read, progress } = self.slots[slot as usize];
        let read = &batch.reads[read as usize];
        assert!(read.len as usize <= self.slot_bytes, "a read fits its slot");
        let filled = progress.filled;
        let fd = batch.files[read.file as usize].raw_fd(batch.direct);
        let address = self.slot_address(slot).wrapping_add(filled as usize);
        let left = read.len - filled;
        let offset = read.offset + u64::from(filled);
        let name = u64::from(self.generation) << 32 | u64::from(slot);
        // SAFETY: the entry writes `read.len - filled` bytes from byte `filled` of a slot at least
        // `read.len` long. The slot's memory belongs to the ring and is neither freed nor given
        // another read until this one's completion is reaped (`in_flight` counts it, `prepare`
        // requires zero, `Drop` leaks otherwise). The descriptor stays open because the caller
        // borrows its file for the batch, and the kernel holds its own reference from submission
        // on; `fetch` does not return while an entry is queued and not submitted (`flush`).
        let pushed = unsafe { self.queue.push(fd, address, left, offset, name) };
        assert!(pushed, "the queue has a place for every slot");
        self.in_flight += 1;
    }

    /// Enters the kernel, waiting for `want` completions, the interrupt period at most.
    fn enter(&self, want: usize) -> Result<()> {
        match self.queue.enter(want, INTERRUPT_PERIOD) {
            Ok(()) => Ok(()),
            Err(error) => match error.raw_os_error() {
                // Nothing is lost: entries not taken stay queued for the next call.
                Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN) => Ok(()),
                errno => Err(Error::Io {
                    doing: "cannot submit reads to the ring".to_owned(),
                    errno: errno.unwrap_or(libc::EIO),
                    place: Box::default(),
                }),
            },
        }
    }

    /// The next completion of this batch: slot and result.
    fn reap(&mut self) -> Option<(u32, i32)> {
        loop {
            let (name, result) = self.queue.next()?;
            self.in_flight -= 1;
            let [slot, generation] = [name & u64::from(u32::MAX), name >> 32]
                .map(|half| u32::try_from(half).unwrap_or(0));
            // A completion of an abandoned batch frees nothing and delivers nothing.
            if generation == self.generation {
                return Some((slot, result));
            }
        }
    }

    /// Hands over entries that are queued but not yet the kernel's. Until then they name
    /// descriptors by number, so this must happen while the batch still holds its files open.
    fn flush(&mut self) -> bool {
        for _ in 0..100 {
            if self.queue.is_submitted() {
                return true;
            }
            if self.enter(0).is_err() {
                return false;
            }
        }
        false
    }

    /// Waits until the kernel writes to no slot any more.
    fn drain(&mut self) {
        while self.in_flight > 0 {
            if self.enter(1).is_err() {
                return; // `Drop` leaks the slots.
            }
            while self.reap().is_some() {}
        }
    }

    fn drive(
        &mut self,
        batch: &Batch<'_>,
        done: &mut dyn FnMut(usize, &[u8]),
        idle: &mut dyn FnMut() -> bool,
        depth: usize,
        cost: &mut Cost,
    ) -> Result<()> {
        let longest = batch
            .reads
            .iter()
            .map(|read| read.len as usize)
            .max()
            .unwrap_or(0);
        self.prepare(longest, batch.direct)?;
        let unread = batch.unread;
        let mut busy = true;
        let mut checked = Instant::now();
        while unread.left() > 0 {
            let mut queued = 0;
            while self.in_flight < depth && !self.free.is_empty() {
                let Some(read) = unread.first() else { break };
                let Some(slot) = self.free.pop() else { break };
                let expected = batch.expected(&batch.reads[read as usize]);
                self.slots[slot as usize] = Slot {
                    read,
                    progress: Progress::new(expected),
                };
                self.push(slot, batch);
                cost.reads += 1;
                queued += 1;
                let shallow = self.in_flight <= SHALLOW;
                if queued == if shallow { PAIR } else { GROUP } {
                    self.enter(0)?;
                    queued = 0;
                }
            }
            cost.depth = cost.depth.max(self.in_flight as u64);
            if self.in_flight == 0 && !busy {
                // Helpers have the rest, none of which waits.
                std::thread::yield_now();
            } else {
                let want = if busy {
                    0
                } else {
                    (self.in_flight / WAIT_SHARE).max(1)
                };
                self.enter(want)?;
            }
            let mut arrived = false;
            while let Some((slot, result)) = self.reap() {
                arrived = true;
                let whole = self.completed(slot, result, batch, cost, done)?;
                unread.finish(usize::from(whole));
            }
            if !arrived {
                busy = busy && idle();
                // Interrupts are looked for in there.
                self.require_own_process()?;
            }
            let left = unread.left();
            if left > 0 {
                batch.check(&mut checked, left)?;
            }
        }
        Ok(())
    }

    /// Handles one completion; whether its read is now whole.
    fn completed(
        &mut self,
        slot: u32,
        result: i32,
        batch: &Batch<'_>,
        cost: &mut Cost,
        done: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<bool> {
        let index = self.slots[slot as usize].read as usize;
        let read = &batch.reads[index];
        let mut next = self.slots[slot as usize].progress.advance(result);
        let start = slot as usize * self.slot_bytes;
        let file = &batch.files[read.file as usize];
        if next == Next::Block {
            let filled = self.slots[slot as usize].progress.filled;
            let rest =
                &mut self.memory.as_mut_slice()[start + filled as usize..start + read.len as usize];
            let outcome = file.read_at(rest, read.offset + u64::from(filled), batch.direct);
            cost.reads += 1;
            next = match outcome {
                Ok(bytes) => self.slots[slot as usize]
                    .progress
                    .advance(i32::try_from(bytes).unwrap_or(i32::MAX)),
                Err(error) => Next::Fail(error.raw_os_error().unwrap_or(libc::EIO)),
            };
        }
        let progress = self.slots[slot as usize].progress;
        match next {
            Next::Complete => {
                cost.bytes += u64::from(progress.expected);
                done(
                    index,
                    &self.memory.as_mut_slice()[start..start + progress.expected as usize],
                );
                self.free.push(slot);
                Ok(true)
            }
            Next::Continue(_) | Next::Retry | Next::Block => {
                self.push(slot, batch);
                cost.reads += 1;
                Ok(false)
            }
            Next::Fail(errno) => Err(read_error(file, read, progress.filled, Some(errno))),
            Next::Ended => Err(read_error(file, read, progress.filled, None)),
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.in_flight == 0 {
            // SAFETY: the field is not used again, and the kernel writes to no slot.
            unsafe { ManuallyDrop::drop(&mut self.memory) }
        }
    }
}

fn rings() -> Result<std::sync::Arc<(u32, Mutex<Vec<Ring>>)>> {
    static RINGS: PerProcess<Mutex<Vec<Ring>>> = PerProcess::new();
    RINGS.get(|| Ok(Mutex::default()))
}

/// Rings kept for later batches; more than threads that miss at the same time are closed.
const KEPT: usize = 8;

fn keep(ring: Ring) {
    if ring.in_flight > 0 {
        return; // Could not be drained: dropped, its slots leaked.
    }
    if let Ok(rings) = rings() {
        let mut rings = rings.1.lock().unwrap_or_else(PoisonError::into_inner);
        if rings.len() < KEPT {
            rings.push(ring);
        }
    }
}

/// An idle ring of the process, or a new one; the kernel's reason where there can be none.
pub fn acquire() -> io::Result<Ring> {
    let kept = rings()
        .ok()
        .and_then(|rings| rings.1.lock().unwrap_or_else(PoisonError::into_inner).pop());
    kept.map_or_else(Ring::new, Ok)
}

/// Whether the kernel lets this process make rings, without making one; its reason otherwise.
pub fn allowed() -> io::Result<()> {
    Queue::allowed()
}

/// Whether a ring can be made here and now; the kernel's reason otherwise.
pub fn probe() -> io::Result<()> {
    keep(acquire()?);
    Ok(())
}

/// A ring for one batch; afterwards it goes back to the process, once the kernel is done with it.
#[derive(Debug)]
pub struct Uring {
    ring: Option<Ring>,
    depth: usize,
}

impl Uring {
    /// Keeps `depth` reads in flight at most, where a ring has room for more.
    pub fn with_depth(ring: Ring, depth: usize) -> Self {
        Self {
            ring: Some(ring),
            depth: depth.max(1),
        }
    }
}

impl From<Ring> for Uring {
    fn from(ring: Ring) -> Self {
        Self::with_depth(ring, DEPTH as usize)
    }
}

impl Fetch for Uring {
    fn shares(&self) -> bool {
        true
    }

    fn fetch(
        &mut self,
        batch: &Batch<'_>,
        done: &mut dyn FnMut(usize, &[u8]),
        idle: &mut dyn FnMut() -> bool,
        cost: &mut Cost,
    ) -> Result<()> {
        let mut ring = match self.ring.take() {
            Some(ring) => ring,
            None => acquire().map_err(|error| Error::Io {
                doing: "cannot make a ring".to_owned(),
                errno: error.raw_os_error().unwrap_or(libc::EIO),
                place: Box::default(),
            })?,
        };
        let outcome = ring.drive(batch, done, idle, self.depth, cost);
        if let Err(error) = ring.require_own_process() {
            // Nothing of it may be touched here, and its destructor would unmap what is not there.
            std::mem::forget(ring);
            return Err(error);
        }
        if ring.in_flight == 0 {
            keep(ring);
        } else if ring.flush() {
            // If no thread can be had the ring is dropped there, which leaks its slots: safe. A
            // ring whose queue could not be emptied is closed with its entries never submitted.
            drop(threads::spawn_blocking(move || {
                ring.drain();
                keep(ring);
            }));
        }
        outcome
    }
}

#[cfg(test)]
mod tests;
