//! Making a table resident, and saying how much of it is.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::time::Instant;

use crate::buffer::{HostBuffer, PlaneSink};
use crate::cgroup;
use crate::copy;
use crate::error::{Error, Result};
use crate::fault;
use crate::file::OpenFile;
use crate::gather::{Control, forget_faults};
use crate::map::Map;
use crate::reader::{Advice, Reader};

/// Bytes read in one call while prewarming: large enough for the device's best rate, small enough
/// to report progress and to stop soon.
const STEP: u64 = 4 << 20;

const SMALL_PAGE: usize = 4096;

/// Bytes of a large page, where small ones have 4 KiB: a table that is mapped by such needs so many
/// fewer entries that finding the memory behind a row no longer takes as long as reading it.
const LARGE_PAGE: u64 = 2 << 20;

/// Faults that fill large pages read at most so far ahead of themselves.
const READ_AHEAD: u64 = 6 * LARGE_PAGE;

/// Pages asked about in one call: 1 GiB, answered in some milliseconds.
const PROBE: u64 = 1 << 18;

/// How much of a table is in memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Resident {
    /// Pages that hold rows of the table.
    pub pages: u64,
    /// Those that are in memory by the kernel's answer; `None` where it does not tell.
    pub resident: Option<u64>,
    /// Those believed to be.
    pub believed: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
}

/// Byte ranges that hold rows of the reader's table: file and bytes, in row order of each plane.
fn ranges(reader: &Reader) -> Vec<(usize, Range<u64>)> {
    let mut ranges: Vec<(usize, Range<u64>)> = Vec::new();
    for plane in &reader.table().planes {
        for piece in plane.pieces() {
            let bytes = piece.offset..piece.offset + piece.rows * plane.row_bytes() as u64;
            match ranges.last_mut() {
                Some((file, last)) if *file == piece.file && last.end == bytes.start => {
                    last.end = bytes.end;
                }
                _ => ranges.push((piece.file, bytes)),
            }
        }
    }
    ranges
}

/// Asks the kernel how much of the table is in memory, and corrects what is believed of it.
pub fn residency(reader: &Reader, control: &Control<'_>) -> Result<Resident> {
    let mut total = Resident {
        resident: Some(0),
        page_bytes: rustix::param::page_size() as u64,
        ..Resident::default()
    };
    let mut states = Vec::new();
    for (file, bytes) in ranges(reader) {
        let file = &reader.files()[file];
        let residency = file.residency();
        let pages = residency.pages_of(bytes.start, bytes.end - bytes.start);
        total.pages += pages.end - pages.start;
        let map = file.map().ok().filter(|_| file.may_query());
        let mut start = pages.start;
        while start < pages.end {
            (control.interrupt)()?;
            let step = start..(start + PROBE).min(pages.end);
            match map.map(|map| map.resident(step.clone(), &mut states)) {
                Some(Ok(())) => learn(file, step.start, &states, &mut total),
                _ => total.resident = None,
            }
            start = step.end;
        }
        total.believed += residency.count(pages);
    }
    Ok(total)
}

fn learn(file: &OpenFile, first: u64, states: &[u8], total: &mut Resident) {
    let mut page = first;
    for run in states.chunk_by(|one, next| one & 1 == next & 1) {
        let end = page + run.len() as u64;
        if run[0] & 1 == 1 {
            file.residency().set(page..end);
            total.resident = total.resident.map(|resident| resident + (end - page));
        } else {
            file.residency().clear(page..end);
        }
        page = end;
    }
}

/// Of `available` bytes of memory those that pages can stay in: the rest goes to page tables, to the
/// kernel's own list of the pages, and to the memory that they are read into.
fn room(available: u64) -> u64 {
    available.saturating_sub(available / 64 + 2 * STEP)
}

/// Reads up to `max_bytes` of the table sequentially into the page cache, what is not there yet in
/// large pages where the filesystem has them, fills the mapping's page tables, touches the pages and
/// notes them as resident. In any case it stops where the machine's or the control group's memory
/// would have to give something else up: that might be what was read first.
///
/// `progress` is called with bytes done and bytes to do; an error from it stops the work and keeps
/// what was done. Returns the bytes made resident.
pub fn prewarm(
    reader: &Reader,
    max_bytes: Option<u64>,
    progress: &mut dyn FnMut(u64, u64) -> Result<()>,
) -> Result<u64> {
    let table = reader.table().total_bytes();
    let goal = table
        .min(max_bytes.unwrap_or(u64::MAX))
        .min(room(cgroup::available_memory()));
    let mut done = 0;
    let outcome = prewarm_ranges(reader, goal, &mut done, progress);
    // Those that read are not to be taken for faults of copies.
    forget_faults();
    reader.look_at_belief();
    outcome.map(|()| done)
}

fn prewarm_ranges(
    reader: &Reader,
    goal: u64,
    done: &mut u64,
    progress: &mut dyn FnMut(u64, u64) -> Result<()>,
) -> Result<()> {
    let mut slot = HostBuffer::new(usize::try_from(STEP).unwrap_or(usize::MAX), false)?;
    progress(0, goal)?;
    for (index, bytes) in ranges(reader) {
        if *done >= goal {
            break;
        }
        let file = &reader.files()[index];
        // Random advice would keep the kernel from reading ahead and from using large pages.
        if let Ok(map) = file.map() {
            let _ = map.advise_normal();
        }
        let outcome = prewarm_range(reader, index, bytes, goal, done, &mut slot, progress);
        if let (Ok(map), true) = (file.map(), reader.advice() != Advice::Normal) {
            let _ = map.advise_random();
        }
        outcome.map_err(|error| error.in_table(&reader.table().name))?;
    }
    Ok(())
}

/// Reads a range of a file into the page cache.
struct Pull<'a> {
    file: &'a OpenFile,
    sequential: File,
    /// A mapping whose faults fill large pages, and the part of the bytes that is read in this way:
    /// whole ones, far enough from the end that nothing behind it is read. Rows are copied from
    /// another mapping; without one large pages would be no use.
    by_faults: Option<(Map, Range<u64>)>,
}

impl<'a> Pull<'a> {
    fn new(file: &'a OpenFile, bytes: &Range<u64>) -> Result<Self> {
        let end = bytes.end.saturating_sub(READ_AHEAD) / LARGE_PAGE * LARGE_PAGE;
        let aligned = bytes.start.next_multiple_of(LARGE_PAGE)..end;
        let sequential = file.reopen()?;
        let useful = file.map().is_ok()
            && aligned.start < aligned.end
            && rustix::param::page_size() == SMALL_PAGE;
        let by_faults = useful
            .then(|| Map::unregistered(&sequential, file.len()).ok())
            .flatten()
            .filter(|map| map.advise_large_pages().is_ok())
            .map(|map| (map, aligned));
        Ok(Self {
            file,
            sequential,
            by_faults,
        })
    }

    /// Reads the beginning of `bytes`, up to [`STEP`]; returns how much.
    fn next(&mut self, bytes: Range<u64>, slot: &mut HostBuffer) -> Result<u64> {
        let mut length = STEP.min(bytes.end - bytes.start);
        if let Some((map, aligned)) = &self.by_faults {
            if aligned.contains(&bytes.start) {
                let end = aligned.end.min(bytes.start + STEP);
                let range = usize::try_from(bytes.start)
                    .and_then(|start| usize::try_from(end).map(|end| start..end));
                if let Ok(range) = range
                    && map.populate(range.clone()).is_ok()
                {
                    let _ = map.trim(range);
                    return Ok(end - bytes.start);
                }
                // Read instead, which also tells why it cannot be had.
                length = end - bytes.start;
            } else if bytes.start < aligned.start {
                length = length.min(aligned.start - bytes.start);
            }
        }
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let refuse = |error: std::io::Error| {
            Error::io("cannot prewarm", &error, self.file.path()).at_offset(bytes.start)
        };
        let place = &mut slot.as_mut_slice()[..length];
        let read = self
            .sequential
            .read_at(place, bytes.start)
            .map_err(refuse)?;
        match read {
            0 => {
                let doing = "cannot prewarm: the file ended early";
                Err(Error::os(doing, libc::EIO, self.file.path()).at_offset(bytes.start))
            }
            read => Ok(read as u64),
        }
    }
}

fn prewarm_range(
    reader: &Reader,
    index: usize,
    bytes: Range<u64>,
    goal: u64,
    done: &mut u64,
    slot: &mut HostBuffer,
    progress: &mut dyn FnMut(u64, u64) -> Result<()>,
) -> Result<()> {
    let file = &reader.files()[index];
    let end = bytes.end.min(bytes.start + (goal - *done));
    let mut pull = Pull::new(file, &(bytes.start..end))?;
    let mut offset = bytes.start;
    while offset < end {
        let next = offset + pull.next(offset..end, slot)?;
        if let Ok(map) = file.map() {
            let residency = file.residency();
            let pages = residency.pages_of(offset, next - offset);
            let page = rustix::param::page_size() as u64;
            let span = pages.start * page..(pages.end * page).min(map.len() as u64);
            populate(reader, index, span);
            residency.set(pages);
        }
        *done += next - offset;
        offset = next;
        progress(*done, goal)?;
    }
    Ok(())
}

/// Fills the page tables for `bytes` of a file, as far as the cap on mapped bytes leaves room.
fn populate(reader: &Reader, index: usize, bytes: Range<u64>) {
    let (Ok(map), Ok(start), Ok(end)) = (
        reader.files()[index].map(),
        usize::try_from(bytes.start),
        usize::try_from(bytes.end),
    ) else {
        return;
    };
    if reader
        .trimmer()
        .is_some_and(|trimmer| trimmer.room() < bytes.end - bytes.start)
    {
        return;
    }
    // Kernels before 5.14 cannot; rows are then mapped as they are first touched.
    let populated = map.populate(start..end).is_ok();
    if populated && fault::still_on_top(Instant::now()).is_ok() {
        touch(map, start..end);
    }
    if let (true, Some(trimmer)) = (populated, reader.trimmer()) {
        trimmer.keep(index, bytes);
    }
}

/// Loads a byte of every page. A virtual machine may have to be given the memory behind a page when
/// it uses it first, which costs more than the copy of ten rows, and that its device wrote there does
/// not count.
fn touch(map: &Map, bytes: Range<usize>) {
    let mut byte = [0];
    for offset in bytes.step_by(rustix::param::page_size()) {
        if let Ok(sink) = PlaneSink::new(&mut byte, 0, 1, 1, 1) {
            copy::copy_row(map.row(offset as u64, 1), &sink, 0);
        }
        // Loads whose result is never looked at would not be made.
        std::hint::black_box(byte);
    }
}
