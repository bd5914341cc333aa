//! A page of a mapping that cannot be read becomes an error of the batch that touched it.
//!
//! A page fault has no way to return an error: where a file was cut short, a sector cannot be read
//! or a server has gone away, the kernel sends SIGBUS, and a process without an answer dies with
//! every request it holds. engram answers for its own mappings, and for nothing else:
//!
//! ```text
//! SIGBUS -> address in a registered mapping?
//!     yes: note the lost part, put zero pages in its place in one piece, return; the copy goes on,
//!          and the gather, which looks at what was lost once it has copied, reads those rows again
//!     no:  do exactly what would have been done without engram
//! ```
//!
//! The handler (`handlers.rs`) takes no lock and allocates nothing.
//!
//! Zero pages are never served: every gather that copied from a mapping looks at [`Registered::lost`].
#![expect(
    unsafe_code,
    reason = "slots that a signal handler walks, and pages mapped in place of those that were lost"
)]

use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use libc::c_int;

use crate::process::PerProcess;

mod handlers;

pub(crate) use handlers::still_on_top;

/// Where fewer bytes than this cannot be read, as many are given up: a failing disk loses sectors in
/// groups, and every piece of a mapping counts against `vm.max_map_count`.
const BLOCK: usize = 2 << 20;

/// One registered mapping. Slots are never freed, only used again, so that the handler may walk
/// them at any time.
struct Slot {
    /// Even while `start` and `len` hold still, odd while they change.
    version: AtomicUsize,
    /// Address of the mapping; 0 for a slot not in use.
    start: AtomicUsize,
    /// Bytes of the mapping, whole pages.
    len: AtomicUsize,
    /// Descriptor to ask for the file's size.
    descriptor: AtomicI32,
    /// What the mapping may be used for (`PROT_READ`, `PROT_WRITE`); zero pages have to allow as much.
    protection: AtomicI32,
    /// First byte lost; `usize::MAX` for none. Only ever goes down while the mapping lives.
    low: AtomicUsize,
    /// End of the bytes lost. Only ever goes up.
    high: AtomicUsize,
    next: AtomicPtr<Slot>,
}

/// The slots, newest first.
static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());

/// Held while a slot is taken or given back and while a handler is installed; never by the handler.
static CHANGING: PerProcess<Mutex<Changing>> = PerProcess::new();

/// What a process knows of the slots it has from its parent.
#[derive(Default)]
struct Changing {
    /// Slots that were changing at the fork have been given up.
    inherited: bool,
}

/// Calls `work` while no other thread of this process changes anything.
fn changing<T>(work: impl FnOnce() -> T) -> T {
    CHANGING.lock(|state| {
        if !std::mem::replace(&mut state.inherited, true) {
            for slot in slots() {
                slot.recover();
            }
        }
        work()
    })
}

/// Times a part of some mapping was lost.
static LOSSES: AtomicU64 = AtomicU64::new(0);

/// How often anything was lost in this process; while it is 0 no mapping needs a closer look.
pub(crate) fn losses() -> u64 {
    LOSSES.load(Ordering::SeqCst)
}

/// Whether engram may answer for SIGBUS. Without an answer there must be no mapping.
pub(crate) fn allowed() -> bool {
    std::env::var_os("ENGRAM_SIGBUS").is_none_or(|value| value != "0")
}

fn slots() -> impl Iterator<Item = &'static Slot> {
    let mut next = SLOTS.load(Ordering::Acquire);
    std::iter::from_fn(move || {
        // SAFETY: null, or a slot that was leaked after it had been filled in.
        let slot = unsafe { next.as_ref() }?;
        next = slot.next.load(Ordering::Acquire);
        Some(slot)
    })
}

/// Where a mapping and its descriptor are, for the time they are registered.
#[derive(Debug)]
pub(crate) struct Registered(&'static Slot);

impl std::fmt::Debug for Slot {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Slot")
            .field("start", &self.start)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

impl Registered {
    /// Answers from now on for SIGBUS in the `len` bytes at `start`, a read-only mapping of the file
    /// behind `descriptor`.
    pub(crate) fn new(start: usize, len: usize, descriptor: c_int) -> io::Result<Self> {
        Self::with(start, len, descriptor, libc::PROT_READ)
    }

    /// As [`Registered::new`], for a mapping that is written to as well.
    pub(crate) fn writable(start: usize, len: usize, descriptor: c_int) -> io::Result<Self> {
        Self::with(start, len, descriptor, libc::PROT_READ | libc::PROT_WRITE)
    }

    fn with(start: usize, len: usize, descriptor: c_int, protection: c_int) -> io::Result<Self> {
        still_on_top(Instant::now())?;
        Ok(changing(|| {
            let free = slots().find(|slot| slot.start.load(Ordering::Relaxed) == 0);
            let slot = free.unwrap_or_else(Slot::leak);
            // Before the slot is one of a mapping that can fault.
            slot.protection.store(protection, Ordering::SeqCst);
            slot.change(start, len.next_multiple_of(page()), descriptor);
            Self(slot)
        }))
    }

    /// The bytes of the mapping that were lost and hold zeros now.
    pub(crate) fn lost(&self) -> Option<Range<u64>> {
        let (low, high) = (&self.0.low, &self.0.high);
        let (low, high) = (low.load(Ordering::SeqCst), high.load(Ordering::SeqCst));
        (low < high).then_some(low as u64..high as u64)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        changing(|| self.0.change(0, 0, -1));
    }
}

impl Slot {
    /// A slot more.
    fn leak() -> &'static Self {
        let slot: &'static Self = Box::leak(Box::new(Self {
            version: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            descriptor: AtomicI32::new(-1),
            protection: AtomicI32::new(libc::PROT_READ),
            low: AtomicUsize::new(usize::MAX),
            high: AtomicUsize::new(0),
            next: AtomicPtr::new(SLOTS.load(Ordering::Relaxed)),
        }));
        SLOTS.store(ptr::from_ref(slot).cast_mut(), Ordering::Release);
        slot
    }

    /// In a forked child: gives up a slot that a thread of the parent was changing at the fork. Its
    /// mapping was that thread's alone.
    fn recover(&self) {
        if !self.version.load(Ordering::SeqCst).is_multiple_of(2) {
            self.start.store(0, Ordering::SeqCst);
            self.version.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Takes the slot for a mapping or gives it back; by one thread at a time.
    fn change(&self, start: usize, len: usize, descriptor: c_int) {
        self.version.fetch_add(1, Ordering::SeqCst);
        self.start.store(start, Ordering::SeqCst);
        self.len.store(len, Ordering::SeqCst);
        self.descriptor.store(descriptor, Ordering::SeqCst);
        self.low.store(usize::MAX, Ordering::SeqCst);
        self.high.store(0, Ordering::SeqCst);
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// Start and length, unless the slot is just changing: then it is not that of a mapping
    /// somebody reads from.
    fn range(&self) -> Option<(usize, usize)> {
        let version = self.version.load(Ordering::SeqCst);
        let range = (
            self.start.load(Ordering::SeqCst),
            self.len.load(Ordering::SeqCst),
        );
        (version.is_multiple_of(2) && version == self.version.load(Ordering::SeqCst))
            .then_some(range)
    }

    /// Puts zero pages where the page at `offset` and what is lost with it were; whether it could.
    fn give_up(&self, start: usize, len: usize, offset: usize) -> bool {
        let (from, to) = self.extent(len, offset);
        // The order matters: whoever reads a zero page sees that bytes were lost, and which.
        let low = self.low.fetch_min(from, Ordering::SeqCst).min(from);
        let high = self.high.fetch_max(to, Ordering::SeqCst).max(to);
        LOSSES.fetch_add(1, Ordering::SeqCst);
        let protection = self.protection.load(Ordering::SeqCst);
        if replace(start + low, high - low, protection) {
            return true;
        }
        // Replacing a part splits the mapping, which `vm.max_map_count` may forbid; the whole does
        // not.
        self.low.store(0, Ordering::SeqCst);
        self.high.store(len, Ordering::SeqCst);
        LOSSES.fetch_add(1, Ordering::SeqCst);
        replace(start, len, protection)
    }

    /// What cannot be read if the page at `offset` cannot: all that lies past the end of a file that
    /// was cut short, else the rest of a block.
    fn extent(&self, len: usize, offset: usize) -> (usize, usize) {
        let mut status = MaybeUninit::<libc::stat>::uninit();
        // SAFETY: `status` has room for one `stat`; a descriptor that is none gives an error.
        let result =
            unsafe { libc::fstat(self.descriptor.load(Ordering::SeqCst), status.as_mut_ptr()) };
        if result == 0 {
            // SAFETY: the call succeeded and so filled it in.
            let size = unsafe { status.assume_init() }.st_size;
            let end = usize::try_from(size).map_or(usize::MAX, |size| {
                size.checked_next_multiple_of(page()).unwrap_or(usize::MAX)
            });
            if end <= offset {
                return (end, len);
            }
        }
        (offset, (offset + 1).next_multiple_of(BLOCK).min(len))
    }
}

fn replace(address: usize, len: usize, protection: c_int) -> bool {
    // SAFETY: the range lies in a mapping that engram made and that stays registered, so mapped,
    // while the faulting thread copies from it. Nothing holds a reference into it, only addresses
    // to copy from; those find zeros, which the gather discards.
    let mapped = unsafe {
        libc::mmap(
            ptr::without_provenance_mut(address),
            len,
            protection,
            libc::MAP_PRIVATE | libc::MAP_ANON | libc::MAP_FIXED | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    mapped != libc::MAP_FAILED
}

fn page() -> usize {
    rustix::param::page_size()
}

/// Gives up the page at `address`, if it lies in a registered mapping; whether it can be read now.
fn rescue(address: usize) -> bool {
    let found = slots().find_map(|slot| {
        let (start, len) = slot.range()?;
        (start != 0 && (start..start + len).contains(&address)).then_some((slot, start, len))
    });
    found.is_some_and(|(slot, start, len)| {
        let offset = (address - start) / page() * page();
        slot.give_up(start, len, offset)
    })
}

#[cfg(test)]
mod tests;
