//! A read-only mapping of a file: its advice, its residency, and copies out of it.
//!
//! The file may be changed by others at any time, so no `&[u8]` is ever made over the mapping;
//! rows leave it through raw copies only.
#![expect(
    unsafe_code,
    reason = "raw copies out of the mapping, and MADV_DONTNEED on it"
)]
#![expect(
    clippy::inline_always,
    reason = "a call costs as much as the few instructions it would run, once per row"
)]

use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;

use memmap2::{Advice, MmapOptions, MmapRaw, UncheckedAdvice};

use crate::buffer::{HostBuffer, PlaneSink};
use crate::fault::Registered;
use crate::system;

/// A shared read-only mapping of a whole file.
#[derive(Debug)]
pub struct Map {
    /// Declared first, so that it ends before the mapping does. `None` if nothing is ever copied.
    registered: Option<Registered>,
    map: MmapRaw,
}

/// A range of a mapping, kept alive: rows inside it are found with one addition.
#[derive(Debug, Clone)]
pub struct Window {
    address: *const u8,
    len: usize,
    map: Arc<Map>,
}

// SAFETY: the address lies in a shared, read-only mapping that `map` keeps alive; reading it from
// another thread is no different from reading it here.
unsafe impl Send for Window {}
// SAFETY: as for `Send`; a `Window` has no interior state.
unsafe impl Sync for Window {}

impl Window {
    /// The `len` bytes of `map` from `offset` on; `None` if they do not all lie in it.
    pub fn new(map: &Arc<Map>, offset: u64, len: u64) -> Option<Self> {
        let offset = usize::try_from(offset).ok()?;
        let len = usize::try_from(len).ok()?;
        if offset > map.len() || len > map.len() - offset {
            return None;
        }
        Some(Self {
            address: map.map.as_ptr().wrapping_add(offset),
            len,
            map: Arc::clone(map),
        })
    }

    /// The mapping.
    pub fn map(&self) -> &Map {
        &self.map
    }

    /// Address of the `len` bytes at `offset` of the window, which must lie inside it.
    #[inline(always)]
    pub fn row(&self, offset: usize, len: usize) -> RowAddress<'_> {
        assert!(
            offset <= self.len && len <= self.len - offset,
            "row inside its window"
        );
        RowAddress {
            address: self.address.wrapping_add(offset),
            map: PhantomData,
        }
    }
}

/// Address of one row inside a mapping or a buffer, proven to lie in it.
#[derive(Debug, Clone, Copy)]
pub struct RowAddress<'m> {
    address: *const u8,
    map: PhantomData<&'m ()>,
}

// SAFETY: the address lies in memory that outlives 'm and is only ever read through it; reading it
// from another thread is no different from reading it here.
unsafe impl Send for RowAddress<'_> {}
// SAFETY: as for `Send`; a `RowAddress` has no interior state.
unsafe impl Sync for RowAddress<'_> {}

impl RowAddress<'_> {
    /// Placeholder for unused places of a block.
    pub(crate) const UNUSED: Self = Self {
        address: std::ptr::null(),
        map: PhantomData,
    };
}

impl<'m> RowAddress<'m> {
    /// Address of the `len` bytes at `offset` of a buffer, which must lie inside it.
    #[inline]
    pub(crate) fn in_buffer(buffer: &'m HostBuffer, offset: usize, len: usize) -> Self {
        assert!(
            offset <= buffer.len() && len <= buffer.len() - offset,
            "row inside its buffer"
        );
        Self {
            address: buffer.address().wrapping_add(offset),
            map: PhantomData,
        }
    }
}

impl Map {
    /// Maps the `len` bytes of `file` to copy rows from. A page that turns out not to be readable
    /// is replaced by zeros and listed in [`Map::lost`]; that is for the caller to look at, after
    /// every copy.
    pub fn new(file: &File, len: u64) -> io::Result<Self> {
        let mut map = Self::for_queries(file, len)?;
        map.registered = Some(Registered::new(map.address(), map.len(), file.as_raw_fd())?);
        Ok(map)
    }

    /// Maps the `len` bytes of `file` only to ask which of its pages are in memory.
    pub fn for_queries(file: &File, len: u64) -> io::Result<Self> {
        let len =
            usize::try_from(len).map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))?;
        let map = MmapOptions::new().len(len).map_raw_read_only(file)?;
        Ok(Self {
            registered: None,
            map,
        })
    }

    /// The bytes that could not be read when a copy came to them. The mapping holds zeros there,
    /// now and for good; a row that has a byte among them has to be read in another way.
    pub fn lost(&self) -> Option<Range<u64>> {
        self.registered.as_ref()?.lost()
    }

    /// Bytes mapped.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether nothing is mapped (never true).
    pub fn is_empty(&self) -> bool {
        self.map.len() == 0
    }

    /// Address of the first byte, for tools that look the mapping up in `/proc/self/maps`.
    pub fn address(&self) -> usize {
        self.map.as_ptr() as usize
    }

    /// Address of the `len` bytes at `offset`, which must lie inside the mapping.
    #[inline]
    pub fn row(&self, offset: u64, len: usize) -> RowAddress<'_> {
        let mapped = self.map.len() as u64;
        assert!(
            offset <= mapped && len as u64 <= mapped - offset,
            "bytes {offset}..+{len} of a mapping of {mapped}"
        );
        #[expect(
            clippy::cast_possible_truncation,
            reason = "below the mapping's length, a usize"
        )]
        let offset = offset as usize;
        RowAddress {
            address: self.map.as_ptr().wrapping_add(offset),
            map: PhantomData,
        }
    }

    /// Random access: a fault on the mapping reads one page and does not read ahead.
    pub fn advise_random(&self) -> io::Result<()> {
        self.map.advise(Advice::Random)
    }

    /// The kernel's default for faults and reclaim.
    pub fn advise_normal(&self) -> io::Result<()> {
        self.map.advise(Advice::Normal)
    }

    /// Fills the page tables for `bytes` with whatever is in the page cache, reading what is not.
    /// Needs Linux 5.14; `EINVAL` otherwise.
    pub fn populate(&self, bytes: Range<usize>) -> io::Result<()> {
        let advice = system::POPULATE_READ.ok_or(io::ErrorKind::Unsupported)?;
        self.map
            .advise_range(advice, bytes.start, bytes.end - bytes.start)
    }

    /// Drops the page-table entries of `bytes`; the pages stay in the page cache.
    pub fn trim(&self, bytes: Range<usize>) -> io::Result<()> {
        // SAFETY: the mapping is shared, read-only and backed by a file, so dropping its entries
        // loses nothing: the next access maps the same file bytes again, also for a copy that is
        // running meanwhile.
        unsafe {
            self.map.unchecked_advise_range(
                UncheckedAdvice::DontNeed,
                bytes.start,
                bytes.end - bytes.start,
            )
        }
    }

    /// One byte per page of `pages`, its lowest bit set if the page is in memory.
    ///
    /// The kernel answers "all resident" to a caller who neither owns the file nor may write it.
    pub fn resident(&self, pages: Range<u64>, states: &mut Vec<u8>) -> io::Result<()> {
        let page = rustix::param::page_size();
        let range = usize::try_from(pages.start)
            .and_then(|start| usize::try_from(pages.end).map(|end| start..end))
            .map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))?;
        assert!(range.start <= range.end && range.end <= self.map.len().div_ceil(page));
        let count = range.end - range.start;
        states.clear();
        states.resize(count, 0);
        if count == 0 {
            return Ok(());
        }
        system::resident_pages(self.map.as_ptr().wrapping_add(range.start * page), states)?;
        if let Some(lost) = self.lost() {
            // Zero pages in place of the file's, whatever the kernel says of them.
            for (page_of, state) in pages.zip(states) {
                *state &= u8::from(!lost.contains(&(page_of * page as u64)));
            }
        }
        Ok(())
    }
}

/// Rows between the one that is copied and the one the processor is told of. Its own look-ahead ends
/// a few rows on.
pub(crate) const AHEAD: usize = 16;

/// Of each row at most so many bytes are loaded ahead; the processor sees the pattern by then.
#[cfg(target_arch = "x86_64")]
const MOST_AHEAD: usize = 256;

#[cfg(target_arch = "x86_64")]
const CACHE_LINE: usize = 64;

/// Stands for rows of a length that is not known when the code is compiled.
pub(crate) const ANY: usize = 0;

impl RowAddress<'_> {
    /// Tells the processor that the row of `row_bytes` bytes will be copied soon.
    #[inline(always)]
    pub(crate) fn load_soon(self, row_bytes: usize) {
        #[cfg(target_arch = "x86_64")]
        for offset in (0..row_bytes.min(MOST_AHEAD)).step_by(CACHE_LINE) {
            use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
            // SAFETY: a prefetch is a hint that may name any address and never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(self.address.wrapping_add(offset).cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = row_bytes;
    }
}

/// Copies one row, of `BYTES` bytes unless that is [`ANY`], to `position`.
///
/// Short rows are a few inlined moves. For longer ones a call of the C library's `memcpy` wins: it
/// uses the widest registers the processor has, so a row that misses the cache occupies fewer load
/// slots while it waits (39 against 44 ns per row of 160 bytes).
#[inline(always)]
pub(crate) fn copy_row_of<const BYTES: usize>(
    row: RowAddress<'_>,
    sink: &PlaneSink<'_>,
    position: usize,
) {
    let bytes = if BYTES == ANY {
        sink.row_bytes()
    } else {
        assert_eq!(sink.row_bytes(), BYTES);
        BYTES
    };
    // SAFETY: `RowAddress` lies in live memory for as many bytes as it was made for, the sink's
    // row length; `PlaneSink::row` is valid for that many writes; the caller's memory cannot
    // overlap a file mapping that only engram knows, and is checked not to overlap a buffer.
    unsafe { std::ptr::copy_nonoverlapping(row.address, sink.row(position), bytes) };
}

/// Copies `rows` into consecutive positions of `sink` from `first` on.
#[inline]
pub(crate) fn copy_rows(rows: &[RowAddress<'_>], sink: &PlaneSink<'_>, first: usize) {
    match sink.row_bytes() {
        8 => copy_rows_of::<8>(rows, sink, first),
        10 => copy_rows_of::<10>(rows, sink, first),
        80 => copy_rows_of::<80>(rows, sink, first),
        _ => copy_rows_of::<ANY>(rows, sink, first),
    }
}

#[inline(always)]
fn copy_rows_of<const BYTES: usize>(rows: &[RowAddress<'_>], sink: &PlaneSink<'_>, first: usize) {
    for (index, row) in rows.iter().enumerate() {
        if let Some(next) = rows.get(index + AHEAD) {
            next.load_soon(sink.row_bytes());
        }
        copy_row_of::<BYTES>(*row, sink, first + index);
    }
}

/// Copies one row to `position`.
#[inline]
pub(crate) fn copy_row(row: RowAddress<'_>, sink: &PlaneSink<'_>, position: usize) {
    copy_row_of::<ANY>(row, sink, position);
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn mapped(bytes: &[u8]) -> (tempfile::NamedTempFile, Map) {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        let map = Map::new(file.as_file(), bytes.len() as u64).unwrap();
        (file, map)
    }

    #[test]
    fn copies_rows_of_any_length_from_any_offset() {
        let bytes: Vec<u8> = (0..9000_u32).map(|index| (index % 251) as u8).collect();
        let (_file, map) = mapped(&bytes);
        for row_bytes in [1, 8, 10, 80, 90, 128, 160, 256, 320, 512, 700] {
            let offsets = [0_u64, 1, 4090, 8999 - row_bytes as u64];
            let rows: Vec<_> = offsets
                .iter()
                .map(|&offset| map.row(offset, row_bytes))
                .collect();
            let mut out = vec![0; row_bytes * 4];
            let sink = PlaneSink::new(&mut out, 0, row_bytes, row_bytes, 4).unwrap();
            copy_rows(&rows, &sink, 0);
            for (index, &offset) in offsets.iter().enumerate() {
                let offset = offset as usize;
                assert_eq!(
                    out[index * row_bytes..][..row_bytes],
                    bytes[offset..][..row_bytes]
                );
            }
        }
    }

    #[test]
    fn residency_covers_every_page() {
        let (_file, map) = mapped(&[1; 10_000]);
        let mut states = Vec::new();
        let answer = map.resident(0..3, &mut states);
        assert_eq!(answer.is_ok(), system::TELLS_RESIDENT_PAGES);
        assert_eq!(states.len(), 3);
        assert_eq!(
            states.iter().all(|state| state & 1 == 1),
            system::TELLS_RESIDENT_PAGES,
            "just written, so cached"
        );
        map.trim(0..8192).unwrap();
        assert_eq!(
            map.populate(0..8192).is_ok(),
            system::POPULATE_READ.is_some()
        );
    }

    #[test]
    #[should_panic(expected = "of a mapping of 10")]
    fn rows_past_the_end_are_refused() {
        let (_file, map) = mapped(&[1; 10]);
        map.row(5, 6);
    }

    #[test]
    fn directories_cannot_be_mapped() {
        let directory = tempfile::tempdir().unwrap();
        let handle = File::open(directory.path()).unwrap();
        assert_eq!(
            Map::new(&handle, 10).unwrap_err().raw_os_error(),
            Some(libc::ENODEV)
        );
    }
}
