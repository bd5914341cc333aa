//! What the benchmarks hold the library against: bare loops, and simulated caches. Built only with
//! the feature `bench`, never part of a released wheel.
#![expect(
    unsafe_code,
    reason = "a bare ring loop hands raw addresses to the kernel"
)]

use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use io_uring::types::Fd;
use io_uring::{IoUring, opcode};

use crate::buffer::{HostBuffer, PlaneSink};
use crate::copy;
use crate::error::{Error, Result};
use crate::map::RowAddress;
use crate::reader::Reader;
use crate::threads;

mod lists;
mod policy;
mod queues;
mod sets;
mod sketch;
mod trace;

pub use trace::Trace;

/// Copies the rows of `ids` from the mapping with nothing around the copy: addresses are computed
/// beforehand, the work is cut into equal parts, no residency is looked at.
pub fn copy(
    reader: &Reader,
    ids: &[i64],
    sink: &PlaneSink<'_>,
    thread_count: usize,
) -> Result<Duration> {
    let plane = &reader.table().planes[0];
    let addresses = ids
        .iter()
        .map(|&id| {
            let span = plane.span(id.cast_unsigned());
            let map = reader.files()[span.file]
                .map()
                .map_err(|_| Error::value("not mapped"))?;
            Ok(map.row(span.offset, plane.row_bytes()))
        })
        .collect::<Result<Vec<RowAddress<'_>>>>()?;
    let part = addresses.len().div_ceil(thread_count).max(1);
    let pool = threads::compute().ok_or_else(|| Error::value("cannot start copy threads"))?;
    let started = Instant::now();
    if thread_count == 1 {
        copy::copy_rows(&addresses, addresses.len(), sink, 0);
        return Ok(started.elapsed());
    }
    pool.1.in_place_scope(|scope| {
        let mut parts = addresses.chunks(part).enumerate();
        let first = parts.next();
        for (index, rows) in parts {
            scope.spawn(move |_| copy::copy_rows(rows, rows.len(), sink, index * part));
        }
        if let Some((_, rows)) = first {
            copy::copy_rows(rows, rows.len(), sink, 0);
        }
    });
    Ok(started.elapsed())
}

/// Unmaps `pages` of the first file and forgets that they are resident, as if the kernel had been asked
/// after they were dropped, which the caller does next.
pub fn forget(reader: &Reader, pages: &[i64]) -> Result<()> {
    let file = &reader.files()[0];
    let (residency, bytes) = (file.residency(), rustix::param::page_size());
    for page in pages.iter().map(|page| page.cast_unsigned()) {
        residency.clear(page..page + 1);
        if let Ok(map) = file.map() {
            let start = usize::try_from(page).unwrap_or(usize::MAX) * bytes;
            map.trim(start..(start + bytes).min(map.len()))
                .map_err(|error| Error::value(format!("cannot unmap: {error}")))?;
        }
    }
    Ok(())
}

/// Reads the rows of `ids`, or the aligned blocks around them with `direct`, through a plain ring:
/// fill the queue to `depth`, wait for one, reap what is there. Nothing is copied out.
pub fn uring(reader: &Reader, ids: &[i64], direct: bool, depth: usize) -> Result<Duration> {
    let ring_error = |error: std::io::Error| Error::value(format!("bare ring: {error}"));
    let plane = &reader.table().planes[0];
    let alignment = if direct {
        let mut alignment = 512;
        for file in reader.files() {
            let opened = file
                .direct()
                .map_err(|errno| Error::os("no direct I/O", errno, file.path()))?;
            alignment = alignment.max(opened.alignment());
        }
        alignment
    } else {
        1
    };
    let spans: Vec<(i32, u64, u32)> = ids
        .iter()
        .map(|&id| {
            let span = plane.span(id.cast_unsigned());
            let end = (span.offset + plane.row_bytes() as u64).next_multiple_of(alignment);
            let start = span.offset / alignment * alignment;
            let fd = reader.files()[span.file].raw_fd(direct);
            (fd, start, u32::try_from(end - start).unwrap_or(u32::MAX))
        })
        .collect();
    let slot = spans
        .iter()
        .map(|span| span.2)
        .max()
        .unwrap_or(0)
        .next_multiple_of(4096);
    let mut slots = HostBuffer::new(depth * slot as usize, false)?;
    // Touched now: the kernel would otherwise make each page on the first read into it.
    slots.as_mut_slice().fill(1);
    let entries = u32::try_from(depth).unwrap_or(u32::MAX);
    let mut ring = IoUring::new(entries).map_err(ring_error)?;
    debug_assert!(ring.as_raw_fd() >= 0);
    let mut free: Vec<usize> = (0..depth).collect();
    let (mut next, mut left) = (0, spans.len());
    let started = Instant::now();
    while left > 0 {
        while next < spans.len() {
            let Some(index) = free.pop() else { break };
            let (fd, offset, length) = spans[next];
            let address = slots.address().wrapping_add(index * slot as usize);
            let entry = opcode::Read::new(Fd(fd), address, length)
                .offset(offset)
                .build()
                .user_data(index as u64);
            // SAFETY: the slot is at least `length` long, is given to one read at a time, and
            // outlives the loop, which ends only when every read has completed.
            let pushed = unsafe { ring.submission().push(&entry) };
            assert!(pushed.is_ok(), "as many slots as entries");
            next += 1;
        }
        ring.submit_and_wait(1).map_err(ring_error)?;
        for completion in ring.completion() {
            assert!(
                completion.result() > 0,
                "bare read failed: {}",
                completion.result()
            );
            free.push(usize::try_from(completion.user_data()).unwrap_or(0));
            left -= 1;
        }
    }
    Ok(started.elapsed())
}

/// Bits that look random, the same for the same number.
const fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// A number of rows, slots or batches, which [`Trace`] keeps below 2^32.
fn narrow(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

const fn share(whole: usize, percent: usize) -> usize {
    whole * percent / 100
}
