//! Copies that had to wait for a device, by the page faults of their thread.

use std::cell::Cell;
use std::time::Duration;

use super::Lane;
use crate::system;

/// A copy slower than this much, plus a little per row, may have waited for a device.
const SLOW: Duration = Duration::from_micros(20);
const SLOW_PER_ROW: Duration = Duration::from_nanos(200);

/// From this many rows on a sweep tells its major faults from those of other code in its thread.
pub(super) const COUNTED: usize = 256;

/// Whether a copy waited for a device, in which case beliefs are checked from here on. `counted`: no
/// faults but those of this sweep have been seen since the last look.
pub(super) fn was_slow(lane: &Lane<'_>, elapsed: Duration, rows: usize, counted: bool) -> bool {
    if elapsed < SLOW + SLOW_PER_ROW * u32::try_from(rows).unwrap_or(u32::MAX) {
        return false;
    }
    let faults = new_major_faults();
    if faults == 0 {
        return false;
    }
    if counted {
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
}

/// Whatever faulted so far was no copy.
pub(crate) fn forget_faults() {
    if SEEN.get().is_some() {
        SEEN.set(Some(system::major_faults()));
    }
}

/// Notes how many major faults this thread has had, those of other code among them; whether that was
/// done. Asking takes as long as copying a few rows: before small sweeps it is done once per thread.
pub(super) fn begin_counting(rows: usize) -> bool {
    let counts = rows >= COUNTED || SEEN.get().is_none();
    if counts {
        SEEN.set(Some(system::major_faults()));
    }
    counts
}

/// Major faults of this thread since the last look.
fn new_major_faults() -> u64 {
    let now = system::major_faults();
    let seen = SEEN.replace(Some(now)).unwrap_or(now);
    u64::try_from(now - seen).unwrap_or(0)
}
