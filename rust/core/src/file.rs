//! An open file of a checkpoint: its descriptors, its mapping, and what is believed of its pages.
//!
//! One descriptor per file, one more when direct I/O is asked for, one mapping. All are read-only,
//! and shared by every table that has rows in the file.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use arc_swap::ArcSwapOption;
use once_cell::race::OnceBox;

use crate::buffer::HostBuffer;
use crate::checkpoint::{CheckpointFile, Identity};
use crate::error::{Error, Result};
use crate::fault;
use crate::filesystem::Filesystem;
use crate::map::Map;
use crate::residency::Residency;

/// A descriptor that bypasses the page cache.
#[derive(Debug)]
pub struct Direct {
    file: File,
    alignment: u64,
}

impl Direct {
    /// Alignment in bytes that offset, length and memory address of every read must have.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }
}

/// Whether files are mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mapping {
    /// Not at all.
    Never,
    /// Unless the filesystem is remote or the kernel refuses.
    IfSafe,
    /// Even on a remote filesystem.
    Required,
}

/// How a file was asked to be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Wanted {
    mapping: Mapping,
    random: bool,
}

/// A checkpoint file opened for reading rows.
#[derive(Debug)]
pub struct OpenFile {
    path: PathBuf,
    wanted: Wanted,
    file: File,
    identity: Identity,
    filesystem: Filesystem,
    map: std::result::Result<Arc<Map>, NoMap>,
    /// Bytes left of the file when it was found cut short; `u64::MAX` until then.
    cut: AtomicU64,
    // Two threads may both make one, of which one stays: a fork while one waits for another would
    // leave the child waiting for ever.
    residency: OnceBox<Arc<Residency>>,
    may_query: bool,
    direct: OnceBox<std::result::Result<Direct, i32>>,
}

/// Why a file is not mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoMap {
    /// Nobody asked for it.
    NotWanted,
    /// The filesystem is remote.
    Remote,
    /// `ENGRAM_SIGBUS=0` says that engram may not answer for pages that cannot be read.
    Forbidden,
    /// The kernel refused with this error number.
    Refused(i32),
}

impl OpenFile {
    /// Opens a file whose header was read before; it must still be the same, unchanged file. With
    /// `random`, faults on the mapping read one page and nothing around it.
    ///
    /// A file that is open already in the same way is shared: one descriptor and one mapping serve
    /// every table with rows in it, and what one reader learns of its pages the others know.
    pub fn open(
        checkpoint_file: &CheckpointFile,
        mapping: Mapping,
        random: bool,
    ) -> Result<Arc<Self>> {
        let wanted = Wanted { mapping, random };
        if let Some(open) = registered(checkpoint_file, wanted) {
            return Ok(open);
        }
        let path = checkpoint_file.resolved.as_path();
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_CLOEXEC)
            .open(path)
            .map_err(|error| open_error(&error, path))?;
        let metadata = file
            .metadata()
            .map_err(|error| Error::io("cannot stat", &error, path))?;
        let identity = Identity::of(&metadata);
        if identity != checkpoint_file.identity {
            return Err(Error::checkpoint(
                "the file changed between reading its header and opening it for rows; open the checkpoint again",
                path,
            ));
        }
        let len = identity.len;
        let filesystem = rustix::fs::fstatfs(&file).map_or(
            Filesystem {
                name: "unknown",
                remote: false,
            },
            |statfs| Filesystem::from_magic(statfs.f_type.cast_unsigned() & 0xFFFF_FFFF),
        );
        // Reads of single rows must not pull in their neighbourhood.
        #[cfg(target_os = "linux")]
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random);
        let map = match mapping {
            Mapping::Never => Err(NoMap::NotWanted),
            _ if !fault::allowed() => Err(NoMap::Forbidden),
            Mapping::IfSafe if filesystem.remote => Err(NoMap::Remote),
            Mapping::IfSafe | Mapping::Required => Map::new(&file, len)
                .map(Arc::new)
                .map_err(|error| NoMap::Refused(error.raw_os_error().unwrap_or(libc::EIO))),
        };
        if let (Ok(map), true) = (&map, random) {
            // A hint: without it a wrong belief costs a larger read.
            let _ = map.advise_random();
        }
        let may_query = may_query(&metadata, path);
        let open = Arc::new(Self {
            path: path.to_owned(),
            wanted,
            file,
            identity,
            filesystem,
            map,
            cut: AtomicU64::new(u64::MAX),
            residency: OnceBox::new(),
            may_query,
            direct: OnceBox::new(),
        });
        register(&open);
        Ok(open)
    }

    /// The path as it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes in the file when it was opened.
    pub fn len(&self) -> u64 {
        self.identity.len
    }

    /// What the file was when it was opened.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// What the file is now.
    pub(crate) fn identity_now(&self) -> io::Result<Identity> {
        self.file.metadata().map(|metadata| Identity::of(&metadata))
    }

    /// Whether the file has no bytes.
    pub fn is_empty(&self) -> bool {
        self.identity.len == 0
    }

    /// Bytes left of the file, if it was found cut short while open. What was beyond is gone for
    /// good, whatever is written there later.
    pub fn cut(&self) -> Option<u64> {
        Some(self.cut.load(Ordering::Relaxed)).filter(|&cut| cut != u64::MAX)
    }

    /// Where the file ends, as far as is known.
    pub(crate) fn end(&self) -> u64 {
        self.identity.len.min(self.cut.load(Ordering::Relaxed))
    }

    /// Looks at the file's size, a tenth of a microsecond; whether it has never been found short.
    /// The last page of a file that was cut reads as zeros from a mapping, without any fault.
    pub(crate) fn is_whole(&self) -> io::Result<bool> {
        let size = rustix::fs::seek(&self.file, rustix::fs::SeekFrom::End(0))?;
        if size < self.identity.len {
            self.note_cut(size);
        }
        Ok(self.cut.load(Ordering::Relaxed) == u64::MAX)
    }

    #[cold]
    fn note_cut(&self, size: u64) {
        self.cut.fetch_min(size, Ordering::Relaxed);
        let residency = self.residency();
        residency.bar(&(residency.pages_of(size, 1).start..residency.pages()));
    }

    /// Believes nothing of what the mapping lost. If the file was changed meanwhile, what was lost
    /// is taken for cut off.
    #[cold]
    pub(crate) fn give_up_lost(&self) -> io::Result<()> {
        let Some(lost) = self.map().ok().and_then(|map| map.lost()) else {
            return Ok(());
        };
        let residency = self.residency();
        residency.bar(&residency.pages_of(lost.start, lost.end - lost.start));
        if self.is_whole()? && self.identity_now()? != self.identity {
            // Cut and made longer again: where in its last page it ended meanwhile is not known.
            self.note_cut(lost.start.saturating_sub(rustix::param::page_size() as u64));
        }
        Ok(())
    }

    /// The filesystem it lives on.
    pub fn filesystem(&self) -> Filesystem {
        self.filesystem
    }

    /// The mapping, or why there is none.
    pub fn map(&self) -> std::result::Result<&Arc<Map>, NoMap> {
        self.map.as_ref().map_err(|reason| *reason)
    }

    /// What is believed of the file's pages.
    #[inline]
    pub fn residency(&self) -> &Arc<Residency> {
        self.residency
            .get_or_init(|| Box::new(Arc::new(Residency::new(self.identity.len))))
    }

    /// Whether the kernel answers truthfully which pages are in memory: it does so only to the
    /// owner of the file and to those who may write it.
    pub fn may_query(&self) -> bool {
        self.may_query
    }

    /// Raw descriptor for submission queues, direct or through the page cache.
    pub(crate) fn raw_fd(&self, direct: bool) -> i32 {
        match self.direct.get() {
            Some(Ok(descriptor)) if direct => descriptor.file.as_raw_fd(),
            _ => self.file.as_raw_fd(),
        }
    }

    /// Positional read, possibly short.
    pub(crate) fn read_at(
        &self,
        buffer: &mut [u8],
        offset: u64,
        direct: bool,
    ) -> io::Result<usize> {
        match self.direct.get() {
            Some(Ok(descriptor)) if direct => descriptor.file.read_at(buffer, offset),
            _ => self.file.read_at(buffer, offset),
        }
    }

    /// Positional read that returns `EAGAIN` instead of waiting for a device.
    #[cfg(target_os = "linux")]
    pub(crate) fn read_cached_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut slices = [io::IoSliceMut::new(buffer)];
        Ok(rustix::io::preadv2(
            &self.file,
            &mut slices,
            offset,
            rustix::io::ReadWriteFlags::NOWAIT,
        )?)
    }

    /// As on Linux, where nothing can answer: always `EAGAIN`.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn read_cached_at(&self, _buffer: &mut [u8], _offset: u64) -> io::Result<usize> {
        Err(io::Error::from_raw_os_error(libc::EAGAIN))
    }

    /// Asks the kernel to start reading `len` bytes at `offset` into the page cache.
    pub fn will_need(&self, offset: u64, len: u64) -> io::Result<()> {
        #[cfg(target_os = "linux")]
        rustix::fs::fadvise(
            &self.file,
            offset,
            std::num::NonZeroU64::new(len),
            rustix::fs::Advice::WillNeed,
        )?;
        #[cfg(not(target_os = "linux"))]
        let _ = (offset, len);
        Ok(())
    }

    /// A second descriptor of the same file, without the advice for random reads.
    pub(crate) fn reopen(&self) -> Result<File> {
        let refuse = |error: io::Error| open_error(&error, &self.path);
        #[cfg(target_os = "linux")]
        return File::open(format!("/proc/self/fd/{}", self.file.as_raw_fd())).map_err(refuse);
        #[cfg(not(target_os = "linux"))]
        return File::open(&self.path).map_err(refuse);
    }

    /// Refuses what was read through `handle`, another descriptor of this file, if the file was
    /// written to since it was opened: some of it may be old and some new.
    pub(crate) fn require_unchanged(&self, handle: &File) -> Result<()> {
        let metadata = handle
            .metadata()
            .map_err(|error| Error::io("cannot stat", &error, &self.path))?;
        if Identity::of(&metadata) == self.identity {
            return Ok(());
        }
        let text = "the file was written to since it was opened, so what was read of it may be old \
                    and new in parts; open the checkpoint again";
        Err(Error::checkpoint(text, &self.path))
    }

    /// The direct descriptor, opened and proved by one real read on first use.
    pub fn direct(&self) -> std::result::Result<&Direct, i32> {
        self.direct
            .get_or_init(|| Box::new(self.open_direct()))
            .as_ref()
            .map_err(|errno| *errno)
    }

    #[cfg(target_os = "linux")]
    fn open_direct(&self) -> std::result::Result<Direct, i32> {
        let errno = |error: &io::Error| error.raw_os_error().unwrap_or(libc::EINVAL);
        // Through the descriptor, so that a file renamed over the path meanwhile is not opened.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_CLOEXEC | libc::O_DIRECT)
            .open(format!("/proc/self/fd/{}", self.file.as_raw_fd()))
            .map_err(|error| errno(&error))?;
        let flags = rustix::fs::fcntl_getfl(&file).map_err(rustix::io::Errno::raw_os_error)?;
        if !flags.contains(rustix::fs::OFlags::DIRECT) {
            return Err(libc::EOPNOTSUPP);
        }
        let alignment = direct_alignment(file.as_fd());
        // Some stacks accept the flag and refuse every read: only a read proves that it works.
        let mut probe = HostBuffer::new(usize::try_from(alignment).unwrap_or(4096), false)
            .map_err(|_| libc::ENOMEM)?;
        let length = usize::try_from(alignment).unwrap_or(4096);
        let read = file
            .read_at(&mut probe.as_mut_slice()[..length], 0)
            .map_err(|error| errno(&error))?;
        let expected = usize::try_from(self.identity.len.min(alignment)).unwrap_or(length);
        if read < expected {
            return Err(libc::EINVAL);
        }
        Ok(Direct { file, alignment })
    }

    #[cfg(not(target_os = "linux"))]
    fn open_direct(&self) -> std::result::Result<Direct, i32> {
        Err(libc::EOPNOTSUPP)
    }
}

/// Files that are open for reading rows: to be shared, and for [`drop_cache`] to unmap their pages.
/// Replaced as a whole, so that nobody waits for a lock that a fork has orphaned, or for a file whose
/// filesystem hangs.
static OPEN: ArcSwapOption<Vec<Weak<OpenFile>>> = ArcSwapOption::const_empty();

/// A file that is open in the wanted way and sound.
fn registered(checkpoint_file: &CheckpointFile, wanted: Wanted) -> Option<Arc<OpenFile>> {
    open_files().find(|file| {
        file.identity == checkpoint_file.identity
            && file.path == checkpoint_file.resolved
            && file.wanted == wanted
            && file.is_whole().unwrap_or(false)
            && file.map().ok().and_then(|map| map.lost()).is_none()
    })
}

fn open_files() -> impl Iterator<Item = Arc<OpenFile>> {
    let open = OPEN.load_full().unwrap_or_default();
    (0..open.len()).filter_map(move |place| open[place].upgrade())
}

fn register(file: &Arc<OpenFile>) {
    OPEN.rcu(|open| {
        let still_open = open.iter().flat_map(|open| open.iter());
        let mut files: Vec<_> = still_open
            .filter(|file| file.strong_count() > 0)
            .cloned()
            .collect();
        files.push(Arc::downgrade(file));
        Some(Arc::new(files))
    });
}

/// Drops the page cache of the file at `path` and forgets what was believed of its pages; returns
/// the bytes that stayed resident all the same (pages that another process has mapped or locked).
/// For benchmarks and tests.
pub fn drop_cache(path: &Path) -> Result<u64> {
    let refuse = |error: io::Error| Error::io("cannot drop the page cache", &error, path);
    let file = File::open(path).map_err(|error| open_error(&error, path))?;
    let identity = Identity::of(&file.metadata().map_err(refuse)?);
    for file in open_files().filter(|open| open.identity == identity) {
        // Pages in this process's page tables would survive the advice below.
        if let Ok(map) = file.map() {
            map.trim(0..map.len()).map_err(refuse)?;
        }
        let residency = file.residency();
        residency.clear(0..residency.pages());
    }
    // Dirty pages survive it as well.
    file.sync_all().map_err(refuse)?;
    #[cfg(target_os = "linux")]
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)
        .map_err(|errno| refuse(errno.into()))?;
    if identity.len == 0 {
        return Ok(0);
    }
    let map = Map::for_queries(&file, identity.len).map_err(refuse)?;
    let page = rustix::param::page_size() as u64;
    let mut states = Vec::new();
    map.resident(0..identity.len.div_ceil(page), &mut states)
        .map_err(refuse)?;
    Ok(states.iter().filter(|&&state| state & 1 == 1).count() as u64 * page)
}

/// Alignment for direct reads: what the kernel says since 6.1, else a page, which every block
/// device accepts.
#[cfg(target_os = "linux")]
fn direct_alignment(file: BorrowedFd<'_>) -> u64 {
    use rustix::fs::{AtFlags, StatxFlags, statx};
    let page = rustix::param::page_size() as u64;
    statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        .ok()
        .filter(|answer| answer.stx_mask & StatxFlags::DIOALIGN.bits() != 0)
        .map(|answer| u64::from(answer.stx_dio_offset_align.max(answer.stx_dio_mem_align)))
        .filter(|alignment| alignment.is_power_of_two() && (512..=page).contains(alignment))
        .unwrap_or(page)
}

fn may_query(metadata: &std::fs::Metadata, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let user = rustix::process::geteuid();
    user.is_root()
        || metadata.uid() == user.as_raw()
        || rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_ok()
}

fn open_error(error: &io::Error, path: &Path) -> Error {
    let doing = match error.raw_os_error() {
        Some(libc::EMFILE) => {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
            format!(
                "cannot open (this process may hold {} files open; raise the limit with `ulimit -n`)",
                limit.map_or_else(|| "unlimited".to_owned(), |limit| limit.to_string())
            )
        }
        _ => "cannot open".to_owned(),
    };
    Error::io(doing, error, path)
}

#[cfg(test)]
mod tests;
