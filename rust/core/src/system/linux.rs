//! Calls that only Linux has.
#![expect(
    unsafe_code,
    reason = "mincore, mbind, MADV_COLLAPSE and getrusage have no safe wrapper; ring entries hold addresses"
)]

use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, opcode};
use rustix::fs::Advice;

/// Advice on memory to back it with huge pages.
pub(crate) const HUGE_PAGES: Option<memmap2::Advice> = Some(memmap2::Advice::HugePage);
/// Advice on memory to fill its page tables for reading; since 5.14.
pub(crate) const POPULATE_READ: Option<memmap2::Advice> = Some(memmap2::Advice::PopulateRead);
/// Advice on memory to fill its page tables for writing; since 5.14.
pub(crate) const POPULATE_WRITE: Option<memmap2::Advice> = Some(memmap2::Advice::PopulateWrite);

/// Whether the kernel tells which pages of a file are in memory.
pub(crate) const TELLS_RESIDENT_PAGES: bool = true;

/// Processors this thread may run on, quotas left aside.
pub(crate) fn processors() -> usize {
    let allowed = rustix::thread::sched_getaffinity(None).map(|set| set.count());
    // The kernel refuses where there are more processors than the set has places for.
    let count = allowed.ok().and_then(|count| usize::try_from(count).ok());
    count.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Reads of `file` will be at random: they must not pull in their neighbourhood.
pub(crate) fn advise_random(file: &File) -> io::Result<()> {
    Ok(rustix::fs::fadvise(file, 0, None, Advice::Random)?)
}

/// Starts reading `len` bytes at `offset` into the page cache.
pub(crate) fn advise_will_need(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let len = NonZeroU64::new(len);
    Ok(rustix::fs::fadvise(file, offset, len, Advice::WillNeed)?)
}

/// Drops the pages of `file` from the page cache.
pub(crate) fn advise_dont_need(file: &File) -> io::Result<()> {
    Ok(rustix::fs::fadvise(file, 0, None, Advice::DontNeed)?)
}

/// Positional read that returns `EAGAIN` instead of waiting for a device.
pub(crate) fn read_cached_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut slices = [io::IoSliceMut::new(buffer)];
    let flags = rustix::io::ReadWriteFlags::NOWAIT;
    Ok(rustix::io::preadv2(file, &mut slices, offset, flags)?)
}

/// The magic number of the filesystem that `file` is on.
pub(crate) fn filesystem_magic(file: &File) -> Option<u64> {
    let answer = rustix::fs::fstatfs(file).ok()?;
    Some(answer.f_type.cast_unsigned() & 0xFFFF_FFFF)
}

/// A second descriptor of the same file, whatever is at its path by now.
pub(crate) fn open_again(file: &File, _path: &Path) -> io::Result<File> {
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// A second descriptor of the same file that bypasses the page cache, and the alignment its reads
/// need: what the kernel says since 6.1, else a page, which every block device accepts.
pub(crate) fn open_direct(file: &File) -> io::Result<(File, u64)> {
    use rustix::fs::{AtFlags, OFlags, StatxFlags, fcntl_getfl, statx};
    let direct = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_CLOEXEC | libc::O_DIRECT)
        .open(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    if !fcntl_getfl(&direct)?.contains(OFlags::DIRECT) {
        return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
    }
    let page = rustix::param::page_size() as u64;
    let alignment = statx(&direct, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        .ok()
        .filter(|answer| answer.stx_mask & StatxFlags::DIOALIGN.bits() != 0)
        .map(|answer| u64::from(answer.stx_dio_offset_align.max(answer.stx_dio_mem_align)))
        .filter(|alignment| alignment.is_power_of_two() && (512..=page).contains(alignment))
        .unwrap_or(page);
    Ok((direct, alignment))
}

/// Sets the lowest bit of one byte of `states` per page from `address` on, if it is in memory.
pub(crate) fn resident_pages(address: *const u8, states: &mut [u8]) -> io::Result<()> {
    let bytes = states.len() * rustix::param::page_size();
    // SAFETY: the kernel writes one byte per page, which `states` has room for, and only looks at
    // the page tables of the range; what is not mapped is an error.
    match unsafe { libc::mincore(address.cast_mut().cast(), bytes, states.as_mut_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Major faults of the calling thread so far: pages that a copy had to wait for a device for.
pub(crate) fn major_faults() -> i64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` is valid for writes of one `rusage`, which is plain data: zeroed, it is
    // initialised even if the call failed.
    unsafe {
        libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr());
        usage.assume_init().ru_majflt
    }
}

/// Makes huge pages of the ordinary ones in memory that is mapped; since 6.1.
pub(crate) fn collapse(address: *mut u8, bytes: usize) -> io::Result<()> {
    const MADV_COLLAPSE: libc::c_int = 25;
    // SAFETY: the advice moves pages without changing what is in them, and is refused where nothing
    // is mapped.
    match unsafe { libc::madvise(address.cast(), bytes, MADV_COLLAPSE) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Says which memory nodes the pages of mapped memory come from, those touched from now on: in
/// turn, or these before others.
pub(crate) fn place(
    address: *mut u8,
    bytes: usize,
    nodes: &[u32],
    in_turn: bool,
) -> io::Result<()> {
    const MPOL_PREFERRED: libc::c_ulong = 1;
    const MPOL_INTERLEAVE: libc::c_ulong = 3;
    const MPOL_PREFERRED_MANY: libc::c_ulong = 5;
    const BITS: u32 = libc::c_ulong::BITS;
    let Some(&last) = nodes.iter().max() else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let words = usize::try_from(last / BITS + 1).unwrap_or(usize::MAX);
    let mut mask: Vec<libc::c_ulong> = vec![0; words];
    for &node in nodes {
        mask[usize::try_from(node / BITS).unwrap_or(0)] |= 1 << (node % BITS);
    }
    let mode = match (in_turn, nodes.len()) {
        (true, _) => MPOL_INTERLEAVE,
        (false, 1) => MPOL_PREFERRED,
        (false, _) => MPOL_PREFERRED_MANY,
    };
    // SAFETY: `mask` has as many bits as said (the kernel counts one more than it reads). The
    // policy decides where pages come from, not what is in them.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            address,
            bytes.next_multiple_of(rustix::param::page_size()),
            mode,
            mask.as_ptr(),
            mask.len() * BITS as usize + 1,
            0_usize,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// A submission queue and a completion queue, shared with the kernel.
pub(crate) struct Queue(IoUring);

impl Queue {
    /// Whether the kernel lets this process have any; its reason otherwise.
    pub(crate) fn allowed() -> io::Result<()> {
        match IoUring::new(0) {
            // Refused for having no entries, which comes after whether there may be any at all.
            Err(error) if error.raw_os_error() != Some(libc::EINVAL) => Err(error),
            _ => Ok(()),
        }
    }

    /// Makes the queues, or gives the kernel's reason why there can be none.
    pub(crate) fn new(depth: u32) -> io::Result<Self> {
        let uring = IoUring::builder()
            .dontfork()
            .setup_coop_taskrun()
            .setup_taskrun_flag()
            .build(depth)
            .or_else(|error| match error.raw_os_error() {
                // Kernels before 5.19 do not know the flags, which only save interrupts.
                Some(libc::EINVAL) => IoUring::builder().dontfork().build(depth),
                _ => Err(error),
            })?;
        let mut probe = Probe::new();
        uring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) || !uring.params().is_feature_ext_arg() {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        }
        Ok(Self(uring))
    }

    /// Descriptor of the ring.
    pub(crate) fn raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Queues a read; whether there was a place for it.
    ///
    /// # Safety
    /// `address` must be valid for writes of `len` bytes, and not be used in any other way, until
    /// the read's completion was taken. `file` must stay open until the read was submitted.
    #[inline]
    pub(crate) unsafe fn push(
        &mut self,
        file: RawFd,
        address: *mut u8,
        len: u32,
        offset: u64,
        name: u64,
    ) -> bool {
        let entry = opcode::Read::new(Fd(file), address, len)
            .offset(offset)
            .build()
            .user_data(name);
        // SAFETY: the caller's promise.
        unsafe { self.0.submission().push(&entry) }.is_ok()
    }

    /// Whether every queued read is the kernel's by now.
    pub(crate) fn is_submitted(&mut self) -> bool {
        self.0.submission().is_empty()
    }

    /// Submits what is queued and waits for `want` completions, `period` at most.
    #[inline]
    pub(crate) fn enter(&self, want: usize, period: Duration) -> io::Result<()> {
        if want == 0 {
            return self.0.submit().map(drop);
        }
        let period = Timespec::from(period);
        let arguments = SubmitArgs::new().timespec(&period);
        let entered = self.0.submitter().submit_with_args(want, &arguments);
        entered.map(drop)
    }

    /// The next completion: the read's name, and bytes read or a negated error number.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<(u64, i32)> {
        let completion = self.0.completion().next()?;
        Some((completion.user_data(), completion.result()))
    }
}
