//! How rows are read: what was asked for, what runs, and what was fallen back from.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::fetch::uring;
use crate::file::{NoMap, OpenFile};

/// How rows are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Io {
    /// Copy what is believed resident from a mapping, read the rest with many reads in flight.
    Auto,
    /// Advise the kernel of every page range first, then copy everything from a mapping.
    Mmap,
    /// Positional reads by a pool of threads; no mapping.
    Pread,
    /// Buffered reads through `io_uring`; no mapping.
    Uring,
    /// Reads that bypass the page cache.
    Direct,
}

impl Io {
    /// Every mode, in the order messages list them.
    pub const ALL: [Self; 5] = [
        Self::Auto,
        Self::Mmap,
        Self::Pread,
        Self::Uring,
        Self::Direct,
    ];

    /// Name in the Python API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Mmap => "mmap",
            Self::Pread => "pread",
            Self::Uring => "uring",
            Self::Direct => "direct",
        }
    }

    /// The mode of that name.
    pub fn from_name(name: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|io| io.name() == name)
            .ok_or_else(|| {
                Error::value(format!(
                    "io={name:?} is not one of \"auto\", \"mmap\", \"pread\", \"uring\", \"direct\""
                ))
            })
    }
}

/// Which engine performs reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// `io_uring`.
    Uring,
    /// Threads with positional reads.
    Pool,
}

/// What actually runs.
#[derive(Debug, Clone)]
pub struct Mode {
    /// What was asked for.
    pub asked: Io,
    /// Whether rows may be copied from a mapping.
    pub mapped: bool,
    /// Who performs reads.
    pub engine: Engine,
    /// Alignment of direct reads; `None` for reads through the page cache.
    pub direct: Option<u64>,
    /// Every fallback taken, with the kernel's reason.
    pub fallbacks: Vec<String>,
}

impl Mode {
    /// A few words naming what runs, e.g. `mmap+uring`.
    pub fn name(&self) -> String {
        let engine = match (self.engine, self.direct) {
            (Engine::Uring, None) => "uring",
            (Engine::Pool, None) => "pread",
            (Engine::Uring, Some(_)) => "uring-direct",
            (Engine::Pool, Some(_)) => "pread-direct",
        };
        match (self.asked, self.mapped) {
            (Io::Mmap, _) => "mmap+advice".to_owned(),
            (_, true) => format!("mmap+{engine}"),
            (_, false) => engine.to_owned(),
        }
    }
}

fn reason(errno: i32) -> String {
    std::io::Error::from_raw_os_error(errno).to_string()
}

/// What of the asked way can be had.
pub(crate) fn resolve(asked: Io, files: &[Arc<OpenFile>]) -> Result<Mode> {
    let mut mode = Mode {
        asked,
        mapped: false,
        engine: Engine::Pool,
        direct: None,
        fallbacks: Vec::new(),
    };
    if matches!(asked, Io::Auto | Io::Mmap) {
        mode.mapped = resolve_mapping(asked, files, &mut mode.fallbacks)?;
    }
    if matches!(asked, Io::Auto | Io::Uring | Io::Direct) {
        mode.engine = resolve_engine(asked, &mut mode.fallbacks)?;
    }
    if asked == Io::Direct {
        mode.direct = resolve_direct(files, &mut mode.fallbacks);
    }
    Ok(mode)
}

fn resolve_mapping(
    asked: Io,
    files: &[Arc<OpenFile>],
    fallbacks: &mut Vec<String>,
) -> Result<bool> {
    for file in files {
        let Err(refusal) = file.map() else { continue };
        let filesystem = file.filesystem().name;
        match refusal {
            NoMap::Refused(errno) if asked == Io::Mmap => {
                return Err(Error::os(
                    format!("io=\"mmap\" cannot map the file on {filesystem} (use io=\"auto\" or io=\"pread\")"),
                    errno,
                    file.path(),
                ));
            }
            NoMap::Forbidden if asked == Io::Mmap => {
                return Err(Error::value(
                    "io=\"mmap\" needs mappings, which ENGRAM_SIGBUS=0 forbids; unset it, or use io=\"auto\" or io=\"pread\"",
                ));
            }
            NoMap::Forbidden => fallbacks.push(
                "not mapped: ENGRAM_SIGBUS=0 forbids engram to catch pages that cannot be read; rows are read instead".to_owned(),
            ),
            NoMap::Refused(errno) => {
                let hint = match errno {
                    libc::ENOMEM => " (RLIMIT_AS or vm.max_map_count)",
                    libc::EBUSY => " (other handlers of SIGBUS were installed too often)",
                    _ => "",
                };
                fallbacks.push(format!(
                    "mmap refused on {filesystem}: {}{hint}; rows are read instead ({})",
                    reason(errno),
                    file.path().display()
                ));
            }
            NoMap::Remote => fallbacks.push(format!(
                "not mapped: {filesystem} is a network or user-space filesystem, where a page fault may hang or fail; rows are read instead"
            )),
            NoMap::NotWanted => {}
        }
        return Ok(false);
    }
    Ok(true)
}

/// What to do about a ring that is refused for this reason, to be put after it.
pub(crate) fn ring_hint(errno: i32) -> &'static str {
    match errno {
        libc::EPERM => {
            ": a seccomp profile or kernel.io_uring_disabled forbids it; allow io_uring_setup, io_uring_enter and io_uring_register"
        }
        libc::ENOSYS => ": this system has no io_uring, or one older than Linux 5.11",
        libc::ENOMEM => ": raise the locked-memory limit (`ulimit -l`)",
        _ => "",
    }
}

fn resolve_engine(asked: Io, fallbacks: &mut Vec<String>) -> Result<Engine> {
    // A first ring takes as long as opening ten files, which need not wait for it where threads may
    // read as well.
    let may_be_had = match asked {
        Io::Auto => uring::allowed(),
        _ => uring::probe(),
    };
    match may_be_had {
        Ok(()) => Ok(Engine::Uring),
        Err(error) => {
            let errno = error.raw_os_error().unwrap_or(libc::ENOSYS);
            let hint = ring_hint(errno);
            if asked == Io::Uring {
                return Err(Error::Io {
                    doing: format!("io=\"uring\" cannot make a ring{hint}"),
                    errno,
                    place: Box::default(),
                });
            }
            fallbacks.push(format!(
                "io_uring refused ({}{hint}); threads read instead",
                reason(errno)
            ));
            Ok(Engine::Pool)
        }
    }
}

/// The largest alignment any file asks for; all files are read alike, so one refusal is for all.
pub(crate) fn resolve_direct(files: &[Arc<OpenFile>], fallbacks: &mut Vec<String>) -> Option<u64> {
    let mut alignment = 512;
    for file in files {
        match file.direct() {
            Ok(direct) => alignment = alignment.max(direct.alignment()),
            Err(errno) => {
                let hint = match errno {
                    libc::EMFILE => ": it takes a second descriptor per file, see `ulimit -n`",
                    _ => "",
                };
                fallbacks.push(format!(
                    "direct I/O refused on {} ({}{hint}); reads go through the page cache ({})",
                    file.filesystem().name,
                    reason(errno),
                    file.path().display()
                ));
                return None;
            }
        }
    }
    Some(alignment)
}
