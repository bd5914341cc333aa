//! Copies that had to wait for a device, by the page faults of their thread.

use std::cell::Cell;
use std::time::Duration;

use super::Lane;
use crate::system;

/// A copy slower than this much, plus a little per row, may have waited for a device.
const SLOW: Duration = Duration::from_micros(20);
const SLOW_PER_ROW: Duration = Duration::from_nanos(200);

/// From this many rows on the major faults of a sweep are told from those of other code in the
/// calling thread.
const COUNTED: usize = 1024;

/// Whether a copy waited for a device, in which case beliefs are checked from here on.
pub(super) fn was_slow(lane: &Lane<'_>, elapsed: Duration, rows: usize) -> bool {
    if elapsed < SLOW + SLOW_PER_ROW * u32::try_from(rows).unwrap_or(u32::MAX) {
        return false;
    }
    let faults = new_major_faults();
    if faults == 0 {
        return false;
    }
    if COUNTED_ALONE.get() {
        lane.reader.stats().major_faults.add(faults);
        lane.reader.distrust();
    } else {
        // Some or all may be those of other code.
        lane.reader.suspect();
    }
    true
}

thread_local! {
    /// Major faults of this thread when they were last looked at.
    static SEEN: Cell<Option<i64>> = const { Cell::new(None) };

    /// Whether no code but engram's has run in this thread since. So it is where only engram runs.
    static COUNTED_ALONE: Cell<bool> = const { Cell::new(true) };
}

/// Whatever faulted so far was no copy.
pub(crate) fn forget_faults() {
    if SEEN.get().is_some() {
        SEEN.set(Some(system::major_faults()));
    }
}

/// Notes how many major faults the calling thread has had, those of other code among them. Asking takes
/// as long as copying a few rows, and is left out before small sweeps.
pub(super) fn begin_counting(rows: usize) {
    let counts = rows >= COUNTED;
    COUNTED_ALONE.set(counts);
    if counts {
        SEEN.set(Some(system::major_faults()));
    } else {
        know_thread();
    }
}

/// Notes how many major faults this thread has had before its first sweep.
pub(super) fn know_thread() {
    if SEEN.get().is_none() {
        SEEN.set(Some(system::major_faults()));
    }
}

/// Major faults of this thread since the last look.
fn new_major_faults() -> u64 {
    let now = system::major_faults();
    let seen = SEEN.replace(Some(now)).unwrap_or(now);
    u64::try_from(now - seen).unwrap_or(0)
}
