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

use memmap2::{Advice, MmapMut};

use crate::error::{Error, Result};

/// Host memory that starts on a page boundary and never moves.
///
/// The memory is an anonymous private mapping: zeroed, allocated to exactly the size asked for
/// (rounded up to one page by the kernel), and suited to direct I/O and to registration with an
/// accelerator driver.
#[derive(Debug)]
pub struct HostBuffer {
    map: MmapMut,
    huge_pages: bool,
}

impl HostBuffer {
    /// Allocates `bytes` zeroed bytes. With `huge_pages` the kernel is advised to back them with
    /// huge pages; a refusal is not an error, [`HostBuffer::huge_pages`] says what happened.
    pub fn new(bytes: usize, huge_pages: bool) -> Result<Self> {
        let map = MmapMut::map_anon(bytes.max(1)).map_err(|error| Error::Io {
            doing: format!("cannot allocate {bytes} bytes of host memory"),
            errno: error.raw_os_error().unwrap_or(libc::ENOMEM),
            place: Box::default(),
        })?;
        let huge_pages = huge_pages && Self::advise_huge(&map).is_ok();
        Ok(Self { map, huge_pages })
    }

    #[cfg(target_os = "linux")]
    fn advise_huge(map: &MmapMut) -> io::Result<()> {
        map.advise(Advice::HugePage)
    }

    #[cfg(not(target_os = "linux"))]
    fn advise_huge(_map: &MmapMut) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Address of the first byte; constant for the buffer's life.
    pub fn address(&self) -> *mut u8 {
        self.map.as_ptr().cast_mut()
    }

    /// Bytes usable from [`HostBuffer::address`] on.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether the buffer holds no bytes (never true: the smallest mapping is one byte).
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Whether the kernel accepted the advice to use huge pages.
    pub fn huge_pages(&self) -> bool {
        self.huge_pages
    }

    /// The bytes, for the one owner that reads and writes them.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.map
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
        // SAFETY: `row` gives the address of `row_bytes` bytes, initialised because the row was
        // written; the caller sees to it that no thread writes to the row meanwhile.
        let row = unsafe { std::slice::from_raw_parts(self.row(position), self.row_bytes) };
        row == bytes
    }

    /// Fills one row with zeros.
    #[inline]
    pub fn zero(&self, position: usize) {
        // SAFETY: `row` gives an address valid for `row_bytes` writes.
        unsafe { std::ptr::write_bytes(self.row(position), 0, self.row_bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_buffer_is_zeroed_page_aligned_and_writable() {
        let mut buffer = HostBuffer::new(10_000, true).unwrap();
        assert_eq!(buffer.address() as usize % rustix::param::page_size(), 0);
        assert!(buffer.as_mut_slice().iter().all(|&byte| byte == 0));
        buffer.as_mut_slice()[9_999] = 7;
        assert_eq!(buffer.as_mut_slice()[9_999], 7);
        assert!(buffer.len() >= 10_000);
    }

    #[test]
    fn sinks_write_only_their_rows() {
        let mut memory = vec![9_u8; 20];
        {
            let sink = PlaneSink::new(&mut memory, 1, 6, 4, 3).unwrap();
            sink.write(0, &[1, 1, 1, 1]);
            sink.zero(2);
        }
        assert_eq!(
            memory,
            [9, 1, 1, 1, 1, 9, 9, 9, 9, 9, 9, 9, 9, 0, 0, 0, 0, 9, 9, 9]
        );
    }

    #[test]
    fn sinks_that_do_not_fit_are_refused() {
        let mut memory = vec![0_u8; 20];
        assert!(PlaneSink::new(&mut memory, 0, 4, 4, 6).is_err());
        assert!(PlaneSink::new(&mut memory, 1, 4, 4, 5).is_err());
        assert!(PlaneSink::new(&mut memory, 0, 4, 5, 2).is_err());
        assert!(PlaneSink::new(&mut memory, 0, usize::MAX, 4, 3).is_err());
        assert!(PlaneSink::new(&mut memory, 0, 4, 4, 5).is_ok());
        assert!(PlaneSink::new(&mut memory, 99, 4, 4, 0).is_ok());
    }

    #[test]
    #[should_panic(expected = "position 3 of 3")]
    fn writing_past_the_last_row_panics() {
        let mut memory = vec![0_u8; 12];
        PlaneSink::new(&mut memory, 0, 4, 4, 3).unwrap().zero(3);
    }
}
