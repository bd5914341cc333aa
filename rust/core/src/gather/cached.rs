//! Gathers of tables whose rows are kept in a cache.
//!
//! ```text
//! look up  each row in the cache: copied at once; else: missing
//! claim    each missing row once, unless another call is reading it
//! round    of reads for what was claimed, as without a cache, into memory of the call's own;
//!          each row goes from there to all its places and to the cache as soon as it is whole
//! wait     for the rows that others read; what they failed to read is claimed anew
//! ```

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::sweep::{FEWEST_SHARED, PARALLEL, STRIP, chunks};
use super::{Belief, Control, Lane, Lanes, Report, Request, Round, Sinks, proof};
use crate::buffer::PlaneSink;
use crate::cache::{Awaited, Cache, Claim, Mine, RowCache, Waited};
use crate::crew;
use crate::error::{Error, Result};
use crate::reader::Reader;

/// Bytes of rows that one call reads before they are handed on, at most: some thousands of reads,
/// whose beginning and end without enough in flight do not matter.
const ROUND_BYTES: usize = 2 << 20;

/// How long a call waits for rows that another reads before it looks at its interrupt check.
const PERIOD: Duration = Duration::from_millis(50);

/// The same for a call with a deadline.
const SHORT_PERIOD: Duration = Duration::from_millis(1);

/// A missing row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Missing {
    id: i64,
    /// Its position in the request; of rows that only the cache wants, how often they were wanted.
    position: u32,
}

/// What becomes of rows that were read.
#[derive(Clone, Copy)]
enum Use<'r> {
    /// They go to these sinks and to the cache.
    Serve(&'r [PlaneSink<'r>]),
    /// They go to the cache.
    Fill,
    /// They go to the cache, where they have been before.
    Restore,
}

/// A row that was in a cache, and how often it was wanted there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) id: u64,
    pub(crate) wanted: u8,
}

/// One request of a table with a cache.
struct Part<'r> {
    reader: &'r Reader,
    cache: Arc<Cache>,
    wanted_for: Use<'r>,
    /// By id, then position.
    missing: Vec<Missing>,
    /// Those before have had their round.
    next: usize,
    awaited: Awaited,
}

/// Gathers the rows of `requests`, of which at least one has a cache.
pub(super) fn run(
    requests: &[Request<'_, '_>],
    round: &Round<'_>,
    report: &mut Report,
) -> Result<()> {
    let mut parts = Vec::new();
    let mut others = Vec::new();
    for request in requests {
        match request.reader.row_cache().current() {
            Some(cache) => {
                let missing = look_up(request, &cache, round)?;
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
    rounds(&mut parts, others, round, report)?;
    for request in requests
        .iter()
        .filter(|request| request.reader.checks_rows())
    {
        if request.reader.row_cache().is_active() {
            proof::read_again(&lanes_of(request), round.control)?;
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
    let started = Instant::now();
    let request = Request {
        reader,
        ids: &[],
        sinks: Sinks::new(),
        pad_id: None,
    };
    let round = Round {
        armed: proof::arm(&[request], started)?,
        control,
        started,
    };
    let mut report = Report::default();
    rounds(&mut parts, Vec::new(), &round, &mut report)?;
    Ok(report)
}

/// Copies what is in the cache; returns what is not.
fn look_up(request: &Request<'_, '_>, cache: &Cache, round: &Round<'_>) -> Result<Vec<Missing>> {
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
    let mut checked = round.started;
    let mut missed = Vec::new();
    let mut hits = 0;
    let threads = reader.threads();
    if ids.len() * request.sinks.len() < PARALLEL || threads == 1 {
        for range in chunks(ids.len(), STRIP) {
            hits += serve(range, &mut missed);
            round.control.check(&mut checked)?;
        }
    } else {
        let share = (ids.len() / (8 * threads)).clamp(FEWEST_SHARED, STRIP);
        let tasks: Vec<_> = chunks(ids.len(), share).collect();
        let all = Mutex::new((0, Vec::new()));
        let work = |task: usize| {
            let mut missed = Vec::new();
            let hits = serve(tasks[task].clone(), &mut missed);
            let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
            all.0 += hits;
            all.1.append(&mut missed);
        };
        crew::run(tasks.len(), threads - 1, &work, || {
            round.control.check(&mut checked)
        })?;
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
    round: &Round<'_>,
    report: &mut Report,
) -> Result<()> {
    loop {
        let mut slices = Vec::new();
        for part in &mut *parts {
            slices.push(part.take()?);
        }
        if !others.is_empty() || slices.iter().any(|slice| !slice.ids.is_empty()) {
            read(parts, &slices, &others, round, report)?;
            others.clear();
        }
        if parts.iter().any(|part| part.next < part.missing.len()) {
            continue;
        }
        let mut again = false;
        for part in &mut *parts {
            again |= part.wait(round.control)?;
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
    round: &Round<'_>,
    report: &mut Report,
) -> Result<()> {
    let mut memories: Vec<Vec<u8>> = slices
        .iter()
        .zip(parts)
        .map(|(slice, part)| vec![0; slice.ids.len() * part.reader.table().row_bytes()])
        .collect();
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
    let outcome = round.run(&requests, &told, report);
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
        }
    }
    error
}

impl<'r> Part<'r> {
    fn new(
        reader: &'r Reader,
        cache: Arc<Cache>,
        wanted_for: Use<'r>,
        mut missing: Vec<Missing>,
    ) -> Result<Self> {
        missing.sort_unstable();
        Ok(Self {
            awaited: Awaited::new(reader.row_cache().claims().table()?),
            reader,
            cache,
            wanted_for,
            missing,
            next: 0,
        })
    }

    fn row_cache(&self) -> &RowCache {
        self.reader.row_cache()
    }

    /// Claims the next rows that are missing.
    fn take(&mut self) -> Result<Slice> {
        let mut slice = Slice {
            ids: Vec::new(),
            groups: Vec::new(),
            mine: Mutex::new(Mine::new(self.row_cache().claims().table()?)),
        };
        let mine = slice.mine.get_mut().unwrap_or_else(PoisonError::into_inner);
        let most = (ROUND_BYTES / self.reader.table().row_bytes().max(1)).max(1);
        let mut row = Vec::new();
        while slice.ids.len() < most && self.next < self.missing.len() {
            let group = self.group(self.next);
            self.next = group.end;
            let id = self.missing[group.start].id;
            match mine.claim(id.cast_unsigned(), &mut self.awaited) {
                Claim::Another => self.row_cache().stats().waited.add(1),
                Claim::Mine => {
                    slice.ids.push(id);
                    slice.groups.push(group);
                    // Whoever read it last may have been through just before the claim.
                    if self.cache.contains(id.cast_unsigned()) && self.get(id, &mut row) {
                        let number = slice.ids.len() - 1;
                        self.scatter(&slice.groups[number], &row);
                        mine.arrived(number, &|| Arc::from(&row[..]));
                        mine.forget_last();
                        slice.ids.pop();
                        slice.groups.pop();
                    }
                }
            }
        }
        Ok(slice)
    }

    /// Where in `missing` the places of the row at `start` lie.
    fn group(&self, start: usize) -> Range<usize> {
        let id = self.missing[start].id;
        let rest = &self.missing[start..];
        start..start + rest.iter().take_while(|missing| missing.id == id).count()
    }

    /// The row's bytes, if it is in the cache.
    fn get(&self, id: i64, row: &mut Vec<u8>) -> bool {
        row.resize(self.reader.table().row_bytes(), 0);
        let mut rest = &mut row[..];
        let mut planes: SmallVec<[&mut [u8]; 3]> = SmallVec::new();
        for plane in &self.reader.table().planes {
            let (one, others) = rest.split_at_mut(plane.row_bytes());
            planes.push(one);
            rest = others;
        }
        let batch = self.cache.batch();
        self.cache.get(id.cast_unsigned(), &mut planes, batch)
    }

    /// The planes of a row that lie one after another.
    fn planes<'b>(&self, row: &'b [u8]) -> SmallVec<[&'b [u8]; 3]> {
        let mut rest = row;
        let mut planes = SmallVec::new();
        for plane in &self.reader.table().planes {
            let (one, others) = rest.split_at(plane.row_bytes());
            planes.push(one);
            rest = others;
        }
        planes
    }

    /// Copies a row to its places.
    fn scatter(&self, group: &Range<usize>, row: &[u8]) {
        let Use::Serve(sinks) = self.wanted_for else {
            return;
        };
        for (sink, bytes) in sinks.iter().zip(self.planes(row)) {
            for missing in &self.missing[group.clone()] {
                sink.write(missing.position as usize, bytes);
            }
        }
    }

    /// Sinks for `count` rows in `memory`, plane after plane.
    fn scratch<'m>(&self, memory: &'m mut [u8], count: usize) -> Result<Sinks<'m>> {
        let mut rest = memory;
        let mut sinks = Sinks::new();
        for plane in &self.reader.table().planes {
            let bytes = plane.row_bytes();
            let (own, others) = rest.split_at_mut(bytes * count);
            sinks.push(PlaneSink::new(own, 0, bytes, bytes, count)?);
            rest = others;
        }
        Ok(sinks)
    }

    /// Waits for the rows that other calls read; whether some are to be read after all.
    fn wait(&mut self, control: &Control<'_>) -> Result<bool> {
        let mut again = Vec::new();
        if !matches!(self.wanted_for, Use::Serve(_)) {
            // Whoever reads them puts them into the cache.
            return Ok(false);
        }
        let (period, started) = match control.deadline {
            None => (PERIOD, Instant::now()),
            Some(_) => (SHORT_PERIOD, Instant::now()),
        };
        let mut checked = started;
        loop {
            let next = self
                .awaited
                .next(period, &mut || control.check(&mut checked))?;
            let Some((row, outcome)) = next else { break };
            let id = row.cast_signed();
            let start = self.missing.partition_point(|missing| missing.id < id);
            let group = self.group(start);
            match outcome {
                Waited::Row(bytes) => self.scatter(&group, &bytes),
                Waited::Failed => again.extend_from_slice(&self.missing[group]),
            }
        }
        again.sort_unstable();
        self.missing = again;
        self.next = 0;
        Ok(!self.missing.is_empty())
    }
}

/// The rows that one round reads for a part.
struct Slice {
    ids: Vec<i64>,
    /// Per row its places, in [`Part::missing`].
    groups: Vec<Range<usize>>,
    mine: Mutex<Mine>,
}

/// Takes rows as they arrive, to their places and to the cache.
pub(super) struct Arrivals<'a> {
    part: &'a Part<'a>,
    slice: &'a Slice,
    /// Where the round puts the planes of each row.
    scratch: &'a [PlaneSink<'a>],
    progress: Mutex<Progress>,
}

struct Progress {
    /// Per row a bit for each plane that is there.
    planes: Vec<u8>,
    row: Vec<u8>,
}

/// One plane of the rows that arrive.
#[derive(Clone, Copy)]
pub(super) struct Keeper<'a> {
    arrivals: &'a Arrivals<'a>,
    plane: u8,
}

impl Keeper<'_> {
    /// Whether rows come in the order of the file, and many of them.
    pub(super) fn in_order(&self) -> bool {
        matches!(self.arrivals.part.wanted_for, Use::Restore)
    }

    /// This plane of the row at `position` has been read.
    pub(super) fn arrived(&self, position: u32, bytes: &[u8]) {
        self.arrivals.arrived(self.plane, position as usize, bytes);
    }
}

impl<'a> Arrivals<'a> {
    fn new(part: &'a Part<'a>, slice: &'a Slice, scratch: &'a [PlaneSink<'a>]) -> Self {
        Self {
            progress: Mutex::new(Progress {
                planes: vec![0; slice.ids.len()],
                row: Vec::new(),
            }),
            part,
            slice,
            scratch,
        }
    }

    /// What is told of the rows of one plane.
    pub(super) fn of_plane(&self, plane: usize) -> Keeper<'_> {
        Keeper {
            arrivals: self,
            plane: u8::try_from(plane).unwrap_or(u8::MAX),
        }
    }

    /// All planes of a row.
    fn whole(&self) -> u8 {
        let bits = (1_u32 << self.scratch.len()) - 1;
        u8::try_from(bits).unwrap_or(u8::MAX)
    }

    fn arrived(&self, plane: u8, position: usize, bytes: &[u8]) {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        let before = progress.planes[position];
        let now = before | (1 << plane);
        progress.planes[position] = now;
        if now == before || now != self.whole() {
            return;
        }
        if self.scratch.len() == 1 {
            self.keep(position, bytes);
        } else {
            self.collect(position, &mut progress.row);
            self.keep(position, &progress.row);
        }
    }

    /// Puts the planes of a row one after another.
    fn collect(&self, position: usize, row: &mut Vec<u8>) {
        row.clear();
        for sink in self.scratch {
            sink.look(position, |bytes| row.extend_from_slice(bytes));
        }
    }

    /// Takes the rows that were not read but copied, which are right by now.
    fn finish(&self) {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        let progress = &mut *progress;
        for (position, planes) in progress.planes.iter_mut().enumerate() {
            if *planes != self.whole() {
                *planes = self.whole();
                self.collect(position, &mut progress.row);
                self.keep(position, &progress.row);
            }
        }
    }

    /// A row is whole.
    fn keep(&self, position: usize, row: &[u8]) {
        let id = self.slice.ids[position].cast_unsigned();
        let group = &self.slice.groups[position];
        self.part.scatter(group, row);
        let (cache, planes) = (&self.part.cache, self.part.planes(row));
        let insertion = match self.part.wanted_for {
            Use::Serve(_) | Use::Fill => cache.insert(id, &planes),
            Use::Restore => {
                let wanted = self.part.missing[group.start].position;
                cache.restore(id, &planes, u8::try_from(wanted).unwrap_or(u8::MAX))
            }
        };
        self.part.row_cache().note(insertion);
        self.slice
            .mine
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .arrived(position, &|| Arc::from(row));
    }
}
