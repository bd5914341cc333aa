//! Memory that rows land in: page-aligned host buffers, and the sinks a gather writes through.
//!
//! # Who may write where
//!
//! A gather fills rows from several threads at once and in the order reads complete, so a sink
//! cannot be a `&mut [u8]`. A [`PlaneSink`] owns the exclusive borrow of the caller's memory and
//! hands out raw row addresses inside it. The plan assigns every position to exactly one copy
//! (tested as a property of the plan), so two threads never write the same row; nothing reads the
//! memory through a reference while the sink lives.
#![expect(
    unsafe_code,
    reason = "rows are written through raw addresses into memory the caller owns"
)]

use std::io;
use std::marker::PhantomData;
use std::ops::Range;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU32;

use memmap2::{Advice, MmapMut, MmapOptions, MmapRaw};

use crate::error::{Error, Result};
use crate::fault::{self, Registered};
use crate::system;

/// Bytes of a huge page; memory that is to be made of them begins and ends on multiples.
pub const HUGE_PAGE: usize = 2 << 20;

/// Host memory that starts on a page boundary and never moves.
///
/// Private memory is anonymous: zeroed, allocated to exactly the size asked for (rounded up to one
/// page by the kernel, or to one huge page where those are asked for), and suited to direct I/O and
/// to registration with an accelerator driver. Shared memory is that of a file, which other
/// processes may map too.
#[derive(Debug)]
pub struct HostBuffer {
    map: Mapping,
    /// Where the buffer begins in its mapping.
    start: usize,
    len: usize,
    huge_pages: bool,
}

#[derive(Debug)]
enum Mapping {
    Private(MmapMut),
    Shared(Shared),
}

/// Memory of a file. Somebody may cut the file: pages that are gone then hold zeros, of which
/// [`HostBuffer::lost`] tells.
#[derive(Debug)]
struct Shared {
    /// Before the mapping, so that it ends first; absent where engram may not answer for SIGBUS.
    registered: Option<Registered>,
    map: MmapRaw,
    file: OwnedFd,
}

/// `bytes` zeroed bytes that are used once, at any address; an error where there is no memory.
pub(crate) fn scratch(bytes: usize) -> Result<Vec<u8>> {
    let mut scratch = Vec::new();
    scratch.try_reserve_exact(bytes).map_err(|_| Error::Io {
        doing: format!("cannot allocate {bytes} bytes to read rows into"),
        errno: libc::ENOMEM,
        place: Box::default(),
    })?;
    scratch.resize(bytes, 0);
    Ok(scratch)
}

/// Which memory nodes pages come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodePolicy {
    /// The nodes given, others when those are full.
    Prefer,
    /// The nodes given, in turn.
    Interleave,
}

impl HostBuffer {
    /// Allocates `bytes` zeroed bytes. With `huge_pages` the kernel is advised to back them with
    /// huge pages; a refusal is not an error, [`HostBuffer::huge_pages`] says what happened.
    pub fn new(bytes: usize, huge_pages: bool) -> Result<Self> {
        let refuse = |errno| Error::Io {
            doing: format!("cannot allocate {bytes} bytes of host memory"),
            errno,
            place: Box::default(),
        };
        // Address space is reserved, not memory: only pages that are touched count.
        let (len, reserved) = if huge_pages {
            let len = bytes.max(1).checked_next_multiple_of(HUGE_PAGE);
            let reserved = len.and_then(|len| len.checked_add(HUGE_PAGE));
            len.zip(reserved).ok_or_else(|| refuse(libc::ENOMEM))?
        } else {
            (bytes.max(1), bytes.max(1))
        };
        let map = MmapMut::map_anon(reserved)
            .map_err(|error| refuse(error.raw_os_error().unwrap_or(libc::ENOMEM)))?;
        let start = if huge_pages {
            (map.as_ptr() as usize).next_multiple_of(HUGE_PAGE) - map.as_ptr() as usize
        } else {
            0
        };
        let mut buffer = Self {
            map: Mapping::Private(map),
            start,
            len,
            huge_pages: false,
        };
        buffer.huge_pages = huge_pages && buffer.advise_huge().is_ok();
        Ok(buffer)
    }

    /// Maps the first `bytes` bytes of `file` for reading and writing, shared with whoever else
    /// maps it. The file must have at least as many, for as long as the buffer lives.
    pub fn shared(file: BorrowedFd<'_>, bytes: usize) -> Result<Self> {
        let refuse = |errno| Error::Io {
            doing: format!("cannot map {bytes} bytes of shared memory"),
            errno,
            place: Box::default(),
        };
        let status = rustix::fs::fstat(file).map_err(|errno| refuse(errno.raw_os_error()))?;
        if u64::try_from(status.st_size).is_ok_and(|size| size < bytes as u64) {
            return Err(Error::value(format!(
                "a file of {} bytes cannot be mapped as {bytes} bytes of memory",
                status.st_size
            )));
        }
        let map = MmapOptions::new()
            .len(bytes.max(1))
            .map_raw(file.as_raw_fd())
            .map_err(|error| refuse(error.raw_os_error().unwrap_or(libc::ENOMEM)))?;
        let file = file
            .try_clone_to_owned()
            .map_err(|error| refuse(error.raw_os_error().unwrap_or(libc::EMFILE)))?;
        let registered = if fault::allowed() {
            let start = map.as_mut_ptr() as usize;
            let registered = Registered::writable(start, map.len(), file.as_raw_fd());
            Some(registered.map_err(|error| refuse(error.raw_os_error().unwrap_or(libc::EBUSY)))?)
        } else {
            None
        };
        Ok(Self {
            len: map.len(),
            map: Mapping::Shared(Shared {
                registered,
                map,
                file,
            }),
            start: 0,
            huge_pages: false,
        })
    }

    /// Whether the memory is a file's, which others may map too.
    pub fn is_shared(&self) -> bool {
        matches!(self.map, Mapping::Shared(_))
    }

    /// The bytes that are not there any more because the file was cut, or cannot be read; always
    /// `None` for private memory. What was copied before the question, and does not lie among them,
    /// was right.
    pub(crate) fn lost(&self) -> Option<Range<u64>> {
        let Mapping::Shared(shared) = &self.map else {
            return None;
        };
        let len = self.len as u64;
        // The last page of a file that was cut reads as zeros without any fault.
        let left = rustix::fs::fstat(&shared.file)
            .ok()
            .and_then(|status| u64::try_from(status.st_size).ok())
            .map_or(0, |size| size.min(len));
        let cut = (left < len).then_some(left..len);
        let faulted = shared.registered.as_ref().and_then(Registered::lost);
        match (cut, faulted) {
            (Some(one), Some(other)) => Some(one.start.min(other.start)..len),
            (cut, faulted) => cut.or(faulted),
        }
    }

    fn advise_huge(&self) -> io::Result<()> {
        let advice = system::HUGE_PAGES.ok_or(io::ErrorKind::Unsupported)?;
        self.advise(advice, 0..self.len)
    }

    /// Gives advice for `bytes` of the buffer.
    fn advise(&self, advice: Advice, bytes: Range<usize>) -> io::Result<()> {
        let (start, length) = (self.start + bytes.start, bytes.end - bytes.start);
        match &self.map {
            Mapping::Private(map) => map.advise_range(advice, start, length),
            Mapping::Shared(shared) => shared.map.advise_range(advice, start, length),
        }
    }

    /// Address of the first byte; constant for the buffer's life.
    pub fn address(&self) -> *mut u8 {
        let base = match &self.map {
            Mapping::Private(map) => map.as_ptr().cast_mut(),
            Mapping::Shared(shared) => shared.map.as_mut_ptr(),
        };
        base.wrapping_add(self.start)
    }

    /// Bytes usable from [`HostBuffer::address`] on.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the buffer holds no bytes (never true: the smallest mapping is one byte).
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the kernel accepted the advice to use huge pages.
    pub fn huge_pages(&self) -> bool {
        self.huge_pages
    }

    /// The bytes, for the one owner that reads and writes them.
    ///
    /// # Panics
    /// For shared memory, which has no one owner.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        match &mut self.map {
            Mapping::Private(map) => &mut map[self.start..self.start + self.len],
            Mapping::Shared(_) => unreachable!("shared memory is reached by address only"),
        }
    }

    /// Gives the memory of `bytes`, whole pages, back to the kernel; they hold zeros afterwards.
    pub(crate) fn discard(&self, bytes: Range<usize>) -> io::Result<()> {
        let Mapping::Private(map) = &self.map else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let bytes = self.pages(&bytes)?;
        let (start, length) = (self.start + bytes.start, bytes.end - bytes.start);
        // SAFETY: the range lies in the buffer, which is private and anonymous, so its pages become
        // zeros: as good as written by another thread. No reference is made to those bytes. Calls
        // that still use a cache that was given up may copy them meanwhile, by address, under the
        // sequence lock of their set (`cache/memory.rs`); whoever discards changed that first, so
        // such a copy is thrown away.
        unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, length) }
    }

    /// Whole pages of `bytes`, which must lie in the buffer.
    fn pages(&self, bytes: &Range<usize>) -> io::Result<Range<usize>> {
        if bytes.start > bytes.end || bytes.end > self.len {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let page = rustix::param::page_size();
        Ok(bytes.start / page * page..bytes.end)
    }

    /// The four bytes at `offset` as a word that others, a device among them, read and write at any
    /// time. None where they are outside the buffer, or not at a multiple of four.
    #[must_use]
    pub fn word(&self, offset: usize) -> Option<&AtomicU32> {
        let end = offset.checked_add(size_of::<AtomicU32>())?;
        if end > self.len || !offset.is_multiple_of(align_of::<AtomicU32>()) {
            return None;
        }
        // SAFETY: the word lies within the buffer, whose first byte is at a page boundary, so it is
        // aligned; the memory lives as long as `self`, which the reference borrows. Rows and words
        // share no bytes: whoever uses a word keeps its bytes for words.
        Some(unsafe { AtomicU32::from_ptr(self.address().add(offset).cast()) })
    }

    /// Makes the kernel give memory for `bytes` now, as if they were written to; the contents stay.
    pub fn prefault(&self, bytes: Range<usize>) -> io::Result<()> {
        let bytes = self.pages(&bytes)?;
        if let Some(advice) = system::POPULATE_WRITE {
            match self.advise(advice, bytes.clone()) {
                // Kernels before 5.14 do not know the advice.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
                outcome => return outcome,
            }
        }
        for offset in bytes.step_by(rustix::param::page_size()) {
            let byte = self.address().wrapping_add(offset);
            // SAFETY: `pages` keeps the offset inside the buffer, which is mapped for writing.
            // Writing back what was read changes nothing, unless somebody writes meanwhile: the
            // caller prefaults memory that nobody else uses yet.
            unsafe { byte.write_volatile(byte.read_volatile()) };
        }
        Ok(())
    }

    /// Makes huge pages of the ordinary ones of `bytes`, where the kernel finds room. May take
    /// long: a part at a time leaves the caller in control. Needs Linux 6.1.
    pub fn collapse(&self, bytes: Range<usize>) -> io::Result<()> {
        let bytes = self.pages(&bytes)?;
        let address = self.address().wrapping_add(bytes.start);
        system::collapse(address, bytes.end - bytes.start)
    }

    /// Says which memory nodes the buffer's pages come from, for pages touched from now on; those
    /// that are there already stay where they are.
    pub fn place(&self, nodes: &[u32], policy: NodePolicy) -> io::Result<()> {
        let in_turn = policy == NodePolicy::Interleave;
        system::place(self.address(), self.len, nodes, in_turn)
    }
}

/// Where the rows of one plane go: row `i` is the `row_bytes` bytes at `base + i * stride`.
#[derive(Debug)]
pub struct PlaneSink<'a> {
    base: *mut u8,
    stride: usize,
    row_bytes: usize,
    rows: usize,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: the sink has exclusive use of its memory for 'a, and threads sharing it write disjoint
// rows (see the module documentation), so moving or sharing the addresses across threads adds no
// access that was not there before.
unsafe impl Send for PlaneSink<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for PlaneSink<'_> {}

impl<'a> PlaneSink<'a> {
    /// A sink over `memory`, rows laid one after another with `stride` bytes from one to the next,
    /// the first at `offset`.
    pub fn new(
        memory: &'a mut [u8],
        offset: usize,
        stride: usize,
        row_bytes: usize,
        rows: usize,
    ) -> Result<Self> {
        let len = memory.len();
        // SAFETY: `memory` is an exclusive borrow for 'a, which the sink keeps.
        unsafe { Self::from_raw(memory.as_mut_ptr(), len, offset, stride, row_bytes, rows) }
    }

    /// As [`PlaneSink::new`], over memory known only by address.
    ///
    /// # Safety
    ///
    /// * `base` points to `len` bytes that stay allocated and writable for `'a`.
    /// * Nothing else reads or writes those bytes through a Rust reference during `'a`.
    pub unsafe fn from_raw(
        base: *mut u8,
        len: usize,
        offset: usize,
        stride: usize,
        row_bytes: usize,
        rows: usize,
    ) -> Result<Self> {
        debug_assert!(!base.is_null() || len == 0);
        let end = match rows {
            0 => Some(0),
            _ => (rows - 1)
                .checked_mul(stride)
                .and_then(|last| last.checked_add(offset))
                .and_then(|last| last.checked_add(row_bytes)),
        };
        if row_bytes > stride || end.is_none_or(|end| end > len) {
            return Err(Error::value(format!(
                "out holds {len} bytes; {rows} rows of {row_bytes} bytes every {stride} bytes from byte {offset} do not fit"
            )));
        }
        let base = if rows == 0 {
            base
        } else {
            base.wrapping_add(offset)
        };
        Ok(Self {
            base,
            stride,
            row_bytes,
            rows,
            memory: PhantomData,
        })
    }

    /// The same places, for as long as nobody uses this sink for others.
    pub(crate) fn again(&self) -> PlaneSink<'_> {
        PlaneSink {
            base: self.base,
            stride: self.stride,
            row_bytes: self.row_bytes,
            rows: self.rows,
            memory: PhantomData,
        }
    }

    /// Rows the sink holds.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Address of row `position`, valid for writes of `row_bytes` bytes.
    #[inline]
    pub(crate) fn row(&self, position: usize) -> *mut u8 {
        assert!(position < self.rows, "position {position} of {}", self.rows);
        // In bounds by the check in `from_raw`.
        self.base.wrapping_add(position * self.stride)
    }

    /// Addresses from the first row to the end of the last.
    pub(crate) fn addresses(&self) -> Range<usize> {
        let start = self.base as usize;
        let length = match self.rows {
            0 => 0,
            rows => (rows - 1) * self.stride + self.row_bytes,
        };
        start..start + length
    }

    /// Lets `fill` write the rows at `positions`, which lie without gaps.
    ///
    /// # Panics
    /// If there are gaps between rows, or not as many rows.
    pub(crate) fn fill<T>(&self, positions: Range<usize>, fill: impl FnOnce(&mut [u8]) -> T) -> T {
        assert_eq!(self.stride, self.row_bytes, "rows lie without gaps");
        assert!(positions.start <= positions.end && positions.end <= self.rows);
        let start = self.base.wrapping_add(positions.start * self.stride);
        let length = (positions.end - positions.start) * self.stride;
        // SAFETY: the rows lie in the sink's memory, without gaps, as asserted; no two threads are
        // given the same positions (see the module documentation), and nothing else refers to the
        // memory while the sink lives. It comes from the kernel or an allocator outside Rust, so
        // its bytes count as initialised.
        fill(unsafe { std::slice::from_raw_parts_mut(start, length) })
    }

    /// Writes one row.
    #[inline]
    pub fn write(&self, position: usize, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.row_bytes, "row length");
        // SAFETY: `row` gives an address valid for `row_bytes` writes, `bytes` has exactly that
        // length, and engram's own slots (where `bytes` lies) never overlap the caller's memory.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.row(position), self.row_bytes);
        }
    }

    /// Whether a row, written before and by nobody now, is `bytes`.
    pub(crate) fn holds(&self, position: usize, bytes: &[u8]) -> bool {
        assert_eq!(bytes.len(), self.row_bytes, "row length");
        self.look(position, |row| row == bytes)
    }

    /// Shows `look` a row, written before and by nobody now.
    pub(crate) fn look<T>(&self, position: usize, look: impl FnOnce(&[u8]) -> T) -> T {
        // SAFETY: `row` gives the address of `row_bytes` bytes, initialised because the row was
        // written; the caller sees to it that no thread writes to the row meanwhile.
        look(unsafe { std::slice::from_raw_parts(self.row(position), self.row_bytes) })
    }

    /// Fills one row with zeros.
    #[inline]
    pub fn zero(&self, position: usize) {
        // SAFETY: `row` gives an address valid for `row_bytes` writes.
        unsafe { std::ptr::write_bytes(self.row(position), 0, self.row_bytes) }
    }
}

#[cfg(test)]
mod tests;
