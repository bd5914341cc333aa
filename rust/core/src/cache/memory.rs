//! The memory of a cache: one mapping that holds index and rows.
//!
//! # Who may read and write what
//!
//! The index is atomics. Rows are bytes that no reference is ever made to: they are copied in by
//! the one thread that has locked their set, and out by any, at the same time if it so happens. What
//! such a copy gives is thrown away: [`Set::state`] is a sequence lock, which a writer makes odd,
//! then changes tags and bytes, then leaves even and larger. A reader that finds the same even value
//! before and after copying has copied what one writer left. This is the same bargain as copying
//! rows from a file that others may write to (`map.rs`), with the difference that here it is noticed.
//! A cache that was given up gives the memory of its sets back, index and rows, when each has been
//! emptied: it holds zeros then, also as the state of its sets, which is none that a reader began with.
//! The language has no copy of bytes that may race and is as fast; words of atomics cost a sixth of
//! a hit.
//!
//! Readers take no lock and write nothing but a count, so a row that all threads want stays in all
//! their caches. A lock that its thread never gives back (the process was forked at that moment)
//! keeps one set of rows from being used and holds nobody up: readers take it for a miss, writers
//! give up.
#![expect(
    unsafe_code,
    reason = "the index is seen as atomics, rows are copied by address, prefetches"
)]
#![expect(
    clippy::inline_always,
    reason = "a call costs as much as the few instructions it would run, once per row"
)]

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::counts::Counts;
use super::shape::{PlanePlace, Shape};
use crate::buffer::{HUGE_PAGE, HostBuffer, PlaneSink};
use crate::error::Result;

/// Rows per set: as many as one cache line has room for all that is known of them.
pub(super) const WAYS: usize = 13;

/// Bytes of the index per set.
pub(super) const SET_BYTES: usize = 64;

/// Looks at a lock before it is given up: its holder has some hundred nanoseconds of work.
const SPINS: usize = 200;

/// Bit of [`Set::state`] that says that a writer is at work.
const LOCKED: u32 = 1;

/// Bits of [`Set::state`] that count changes, the lock's included.
const SEQUENCE: u32 = 0x00FF_FFFF;

/// Where the hand begins in [`Set::state`].
const HAND_SHIFT: u32 = 24;

/// From this many bytes on, memory is made of huge pages: below, one could be half of all.
const HUGE_FROM: usize = 32 << 20;

/// What is known of the rows of one set.
#[repr(C, align(64))]
pub(super) struct Set {
    /// How often each row was wanted: a hint, which threads may lose each other's changes of.
    counts: AtomicU64,
    state: AtomicU32,
    /// Per way the row's tag, 0 for none.
    pub(super) tags: [AtomicU32; WAYS],
}

const _: () = assert!(size_of::<Set>() == SET_BYTES);

/// A set that this thread alone may change, until it is dropped.
pub(super) struct Locked<'m> {
    set: &'m Set,
    before: u32,
    hand: u8,
    changed: bool,
}

impl Set {
    /// The state that a copy has to find again afterwards; `None` while a writer is at work, and for
    /// a set that never had a row. Those have state 0, as memory that was given back has, which so
    /// cannot be taken for what it was before: a hand is never 0 again.
    #[inline(always)]
    pub(super) fn begin(&self) -> Option<u32> {
        let state = self.state.load(Ordering::Acquire);
        (state & LOCKED == 0 && state != 0).then_some(state)
    }

    /// Whether nothing was changed since [`Set::begin`] gave `state`.
    #[inline(always)]
    pub(super) fn unchanged(&self, state: u32) -> bool {
        fence(Ordering::Acquire);
        self.state.load(Ordering::Relaxed) == state
    }

    /// The way that holds `tag`.
    #[inline(always)]
    pub(super) fn find(&self, tag: u32) -> Option<usize> {
        let mut found = WAYS;
        for (way, each) in self.tags.iter().enumerate() {
            if each.load(Ordering::Relaxed) == tag {
                found = way;
            }
        }
        (found < WAYS).then_some(found)
    }

    /// What the policy knows of the rows.
    #[inline(always)]
    pub(super) fn counts(&self) -> Counts {
        Counts(self.counts.load(Ordering::Relaxed))
    }

    #[inline(always)]
    pub(super) fn set_counts(&self, counts: Counts) {
        self.counts.store(counts.0, Ordering::Relaxed);
    }

    /// Takes the set for changing it; `None` if another thread does not let go of it.
    pub(super) fn lock(&self) -> Option<Locked<'_>> {
        for _ in 0..SPINS {
            let state = self.state.load(Ordering::Relaxed);
            if state & LOCKED == 0
                && self
                    .state
                    .compare_exchange_weak(
                        state,
                        state | LOCKED,
                        Ordering::Acquire,
                        Ordering::Relaxed,
                    )
                    .is_ok()
            {
                // What is written from here on must not be seen before the lock.
                fence(Ordering::Release);
                return Some(Locked {
                    set: self,
                    before: state,
                    hand: (state >> HAND_SHIFT).to_le_bytes()[0],
                    changed: false,
                });
            }
            std::hint::spin_loop();
        }
        None
    }
}

impl Locked<'_> {
    pub(super) fn set(&self) -> &Set {
        self.set
    }

    /// The way that the last row went to, and one.
    pub(super) fn hand(&self) -> usize {
        usize::from(self.hand) % WAYS
    }

    /// A row went to `way`: copies under way are void.
    pub(super) fn changed(&mut self, way: usize) {
        self.changed = true;
        self.hand = u8::try_from(way + 1).unwrap_or(0);
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let step = if self.changed { 2 } else { 0 };
        let sequence = self.before.wrapping_add(step) & SEQUENCE;
        let state = sequence | (u32::from(self.hand) << HAND_SHIFT);
        self.set.state.store(state, Ordering::Release);
    }
}

/// The mapping.
#[derive(Debug)]
pub(super) struct Memory {
    buffer: HostBuffer,
    sets: usize,
    rows_at: usize,
    shape: Shape,
}

impl Memory {
    /// Bytes that a set takes.
    pub(super) fn bytes_per_set(shape: &Shape) -> usize {
        SET_BYTES + WAYS * shape.row_bytes()
    }

    /// Bytes of memory that may be used out of `budget`, for no page to count beyond it.
    pub(super) fn usable(budget: usize) -> usize {
        if budget >= HUGE_FROM {
            budget / HUGE_PAGE * HUGE_PAGE
        } else {
            budget
        }
    }

    /// Memory without any row in it. Pages count once they are touched.
    pub(super) fn new(shape: Shape, sets: usize) -> Result<Self> {
        let bytes = sets * Self::bytes_per_set(&shape);
        Ok(Self {
            buffer: HostBuffer::new(bytes, bytes >= HUGE_FROM)?,
            sets,
            rows_at: sets * SET_BYTES,
            shape,
        })
    }

    /// What is known of every row.
    #[inline(always)]
    #[expect(clippy::cast_ptr_alignment, reason = "the buffer begins on a page")]
    pub(super) fn sets(&self) -> &[Set] {
        // SAFETY: the buffer begins on a page, is zeroed, and has room for the sets (`new`); zeros
        // are a valid `Set`, which is atomics only, so others may hold the same reference. Nothing
        // but this module knows the buffer.
        unsafe { std::slice::from_raw_parts(self.buffer.address().cast::<Set>(), self.sets) }
    }

    /// Address of a slot, which has a row's bytes.
    #[inline(always)]
    fn slot(&self, slot: usize) -> *mut u8 {
        assert!(slot < self.sets * WAYS, "slot {slot} of {}", self.sets);
        let offset = self.rows_at + slot * self.shape.row_bytes();
        self.buffer.address().wrapping_add(offset)
    }

    /// Address of a plane of a slot.
    #[inline(always)]
    fn part(&self, slot: usize, plane: &PlanePlace) -> *mut u8 {
        self.slot(slot).wrapping_add(plane.offset)
    }

    /// Copies every plane of a slot to `position` of the plane's sink. Whether that was one row is
    /// for the caller to find out.
    #[inline(always)]
    pub(super) fn copy_to_sinks(&self, slot: usize, sinks: &[PlaneSink<'_>], position: usize) {
        for (plane, sink) in self.shape.planes().iter().zip(sinks) {
            assert_eq!(sink.row_bytes(), plane.bytes);
            // SAFETY: the part lies in the buffer for the plane's bytes, and `row` is valid for
            // writes of as many, in memory of the caller's, which cannot be the buffer's. Others may
            // write to the part meanwhile: see the module's documentation.
            unsafe { copy(self.part(slot, plane), sink.row(position), plane.bytes) };
        }
    }

    /// Copies one plane of a slot to `out`, which has room for exactly its bytes.
    pub(super) fn copy_plane(&self, slot: usize, plane: usize, out: &mut [u8]) {
        let plane = &self.shape.planes()[plane];
        assert_eq!(out.len(), plane.bytes);
        // SAFETY: as in `copy_to_sinks`.
        unsafe { copy(self.part(slot, plane), out.as_mut_ptr(), plane.bytes) };
    }

    /// Writes one plane of a slot whose set the caller has locked.
    pub(super) fn write_plane(&self, slot: usize, plane: usize, bytes: &[u8]) {
        let plane = &self.shape.planes()[plane];
        assert_eq!(bytes.len(), plane.bytes);
        // SAFETY: as in `copy_to_sinks`, the other way round; nobody else writes to a slot of a
        // locked set.
        unsafe { copy(bytes.as_ptr(), self.part(slot, plane), plane.bytes) };
    }

    /// Brings a set's line near.
    #[inline(always)]
    pub(super) fn prefetch_set(&self, set: usize) {
        prefetch(self.buffer.address().wrapping_add(set * SET_BYTES));
    }

    /// Brings a slot's lines near.
    #[inline(always)]
    pub(super) fn prefetch_slot(&self, slot: usize) {
        let start = self.slot(slot);
        let mut line = start.wrapping_sub(start as usize % 64);
        let end = start.wrapping_add(self.shape.row_bytes());
        while line < end {
            prefetch(line);
            line = line.wrapping_add(64);
        }
    }

    /// Gives memory back, from the first set on.
    pub(super) fn release(&self) -> Release<'_> {
        Release {
            memory: self,
            index: 0,
            rows: self.rows_at,
        }
    }
}

/// What of the memory has been given back: index and rows of the sets before one, whole pages. They
/// hold zeros afterwards.
pub(super) struct Release<'m> {
    memory: &'m Memory,
    /// Where the next pages of the index begin, and those of the rows.
    index: usize,
    rows: usize,
}

impl Release<'_> {
    /// Gives the memory of the sets before `set` back. Every one of them was emptied under its lock,
    /// and takes no row any more.
    pub(super) fn up_to(&mut self, set: usize) {
        let memory = self.memory;
        if set == memory.sets {
            // The page that index and rows share, too.
            let _ = memory.buffer.discard(0..memory.buffer.len());
            return;
        }
        let rows = memory.rows_at + set * WAYS * memory.shape.row_bytes();
        self.index = memory.discard(self.index, set * SET_BYTES);
        self.rows = memory.discard(self.rows, rows);
    }
}

impl Memory {
    /// Gives the whole pages from `from` to `to` back; returns where the next call continues.
    fn discard(&self, from: usize, to: usize) -> usize {
        let page = if self.buffer.huge_pages() {
            HUGE_PAGE
        } else {
            rustix::param::page_size()
        };
        let (start, end) = (from.next_multiple_of(page), to / page * page);
        if end <= start {
            return from;
        }
        // Memory that the kernel does not take back stays until the cache goes.
        let _ = self.buffer.discard(start..end);
        end
    }

    /// Pages of 4 KiB that count, as the kernel has it.
    #[cfg(test)]
    pub(super) fn resident_pages(&self) -> usize {
        use std::os::unix::fs::FileExt as _;
        let page = rustix::param::page_size();
        let mut entries = vec![0; self.buffer.len().div_ceil(page) * 8];
        let first = self.buffer.address() as usize / page;
        std::fs::File::open("/proc/self/pagemap")
            .and_then(|map| map.read_exact_at(&mut entries, (first * 8) as u64))
            .unwrap();
        let (entries, _) = entries.as_chunks::<8>();
        let present = |entry: &&[u8; 8]| u64::from_le_bytes(**entry) >> 63 == 1;
        entries.iter().filter(present).count()
    }
}

/// Copies `bytes` bytes; short rows, which have a few lengths, as a few moves.
///
/// # Safety
///
/// `from` is valid for reads and `to` for writes of as many bytes, and they do not overlap.
#[inline(always)]
unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: as the caller promises.
    unsafe {
        match bytes {
            8 => std::ptr::copy_nonoverlapping(from, to, 8),
            10 => std::ptr::copy_nonoverlapping(from, to, 10),
            80 => std::ptr::copy_nonoverlapping(from, to, 80),
            _ => std::ptr::copy_nonoverlapping(from, to, bytes),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn prefetch(address: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a prefetch reads nothing that the program could notice, whatever the address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
}

/// Without a stable way to prefetch, the processor finds out by itself.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn prefetch(_address: *const u8) {}
