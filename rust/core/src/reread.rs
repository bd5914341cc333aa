//! Reading a row once more, in another way than the one it was served by.
//!
//! Two ways are independent as far as the machine allows: what came through the page cache is
//! compared with what the device says, and what came straight from the device with the page cache.

use crate::buffer::HostBuffer;
use crate::error::{Error, Result};
use crate::file::OpenFile;
use crate::reader::Reader;

/// Reads rows in the second way.
#[derive(Debug)]
pub(crate) struct Again {
    direct: bool,
    buffer: HostBuffer,
}

impl Again {
    /// For rows that `reader` serves.
    pub(crate) fn new(reader: &Reader) -> Result<Self> {
        Ok(Self {
            direct: reader.direct().is_none()
                && reader.files().iter().all(|file| file.direct().is_ok()),
            buffer: HostBuffer::new(1, false)?,
        })
    }

    /// Name of the way: `direct` or `pread`.
    pub(crate) fn name(&self) -> &'static str {
        if self.direct { "direct" } else { "pread" }
    }

    /// The `len` bytes at `offset` of `file`.
    pub(crate) fn read(&mut self, file: &OpenFile, offset: u64, len: usize) -> Result<&[u8]> {
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
        Ok(&self.buffer.as_mut_slice()[before..before + len])
    }
}
