//! Before and after: nothing is copied from a mapping that cannot be answered for, and nothing that
//! was copied is served before it is known to be what the file holds.
//!
//! ```text
//! arm      engram's SIGBUS handler is on top; what earlier faults lost is believed no more
//! prove    the files still have all their bytes (the last page of a cut file reads as zeros)
//!          no row was copied from pages that were lost meanwhile; those that were are read
//! ```

use std::collections::HashSet;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

use smallvec::{SmallVec, smallvec};

use super::account::account;
use super::fill::{self, Round, Way};
use super::scatter::Scatter;
use super::sweep::{Deferred, Rest};
use super::{Belief, Control, Lane, Report, Request};
use crate::cuts::Cuts;
use crate::error::{Error, Result};
use crate::fault;
use crate::file::OpenFile;
use crate::plan::{Plan, Want};
use crate::reread::Again;

/// With this many ids per file all of them are looked at, rather than only those with rows in the
/// batch.
const MANY: usize = 8;

/// Gets ready to copy from the mappings of `requests`; whether that may be done.
#[inline]
pub(super) fn arm(requests: &[Request<'_, '_>], started: Instant) -> Result<bool> {
    let mapped = |request: &&Request<'_, '_>| request.reader.mode().mapped;
    if !requests.iter().any(|request| mapped(&request)) {
        return Ok(true);
    }
    if fault::still_on_top(started).is_err() {
        for request in requests.iter().filter(mapped) {
            request.reader.note_fallback(
                "other handlers of SIGBUS were installed too often; rows are read instead of copied from a mapping",
            );
        }
        return Ok(false);
    }
    if fault::losses() > 0 {
        for request in requests.iter().filter(mapped) {
            for file in request.reader.files() {
                give_up_lost(file)?;
            }
        }
    }
    Ok(true)
}

fn give_up_lost(file: &OpenFile) -> Result<()> {
    file.give_up_lost()
        .map_err(|error| Error::io("cannot stat", &error, file.path()))
}

/// Makes sure that the rows of `lanes` are right, of which `rests` lists those that were read.
#[inline]
pub(super) fn prove(
    lanes: &[Lane<'_>],
    rests: &[Rest],
    requests: &[Request<'_, '_>],
    control: &Control<'_>,
    report: &mut Report,
) -> Result<()> {
    // What follows must not be looked at before the copies have been made.
    fence(Ordering::Acquire);
    if !are_whole(lanes)? {
        refuse_cut(lanes)?;
    }
    if fault::losses() > 0 {
        read_lost(lanes, rests, requests, control, report)?;
    }
    if requests.iter().any(|request| request.reader.checks_rows()) {
        read_again(lanes, control)?;
    }
    Ok(())
}

/// Compares every row with a second read of it.
#[cold]
pub(super) fn read_again(lanes: &[Lane<'_>], control: &Control<'_>) -> Result<()> {
    for lane in lanes.iter().filter(|lane| lane.reader.checks_rows()) {
        let table = &lane.reader.table().name;
        let mut again = Again::new(lane.reader)?;
        for (&id, position) in lane.ids.iter().zip(0_usize..) {
            if position % 256 == 0 {
                (control.interrupt)()?;
            }
            if lane.is_pad(id) {
                continue;
            }
            let span = lane.plane.span(id.cast_unsigned());
            let file = &lane.reader.files()[span.file];
            let second = again.read(file, span.offset, lane.plane.row_bytes());
            let differs = match second {
                Ok(second) if lane.sink.holds(position, second) => continue,
                Ok(_) => Error::os(
                    "ENGRAM_VERIFY: a second read of the row gave other bytes",
                    libc::EIO,
                    file.path(),
                )
                .at_offset(span.offset),
                Err(error) => error,
            };
            return Err(differs
                .in_table(table)
                .at_row(id.cast_unsigned(), position as u64));
        }
    }
    Ok(())
}

/// Whether every file that rows may have been copied from still has all its bytes.
#[inline]
fn are_whole(lanes: &[Lane<'_>]) -> Result<bool> {
    let mut whole = true;
    // A bit per file of all requests.
    let mut seen: SmallVec<[u64; 8]> = SmallVec::new();
    for lane in lanes {
        let Some(cuts) = lane.copied() else { continue };
        let first = lane.first_file as usize;
        let files = lane.reader.files();
        let end = (first + files.len()).div_ceil(64);
        if seen.len() < end {
            seen.resize(end, 0);
        }
        let mut look = |file: usize| -> Result<()> {
            let (word, bit) = ((first + file) / 64, 1 << ((first + file) % 64));
            if seen[word] & bit == 0 {
                seen[word] |= bit;
                whole &= files[file].is_whole().map_err(|error| {
                    let doing = "cannot tell how long the file is";
                    Error::io(doing, &error, files[file].path()).in_table(&lane.reader.table().name)
                })?;
            }
            Ok(())
        };
        if files.len() == 1 {
            look(0)?;
        } else if lane.ids.len() >= MANY * files.len() {
            for file in cuts.files() {
                look(file)?;
            }
        } else {
            for &id in lane.ids.iter().filter(|&&id| !lane.is_pad(id)) {
                look(cuts.file_of(id))?;
            }
        }
    }
    Ok(whole)
}

/// An error for the first row that lies, or lay, beyond what is left of its file.
#[cold]
pub(super) fn refuse_cut(lanes: &[Lane<'_>]) -> Result<()> {
    for lane in lanes {
        let files = lane.reader.files();
        if files.iter().all(|file| file.cut().is_none()) {
            continue;
        }
        for (&id, position) in lane.ids.iter().zip(0_u64..) {
            if lane.is_pad(id) {
                continue;
            }
            let id = id.cast_unsigned();
            let span = lane.plane.span(id);
            let file = &files[span.file];
            let end = span.offset + lane.plane.row_bytes() as u64;
            if let Some(cut) = file.cut().filter(|&cut| cut < end) {
                let doing = format!(
                    "cannot serve a row: the file was cut to {cut} bytes while it was open, of {}; put it back and reopen",
                    file.len()
                );
                return Err(Error::os(doing, libc::EIO, file.path())
                    .in_table(&lane.reader.table().name)
                    .at_row(id, position)
                    .at_offset(span.offset));
            }
        }
    }
    Ok(())
}

/// Reads the rows that were copied from pages that could not be read, and so hold zeros.
#[cold]
fn read_lost(
    lanes: &[Lane<'_>],
    rests: &[Rest],
    requests: &[Request<'_, '_>],
    control: &Control<'_>,
    report: &mut Report,
) -> Result<()> {
    let lost = |lane: &Lane<'_>, file: usize| {
        let map = lane.reader.files()[file].map().ok()?;
        map.lost()
    };
    let mut damaged: Vec<usize> = Vec::new();
    for (index, lane) in lanes
        .iter()
        .enumerate()
        .filter(|(_, lane)| lane.copied().is_some())
    {
        for (file, open) in lane.reader.files().iter().enumerate() {
            if lost(lane, file).is_none() {
                continue;
            }
            give_up_lost(open)?;
            lane.reader.note_fallback(&format!(
                "a part of the mapping of {} could not be read; rows there are read instead",
                open.path().display()
            ));
            damaged.push(index);
        }
    }
    damaged.dedup();
    if damaged.is_empty() {
        return Ok(());
    }
    refuse_cut(lanes)?;
    let read: HashSet<(usize, u32)> = rests
        .iter()
        .filter(|rest| !lanes[rest.lane].advised)
        .flat_map(|rest| rest.missing.iter().map(|&position| (rest.lane, position)))
        .collect();
    let mut ways: SmallVec<[(Way, Vec<Want>); 1]> = smallvec![];
    for index in damaged {
        let lane = &lanes[index];
        let row_bytes = lane.plane.row_bytes() as u64;
        let way = Way::of(lane).by_reads();
        let mut wants = Vec::new();
        for (&id, position) in lane.ids.iter().zip(0_u32..) {
            if lane.is_pad(id) || read.contains(&(index, position)) {
                continue;
            }
            let span = lane.plane.span(id.cast_unsigned());
            let overlaps = lost(lane, span.file).is_some_and(|bytes| {
                span.offset < bytes.end && bytes.start < span.offset + row_bytes
            });
            if overlaps {
                wants.push(fill::want(lanes, index, position));
            }
        }
        lane.reader.stats().rows_reread.add(wants.len() as u64);
        lane.reader.note_news();
        match ways.iter_mut().find(|(known, _)| *known == way) {
            Some((_, known)) => known.extend(wants),
            None => ways.push((way, wants)),
        }
    }
    let files = fill::files(requests);
    for (way, mut wants) in ways {
        let plan = Plan::new(&mut wants, way.coalesce());
        account(lanes, &plan, report);
        let scatter = Scatter {
            lanes,
            plan: &plan,
            files: &files,
            way,
        };
        let round = Round { scatter, control };
        round.fetch(&mut Deferred::new(&[]), report)?;
    }
    Ok(())
}

impl Lane<'_> {
    /// The pieces rows of this lane may have been copied from, unless all are read.
    #[inline]
    fn copied(&self) -> Option<&Cuts> {
        self.cuts
            .filter(|_| self.advised || self.belief != Belief::Nothing)
    }
}
