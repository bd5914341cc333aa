//! Rows that will be wanted soon: read into the cache of rows, or into the page cache where there is
//! none, and copied nowhere.

use std::sync::Arc;

use super::fill::engine;
use super::{Control, cached, check_ids};
use crate::cache::Cache;
use crate::error::{Error, Result};
use crate::fetch::unread::Unread;
use crate::fetch::{Batch, Cost};
use crate::plan::{Coalesce, Plan, Want};
use crate::reader::Reader;
use crate::threads;

/// Prefetches of one reader under way at once; more are dropped, since a caller so far ahead of
/// the device would only push out what it is about to use.
const AT_ONCE: u64 = 16;

/// Starts reading the rows of `ids` that are not in the cache of rows, or without one those not
/// believed resident, and returns at once. With direct I/O and no cache of rows there is nothing to
/// read into, and nothing is done.
///
/// Ids are checked before anything starts. A read that fails is counted, not reported: the gather
/// that wants the row will meet the same failure and name it.
pub fn prefetch(reader: &Arc<Reader>, ids: Vec<i64>) -> Result<()> {
    check_ids(&reader.table().name, reader.table().rows(), &ids, None)?;
    let stats = reader.stats();
    let cache = reader.row_cache().current();
    if ids.is_empty() || (cache.is_none() && reader.mode().direct.is_some()) {
        return Ok(());
    }
    let Some(place) = reader.prefetches().enter(AT_ONCE) else {
        stats.prefetches_dropped.add(1);
        return Ok(());
    };
    stats.prefetches.add(1);
    let reader = Arc::clone(reader);
    threads::spawn_blocking(move || {
        let outcome = match cache {
            Some(cache) => fill(&reader, &cache, &ids),
            None => read(&reader, &ids),
        };
        if outcome.is_err() {
            reader.stats().prefetches_failed.add(1);
        }
        drop(place);
    })
}

/// Stops when the reader is closed.
fn unless_closing(reader: &Reader) -> Result<()> {
    if reader.is_closing() {
        return Err(Error::Cancelled);
    }
    Ok(())
}

fn fill(reader: &Reader, cache: &Arc<Cache>, ids: &[i64]) -> Result<()> {
    let closing = || unless_closing(reader);
    let control = Control {
        deadline: None,
        interrupt: &closing,
    };
    let rows = cached::fill(reader, cache, ids, &control)?.fetched;
    reader.stats().rows_prefetched.add(rows);
    Ok(())
}

fn read(reader: &Reader, ids: &[i64]) -> Result<()> {
    let mut wants = Vec::new();
    for (plane, lane) in reader.table().planes.iter().zip(0..) {
        let row_bytes = plane.row_bytes() as u64;
        for (&id, position) in ids.iter().zip(0..) {
            let span = plane.span(id.cast_unsigned());
            let file = &reader.files()[span.file];
            if !file.residency().contains(span.offset, row_bytes) {
                let file = u32::try_from(span.file).unwrap_or(u32::MAX);
                let len = u32::try_from(row_bytes).unwrap_or(u32::MAX);
                wants.push(Want {
                    file,
                    len,
                    offset: span.offset,
                    lane,
                    position,
                });
            }
        }
    }
    if wants.is_empty() {
        return Ok(());
    }
    let plan = Plan::new(&mut wants, Coalesce::page_cache());
    let closing = || unless_closing(reader);
    let ends: Vec<u64> = reader.files().iter().map(|file| file.end()).collect();
    let batch = Batch {
        reads: &plan.reads,
        files: reader.files(),
        ends: &ends,
        direct: false,
        deadline: None,
        interrupt: &closing,
        unread: &Unread::new(plan.reads.len()),
    };
    let mut done = |index: usize, _: &[u8]| {
        let read = &plan.reads[index];
        let file = &reader.files()[read.file as usize];
        if file.map().is_ok() {
            let residency = file.residency();
            residency.set(residency.pages_of(read.offset, u64::from(read.len)));
        }
    };
    let mut cost = Cost::default();
    let outcome = engine(reader)?.fetch(&batch, &mut done, &mut || false, &mut cost);
    let stats = reader.stats();
    stats.reads.add(cost.reads);
    stats.bytes_read.add(cost.bytes);
    outcome?;
    stats.rows_prefetched.add(plan.copies.len() as u64);
    Ok(())
}
