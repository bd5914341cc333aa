//! The handlers of SIGBUS.
//!
//! They are installed with the first mapping, and before a gather the kernel is asked whether engram
//! is still on top, which costs a fifth of a microsecond (and a lock that all threads share, so it is
//! not asked twice within [`FRESH`]): handlers that others install later (Python's `faulthandler`, a
//! server's own) know nothing of engram's mappings. Then a further level is installed above theirs.
//! Each level is a function of its own and passes on to the handler it found, so that a handler which
//! passes on to "the one before" reaches the level below it and never comes round in a circle.
#![expect(
    unsafe_code,
    reason = "signal handlers, and handlers of others called as the kernel would"
)]

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use libc::{c_int, c_void, sigaction, siginfo_t};

use super::{changing, rescue};

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
pub(super) static BELOW: [AtomicPtr<sigaction>; LEVELS.len()] =
    [const { AtomicPtr::new(ptr::null_mut()) }; LEVELS.len()];

/// For so long after the kernel was asked its answer is taken for granted.
const FRESH: Duration = Duration::from_micros(10);

/// When the kernel was asked last, in nanoseconds since [`EPOCH`]; 0 for never.
static ASKED: AtomicU64 = AtomicU64::new(0);

/// The beginning of time, as far as [`ASKED`] goes; null until it has begun. Never freed.
static EPOCH: AtomicPtr<Instant> = AtomicPtr::new(ptr::null_mut());

fn epoch() -> Instant {
    // SAFETY: null, or an instant that was leaked.
    if let Some(epoch) = unsafe { EPOCH.load(Ordering::Acquire).as_ref() } {
        return *epoch;
    }
    let now = Box::leak(Box::new(Instant::now()));
    // Two threads that begin at once differ by next to nothing.
    EPOCH.store(now, Ordering::Release);
    *now
}

/// As [`on_top`], but asks the kernel only if it was not asked a moment before `now`.
#[inline]
pub(crate) fn still_on_top(now: Instant) -> io::Result<()> {
    let since = now.saturating_duration_since(epoch()).as_nanos();
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
pub(super) static TOP: AtomicUsize = AtomicUsize::new(usize::MAX);

fn level_of(action: &sigaction) -> Option<usize> {
    let ours = |level: usize| action.sa_sigaction == LEVELS[level] as *const () as usize;
    let top = TOP.load(Ordering::Relaxed);
    if top < LEVELS.len() && ours(top) {
        return Some(top);
    }
    (0..LEVELS.len()).find(|&level| ours(level))
}

pub(super) fn action(new: Option<&sigaction>) -> io::Result<sigaction> {
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
    changing(install_above)
}

fn install_above() -> io::Result<()> {
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
pub(super) static DEFAULT: sigaction = unsafe { std::mem::zeroed() };

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
