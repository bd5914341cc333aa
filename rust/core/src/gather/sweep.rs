//! First step: copy what is believed resident, collect the rest.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::faults::{begin_counting, know_thread, was_slow};
use super::{Belief, Control, Lane};
use crate::copy::{self, AHEAD};
use crate::crew::{self, Crew};
use crate::cuts::Cuts;
use crate::error::Result;
use crate::map::RowAddress;
use crate::mode::Io;
use crate::reader::Reader;

/// Rows whose addresses are found at a time, while the memory is at work on those before them.
const BLOCK: usize = 128;

/// Rows copied between two looks at the clock.
pub(super) const STRIP: usize = 1024;

/// Rows per task when a batch is shared among threads, at least: a late helper then leaves little.
const FEWEST_SHARED: usize = 64;

/// Batches below this many row parts stay on the calling thread: waking another costs more.
pub(super) const PARALLEL: usize = 2048;

/// What is left of a range of one lane's positions: those to read, and where copying stopped.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Rest {
    pub(super) lane: usize,
    /// Positions not looked at by the copy: all of them but `missing` are resident.
    pub(super) deferred: Range<usize>,
    /// Positions whose rows have to be read, ascending.
    pub(super) missing: Vec<u32>,
}

/// Calls threads to help with a sweep for `rows` rows of a table, if it is worth it: they come while
/// it is being got ready.
pub(super) fn call(reader: &Reader, rows: usize) -> Option<Crew> {
    let parts = rows.saturating_mul(reader.table().planes.len());
    let mode = reader.mode();
    let copies = (mode.mapped && mode.asked != Io::Mmap) || reader.row_cache().is_active();
    (parts >= PARALLEL && reader.threads() > 1 && copies).then(|| crew::call(reader.threads() - 1))
}

/// Sweeps all lanes with the help of `crew`; returns what has to be fetched, empty if every row has
/// been copied.
pub(super) fn sweep(
    lanes: &[Lane<'_>],
    control: &Control<'_>,
    started: Instant,
    crew: Option<Crew>,
) -> Result<Vec<Rest>> {
    let total: usize = lanes.iter().map(|lane| lane.ids.len()).sum();
    begin_counting(total);
    let threads = lanes
        .iter()
        .map(|lane| lane.reader.threads())
        .max()
        .unwrap_or(1);
    if total < PARALLEL || threads == 1 || lanes.iter().all(|lane| lane.belief == Belief::Nothing) {
        return sweep_here(lanes, control, started);
    }
    let lengths = lanes.iter().map(|lane| lane.ids.len());
    let tasks = shares(lengths, total, threads);
    let rests = Mutex::new(Vec::new());
    let verify = control.deadline.is_some();
    let work = |task: usize| {
        let (index, range) = &tasks[task];
        if let Some(rest) = sweep_range(lanes, *index, range.clone(), verify) {
            rests
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(rest);
        }
    };
    let mut checked = started;
    let crew = crew.unwrap_or_else(|| crew::call(threads - 1));
    crew.run(tasks.len(), &work, || control.check(&mut checked))?;
    let mut rests = rests.into_inner().unwrap_or_else(PoisonError::into_inner);
    // Threads finish in any order; the plan sorts, but reports and errors should not depend on it.
    rests.sort_unstable_by_key(|rest| (rest.lane, rest.deferred.start));
    Ok(rests)
}

/// Ranges to hand out among threads, those of a lane growing smaller towards its end: few of them,
/// and little to wait for when the last are under way.
pub(super) fn shares(
    lengths: impl Iterator<Item = usize>,
    total: usize,
    threads: usize,
) -> Vec<(usize, Range<usize>)> {
    let mut tasks = Vec::new();
    let mut left = total;
    for (index, length) in lengths.enumerate() {
        let mut start = 0;
        while start < length {
            let share = (left / (3 * threads)).clamp(FEWEST_SHARED, 4 * STRIP);
            let end = (start + share).min(length);
            tasks.push((index, start..end));
            left -= end - start;
            start = end;
        }
    }
    tasks
}

fn sweep_here(lanes: &[Lane<'_>], control: &Control<'_>, started: Instant) -> Result<Vec<Rest>> {
    let mut rests = Vec::new();
    let mut checked = started;
    for (index, lane) in lanes.iter().enumerate() {
        for range in chunks(lane.ids.len(), STRIP) {
            rests.extend(sweep_range(lanes, index, range, control.deadline.is_some()));
            control.check(&mut checked)?;
        }
    }
    Ok(rests)
}

pub(super) fn chunks(len: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len)
        .step_by(size)
        .map(move |start| start..(start + size).min(len))
}

/// Sweeps `range` of one lane. Rows are copied as they are found resident; from the first block with
/// a missing row on, copying is left for the time when reads are in flight.
fn sweep_range(
    lanes: &[Lane<'_>],
    index: usize,
    range: Range<usize>,
    verify: bool,
) -> Option<Rest> {
    let lane = &lanes[index];
    let Some(cuts) = lane.cuts.filter(|_| lane.belief != Belief::Nothing) else {
        let missing = unmapped(lane, range.clone());
        let deferred = range.start..range.start;
        return (!missing.is_empty()).then_some(Rest {
            lane: index,
            deferred,
            missing,
        });
    };
    let mut sweep = Sweep {
        lane,
        cuts,
        // Where rows are cached, memory is short: pages come and go.
        verify: verify || lane.keeper.is_some() || lane.reader.verifies(),
        whole: lane.whole,
        zeros: RowAddress::zeros(lane.sink.row_bytes()),
        answers: Vec::new(),
        denied: 0,
        copied: 0,
        rest: None,
    };
    know_thread();
    let begun = Instant::now();
    let mut before = begun;
    for start in range.clone().step_by(STRIP) {
        let strip = start..(start + STRIP).min(range.end);
        let mut position = strip.start;
        while position < strip.end {
            let mut end = strip.end;
            if sweep.rest.is_none() && !sweep.verify {
                position = sweep.copy_believed(position..strip.end);
                // The block it stopped at is handled row by row; after it, blocks are tried again.
                end = (position + BLOCK).min(strip.end);
            }
            sweep.sort_out(index, position..end, range.end);
            position = end;
        }
        if sweep.rest.is_none() {
            // Reading the clock waits for loads in flight, so it is done once per strip.
            let now = Instant::now();
            sweep.verify |= was_slow(lane, now.duration_since(before), strip.len());
            before = now;
        }
    }
    // A deadline verifies too, but says nothing about beliefs that were found wrong.
    if sweep.verify && lane.reader.verifies() {
        if sweep.denied == 0 {
            lane.reader.trust_more();
        } else {
            lane.reader.distrust();
        }
    }
    lane.count_resident(sweep.copied as u64);
    if sweep.copied > 0 {
        lane.reader
            .stats()
            .copy
            .record(before.duration_since(begun));
    }
    sweep.rest
}

/// The sweep of one range.
struct Sweep<'l> {
    lane: &'l Lane<'l>,
    cuts: &'l Cuts,
    /// Ask the kernel before a belief is acted on.
    verify: bool,
    /// All rows of the lane may be copied.
    whole: bool,
    /// What stands for a pad.
    zeros: Option<RowAddress<'l>>,
    answers: Vec<u8>,
    /// Beliefs the kernel denied.
    denied: usize,
    copied: usize,
    rest: Option<Rest>,
}

impl<'l> Sweep<'l> {
    /// Copies blocks as long as all their rows are believed resident; returns where it stopped.
    ///
    /// A block is found while the last rows of the one before have not been copied yet, so that these
    /// have rows to look ahead to.
    #[inline]
    fn copy_believed(&mut self, strip: Range<usize>) -> usize {
        let lane = self.lane;
        let mut addresses = [RowAddress::UNUSED; BLOCK + AHEAD];
        let (mut found, mut held) = (strip.start, 0);
        let mut position = strip.start;
        let mut stopped = false;
        loop {
            // From the first few on the copy itself stays so many rows ahead.
            let few = found == strip.start;
            let most = if few { AHEAD } else { BLOCK };
            let block = &lane.ids[found..(found + most).min(strip.end)];
            if !stopped && !block.is_empty() {
                let places = &mut addresses[held..held + block.len()];
                stopped = !self.find_block(block, places);
                if !stopped {
                    if few {
                        for address in &*places {
                            address.load_soon(lane.sink.row_bytes());
                        }
                    }
                    held += block.len();
                    found += block.len();
                }
            }
            let last = stopped || found == strip.end;
            let count = if last { held } else { held - AHEAD.min(held) };
            copy::copy_rows(&addresses[..held], count, lane.sink, position);
            position += count;
            addresses.copy_within(count..held, 0);
            held -= count;
            if last {
                break;
            }
        }
        position
    }

    /// Finds the rows of a block; whether all may be copied. Not with a pad among rows that are longer
    /// than the zeros there are.
    #[inline]
    fn find_block(&mut self, block: &[i64], addresses: &mut [RowAddress<'l>]) -> bool {
        let cuts = self.cuts;
        let whole = self.whole;
        let mut believed = true;
        let mut find = |id| {
            if whole {
                return cuts.address(id);
            }
            let found = cuts.find(id);
            believed &= found.believed;
            found.address
        };
        let mut pads = 0;
        let places = addresses.iter_mut().zip(block);
        match (self.lane.pad_id, self.zeros) {
            (None, _) => places.for_each(|(address, &id)| *address = find(id)),
            (Some(pad_id), Some(zeros)) => {
                for (address, &id) in places {
                    *address = if id == pad_id {
                        pads += 1;
                        zeros
                    } else {
                        find(id)
                    };
                }
            }
            (Some(pad_id), None) => {
                if block.contains(&pad_id) {
                    return false;
                }
                places.for_each(|(address, &id)| *address = find(id));
            }
        }
        if believed {
            self.copied += block.len() - pads;
        }
        believed
    }

    /// Handles positions one by one: pads are zeroed, missing rows noted, resident rows copied, or
    /// left for later once a row is missing.
    fn sort_out(&mut self, index: usize, positions: Range<usize>, end: usize) {
        for position in positions {
            let id = self.lane.ids[position];
            if self.lane.is_pad(id) {
                self.lane.sink.zero(position);
            } else if let Some(address) = self.resident(id) {
                if self.rest.is_none() {
                    copy::copy_row(address, self.lane.sink, position);
                    self.copied += 1;
                }
            } else {
                let deferred = position..end;
                let rest = self.rest.get_or_insert_with(|| Rest {
                    lane: index,
                    deferred,
                    missing: Vec::new(),
                });
                rest.missing
                    .push(u32::try_from(position).unwrap_or(u32::MAX));
            }
        }
    }

    /// Address of a row whose pages are all believed resident and, when verifying, are.
    fn resident(&mut self, id: i64) -> Option<RowAddress<'l>> {
        let found = self.cuts.find(id);
        if self.lane.belief == Belief::All {
            return Some(found.address);
        }
        if !found.believed {
            return None;
        }
        if self.verify {
            let span = self.lane.plane.span(id.cast_unsigned());
            if !is_resident(self.lane, span.file, span.offset, &mut self.answers) {
                self.denied += 1;
                return None;
            }
        }
        Some(found.address)
    }
}

/// Asks the kernel whether a row's pages are in memory, and notes the answer. A caller to whom the
/// kernel would not tell the truth is told no.
pub(super) fn is_resident(
    lane: &Lane<'_>,
    file: usize,
    offset: u64,
    answers: &mut Vec<u8>,
) -> bool {
    let file = &lane.reader.files()[file];
    let residency = file.residency();
    let pages = residency.pages_of(offset, lane.plane.row_bytes() as u64);
    let Ok(map) = file.map() else { return false };
    if !file.may_query() || map.resident(pages.clone(), answers).is_err() {
        residency.clear(pages);
        return false;
    }
    lane.reader
        .stats()
        .pages_probed
        .add(pages.end - pages.start);
    let resident = answers.iter().all(|state| state & 1 == 1);
    if resident {
        residency.set(pages);
    } else {
        residency.clear(pages);
    }
    resident
}

/// Without a mapping every row is read; pads are zeroed at once.
fn unmapped(lane: &Lane<'_>, range: Range<usize>) -> Vec<u32> {
    let mut missing = Vec::with_capacity(range.len());
    for position in range {
        if lane.is_pad(lane.ids[position]) {
            lane.sink.zero(position);
        } else {
            missing.push(u32::try_from(position).unwrap_or(u32::MAX));
        }
    }
    missing
}

/// Copies the deferred, resident rows of a rest, a block at a time.
pub(super) struct Deferred<'r> {
    rests: &'r [Rest],
    rest: usize,
    position: usize,
    missing: usize,
}

impl<'r> Deferred<'r> {
    pub(super) fn new(rests: &'r [Rest]) -> Self {
        let position = rests.first().map_or(0, |rest| rest.deferred.start);
        Self {
            rests,
            rest: 0,
            position,
            missing: 0,
        }
    }

    /// Copies the next block; whether there is more.
    pub(super) fn step(&mut self, lanes: &[Lane<'_>]) -> bool {
        let Some(rest) = self.rests.get(self.rest) else {
            return false;
        };
        let lane = &lanes[rest.lane];
        // Beside reads of a device the time to ask does not count.
        begin_counting(usize::MAX);
        let begun = Instant::now();
        let end = (self.position + STRIP).min(rest.deferred.end);
        let mut copied = 0;
        for position in self.position..end {
            if rest
                .missing
                .get(self.missing)
                .is_some_and(|&missing| missing as usize == position)
            {
                self.missing += 1;
                continue;
            }
            let id = lane.ids[position];
            if lane.is_pad(id) {
                lane.sink.zero(position);
                continue;
            }
            if let Some(cuts) = lane.cuts {
                copy::copy_row(cuts.find(id).address, lane.sink, position);
                copied += 1;
            }
        }
        was_slow(lane, begun.elapsed(), end - self.position);
        lane.count_resident(copied);
        self.position = end;
        if end >= rest.deferred.end {
            self.rest += 1;
            self.missing = 0;
            self.position = self
                .rests
                .get(self.rest)
                .map_or(0, |rest| rest.deferred.start);
        }
        self.rest < self.rests.len()
    }
}
