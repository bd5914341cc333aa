//! Reading a row once more, in another way than the one it was served by.
//!
//! Two ways are independent as far as the machine allows: what came through the page cache is
//! compared with what the device says, and what came straight from the device with the page cache.

use std::ops::Range;

use crate::buffer::HostBuffer;
use crate::error::{Error, Result};
use crate::file::OpenFile;
use crate::reader::Reader;

/// Reads rows in the second way.
#[derive(Debug)]
pub(crate) struct Again {
    direct: bool,
    buffer: HostBuffer,
    /// Which bytes of a file were read last, and where in the buffer they begin.
    held: Held,
}

/// Bytes of a file that lie in a buffer.
#[derive(Debug, Default)]
struct Held {
    /// Address of the file, 0 for none.
    file: usize,
    bytes: Range<u64>,
    at: usize,
}

/// Most bytes read at once for rows that follow one another.
const MOST_AHEAD: usize = 1 << 20;

impl Again {
    /// For rows that `reader` serves.
    pub(crate) fn new(reader: &Reader) -> Result<Self> {
        Ok(Self {
            direct: reader.mode().direct.is_none()
                && reader.files().iter().all(|file| file.direct().is_ok()),
            buffer: HostBuffer::new(1, false)?,
            held: Held::default(),
        })
    }

    /// Name of the way: `direct` or `pread`.
    pub(crate) fn name(&self) -> &'static str {
        if self.direct { "direct" } else { "pread" }
    }

    /// Reads as many of `rows` rows from `offset` of `file` on at once as is reasonable; whether that
    /// went well. Where not, each row has to be read alone, so that the bad one is found.
    pub(crate) fn hold(
        &mut self,
        file: &OpenFile,
        offset: u64,
        row_bytes: usize,
        rows: u64,
    ) -> bool {
        let most = (MOST_AHEAD / row_bytes.max(1)).max(1);
        let rows = usize::try_from(rows).map_or(most, |rows| rows.min(most));
        self.load(file, offset, rows * row_bytes).is_ok()
    }

    /// The `len` bytes at `offset` of `file`, if they are among those held.
    pub(crate) fn held(&mut self, file: &OpenFile, offset: u64, len: usize) -> Option<&[u8]> {
        let held = &self.held;
        if held.file != address(file)
            || offset < held.bytes.start
            || held.bytes.end < offset + len as u64
        {
            return None;
        }
        let at = held.at + usize::try_from(offset - held.bytes.start).ok()?;
        Some(&self.buffer.as_mut_slice()[at..at + len])
    }

    /// The `len` bytes at `offset` of `file`, read anew.
    pub(crate) fn read(&mut self, file: &OpenFile, offset: u64, len: usize) -> Result<&[u8]> {
        self.load(file, offset, len)?;
        let at = self.held.at;
        Ok(&self.buffer.as_mut_slice()[at..at + len])
    }

    /// Reads into the buffer, and notes what it holds.
    fn load(&mut self, file: &OpenFile, offset: u64, len: usize) -> Result<()> {
        self.held = Held::default();
        let alignment = match file.direct() {
            Ok(direct) if self.direct => direct.alignment(),
            _ => 1,
        };
        let start = offset / alignment * alignment;
        let end = (offset + len as u64).next_multiple_of(alignment);
        let fail = |at: usize, errno: i32, doing: &str| {
            Error::os(doing, errno, file.path()).at_offset(start + at as u64)
        };
        let room = usize::try_from(end - start)
            .map_err(|_| fail(0, libc::EOVERFLOW, "cannot read a row again"))?;
        if self.buffer.len() < room {
            self.buffer = HostBuffer::new(room.next_power_of_two(), false)?;
        }
        let before = room - usize::try_from(end - offset).unwrap_or(room);
        let mut filled = 0;
        while filled < before + len {
            let rest = &mut self.buffer.as_mut_slice()[filled..room];
            match file.read_at(rest, start + filled as u64, self.direct) {
                Ok(0) => {
                    let doing = "cannot read a row again: the file ended early";
                    return Err(fail(filled, libc::EIO, doing));
                }
                Ok(bytes) => filled += bytes,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    let errno = error.raw_os_error().unwrap_or(libc::EIO);
                    return Err(fail(filled, errno, "cannot read a row again"));
                }
            }
        }
        self.held = Held {
            file: address(file),
            bytes: offset..offset + len as u64,
            at: before,
        };
        Ok(())
    }
}

fn address(file: &OpenFile) -> usize {
    std::ptr::from_ref(file).addr()
}
