//! What gathers and their reads are counted as.
//!
//! Every position of a gather counts once per plane: as read, or as copied from memory. Where rows
//! are kept in a cache, a round reads each row once for all its places, and those count here.

use std::time::Instant;

use smallvec::{SmallVec, smallvec};

use super::fill::Way;
use super::scatter::Scatter;
use super::{Lane, Report};
use crate::fetch::Cost;
use crate::plan::{Plan, Read};
use crate::reader::Reader;

/// Counts the rows of a plan as read.
pub(super) fn account(lanes: &[Lane<'_>], plan: &Plan, report: &mut Report) {
    report.fetched += plan.copies.len() as u64;
    report.unique_fetched += plan.unique;
    let mut counts: SmallVec<[(u64, u64); 4]> = smallvec![(0, 0); lanes.len()];
    for read in &plan.reads {
        let mut previous = None;
        for copy in plan.copies_of(read) {
            let (rows, unique) = &mut counts[copy.lane as usize];
            let keeper = lanes[copy.lane as usize].keeper;
            *rows += keeper.map_or(1, |keeper| keeper.reads(copy.position));
            if previous != Some(copy.within) {
                *unique += 1;
                previous = Some(copy.within);
            }
        }
    }
    for (lane, (rows, unique)) in lanes.iter().zip(counts) {
        if lane.serves() {
            let stats = lane.reader.stats();
            stats.rows_fetched.add(rows);
            stats.unique_rows_fetched.add(unique);
        }
    }
}

/// Counts a read that has brought bytes, for the reader of its rows.
pub(super) fn served(scatter: &Scatter<'_>, read: &Read, bytes: usize) {
    let copies = scatter.plan.copies_of(read);
    let lane = copies.first().map_or(0, |copy| copy.lane as usize);
    let stats = scatter.lanes[lane].reader.stats();
    stats.reads.add(1);
    stats.bytes_read.add(bytes as u64);
}

/// Counts what the reads of a round cost besides, of which `served` brought bytes: retries,
/// remainders, and those that brought nothing.
pub(super) fn finish(scatter: &Scatter<'_>, cost: Cost, served: u64, started: Instant) {
    let elapsed = started.elapsed();
    let mut previous: Option<&Reader> = None;
    for lane in scatter
        .lanes
        .iter()
        .filter(|lane| Way::of(lane) == scatter.way)
    {
        if previous.is_none_or(|reader| !std::ptr::eq(reader, lane.reader)) {
            lane.reader.stats().fetch.record(elapsed);
            lane.reader.stats().depth.raise(cost.depth);
        }
        if previous.is_none() {
            let others = cost.reads.saturating_sub(served);
            lane.reader.stats().reads.add(others);
        }
        previous = Some(lane.reader);
    }
}
