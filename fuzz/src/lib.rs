//! What the targets share: bytes taken apart, and memory counted.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Values out of a fuzzer's bytes; zeros once they are used up.
pub struct Bytes<'a>(pub &'a [u8]);

impl Bytes<'_> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut value = [0; N];
        let (taken, rest) = self.0.split_at(N.min(self.0.len()));
        value[..taken.len()].copy_from_slice(taken);
        self.0 = rest;
        value
    }

    pub fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// A number that is mostly small, and at times any.
    pub fn integer(&mut self) -> i64 {
        match self.u8() {
            255 => self.u64().cast_signed(),
            254 => -1 - i64::from(self.u8()),
            253 => i64::from(self.u32()),
            252 => i64::from(self.u16()),
            small => i64::from(small),
        }
    }
}

/// Counts what is allocated, and the most at once.
pub struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is left to the system's allocator; only numbers are kept.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(held, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(place, layout) }
    }
}

/// What `work` returns, and the most bytes it held at once.
pub fn measured<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    let value = work();
    (value, MOST.load(Ordering::Relaxed).saturating_sub(before))
}
