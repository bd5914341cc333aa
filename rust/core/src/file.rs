//! An open file of a checkpoint: its descriptors, its mapping, and what is believed of its pages.
//!
//! One descriptor per file, one more when direct I/O is asked for, one mapping. All are read-only,
//! and shared by every table that has rows in the file.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use once_cell::race::{OnceBool, OnceBox};

use crate::buffer::HostBuffer;
use crate::checkpoint::{CheckpointFile, Identity};
use crate::error::{Error, Result};
use crate::fault;
use crate::filesystem::Filesystem;
use crate::map::Map;
use crate::residency::Residency;
use crate::system;

mod registry;

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
    path: Arc<Path>,
    wanted: Wanted,
    file: Arc<File>,
    identity: Identity,
    filesystem: Filesystem,
    map: std::result::Result<Arc<Map>, NoMap>,
    /// Bytes left of the file when it was found cut short; `u64::MAX` until then.
    cut: AtomicU64,
    // Two threads may both make one, of which one stays: a fork while one waits for another would
    // leave the child waiting for ever.
    residency: OnceBox<Arc<Residency>>,
    may_query: OnceBool,
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
    /// Opens files whose headers were read before; they must still be the same, unchanged files.
    /// `handles` has those that are open already, by the same numbers. With `random`, faults on the
    /// mapping read one page and nothing around it.
    ///
    /// A file that is open already in the same way is shared: one descriptor and one mapping serve
    /// every table with rows in it, and what one reader learns of its pages the others know.
    pub fn open_all(
        files: &[CheckpointFile],
        handles: &[Option<Arc<File>>],
        mapping: Mapping,
        random: bool,
    ) -> Result<Vec<Arc<Self>>> {
        let wanted = Wanted { mapping, random };
        let mut filesystems = Filesystems::default();
        let registered = registry::now();
        let mut open = Vec::with_capacity(files.len());
        let mut new = Vec::new();
        for (number, file) in files.iter().enumerate() {
            if let Some(shared) = registered.find(file, wanted) {
                open.push(shared);
                continue;
            }
            let handle = handles.get(number).cloned().flatten();
            let opened = Self::open_new(file, handle, wanted, &mut filesystems)?;
            new.push(Arc::clone(&opened));
            open.push(opened);
        }
        registry::add(&new);
        Ok(open)
    }

    /// One such file.
    #[cfg(test)]
    pub(crate) fn open(file: &CheckpointFile, mapping: Mapping, random: bool) -> Result<Arc<Self>> {
        let opened = Self::open_all(std::slice::from_ref(file), &[], mapping, random)?;
        Ok(opened.into_iter().next().expect("one file was opened"))
    }

    fn open_new(
        checkpoint_file: &CheckpointFile,
        handle: Option<Arc<File>>,
        wanted: Wanted,
        filesystems: &mut Filesystems,
    ) -> Result<Arc<Self>> {
        let path = &*checkpoint_file.resolved;
        let identity = checkpoint_file.identity;
        let file = match handle {
            Some(file) => {
                // Opened so as not to wait for the other end of a pipe; reads through a ring would
                // then not wait for the device either.
                rustix::fs::fcntl_setfl(&file, rustix::fs::OFlags::empty())
                    .map_err(|errno| Error::io("cannot open", &errno.into(), path))?;
                file
            }
            None => Arc::new(open_for_rows(path)?),
        };
        require_identity(&file, identity, path)?;
        let filesystem = filesystems.of(&file, identity.device);
        // A hint: without it reads of single rows may pull in their neighbourhood.
        let _ = system::advise_random(&file);
        let map = match wanted.mapping {
            Mapping::Never => Err(NoMap::NotWanted),
            _ if !fault::allowed() => Err(NoMap::Forbidden),
            Mapping::IfSafe if filesystem.remote => Err(NoMap::Remote),
            Mapping::IfSafe | Mapping::Required => Map::new(&file, identity.len)
                .map(Arc::new)
                .map_err(|error| NoMap::Refused(error.raw_os_error().unwrap_or(libc::EIO))),
        };
        if let (Ok(map), true) = (&map, wanted.random) {
            // A hint: without it a wrong belief costs a larger read.
            let _ = map.advise_random();
        }
        Ok(Arc::new(Self {
            path: Arc::clone(&checkpoint_file.resolved),
            wanted,
            file,
            identity,
            filesystem,
            map,
            cut: AtomicU64::new(u64::MAX),
            residency: OnceBox::new(),
            may_query: OnceBool::new(),
            direct: OnceBox::new(),
        }))
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
            .get_or_init(|| may_query(&self.file, &self.path))
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
    pub(crate) fn read_cached_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        system::read_cached_at(&self.file, buffer, offset)
    }

    /// Asks the kernel to start reading `len` bytes at `offset` into the page cache.
    pub fn will_need(&self, offset: u64, len: u64) -> io::Result<()> {
        #[cfg(test)]
        ADVISED.set(ADVISED.get() + 1);
        system::advise_will_need(&self.file, offset, len)
    }

    /// A second descriptor of the same file, without the advice for random reads.
    pub(crate) fn reopen(&self) -> Result<File> {
        system::open_again(&self.file, &self.path).map_err(|error| open_error(&error, &self.path))
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

    fn open_direct(&self) -> std::result::Result<Direct, i32> {
        let errno = |error: &io::Error| error.raw_os_error().unwrap_or(libc::EINVAL);
        let (file, alignment) = system::open_direct(&self.file).map_err(|error| errno(&error))?;
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
}

#[cfg(test)]
thread_local! {
    static ADVISED: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Times that this thread has asked the kernel to start reading.
#[cfg(test)]
pub(crate) fn advised() -> u64 {
    ADVISED.get()
}

/// The filesystems that files being opened together lie on, each asked once.
#[derive(Default)]
struct Filesystems(Vec<(u64, Filesystem)>);

impl Filesystems {
    fn of(&mut self, file: &File, device: u64) -> Filesystem {
        if let Some(&(_, known)) = self.0.iter().find(|(of, _)| *of == device) {
            return known;
        }
        let found =
            system::filesystem_magic(file).map_or(Filesystem::UNKNOWN, Filesystem::from_magic);
        self.0.push((device, found));
        found
    }
}

fn open_for_rows(path: &Path) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_CLOEXEC)
        .open(path)
        .map_err(|error| open_error(&error, path))
}

/// Refuses a file that is not, or no longer, what its header was read of.
fn require_identity(file: &File, identity: Identity, path: &Path) -> Result<()> {
    let metadata = file
        .metadata()
        .map_err(|error| Error::io("cannot stat", &error, path))?;
    if Identity::of(&metadata) == identity {
        return Ok(());
    }
    Err(Error::checkpoint(
        "the file changed between reading its header and opening it for rows; open the checkpoint again",
        path,
    ))
}

/// Drops the page cache of the file at `path` and forgets what was believed of its pages; returns
/// the bytes that stayed resident all the same (pages that another process has mapped or locked).
/// For benchmarks and tests.
pub fn drop_cache(path: &Path) -> Result<u64> {
    let refuse = |error: io::Error| Error::io("cannot drop the page cache", &error, path);
    let file = File::open(path).map_err(|error| open_error(&error, path))?;
    let identity = Identity::of(&file.metadata().map_err(refuse)?);
    for file in registry::now().same(identity) {
        // Pages in this process's page tables would survive the advice below.
        if let Ok(map) = file.map() {
            map.trim(0..map.len()).map_err(refuse)?;
        }
        let residency = file.residency();
        residency.clear(0..residency.pages());
    }
    // Dirty pages survive it as well.
    file.sync_all().map_err(refuse)?;
    system::advise_dont_need(&file).map_err(refuse)?;
    if identity.len == 0 {
        return Ok(0);
    }
    let map = Map::unregistered(&file, identity.len).map_err(refuse)?;
    let page = rustix::param::page_size() as u64;
    let mut states = Vec::new();
    map.resident(0..identity.len.div_ceil(page), &mut states)
        .map_err(refuse)?;
    Ok(states.iter().filter(|&&state| state & 1 == 1).count() as u64 * page)
}

fn may_query(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let user = rustix::process::geteuid();
    let owned = || {
        let status = file.metadata();
        status.is_ok_and(|status| status.uid() == user.as_raw())
    };
    system::TELLS_RESIDENT_PAGES
        && (user.is_root()
            || owned()
            || rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_ok())
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
