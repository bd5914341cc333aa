//! Which rows are in memory, of those that would be read past the page cache.
//!
//! A read through the page cache finds out by itself. A direct read goes to the device for a row that
//! another process may have brought into memory; asking about it costs a twentieth of that.

use rayon::prelude::*;

use super::sweep::{Rest, is_resident};
use super::{Belief, Lane};
use crate::threads;

/// Missing rows sampled before the kernel is asked about all of them: one in [`SPARSE`], within these
/// bounds. Asking about each of 16 cold rows would take a twentieth of the time of reading them.
const FEWEST_SAMPLED: usize = 4;
const MOST_SAMPLED: usize = 32;
const SPARSE: usize = 4;

/// Asking about every page pays when at least one in this many sampled rows is resident.
const WORTH: usize = 8;

/// From this many rows on, asking is shared among threads.
const PARALLEL: usize = 512;

fn is_asked_about(lane: &Lane<'_>) -> bool {
    lane.belief == Belief::Pages && lane.direct.is_some()
}

/// Removes from `rests` what the kernel says is resident, if a sample says that asking pays.
pub(super) fn ask(lanes: &[Lane<'_>], rests: &mut [Rest]) {
    let candidates: Vec<(usize, u32)> = rests
        .iter()
        .filter(|rest| is_asked_about(&lanes[rest.lane]))
        .flat_map(|rest| rest.missing.iter().map(|&position| (rest.lane, position)))
        .collect();
    if candidates.is_empty() {
        return;
    }
    let resident = |lane: usize, position: u32, states: &mut Vec<u8>| {
        let lane = &lanes[lane];
        let span = lane.plane.span(lane.ids[position as usize].cast_unsigned());
        lane.reader.files()[span.file].may_query()
            && is_resident(lane, span.file, span.offset, states)
    };
    let sampled = (candidates.len() / SPARSE).clamp(FEWEST_SAMPLED, MOST_SAMPLED);
    if candidates.len() > sampled {
        let mut states = Vec::new();
        let step = candidates.len() / sampled;
        let hits = candidates
            .iter()
            .step_by(step)
            .filter(|&&(lane, position)| resident(lane, position, &mut states))
            .count();
        if hits * WORTH < candidates.len().div_ceil(step) {
            return;
        }
    }
    let retain = |rest: &mut Rest| {
        if is_asked_about(&lanes[rest.lane]) {
            let mut states = Vec::new();
            let lane = rest.lane;
            rest.missing
                .retain(|&position| !resident(lane, position, &mut states));
        }
    };
    let shared = candidates.len() >= PARALLEL && threads::available() > 1;
    match shared.then(threads::compute).flatten() {
        Some(pool) => pool.1.install(|| rests.par_iter_mut().for_each(retain)),
        None => rests.iter_mut().for_each(retain),
    }
}
