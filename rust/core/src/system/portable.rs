//! The same names for systems that have no such calls.
#![expect(
    unsafe_code,
    reason = "a function is named like the one that hands addresses to the kernel; it has no body to run"
)]

use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::path::Path;
use std::time::Duration;

pub(crate) const HUGE_PAGES: Option<memmap2::Advice> = None;
pub(crate) const POPULATE_READ: Option<memmap2::Advice> = None;
pub(crate) const POPULATE_WRITE: Option<memmap2::Advice> = None;
pub(crate) const TELLS_RESIDENT_PAGES: bool = false;

fn absent() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOSYS)
}

pub(crate) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

pub(crate) fn advise_random(_file: &File) -> io::Result<()> {
    Err(absent())
}

pub(crate) fn advise_will_need(_file: &File, _offset: u64, _len: u64) -> io::Result<()> {
    Err(absent())
}

pub(crate) fn advise_dont_need(_file: &File) -> io::Result<()> {
    Err(absent())
}

pub(crate) fn read_cached_at(_file: &File, _buffer: &mut [u8], _offset: u64) -> io::Result<usize> {
    Err(absent())
}

pub(crate) fn filesystem_magic(_file: &File) -> Option<u64> {
    None
}

pub(crate) fn open_again(_file: &File, path: &Path) -> io::Result<File> {
    File::open(path)
}

pub(crate) fn open_direct(_file: &File) -> io::Result<(File, u64)> {
    Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
}

pub(crate) fn resident_pages(_address: *const u8, _states: &mut [u8]) -> io::Result<()> {
    Err(absent())
}

/// None that could be counted: what was believed wrongly is not noticed, only slow.
pub(crate) fn major_faults() -> i64 {
    0
}

pub(crate) fn collapse(_address: *mut u8, _bytes: usize) -> io::Result<()> {
    Err(absent())
}

pub(crate) fn place(
    _address: *mut u8,
    _bytes: usize,
    _nodes: &[u32],
    _in_turn: bool,
) -> io::Result<()> {
    Err(absent())
}

/// There is none.
pub(crate) enum Queue {}

impl Queue {
    pub(crate) fn allowed() -> io::Result<()> {
        Err(absent())
    }

    pub(crate) fn new(_depth: u32) -> io::Result<Self> {
        Err(absent())
    }

    pub(crate) fn raw_fd(&self) -> RawFd {
        match *self {}
    }

    pub(crate) unsafe fn push(
        &mut self,
        _file: RawFd,
        _address: *mut u8,
        _len: u32,
        _offset: u64,
        _name: u64,
    ) -> bool {
        match *self {}
    }

    pub(crate) fn is_submitted(&mut self) -> bool {
        match *self {}
    }

    pub(crate) fn enter(&self, _want: usize, _period: Duration) -> io::Result<()> {
        match *self {}
    }

    pub(crate) fn next(&mut self) -> Option<(u64, i32)> {
        match *self {}
    }
}
