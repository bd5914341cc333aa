//! Which pages of a file are believed to be in memory: one bit per page.
//!
//! Asking the kernel costs 200 to 400 ns per page and copying a cached row costs 40 to 60, so the
//! kernel is not asked about pages engram has read before. A bit is set by a completed read or a
//! prewarm, and cleared when the kernel, asked after an unexpected major fault, denies it. A wrong
//! bit costs time and never correctness: a row believed resident that is not is faulted in by the
//! copy, a row not believed resident is read.
#![expect(
    clippy::inline_always,
    reason = "a call costs as much as the few instructions it would run, once per row"
)]

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use once_cell::race::OnceBox;

use crate::words::Words;

/// Beliefs given up in this process, of any file: what was believed of many pages together still is
/// while this stays the same.
static GIVEN_UP: AtomicU64 = AtomicU64::new(0);

/// A number that changes whenever a belief is given up.
#[inline]
pub(crate) fn given_up() -> u64 {
    GIVEN_UP.load(Ordering::Acquire)
}

/// Bits of word `index` that stand for nothing, where there are `count` bits in all.
fn beyond(index: usize, count: u64) -> u64 {
    match count.saturating_sub(index as u64 * 64) {
        used @ 0..64 => u64::MAX << used,
        _ => 0,
    }
}

/// Believed residency of one file.
///
/// A second, much smaller set of bits says of each 64 pages whether all of them are believed
/// resident, and a third says so of each 4,096 pages. Once a table has been prewarmed the third
/// answers for any row, from a line or a few for the largest table, where the full set would cost a
/// cache miss.
#[derive(Debug)]
pub struct Residency {
    /// Made when a page is first believed resident.
    words: OnceBox<Words>,
    /// One bit per word of `words`: all its pages are believed resident.
    full: Box<[AtomicU64]>,
    /// One bit per word of `full`: all its bits are set.
    vast: Box<[AtomicU64]>,
    pages: u64,
    page_shift: u32,
    /// First page and end of what is never believed resident.
    barred: [AtomicU64; 2],
}

/// Whether all bits of `range` are set in the first of `levels`, each of which has a bit for every
/// word of the one before.
fn all_set(levels: &[&[AtomicU64]], range: Range<u64>) -> bool {
    let Some((words, above)) = levels.split_first() else {
        return false;
    };
    let all = |range: Range<u64>| {
        let mut at = range.start;
        while at < range.end {
            let end = (at | 63).min(range.end - 1);
            let mask = (u64::MAX >> (63 - (end - at))) << (at & 63);
            let word = usize::try_from(at >> 6)
                .ok()
                .and_then(|word| words.get(word));
            if word.is_none_or(|word| word.load(Ordering::Relaxed) & mask != mask) {
                return false;
            }
            at = end + 1;
        }
        true
    };
    let whole = range.start.div_ceil(64)..range.end / 64;
    if above.is_empty() || whole.start >= whole.end {
        return all(range);
    }
    all(range.start..whole.start * 64) && all(whole.end * 64..range.end) && all_set(above, whole)
}

fn zeroed(count: u64) -> Box<[AtomicU64]> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

impl Residency {
    /// Nothing believed resident in a file of `len` bytes.
    pub fn new(len: u64) -> Self {
        let page_shift = rustix::param::page_size().trailing_zeros();
        let pages = len.div_ceil(1 << page_shift);
        Self {
            words: OnceBox::new(),
            full: zeroed(pages.div_ceil(64 * 64)),
            vast: zeroed(pages.div_ceil(64 * 64 * 64)),
            pages,
            page_shift,
            barred: [AtomicU64::new(u64::MAX), AtomicU64::new(0)],
        }
    }

    /// Pages in the file.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Bytes this belief itself occupies.
    pub fn memory_bytes(&self) -> u64 {
        8 * (self.written().len() + self.full.len() + self.vast.len()) as u64
    }

    fn word_count(&self) -> usize {
        usize::try_from(self.pages.div_ceil(64)).unwrap_or(usize::MAX)
    }

    /// The words, or none as long as no page was believed resident.
    #[inline]
    fn written(&self) -> &[AtomicU64] {
        self.words.get().map_or(&[], |words| words)
    }

    /// Pages that hold the bytes `[offset, offset + len)`.
    #[inline(always)]
    pub fn pages_of(&self, offset: u64, len: u64) -> Range<u64> {
        let first = offset >> self.page_shift;
        let end = ((offset + len.max(1) - 1) >> self.page_shift) + 1;
        first..end
    }

    #[inline(always)]
    fn bit(words: &[AtomicU64], index: u64) -> bool {
        let word = (index >> 6) as usize;
        words[word].load(Ordering::Relaxed) >> (index & 63) & 1 == 1
    }

    /// Whether every page of `[offset, offset + len)` is believed resident.
    #[inline(always)]
    pub fn contains(&self, offset: u64, len: u64) -> bool {
        let pages = self.pages_of(offset, len);
        let (first, last) = (pages.start >> 6, (pages.end - 1) >> 6);
        if first >> 6 == last >> 6 && Self::bit(&self.vast, first >> 6) {
            return true;
        }
        if Self::bit(&self.full, first)
            && (first == last || Self::bit(&self.full, last))
            && last - first < 2
        {
            return true;
        }
        let words = self.written();
        !words.is_empty() && pages.into_iter().all(|page| Self::bit(words, page))
    }

    /// As [`Residency::contains`], for so many bytes that a bit for each page would take long.
    pub fn contains_all(&self, offset: u64, len: u64) -> bool {
        let words = self.written();
        !words.is_empty() && all_set(&[words, &self.full, &self.vast], self.pages_of(offset, len))
    }

    /// Notes that `pages` are in memory.
    pub fn set(&self, pages: Range<u64>) {
        let words = self
            .words
            .get_or_init(|| Box::new(Words::zeroed(self.word_count())));
        self.for_words(words, pages.clone(), |index, word, mask| {
            // Most bits are set once and stay: reading first keeps the line shared.
            if word.load(Ordering::Relaxed) & mask != mask {
                let before = word.fetch_or(mask, Ordering::Relaxed);
                if before | mask | beyond(index, self.pages) == u64::MAX {
                    let bit = 1 << (index % 64);
                    let before = self.full[index / 64].fetch_or(bit, Ordering::Relaxed);
                    let count = words.len() as u64;
                    if before | bit | beyond(index / 64, count) == u64::MAX {
                        let bit = 1 << (index / 64 % 64);
                        self.vast[index / 4096].fetch_or(bit, Ordering::Relaxed);
                    }
                    fence(Ordering::SeqCst);
                    if word.load(Ordering::Relaxed) | beyond(index, self.pages) != u64::MAX {
                        // Cleared meanwhile, perhaps before the bits above were there.
                        self.not_full(index);
                    }
                }
            }
        });
        self.clear_barred(&pages);
    }

    /// Never believes `pages` resident again, nor any between them and those barred before: their
    /// place in the mapping no longer shows the file.
    pub fn bar(&self, pages: &Range<u64>) {
        if pages.is_empty() {
            return;
        }
        self.barred[0].fetch_min(pages.start, Ordering::Relaxed);
        self.barred[1].fetch_max(pages.end, Ordering::Relaxed);
        self.clear_barred(&(0..self.pages));
    }

    fn clear_barred(&self, pages: &Range<u64>) {
        let [start, end] = self
            .barred
            .each_ref()
            .map(|page| page.load(Ordering::Relaxed));
        let barred = start.max(pages.start)..end.min(pages.end);
        if barred.start < barred.end {
            self.clear(barred);
        }
    }

    /// Notes that `pages` are not in memory.
    pub fn clear(&self, pages: Range<u64>) {
        self.for_words(self.written(), pages, |index, word, mask| {
            if word.load(Ordering::Relaxed) & mask != 0 {
                word.fetch_and(!mask, Ordering::Relaxed);
                fence(Ordering::SeqCst);
                self.not_full(index);
            }
        });
    }

    /// Takes back that all pages of a word, and all around it, are believed resident.
    fn not_full(&self, index: usize) {
        self.vast[index / 4096].fetch_and(!(1 << (index / 64 % 64)), Ordering::Relaxed);
        self.full[index / 64].fetch_and(!(1 << (index % 64)), Ordering::Relaxed);
        GIVEN_UP.fetch_add(1, Ordering::Release);
    }

    /// Pages of `pages` believed resident.
    pub fn count(&self, pages: Range<u64>) -> u64 {
        let mut total = 0;
        self.for_words(self.written(), pages, |_, word, mask| {
            total += u64::from((word.load(Ordering::Relaxed) & mask).count_ones());
        });
        total
    }

    fn for_words(
        &self,
        words: &[AtomicU64],
        pages: Range<u64>,
        mut each: impl FnMut(usize, &AtomicU64, u64),
    ) {
        let end = pages.end.min(self.pages);
        let mut page = pages.start;
        while page < end {
            let bit = page & 63;
            let count = (64 - bit).min(end - page);
            let mask = (u64::MAX >> (64 - count)) << bit;
            let index = usize::try_from(page >> 6).unwrap_or(usize::MAX);
            if let Some(word) = words.get(index) {
                each(index, word, mask);
            }
            page += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn barred_pages_stay_out() {
        let residency = Residency::new(200 * 4096);
        residency.set(0..200);
        residency.bar(&(70..80));
        residency.bar(&(150..160));
        residency.set(0..200);
        assert_eq!(residency.count(0..200), 70 + 40);
        assert!(residency.contains(0, 70 * 4096) && !residency.contains(0, 70 * 4096 + 1));
        assert!(!residency.contains(100 * 4096, 1) && residency.contains(160 * 4096, 40 * 4096));
    }

    #[test]
    fn only_a_belief_that_was_held_is_given_up() {
        let residency = Residency::new(200 * 4096);
        assert_eq!(
            residency.memory_bytes(),
            16,
            "no words before there is a belief"
        );
        residency.set(5..9);
        let before = given_up();
        residency.clear(5..6);
        assert!(given_up() > before);
        assert!(residency.contains_all(6 * 4096, 3 * 4096));
        assert!(!residency.contains_all(5 * 4096, 4 * 4096));
    }

    #[test]
    fn the_smaller_sets_answer_for_a_file_that_is_all_there() {
        for pages in [1, 63, 64, 65, 4095, 4096, 4097, 300_000] {
            let residency = Residency::new(pages * 4096);
            residency.set(0..pages - 1);
            let last = (pages - 1) / 4096;
            assert!(!Residency::bit(&residency.vast, last), "{pages}");
            residency.set(pages - 1..pages);
            assert!((0..=last).all(|bit| Residency::bit(&residency.vast, bit)));
            residency.clear(0..1);
            assert!(!Residency::bit(&residency.vast, 0));
        }
    }

    proptest! {
        #[test]
        fn agrees_with_a_set_of_pages(
            len in prop_oneof![1_u64..2_000_000, 50_000_000_u64..60_000_000],
            steps in prop::collection::vec((any::<bool>(), 0_u64..9000, prop_oneof![0_u64..200, 3000_u64..9000]), 0..40),
            probe in (0_u64..40_000_000, 1_u64..20_000),
        ) {
            let residency = Residency::new(len);
            let page = 1_u64 << residency.page_shift;
            let mut naive = std::collections::BTreeSet::new();
            for (insert, first, count) in steps {
                let pages = first..first + count;
                if insert { residency.set(pages.clone()) } else { residency.clear(pages.clone()) }
                for index in pages {
                    if insert && index < residency.pages() { naive.insert(index); } else { naive.remove(&index); }
                }
            }
            prop_assert_eq!(residency.count(0..residency.pages()), naive.len() as u64);
            let (offset, count) = probe;
            if offset + count <= len {
                let expected = (offset / page..=(offset + count - 1) / page).all(|index| naive.contains(&index));
                prop_assert_eq!(residency.contains(offset, count), expected);
                prop_assert_eq!(residency.contains_all(offset, count), expected);
            }
        }
    }
}
