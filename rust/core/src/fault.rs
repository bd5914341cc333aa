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
//! The handler takes no lock and allocates nothing. It is installed with the first mapping, and
//! before a gather the kernel is asked whether it is still on top, which costs a fifth of a
//! microsecond (and a lock all threads share, so it is not asked twice within [`FRESH`]): handlers that others install later (Python's `faulthandler`, a server's own) know
//! nothing of these mappings. Then a further level is installed above theirs. Each level is a
//! function of its own and passes on to the handler it found, so that a handler which passes on to
//! "the one before" reaches the level below it and never comes round in a circle.
//!
//! Zero pages are never served: every gather that copied from a mapping looks at [`Registered::lost`].
#![expect(
    unsafe_code,
    reason = "signal handlers, and pages mapped in place of those that were lost"
)]

use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use libc::{c_int, c_void, sigaction, siginfo_t};

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
    /// First byte lost; `usize::MAX` for none. Only ever goes down while the mapping lives.
    low: AtomicUsize,
    /// End of the bytes lost. Only ever goes up.
    high: AtomicUsize,
    next: AtomicPtr<Slot>,
}

/// The slots, newest first.
static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());

/// Held while a slot is taken or given back; never by the handler.
static CHANGING: Mutex<()> = Mutex::new(());

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
    /// Answers from now on for SIGBUS in the `len` bytes at `start`, a mapping of the file behind
    /// `descriptor`.
    pub(crate) fn new(start: usize, len: usize, descriptor: c_int) -> io::Result<Self> {
        still_on_top(Instant::now())?;
        let _changing = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
        let free = slots().find(|slot| slot.start.load(Ordering::Relaxed) == 0);
        let slot = free.unwrap_or_else(|| {
            let slot: &'static Slot = Box::leak(Box::new(Slot {
                version: AtomicUsize::new(0),
                start: AtomicUsize::new(0),
                len: AtomicUsize::new(0),
                descriptor: AtomicI32::new(-1),
                low: AtomicUsize::new(usize::MAX),
                high: AtomicUsize::new(0),
                next: AtomicPtr::new(SLOTS.load(Ordering::Relaxed)),
            }));
            SLOTS.store(ptr::from_ref(slot).cast_mut(), Ordering::Release);
            slot
        });
        slot.change(start, len.next_multiple_of(page()), descriptor);
        Ok(Self(slot))
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
        let _changing = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
        self.0.change(0, 0, -1);
    }
}

impl Slot {
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
        if replace(start + low, high - low) {
            return true;
        }
        // Replacing a part splits the mapping, which `vm.max_map_count` may forbid; the whole does
        // not.
        self.low.store(0, Ordering::SeqCst);
        self.high.store(len, Ordering::SeqCst);
        LOSSES.fetch_add(1, Ordering::SeqCst);
        replace(start, len)
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

fn replace(address: usize, len: usize) -> bool {
    // SAFETY: the range lies in a mapping that engram made and that stays registered, so mapped,
    // while the faulting thread copies from it. Nothing holds a reference into it, only addresses
    // to copy from; those find zeros, which the gather discards.
    let mapped = unsafe {
        libc::mmap(
            ptr::without_provenance_mut(address),
            len,
            libc::PROT_READ,
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

type Handler = unsafe extern "C" fn(c_int, *mut siginfo_t, *mut c_void);

/// One function per level, each with a handler of its own to pass on to.
static LEVELS: [Handler; 16] = [
    answer::<0>,
    answer::<1>,
    answer::<2>,
    answer::<3>,
    answer::<4>,
    answer::<5>,
    answer::<6>,
    answer::<7>,
    answer::<8>,
    answer::<9>,
    answer::<10>,
    answer::<11>,
    answer::<12>,
    answer::<13>,
    answer::<14>,
    answer::<15>,
];

/// What each level passes on to; null for a level never installed. Never freed.
static BELOW: [AtomicPtr<sigaction>; LEVELS.len()] =
    [const { AtomicPtr::new(ptr::null_mut()) }; LEVELS.len()];

/// For so long after the kernel was asked its answer is taken for granted.
const FRESH: Duration = Duration::from_micros(10);

/// When the kernel was asked last, in nanoseconds since [`EPOCH`]; 0 for never.
static ASKED: AtomicU64 = AtomicU64::new(0);

/// The beginning of time, as far as [`ASKED`] goes.
static EPOCH: LazyLock<Instant> = LazyLock::new(Instant::now);

/// As [`on_top`], but asks the kernel only if it was not asked a moment before `now`.
#[inline]
pub(crate) fn still_on_top(now: Instant) -> io::Result<()> {
    let since = now.saturating_duration_since(*EPOCH).as_nanos();
    let since = u64::try_from(since).unwrap_or(u64::MAX);
    let asked = ASKED.load(Ordering::Relaxed);
    if asked != 0 && Duration::from_nanos(since.saturating_sub(asked)) < FRESH {
        return Ok(());
    }
    on_top()?;
    ASKED.store(since, Ordering::Relaxed);
    Ok(())
}

/// The level last seen on top.
static TOP: AtomicUsize = AtomicUsize::new(usize::MAX);

fn level_of(action: &sigaction) -> Option<usize> {
    let ours = |level: usize| action.sa_sigaction == LEVELS[level] as *const () as usize;
    let top = TOP.load(Ordering::Relaxed);
    if top < LEVELS.len() && ours(top) {
        return Some(top);
    }
    (0..LEVELS.len()).find(|&level| ours(level))
}

fn action(new: Option<&sigaction>) -> io::Result<sigaction> {
    let new = new.map_or(ptr::null(), ptr::from_ref);
    let mut old = MaybeUninit::<sigaction>::zeroed();
    // SAFETY: `new` is null or a whole `sigaction`, `old` has room for one.
    if unsafe { sigaction(libc::SIGBUS, new, old.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed, then filled in; every bit pattern is one.
    Ok(unsafe { old.assume_init() })
}

/// Makes sure that SIGBUS comes to engram first. An error if others took that place so often, each
/// with another handler, that engram has given up; mappings must not be read from then.
pub(crate) fn on_top() -> io::Result<()> {
    let now = action(None)?;
    match level_of(&now) {
        Some(level) => {
            if TOP.load(Ordering::Relaxed) != level {
                TOP.store(level, Ordering::Relaxed);
            }
            Ok(())
        }
        None => install(),
    }
}

#[cold]
fn install() -> io::Result<()> {
    let _changing = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
    let found = action(None)?;
    if level_of(&found).is_some() {
        return Ok(());
    }
    let top = TOP.load(Ordering::Relaxed);
    let above = if top < LEVELS.len() { top + 1 } else { 0 };
    let passes_on_to_it = |level: &usize| {
        // SAFETY: null, or an action that was leaked.
        let below = unsafe { BELOW[*level].load(Ordering::Acquire).as_ref() };
        below.is_some_and(|below| {
            (below.sa_sigaction, below.sa_flags) == (found.sa_sigaction, found.sa_flags)
        })
    };
    let unused = |level: &usize| BELOW[*level].load(Ordering::Acquire).is_null();
    // A handler that comes and goes finds its old level again; one that might pass on to that
    // level itself only where there is no other.
    let level = (above..LEVELS.len())
        .find(passes_on_to_it)
        .or_else(|| (above..LEVELS.len()).find(unused))
        .or_else(|| (0..LEVELS.len()).find(passes_on_to_it))
        .ok_or_else(|| io::Error::from_raw_os_error(libc::EBUSY))?;
    if !passes_on_to_it(&level) {
        BELOW[level].store(Box::leak(Box::new(found)), Ordering::Release);
    }
    // SAFETY: all zeros is a `sigaction`: the default action, no flags, an empty mask.
    let mut ours: sigaction = unsafe { std::mem::zeroed() };
    ours.sa_sigaction = LEVELS[level] as *const () as usize;
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    let replaced = action(Some(&ours))?;
    if replaced.sa_sigaction != found.sa_sigaction {
        BELOW[level].store(Box::leak(Box::new(replaced)), Ordering::Release);
    }
    TOP.store(level, Ordering::Relaxed);
    Ok(())
}

/// The handler of one level.
unsafe extern "C" fn answer<const LEVEL: usize>(
    signal: c_int,
    info: *mut siginfo_t,
    context: *mut c_void,
) {
    let before = errno::errno();
    // SAFETY: the kernel passes a whole `siginfo_t` to a handler with SA_SIGINFO, and so does a
    // handler that passes on to this one in the same way.
    let (code, address) = match unsafe { info.as_ref() } {
        // SAFETY: `si_addr` is read only where the code says that a fault was the cause; for others
        // the union holds something else, equally plain.
        Some(info) => (info.si_code, unsafe { info.si_addr() } as usize),
        None => (0, 0),
    };
    if code <= 0 || !rescue(address) {
        // SAFETY: the arguments are those this handler was called with.
        unsafe { pass_on(LEVEL, code, signal, info, context) };
    }
    errno::set_errno(before);
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

/// Does what would have been done without this level.
///
/// # Safety
///
/// Called from a handler of SIGBUS with the arguments it was given; `code` is that of `info`.
unsafe fn pass_on(
    level: usize,
    code: c_int,
    signal: c_int,
    info: *mut siginfo_t,
    context: *mut c_void,
) {
    // SAFETY: set before the level was installed, and never freed.
    let Some(below) = (unsafe { BELOW[level].load(Ordering::Acquire).as_ref() }) else {
        return;
    };
    match below.sa_sigaction {
        libc::SIG_IGN if code <= 0 => {} // Sent by somebody, and ignored.
        libc::SIG_DFL | libc::SIG_IGN => {
            // The instruction faults again on return and meets the action that was there before; a
            // signal somebody sent has to be sent once more. Ignored or not, the kernel ends a
            // process for a fault it cannot get past.
            drop(action(Some(below)));
            if code <= 0 {
                // SAFETY: sends this thread the signal; it is blocked until the handler returns.
                unsafe { libc::raise(signal) };
            }
        }
        handler => {
            if below.sa_flags & libc::SA_RESETHAND != 0 {
                let default = ptr::from_ref(&DEFAULT).cast_mut();
                BELOW[level].store(default, Ordering::Release);
            }
            let mask = Mask::of(below);
            if below.sa_flags & libc::SA_SIGINFO == 0 {
                // SAFETY: without SA_SIGINFO the field holds a function of this type, which its
                // owner gave to the kernel to be called in this way.
                let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
                handler(signal);
            } else {
                // SAFETY: as above, with SA_SIGINFO.
                let handler: Handler = unsafe { std::mem::transmute(handler) };
                // SAFETY: the arguments are those the kernel gave.
                unsafe { handler(signal, info, context) };
            }
            drop(mask);
        }
    }
}

/// What a handler with `SA_RESETHAND` leaves behind.
// SAFETY: all zeros is a `sigaction`: the default action, no flags, an empty mask.
static DEFAULT: sigaction = unsafe { std::mem::zeroed() };

/// The signals blocked while a handler runs that the kernel would have called with others blocked.
struct Mask(libc::sigset_t);

impl Mask {
    fn of(action: &sigaction) -> Self {
        let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: the masks are whole sets; `before` has room for one, and zeroed is a set.
        unsafe {
            libc::pthread_sigmask(
                libc::SIG_BLOCK,
                &raw const action.sa_mask,
                before.as_mut_ptr(),
            );
            if action.sa_flags & libc::SA_NODEFER != 0 {
                let mut own = MaybeUninit::<libc::sigset_t>::zeroed();
                libc::sigemptyset(own.as_mut_ptr());
                libc::sigaddset(own.as_mut_ptr(), libc::SIGBUS);
                libc::pthread_sigmask(libc::SIG_UNBLOCK, own.as_ptr(), ptr::null_mut());
            }
            Self(before.assume_init())
        }
    }
}

impl Drop for Mask {
    fn drop(&mut self) {
        // SAFETY: the set is the one this thread had before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests;
