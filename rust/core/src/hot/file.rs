//! The file that says which rows were in a cache.
//!
//! ```text
//! magic (8 bytes)   version (4)   length of the header (4)   header (JSON)
//! blocks: number of rows (4), then per row, by ascending id: its distance from the one before, as
//!   7 bits per byte, the lowest first, each byte but the last with its high bit set; then a byte
//!   that says how often it was wanted
//! a block of 0 rows   CRC-32 of everything before (4)
//! ```
//!
//! Numbers are little-endian, a distance is one less than the difference of ids. It is read anew each
//! time it is gone through, so that nothing is believed before the checksum has been seen, and never
//! held in memory.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::reader::Reader;

const MAGIC: &[u8; 8] = b"ENGRMHOT";
const VERSION: u32 = 1;

/// Rows of a block, at most.
const BLOCK: usize = 1 << 16;

/// Files begun by this process: each has a temporary name of its own.
static WRITERS: AtomicU64 = AtomicU64::new(0);

/// Longest header believed: one of a hundred thousand files would fit.
const LONGEST_HEADER: u32 = 4 << 20;

/// Which table the rows are of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    pub(super) table: String,
    pub(super) rows: u64,
    pub(super) encoding: String,
    /// Bytes of a row, per plane.
    pub(super) row_bytes: Vec<u64>,
    /// Bytes of each file.
    pub(super) files: Vec<u64>,
}

impl Identity {
    pub(super) fn of(reader: &Reader) -> Self {
        let table = reader.table();
        Self {
            table: table.name.clone(),
            rows: table.rows(),
            encoding: table.encoding.name(),
            row_bytes: table
                .planes
                .iter()
                .map(|plane| plane.row_bytes() as u64)
                .collect(),
            files: reader.files().iter().map(|file| file.len()).collect(),
        }
    }
}

/// CRC-32 as of zip and PNG.
#[derive(Debug, Clone, Copy)]
struct Checksum(u32);

const CRC: [u32; 256] = {
    let mut table = [0; 256];
    let mut index = 0_u32;
    while index < 256 {
        let mut value = index;
        let mut bit = 0;
        while bit < 8 {
            value = (value >> 1) ^ (if value & 1 == 1 { 0xEDB8_8320 } else { 0 });
            bit += 1;
        }
        table[index as usize] = value;
        index += 1;
    }
    table
};

impl Checksum {
    const EMPTY: Self = Self(u32::MAX);

    fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            let [low, ..] = self.0.to_le_bytes();
            self.0 = (self.0 >> 8) ^ CRC[usize::from(low ^ byte)];
        }
    }

    fn value(self) -> u32 {
        !self.0
    }
}

/// Writes the file under another name and puts it in its place when it is whole.
#[derive(Debug)]
pub(super) struct Writer {
    path: PathBuf,
    temporary: PathBuf,
    file: BufWriter<File>,
    checksum: Checksum,
    previous: Option<u64>,
    finished: bool,
}

impl Writer {
    /// Begins a file at `path`.
    pub(super) fn new(path: &Path, identity: &Identity) -> Result<Self> {
        let name = path
            .file_name()
            .ok_or_else(|| Error::value(format!("{} names no file to write", path.display())))?;
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        let number = WRITERS.fetch_add(1, Ordering::Relaxed);
        hidden.push(format!(".{}.{number}.part", std::process::id()));
        let temporary = path.with_file_name(hidden);
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW)
            .open(&temporary)
            .map_err(|error| Error::io("cannot write the list of cached rows", &error, path))?;
        let mut writer = Self {
            path: path.to_owned(),
            temporary,
            file: BufWriter::new(file),
            checksum: Checksum::EMPTY,
            previous: None,
            finished: false,
        };
        let header = serde_json::to_vec(identity)
            .map_err(|error| Error::value(format!("cannot describe the table: {error}")))?;
        let length = u32::try_from(header.len())
            .ok()
            .filter(|&length| length <= LONGEST_HEADER)
            .ok_or_else(|| Error::value("the table has too many files to list"))?;
        writer.put(MAGIC)?;
        writer.put(&VERSION.to_le_bytes())?;
        writer.put(&length.to_le_bytes())?;
        writer.put(&header)?;
        Ok(writer)
    }

    fn refuse(&self, error: &io::Error) -> Error {
        Error::io("cannot write the list of cached rows", error, &self.path)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.checksum.add(bytes);
        let written = self.file.write_all(bytes);
        written.map_err(|error| self.refuse(&error))
    }

    /// Adds rows, ids ascending and above those of earlier calls.
    pub(super) fn rows(&mut self, rows: &[(u64, u8)]) -> Result<()> {
        for block in rows.chunks(BLOCK) {
            let count = u32::try_from(block.len()).unwrap_or(u32::MAX);
            self.put(&count.to_le_bytes())?;
            for &(id, wanted) in block {
                self.row(id, wanted)?;
            }
        }
        Ok(())
    }

    fn row(&mut self, id: u64, wanted: u8) -> Result<()> {
        let mut distance = id - self.previous.map_or(0, |previous| previous + 1);
        self.previous = Some(id);
        let mut bytes = [0; 11];
        let mut length = 0;
        loop {
            let [low, ..] = distance.to_le_bytes();
            distance >>= 7;
            bytes[length] = (low & 0x7F) | if distance > 0 { 0x80 } else { 0 };
            length += 1;
            if distance == 0 {
                break;
            }
        }
        bytes[length] = wanted;
        self.put(&bytes[..=length])
    }

    /// Puts the file in its place.
    pub(super) fn finish(mut self) -> Result<()> {
        self.put(&0_u32.to_le_bytes())?;
        let checksum = self.checksum.value().to_le_bytes();
        let outcome = self
            .file
            .write_all(&checksum)
            .and_then(|()| self.file.flush())
            .and_then(|()| self.file.get_ref().sync_all())
            .and_then(|()| std::fs::rename(&self.temporary, &self.path));
        self.finished = outcome.is_ok();
        outcome.map_err(|error| self.refuse(&error))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if !self.finished {
            // What was begun is of no use; a file that stays behind harms nobody.
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

/// Opens a list; never waits for the other end of a pipe.
fn open(path: &Path) -> Result<File> {
    let refuse = |error: io::Error| Error::io("cannot read the list of cached rows", &error, path);
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(refuse)?;
    let kind = file.metadata().map_err(refuse)?.file_type();
    // Reading a directory fails, and says so.
    if kind.is_file() || kind.is_dir() {
        return Ok(file);
    }
    Err(Error::checkpoint(
        "this is no regular file, so it cannot be a list of cached rows; pass one that save_hot wrote",
        path,
    ))
}

/// Reads the rows of a file.
#[derive(Debug)]
pub(super) struct Rows {
    path: PathBuf,
    file: BufReader<File>,
    checksum: Checksum,
    identity: Identity,
    /// Rows left of the block.
    left: u32,
    /// The smallest id that can come next.
    next: u64,
    header_bytes: usize,
}

impl Rows {
    /// Opens the file at `path`; only its header has been looked at.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = open(path)?;
        let mut rows = Self {
            path: path.to_owned(),
            file: BufReader::with_capacity(1 << 16, file),
            checksum: Checksum::EMPTY,
            identity: Identity {
                table: String::new(),
                rows: 0,
                encoding: String::new(),
                row_bytes: Vec::new(),
                files: Vec::new(),
            },
            left: 0,
            next: 0,
            header_bytes: 0,
        };
        let magic: [u8; 8] = rows.take()?;
        if &magic != MAGIC {
            return Err(rows.bad("is not a list of cached rows"));
        }
        let version = u32::from_le_bytes(rows.take()?);
        if version != VERSION {
            return Err(rows.bad(&format!(
                "has format version {version}, and this engram knows {VERSION}"
            )));
        }
        let length = u32::from_le_bytes(rows.take()?);
        if length > LONGEST_HEADER {
            return Err(rows.bad("is damaged: its header would be too long"));
        }
        let mut header = vec![0; length as usize];
        rows.fill(&mut header)?;
        rows.identity = serde_json::from_slice(&header)
            .map_err(|error| rows.bad(&format!("is damaged: {error}")))?;
        rows.header_bytes = 16 + header.len();
        Ok(rows)
    }

    pub(super) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// An error about this file.
    pub(super) fn bad(&self, what: &str) -> Error {
        Error::checkpoint(
            format!("the file {what}; delete it and write a new one with save_hot"),
            &self.path,
        )
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<()> {
        match self.file.read_exact(bytes) {
            Ok(()) => {
                self.checksum.add(bytes);
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(self.bad("is damaged: it ends too early"))
            }
            Err(error) => Err(Error::io(
                "cannot read the list of cached rows",
                &error,
                &self.path,
            )),
        }
    }

    fn take<const BYTES: usize>(&mut self) -> Result<[u8; BYTES]> {
        let mut bytes = [0; BYTES];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    /// The next row and how often it was wanted; `None` after the last, once the checksum agrees.
    pub(super) fn next(&mut self) -> Result<Option<(u64, u8)>> {
        if self.left == 0 {
            self.left = u32::from_le_bytes(self.take()?);
        }
        if self.left == 0 {
            let computed = self.checksum.value();
            let stored = u32::from_le_bytes(self.take()?);
            let mut more = [0];
            let ended = matches!(self.file.read(&mut more), Ok(0));
            return if stored == computed && ended {
                Ok(None)
            } else {
                Err(self.bad("is damaged: its checksum is wrong"))
            };
        }
        let mut distance = 0_u64;
        let mut shift = 0;
        loop {
            let [byte] = self.take()?;
            let bits = u64::from(byte & 0x7F);
            if shift >= 64 || (bits << shift) >> shift != bits {
                return Err(self.bad("is damaged: it lists a row that no table has"));
            }
            distance |= bits << shift;
            shift += 7;
            if byte & 0x80 == 0 {
                break;
            }
        }
        let [wanted] = self.take()?;
        let id = self.next.checked_add(distance);
        let Some(id) = id.filter(|&id| id < self.identity.rows) else {
            return Err(self.bad("is damaged: it lists a row that the table does not have"));
        };
        self.next = id + 1;
        self.left -= 1;
        Ok(Some((id, wanted)))
    }

    /// Goes back to the first row, for a second look at a file that was found good.
    pub(super) fn rewind(&mut self) -> Result<()> {
        self.file.seek(SeekFrom::Start(0)).map_err(|error| {
            Error::io("cannot read the list of cached rows", &error, &self.path)
        })?;
        self.checksum = Checksum::EMPTY;
        let mut before = vec![0; self.header_bytes];
        self.fill(&mut before)?;
        self.left = 0;
        self.next = 0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_zip() {
        let mut checksum = Checksum::EMPTY;
        checksum.add(b"12345");
        checksum.add(b"6789");
        assert_eq!(checksum.value(), 0xCBF4_3926);
    }
}
