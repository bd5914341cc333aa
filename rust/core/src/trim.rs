//! Keeping the resident set of the mappings from creeping.
//!
//! Touching one row maps its page, and often the pages around it: with the large pages of a file
//! read sequentially, two mebibytes for 160 bytes. Mapped pages count towards the process although
//! the page cache holds them anyway. With a cap, page-table entries are given back slice by slice;
//! the pages stay in the page cache, and the next touch maps them again.

use std::fs;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use arc_swap::ArcSwap;

use crate::file::OpenFile;

/// Bytes of a mapping given back at once.
const SLICE: u64 = 64 << 20;

/// Most bytes that touching one row may map: a large page of the page cache.
const MOST_PER_ROW: u64 = 2 << 20;

/// Rows copied between two looks at the resident set, at least.
const FEWEST_ROWS: i64 = 64;

/// A file and some of its bytes.
type Slice = (usize, Range<u64>);

/// Caps the resident bytes of a reader's mappings. Without a lock: a fork while one was held would
/// leave the child waiting for it for ever.
#[derive(Debug)]
pub(crate) struct Trimmer {
    limit: u64,
    /// File-backed resident bytes of the process before the reader touched anything.
    baseline: u64,
    /// Rows that may be copied before the next look.
    rows_left: AtomicI64,
    /// Where the next slice begins, all files taken as one.
    next: AtomicU64,
    /// Ranges that a prewarm mapped; they are not given back.
    kept: ArcSwap<Vec<Slice>>,
}

impl Trimmer {
    pub(crate) fn new(limit: u64) -> Self {
        let baseline = resident_file_bytes().unwrap_or(0);
        Self {
            limit,
            baseline,
            rows_left: AtomicI64::new(FEWEST_ROWS),
            next: AtomicU64::new(0),
            kept: ArcSwap::default(),
        }
    }

    /// Bytes that may still be mapped.
    pub(crate) fn room(&self) -> u64 {
        self.limit.saturating_sub(self.resident())
    }

    /// Notes that a prewarm mapped `bytes` of a file.
    pub(crate) fn keep(&self, file: usize, bytes: Range<u64>) {
        self.kept.rcu(|kept| {
            let mut kept = Vec::clone(kept);
            match kept.last_mut() {
                Some((last, kept)) if *last == file && kept.end == bytes.start => {
                    kept.end = bytes.end;
                }
                _ => kept.push((file, bytes.clone())),
            }
            kept
        });
    }

    fn resident(&self) -> u64 {
        // Where the system does not tell, every look finds the cap reached.
        resident_file_bytes().map_or(u64::MAX, |bytes| bytes.saturating_sub(self.baseline))
    }

    /// Called after `rows` rows were copied; returns the bytes of mappings given back.
    pub(crate) fn copied(&self, rows: u64, files: &[Arc<OpenFile>]) -> u64 {
        let rows = i64::try_from(rows).unwrap_or(i64::MAX);
        if self.rows_left.fetch_sub(rows, Ordering::Relaxed) > rows {
            return 0;
        }
        let mut trimmed = 0;
        let mut resident = self.resident();
        if resident > self.limit {
            let kept = self.kept.load();
            let total: u64 = files.iter().map(|file| file.len()).sum();
            let goal = self.limit / 4 * 3;
            let mut visited = 0;
            while resident > goal && visited < total {
                let slice = self.slice(files, total);
                visited += slice.1.end - slice.1.start;
                for part in outside(&kept, &slice) {
                    trimmed += give_back(&files[slice.0], &part);
                }
                resident = self.resident();
            }
        }
        let room = self.limit.saturating_sub(resident) / MOST_PER_ROW;
        let next = i64::try_from(room).unwrap_or(i64::MAX).max(FEWEST_ROWS);
        self.rows_left.store(next, Ordering::Relaxed);
        trimmed
    }

    /// The next slice in turn of the `total` bytes of all files, of which there are some.
    fn slice(&self, files: &[Arc<OpenFile>], total: u64) -> Slice {
        let lengths = || files.iter().map(|file| file.len());
        let taken = self
            .next
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |place| {
                let (_, bytes) = slice_at(lengths(), place % total);
                Some(place % total + (bytes.end - bytes.start))
            })
            .unwrap_or(0);
        slice_at(lengths(), taken % total)
    }
}

/// The slice that begins at `place`, all files taken as one; it ends where its file does.
fn slice_at(lengths: impl Iterator<Item = u64>, place: u64) -> Slice {
    let mut start = place;
    for (file, length) in lengths.enumerate() {
        if start < length {
            return (file, start..(start + SLICE).min(length));
        }
        start -= length;
    }
    (0, 0..0)
}

/// What of `slice` no prewarm mapped.
fn outside(kept: &[Slice], slice: &Slice) -> Vec<Range<u64>> {
    let mut parts = vec![slice.1.clone()];
    for (_, kept) in kept.iter().filter(|(file, _)| *file == slice.0) {
        parts = parts
            .into_iter()
            .flat_map(|part| {
                let before = part.start..part.end.min(kept.start);
                let after = part.start.max(kept.end)..part.end;
                [before, after]
            })
            .filter(|part| part.start < part.end)
            .collect();
    }
    parts
}

fn give_back(file: &OpenFile, bytes: &Range<u64>) -> u64 {
    let page = rustix::param::page_size() as u64;
    let start = bytes.start.next_multiple_of(page);
    let end = if bytes.end == file.len() {
        bytes.end
    } else {
        bytes.end / page * page
    };
    let (Ok(map), Ok(start), Ok(end)) = (file.map(), usize::try_from(start), usize::try_from(end))
    else {
        return 0;
    };
    if start < end && map.trim(start..end).is_ok() {
        (end - start) as u64
    } else {
        0
    }
}

/// File-backed resident bytes of this process, by the kernel's own count.
fn resident_file_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split(' ').nth(2)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prewarmed_ranges_are_left_out() {
        let kept = [(0, 10..20), (0, 30..40), (1, 0..100)];
        assert_eq!(outside(&kept, &(0, 0..50)), [0..10, 20..30, 40..50]);
        assert_eq!(outside(&kept, &(0, 12..18)), []);
        assert_eq!(outside(&kept, &(1, 0..100)), []);
        assert_eq!(outside(&kept, &(2, 0..5)).first(), Some(&(0..5)));
    }

    #[test]
    fn slices_go_round_all_files_and_end_with_each() {
        let lengths = [SLICE + 5, 0, 7];
        let total = lengths.iter().sum();
        let mut place = 0;
        let mut seen = Vec::new();
        while place < total {
            let slice = slice_at(lengths.into_iter(), place);
            place += slice.1.end - slice.1.start;
            seen.push(slice);
        }
        assert_eq!(seen, [(0, 0..SLICE), (0, SLICE..SLICE + 5), (2, 0..7)]);
    }

    #[test]
    fn the_system_tells_the_resident_set() {
        assert!(resident_file_bytes().is_some_and(|bytes| bytes > 0));
    }
}
