//! A read-only mapping of a file: its advice, its residency, and the addresses of its rows.
//!
//! The file may be changed by others at any time, so no `&[u8]` is ever made over the mapping;
//! rows leave it through raw copies only (`copy.rs`).
#![expect(
    unsafe_code,
    reason = "addresses that other threads may read, and MADV_DONTNEED on the mapping"
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

use crate::buffer::HostBuffer;
use crate::fault::Registered;
use crate::system;

/// A shared read-only mapping of a whole file.
#[derive(Debug)]
pub struct Map {
    /// Declared first, so that it ends before the mapping does. `None` if nothing is ever copied.
    registered: Option<Registered>,
    map: MmapRaw,
}

/// Rows of a mapping, kept alive: they are found with one multiplication.
#[derive(Debug, Clone)]
pub struct Window {
    address: *const u8,
    rows: u64,
    row_bytes: usize,
    map: Arc<Map>,
}

// SAFETY: the address lies in a shared, read-only mapping that `map` keeps alive; reading it from
// another thread is no different from reading it here.
unsafe impl Send for Window {}
// SAFETY: as for `Send`; a `Window` has no interior state.
unsafe impl Sync for Window {}

impl Window {
    /// `rows` rows of `row_bytes` bytes, one after another in `map` from `offset` on; `None` if they
    /// do not all lie in it.
    pub fn new(map: &Arc<Map>, offset: u64, rows: u64, row_bytes: usize) -> Option<Self> {
        let offset = usize::try_from(offset).ok()?;
        let len = usize::try_from(rows.checked_mul(row_bytes as u64)?).ok()?;
        if offset > map.len() || len > map.len() - offset {
            return None;
        }
        Some(Self {
            address: map.map.as_ptr().wrapping_add(offset),
            rows,
            row_bytes,
            map: Arc::clone(map),
        })
    }

    /// The mapping.
    pub fn map(&self) -> &Map {
        &self.map
    }

    /// Rows in the window.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Address of row `index` of the window; `None` if it has no such row.
    #[inline(always)]
    pub fn row(&self, index: u64) -> Option<RowAddress<'_>> {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "all rows together are of so many bytes as a usize can count"
        )]
        (index < self.rows).then(|| RowAddress {
            address: self.address.wrapping_add(index as usize * self.row_bytes),
            map: PhantomData,
        })
    }
}

/// Address of one row inside a mapping, a buffer or a few zeros, proven to lie in it.
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
    /// The first byte, valid for reads of as many as the address was made for.
    #[inline(always)]
    pub(crate) fn as_ptr(self) -> *const u8 {
        self.address
    }

    /// A row of zeros; `None` for one that is longer than rows usually are.
    pub(crate) fn zeros(len: usize) -> Option<RowAddress<'static>> {
        const LONGEST: usize = 8192;
        static ZEROS: [u8; LONGEST] = [0; LONGEST];
        (len <= ZEROS.len()).then_some(RowAddress {
            address: ZEROS.as_ptr(),
            map: PhantomData,
        })
    }

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
        let mut map = Self::unregistered(file, len)?;
        map.registered = Some(Registered::new(map.address(), map.len(), file.as_raw_fd())?);
        Ok(map)
    }

    /// Maps the `len` bytes of `file` only to ask which of its pages are in memory, or to have them
    /// read; nothing is ever copied from it.
    pub fn unregistered(file: &File, len: u64) -> io::Result<Self> {
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

    /// Faults fill large pages, where the filesystem can. `EINVAL` where the kernel has none.
    pub fn advise_large_pages(&self) -> io::Result<()> {
        let advice = system::HUGE_PAGES.ok_or(io::ErrorKind::Unsupported)?;
        self.map.advise(advice)
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
