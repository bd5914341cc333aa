//! `/proc/self/maps`: which file backs this address, and how much of this memory is huge pages.
//!
//! The kernel writes one line per mapping:
//!
//! ```text
//! 7f10c0000000-7f10d7d79000 rw-p 0412a000 fe:00 1001   /models/model-00001-of-00131.safetensors
//! ```
//!
//! A byte of the file at `offset` lies at `start + (byte - offset)`. Advice or protection that was
//! changed for a part of a mapping splits its line, so a tensor may span several of them; it is
//! backed by a file only if all are, and follow one another there as in memory.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Appended by the kernel to the name of a file that no longer has one.
const DELETED: &[u8] = b" (deleted)";

/// One line of `/proc/self/maps`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    /// Addresses.
    pub addresses: Range<u64>,
    /// Whether writes would go to other mappings of the same memory too.
    pub shared: bool,
    /// Offset in the file of the first address.
    pub offset: u64,
    /// Inode of the file; 0 for memory without a file.
    pub inode: u64,
    /// Path, or a name in brackets, or nothing.
    pub name: Vec<u8>,
}

/// Bytes of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileRange {
    /// The file, symbolic links followed.
    pub path: PathBuf,
    /// Offset of the first byte.
    pub offset: u64,
}

/// What backs memory that no checkpoint file backs: a phrase to follow "is backed by".
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotAFile(pub String);

/// Every mapping of a process, ascending by address.
#[derive(Debug, Clone, Default)]
pub struct Maps(Vec<Region>);

impl Maps {
    /// This process's mappings, as they are now.
    pub fn read() -> io::Result<Self> {
        fs::read("/proc/self/maps").map(|text| Self::parse(&text))
    }

    /// Parses the text of `/proc/self/maps`; lines that are none are left out.
    pub fn parse(text: &[u8]) -> Self {
        let mut regions: Vec<Region> = text.split(|&byte| byte == b'\n').filter_map(line).collect();
        regions.sort_by_key(|region| region.addresses.start);
        Self(regions)
    }

    /// The mappings that hold any of `addresses`.
    fn touching(&self, addresses: &Range<u64>) -> &[Region] {
        let first = self
            .0
            .partition_point(|region| region.addresses.end <= addresses.start);
        let count =
            self.0[first..].partition_point(|region| region.addresses.start < addresses.end);
        &self.0[first..first + count]
    }

    /// The file bytes behind `addresses`, which must not be empty.
    ///
    /// # Errors
    /// What backs the memory instead.
    pub fn file_range(&self, addresses: Range<u64>) -> Result<FileRange, NotAFile> {
        let regions = self.touching(&addresses);
        let Some(first) = regions.first() else {
            return Err(NotAFile("no mapping of this process".to_owned()));
        };
        let path = file_of(first)?;
        let mut next = first.addresses.start;
        for region in regions {
            // Differences of addresses and of offsets agree wherever one file runs on.
            let runs_on = region.addresses.start == next
                && region.inode == first.inode
                && region.name == first.name
                && region.offset.wrapping_sub(first.offset)
                    == region.addresses.start - first.addresses.start;
            if !runs_on {
                return Err(NotAFile(format!(
                    "several mappings, {} and {} among them",
                    describe(first),
                    describe(region)
                )));
            }
            next = region.addresses.end;
        }
        if addresses.start < first.addresses.start || addresses.end > next {
            return Err(NotAFile(format!(
                "{} for a part of its length only",
                describe(first)
            )));
        }
        Ok(FileRange {
            path,
            offset: first.offset + (addresses.start - first.addresses.start),
        })
    }
}

/// Parses one line; `None` if it is not one.
fn line(text: &[u8]) -> Option<Region> {
    let mut rest = text;
    let mut field = || {
        rest = rest.trim_ascii_start();
        let end = rest
            .iter()
            .position(|&byte| byte == b' ')
            .unwrap_or(rest.len());
        let (field, after) = rest.split_at(end);
        rest = after;
        std::str::from_utf8(field)
            .ok()
            .filter(|field| !field.is_empty())
    };
    let (start, end) = field()?.split_once('-')?;
    let permissions = field()?;
    let offset = field()?;
    let _device = field()?;
    let inode = field()?;
    let hexadecimal = |text| u64::from_str_radix(text, 16).ok();
    let addresses = hexadecimal(start)?..hexadecimal(end)?;
    // A name may itself begin with blanks only if it is no path, which no kernel name does.
    let name = unescape(rest.trim_ascii_start());
    Some(Region {
        addresses,
        shared: permissions.as_bytes().get(3) == Some(&b's'),
        offset: hexadecimal(offset)?,
        inode: inode.parse().ok()?,
        name,
    })
}

/// Line breaks in names are written `\012`; nothing else is escaped.
fn unescape(name: &[u8]) -> Vec<u8> {
    const ESCAPED: &[u8] = b"\\012";
    let mut plain = Vec::with_capacity(name.len());
    let mut rest = name;
    while let Some(&byte) = rest.first() {
        if let Some(after) = rest.strip_prefix(ESCAPED) {
            plain.push(b'\n');
            rest = after;
        } else {
            plain.push(byte);
            rest = &rest[1..];
        }
    }
    plain
}

/// The file a mapping is of, if it is one that rows can be read from.
fn file_of(region: &Region) -> Result<PathBuf, NotAFile> {
    let refuse = || Err(NotAFile(describe(region)));
    if region.inode == 0 || !region.name.starts_with(b"/") || is_memory(&region.name) {
        return refuse();
    }
    let path = Path::new(OsStr::from_bytes(&region.name));
    if region.name.ends_with(DELETED) && !is_named(path, region.inode) {
        return refuse();
    }
    if path.starts_with("/dev") && !is_checkpoint_in_memory(path) {
        return refuse();
    }
    Ok(path.to_owned())
}

/// Whether a file is really called so, its name merely looking like a deleted one's.
fn is_named(path: &Path, inode: u64) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.ino() == inode)
}

/// Names that the kernel gives to shared memory without a file.
fn is_memory(name: &[u8]) -> bool {
    [&b"/memfd:"[..], b"/SYSV", b"/dev/zero", b"/anon_hugepage"]
        .iter()
        .any(|prefix| name.starts_with(prefix))
}

/// Somebody may have copied a checkpoint to `/dev/shm`; anything else there is shared memory.
fn is_checkpoint_in_memory(path: &Path) -> bool {
    path.starts_with("/dev/shm")
        && path
            .extension()
            .is_some_and(|extension| extension == "safetensors")
}

/// Names what backs a mapping, for messages.
fn describe(region: &Region) -> String {
    let name = String::from_utf8_lossy(&region.name);
    match &region.name[..] {
        b"" => if region.shared {
            "shared anonymous memory"
        } else {
            "anonymous memory"
        }
        .to_owned(),
        b"[heap]" => "the heap".to_owned(),
        bracketed if bracketed.starts_with(b"[anon:") => format!("anonymous memory {name}"),
        bracketed if bracketed.starts_with(b"[stack") => "a stack".to_owned(),
        path if is_memory(path) || path.starts_with(b"/dev/shm/") => {
            format!("shared memory ({name})")
        }
        path if path.starts_with(b"/dev/") => format!("memory of a device driver ({name})"),
        path if path.ends_with(DELETED) => format!(
            "a file that has been deleted ({})",
            name.trim_end_matches(" (deleted)")
        ),
        _ => format!("{name}"),
    }
}

/// How much of a range of memory is backed by huge pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HugePages {
    /// Bytes in memory.
    pub resident: u64,
    /// Those in huge pages.
    pub huge: u64,
}

/// Asks the kernel how much of `addresses` is backed by huge pages.
///
/// The kernel counts per mapping, and joins neighbours that are alike into one; the counts are
/// those of the mappings that `addresses` touches.
pub fn huge_pages(addresses: Range<u64>) -> io::Result<HugePages> {
    fs::read("/proc/self/smaps").map(|text| count_huge_pages(&text, &addresses))
}

fn count_huge_pages(text: &[u8], addresses: &Range<u64>) -> HugePages {
    let mut total = HugePages::default();
    let mut inside = false;
    for text in text.split(|&byte| byte == b'\n') {
        if let Some(region) = line(text) {
            inside =
                region.addresses.start < addresses.end && addresses.start < region.addresses.end;
        } else if inside {
            total.resident += kilobytes(text, "Rss:");
            total.huge += kilobytes(text, "AnonHugePages:") + kilobytes(text, "ShmemPmdMapped:");
        }
    }
    total
}

/// Bytes of a line such as `Rss:  2048 kB`; 0 for any other line.
fn kilobytes(text: &[u8], key: &str) -> u64 {
    let Some(value) = text.strip_prefix(key.as_bytes()) else {
        return 0;
    };
    std::str::from_utf8(value)
        .ok()
        .and_then(|value| value.trim().strip_suffix(" kB")?.parse::<u64>().ok())
        .map_or(0, |kilobytes| kilobytes.saturating_mul(1024))
}

#[cfg(test)]
mod tests;
