//! Gathers of tables whose rows are kept in a cache.
//!
//! ```text
//! look up  each row in the cache: copied at once; else: missing
//! claim    each missing row once, unless another call is reading it
//! round    of reads for what was claimed, as without a cache, into memory of the call's own;
//!          each row goes from there to all its places and to the cache as soon as it is whole
//! wait     for the rows that others read; what they failed to read is claimed anew
//! ```

mod arrivals;
mod part;

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

pub(super) use arrivals::{Arrivals, Keeper};
use part::{Missing, Part, Slice, Use};

use super::sweep::{PARALLEL, STRIP, chunks, shares};
use super::{Belief, Control, Lane, Lanes, Report, Request, Round, proof};
use crate::buffer::{self, PlaneSink};
use crate::cache::Cache;
use crate::crew::{self, Crew};
use crate::error::{Error, Result};
use crate::reader::Reader;

/// A row that was in a cache, and how often it was wanted there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) id: u64,
    pub(crate) wanted: u8,
}

/// Gathers the rows of `requests`, of which at least one has a cache.
pub(super) fn run(
    requests: &[Request<'_, '_>],
    control: &Control<'_>,
    started: Instant,
    mut crew: Option<Crew>,
    report: &mut Report,
) -> Result<()> {
    let mut parts = Vec::new();
    let mut others = Vec::new();
    for request in requests {
        match request.reader.row_cache().current() {
            Some(cache) => {
                let missing = look_up(request, &cache, control, started, crew.take())?;
                parts.push(Part::new(
                    request.reader,
                    cache,
                    Use::Serve(&request.sinks),
                    missing,
                )?);
            }
            None => others.push(Request {
                reader: request.reader,
                ids: request.ids,
                sinks: request.sinks.iter().map(PlaneSink::again).collect(),
                pad_id: request.pad_id,
            }),
        }
    }
    rounds(&mut parts, others, control, report)?;
    for request in requests
        .iter()
        .filter(|request| request.reader.checks_rows())
    {
        if request.reader.row_cache().is_active() {
            proof::read_again(&lanes_of(request), control)?;
        }
    }
    Ok(())
}

/// Reads the rows of `ids`, which are rows of the table, into `cache` unless they are there.
pub(super) fn fill(
    reader: &Reader,
    cache: &Arc<Cache>,
    ids: &[i64],
    control: &Control<'_>,
) -> Result<Report> {
    let missing = ids.iter().map(|&id| Missing { id, position: 0 });
    keep(reader, cache, missing, Use::Fill, control)
}

/// Reads `rows`, which are rows of the table, into `cache` unless they are there: neighbours in one
/// read.
pub(crate) fn restore(
    reader: &Reader,
    cache: &Arc<Cache>,
    rows: &[Wanted],
    control: &Control<'_>,
) -> Result<Report> {
    let missing = rows.iter().map(|row| Missing {
        id: row.id.cast_signed(),
        position: u32::from(row.wanted),
    });
    keep(reader, cache, missing, Use::Restore, control)
}

fn keep(
    reader: &Reader,
    cache: &Arc<Cache>,
    rows: impl Iterator<Item = Missing>,
    wanted_for: Use<'_>,
    control: &Control<'_>,
) -> Result<Report> {
    let missing = rows
        .filter(|row| !cache.contains(row.id.cast_unsigned()))
        .collect();
    let mut parts = [Part::new(reader, Arc::clone(cache), wanted_for, missing)?];
    let mut report = Report::default();
    rounds(&mut parts, Vec::new(), control, &mut report)?;
    Ok(report)
}

/// Copies what is in the cache; returns what is not.
fn look_up(
    request: &Request<'_, '_>,
    cache: &Cache,
    control: &Control<'_>,
    started: Instant,
    crew: Option<Crew>,
) -> Result<Vec<Missing>> {
    let begun = Instant::now();
    let (ids, reader) = (request.ids, request.reader);
    let batch = cache.batch();
    let serve = |range: Range<usize>, missed: &mut Vec<u32>| {
        let first = range.start;
        cache.serve(
            &ids[range],
            first,
            request.pad_id,
            &request.sinks,
            batch,
            missed,
        )
    };
    let mut checked = started;
    let mut missed = Vec::new();
    let mut hits = 0;
    let threads = reader.threads();
    if ids.len() * request.sinks.len() < PARALLEL || threads == 1 {
        for range in chunks(ids.len(), STRIP) {
            hits += serve(range, &mut missed);
            control.check(&mut checked)?;
        }
    } else {
        let tasks = shares(std::iter::once(ids.len()), ids.len(), threads);
        let all = Mutex::new((0, Vec::new()));
        let work = |task: usize| {
            let mut missed = Vec::new();
            let hits = serve(tasks[task].1.clone(), &mut missed);
            let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
            all.0 += hits;
            all.1.append(&mut missed);
        };
        let crew = crew.unwrap_or_else(|| crew::call(threads - 1));
        crew.run(tasks.len(), &work, || control.check(&mut checked))?;
        (hits, missed) = all.into_inner().unwrap_or_else(PoisonError::into_inner);
    }
    let stats = reader.row_cache().stats();
    stats.hits.add(hits);
    stats.misses.add(missed.len() as u64);
    reader
        .stats()
        .rows_resident
        .add(hits * request.sinks.len() as u64);
    if hits > 0 {
        reader.stats().copy.record(begun.elapsed());
    }
    Ok(missed
        .into_iter()
        .map(|position| Missing {
            id: ids[position as usize],
            position,
        })
        .collect())
}

/// The rows of a request as they were served, to be compared with the files.
fn lanes_of<'a>(request: &'a Request<'_, '_>) -> Lanes<'a> {
    let reader = request.reader;
    let planes = reader.table().planes.iter().zip(&request.sinks);
    planes
        .map(|(plane, sink)| Lane {
            cuts: None,
            whole: false,
            reader,
            plane,
            sink,
            ids: request.ids,
            pad_id: request.pad_id,
            first_file: 0,
            belief: Belief::Nothing,
            advised: false,
            direct: None,
            keeper: None,
        })
        .collect()
}

/// Rounds of reads until no part misses a row; `others` take part in the first.
fn rounds(
    parts: &mut [Part<'_>],
    mut others: Vec<Request<'_, '_>>,
    control: &Control<'_>,
    report: &mut Report,
) -> Result<()> {
    loop {
        let mut slices = Vec::new();
        for part in &mut *parts {
            slices.push(part.take()?);
        }
        if !others.is_empty() || slices.iter().any(|slice| !slice.ids.is_empty()) {
            read(parts, &slices, &others, control, report)?;
            others.clear();
        }
        if parts.iter().any(|part| part.next < part.missing.len()) {
            continue;
        }
        let mut again = false;
        for part in &mut *parts {
            again |= part.wait(control)?;
        }
        if !again {
            return Ok(());
        }
    }
}

/// Reads the rows of one slice per part, and those of `others`.
fn read(
    parts: &[Part<'_>],
    slices: &[Slice],
    others: &[Request<'_, '_>],
    control: &Control<'_>,
    report: &mut Report,
) -> Result<()> {
    let mut memories: Vec<Vec<u8>> = slices
        .iter()
        .zip(parts)
        .map(|(slice, part)| buffer::scratch(slice.ids.len() * part.reader.table().row_bytes()))
        .collect::<Result<_>>()?;
    let mut sinks = Vec::with_capacity(parts.len());
    for ((part, slice), memory) in parts.iter().zip(slices).zip(&mut memories) {
        sinks.push(part.scratch(memory, slice.ids.len())?);
    }
    let arrivals: Vec<_> = parts
        .iter()
        .zip(slices)
        .zip(&sinks)
        .map(|((part, slice), sinks)| Arrivals::new(part, slice, sinks))
        .collect();
    let mut requests: Vec<Request<'_, '_>> = Vec::with_capacity(parts.len() + others.len());
    for ((part, slice), sinks) in parts.iter().zip(slices).zip(&sinks) {
        requests.push(Request {
            reader: part.reader,
            ids: &slice.ids,
            sinks: sinks.iter().map(PlaneSink::again).collect(),
            pad_id: None,
        });
    }
    for other in others {
        requests.push(Request {
            reader: other.reader,
            ids: other.ids,
            sinks: other.sinks.iter().map(PlaneSink::again).collect(),
            pad_id: other.pad_id,
        });
    }
    let told: Vec<_> = arrivals.iter().map(Some).collect();
    let outcome = Round::new(&requests, control, Instant::now())
        .and_then(|round| round.run(&requests, &told, None, report));
    outcome.map_err(|error| located(error, parts, slices))?;
    for arrivals in &arrivals {
        arrivals.finish();
    }
    Ok(())
}

/// An error about a row of a slice names the row's position in the request.
fn located(mut error: Error, parts: &[Part<'_>], slices: &[Slice]) -> Error {
    let Some(place) = error.place_mut() else {
        return error;
    };
    let (Some(row), Some(position)) = (place.row, place.position) else {
        return error;
    };
    let Ok(index) = usize::try_from(position) else {
        return error;
    };
    for (part, slice) in parts.iter().zip(slices) {
        let named = place
            .table
            .as_ref()
            .is_none_or(|table| *table == part.reader.table().name);
        if named && slice.ids.get(index).copied() == i64::try_from(row).ok() {
            let first = part.missing[slice.groups[index].start];
            place.position =
                matches!(part.wanted_for, Use::Serve(_)).then(|| u64::from(first.position));
            break;
        }
    }
    error
}
