//! Many words that begin as zeros, most of which nobody ever writes.
//!
//! Clearing memory means touching it, and a large table has a megabyte and a half of page bits. Memory fresh from the kernel is zero already, and a
//! page of it is there once it is used.
#![expect(
    unsafe_code,
    reason = "memory of the kernel is looked at as words that threads share"
)]

use std::alloc::{Layout, handle_alloc_error};
use std::ops::Deref;
use std::sync::atomic::AtomicU64;

use memmap2::MmapMut;

/// Words of 64 bits, zero at first, read and written by any thread.
#[derive(Debug)]
pub(crate) struct Words {
    memory: MmapMut,
    count: usize,
}

impl Words {
    /// `count` zeros. Like any other allocation it ends the process if there is no memory.
    pub(crate) fn zeroed(count: usize) -> Self {
        let bytes = count.max(1).saturating_mul(size_of::<AtomicU64>());
        match MmapMut::map_anon(bytes) {
            Ok(memory) => Self { memory, count },
            Err(_) => handle_alloc_error(Layout::new::<AtomicU64>()),
        }
    }
}

impl Deref for Words {
    type Target = [AtomicU64];

    #[inline]
    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is private, begins at a page boundary, so the words are aligned, and
        // has room for `count` of them, all initialised by the kernel; it lives as long as `self`,
        // which the slice borrows. Nothing else refers to it, and words are only used atomically.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.count) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn words_are_zeros_that_keep_what_is_put_in() {
        for count in [0, 1, 511, 512, 513, 100_000] {
            let words = Words::zeroed(count);
            assert_eq!(words.len(), count);
            assert!(words.iter().all(|word| word.load(Ordering::Relaxed) == 0));
            for (word, value) in words.iter().zip(1..) {
                word.store(value, Ordering::Relaxed);
            }
            let sum: u64 = words.iter().map(|word| word.load(Ordering::Relaxed)).sum();
            let count = count as u64;
            assert_eq!(sum, count * (count + 1) / 2);
        }
    }
}
