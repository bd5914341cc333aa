//! Second step: bring in what the sweep did not find, while the rest is copied.
//!
//! Rows that nobody knows to be resident are read without asking the kernel about them, unless they
//! are read past the page cache. If they are resident, reading takes a microsecond or two each, beside
//! the waiting for those that are not; asking takes half of that before the first read, and the first
//! touch of a mapped page several times as long.

use std::sync::Arc;
use std::time::Instant;

use super::account::{self, account};
use super::ask;
use super::proof;
use super::scatter::{Helped, Scatter};
use super::sweep::{Deferred, Rest, sweep};
use super::{Belief, Control, Lane, Lanes, Report, Request};
use crate::crew;
use crate::error::{Error, Result};
use crate::fetch::pool::Pool;
use crate::fetch::unread::Unread;
use crate::fetch::{Batch, Cost, Fetch};
use crate::file::OpenFile;
use crate::mode::{self, Engine, Io};
use crate::plan::{AT_ONCE, Coalesce, Plan, Read, Want};
use crate::reader::Reader;

/// Pieces of advice between two looks at the clock.
const ADVICE_PER_CHECK: usize = 256;

/// Threads that help with reads that need not wait: one for so many reads.
const READS_PER_HELPER: usize = 1024;

/// Readers that are read in the same way share one round of reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Way {
    advised: bool,
    engine: Engine,
    pub(super) alignment: Option<u64>,
    /// Many rows in the order of the file: what lies between two is read too.
    in_order: bool,
}

impl Way {
    pub(super) fn of(lane: &Lane<'_>) -> Self {
        let mode = lane.reader.mode();
        Self {
            advised: lane.advised,
            engine: mode.engine,
            alignment: lane.direct,
            in_order: lane.keeper.is_some_and(|keeper| keeper.in_order()),
        }
    }

    /// The same without advice: rows are read.
    pub(super) fn by_reads(self) -> Self {
        Self {
            advised: false,
            ..self
        }
    }

    pub(super) fn coalesce(self) -> Coalesce {
        let coalesce = self
            .alignment
            .map_or_else(Coalesce::page_cache, Coalesce::direct);
        if self.in_order {
            coalesce.in_order()
        } else {
            coalesce
        }
    }
}

pub(super) fn fill(
    lanes: &[Lane<'_>],
    rests: &mut [Rest],
    requests: &[Request<'_, '_>],
    control: &Control<'_>,
    started: Instant,
    report: &mut Report,
) -> Result<()> {
    let files = files(requests);
    ask::ask(lanes, rests);
    let rests = &*rests;
    let mut deferred = Deferred::new(rests);
    let mut ways: Vec<Way> = Vec::new();
    for rest in rests.iter().filter(|rest| !rest.missing.is_empty()) {
        let way = Way::of(&lanes[rest.lane]);
        if !ways.contains(&way) {
            ways.push(way);
        }
    }
    let mut checked = started;
    let mut check = || control.check_while("planning reads", &mut checked);
    for way in ways {
        let mut wants = Vec::new();
        let mut next = AT_ONCE;
        for rest in rests
            .iter()
            .filter(|rest| Way::of(&lanes[rest.lane]) == way)
        {
            wants.extend(
                rest.missing
                    .iter()
                    .map(|&position| want(lanes, rest.lane, position)),
            );
            if wants.len() >= next {
                check()?;
                next = wants.len() + AT_ONCE;
            }
        }
        let plan = Plan::checked(wants, way.coalesce(), &mut check)?;
        account(lanes, &plan, report);
        for request in requests {
            request.reader.stats().plan.record(started.elapsed());
        }
        let scatter = Scatter {
            lanes,
            plan: &plan,
            files: &files,
            way,
        };
        let round = Round { scatter, control };
        // A copy that may wait for a device cannot keep a deadline; a read can.
        if way.advised && control.deadline.is_none() {
            round.advise_and_copy()?;
        } else {
            round.fetch(&mut deferred, report)?;
        }
    }
    // Whatever copying the reads left no time for.
    let mut checked = started;
    while deferred.step(lanes) {
        control.check(&mut checked)?;
    }
    Ok(())
}

/// The files of all requests, as [`Want::file`] counts them.
pub(super) fn files(requests: &[Request<'_, '_>]) -> Vec<Arc<OpenFile>> {
    requests
        .iter()
        .flat_map(|request| request.reader.files().iter().cloned())
        .collect()
}

pub(super) fn want(lanes: &[Lane<'_>], index: usize, position: u32) -> Want {
    let lane = &lanes[index];
    let span = lane.plane.span(lane.ids[position as usize].cast_unsigned());
    Want {
        file: lane.first_file + u32::try_from(span.file).unwrap_or(u32::MAX),
        len: u32::try_from(lane.plane.row_bytes()).unwrap_or(u32::MAX),
        offset: span.offset,
        lane: u32::try_from(index).unwrap_or(u32::MAX),
        position,
    }
}

/// The engine that reads for `reader`; threads where a ring, once possible, is refused now.
pub(super) fn engine(reader: &Reader) -> Result<Box<dyn Fetch>> {
    use crate::fetch::uring::{self, Uring};
    if reader.mode().engine == Engine::Pool {
        return Ok(Box::new(Pool));
    }
    match uring::acquire() {
        Ok(ring) => Ok(Box::new(Uring::from(ring))),
        Err(error) if reader.mode().asked != Io::Uring => {
            let hint = mode::ring_hint(error.raw_os_error().unwrap_or(libc::EIO));
            reader.note_fallback(&format!(
                "io_uring refused later ({error}{hint}); threads read instead"
            ));
            Ok(Box::new(Pool))
        }
        Err(error) => Err(Error::Io {
            doing: "io=\"uring\" cannot make a ring".to_owned(),
            errno: error.raw_os_error().unwrap_or(libc::EIO),
            place: Box::default(),
        }),
    }
}

/// One round of reads.
pub(super) struct Round<'r> {
    pub(super) scatter: Scatter<'r>,
    pub(super) control: &'r Control<'r>,
}

impl Round<'_> {
    /// The original method: one piece of advice per page range, then the copy from the mapping,
    /// which waits where the device has not delivered yet.
    fn advise_and_copy(&self) -> Result<()> {
        let started = Instant::now();
        let mut checked = started;
        for (index, read) in self.scatter.plan.reads.iter().enumerate() {
            if index % ADVICE_PER_CHECK == 0 {
                self.control.check(&mut checked)?;
            }
            // Advice is a hint; without it the copy faults.
            drop(
                self.scatter.files[read.file as usize].will_need(read.offset, u64::from(read.len)),
            );
        }
        let lanes: Lanes<'_> = self
            .scatter
            .lanes
            .iter()
            .filter(|lane| Way::of(lane) == self.scatter.way)
            .map(|lane| Lane {
                belief: Belief::All,
                whole: true,
                ..*lane
            })
            .collect();
        let rests = sweep(&lanes, self.control, started, None)?;
        debug_assert!(
            rests.is_empty(),
            "nothing is missing when everything is copied"
        );
        for lane in &lanes {
            lane.reader.stats().fetch.record(started.elapsed());
        }
        Ok(())
    }

    pub(super) fn fetch(&self, deferred: &mut Deferred<'_>, report: &mut Report) -> Result<()> {
        let started = Instant::now();
        let ends = self.whole_rows()?;
        let direct = self.scatter.way.alignment.is_some();
        let mut reads = &self.scatter.plan.reads[..];
        let mut left = Vec::new();
        let helped = Helped::default();
        if self.scatter.way.engine == Engine::Pool && !direct {
            self.scatter
                .read_cached(self.control, &helped, &mut left, started)?;
            reads = &left;
        }
        let mut served = 0;
        let mut done = |index: usize, bytes: &[u8]| {
            served += 1;
            account::served(&self.scatter, &reads[index], bytes.len());
            self.scatter.deliver(&reads[index], bytes);
        };
        let mut idle = || deferred.step(self.scatter.lanes);
        let mut cost = Cost::default();
        let outcome = if reads.is_empty() {
            self.look_at_sizes();
            self.whole_rows().map(|_| ())
        } else {
            self.deliver_all(reads, ends, &helped, &mut done, &mut idle, &mut cost)
        };
        report.reads += cost.reads;
        report.bytes_read += cost.bytes;
        helped.add_to(report);
        account::finish(&self.scatter, cost, served, started);
        outcome
    }

    /// Has `reads` done, and done again as far as files have been found to end earlier meanwhile.
    fn deliver_all(
        &self,
        reads: &[Read],
        mut ends: Vec<u64>,
        helped: &Helped,
        done: &mut dyn FnMut(usize, &[u8]),
        idle: &mut dyn FnMut() -> bool,
        cost: &mut Cost,
    ) -> Result<()> {
        loop {
            let mut engine = engine(self.reader())?;
            let helpers = if engine.shares() {
                self.helpers(reads.len())
            } else {
                0
            };
            let unread = if helpers > 0 {
                Unread::spread(reads.len())
            } else {
                Unread::new(reads.len())
            };
            let batch = Batch {
                reads,
                files: self.scatter.files,
                ends: &ends,
                direct: self.scatter.way.alignment.is_some(),
                deadline: self.control.deadline,
                interrupt: self.control.interrupt,
                unread: &unread,
            };
            let outcome = if helpers > 0 {
                let scatter = &self.scatter;
                crew::call(helpers).beside(&|| scatter.help(&unread, helped), || {
                    let _closing = unread.closing();
                    engine.fetch(&batch, done, idle, cost)
                })
            } else {
                engine.fetch(&batch, done, idle, cost)
            };
            self.look_at_sizes();
            let now = self.whole_rows()?;
            match outcome {
                Ok(()) => return Ok(()),
                // A file was found cut short. All rows lie before the cut, so a read only reached
                // past it, and comes out whole now that it is known to end there.
                Err(Error::Io { .. }) if now != ends => ends = now,
                Err(error) => return Err(self.locate(error)),
            }
        }
    }

    /// How many threads help with so many reads: none where they would not come through the page
    /// cache, or are to come in order; nor with a deadline, since a read that is not to wait still
    /// does if the queue of a device that hangs is full.
    fn helpers(&self, reads: usize) -> usize {
        let way = self.scatter.way;
        if way.alignment.is_some() || way.in_order || self.control.deadline.is_some() {
            return 0;
        }
        let lanes = self.scatter.lanes.iter();
        let threads = lanes
            .filter(|lane| Way::of(lane) == way)
            .map(|lane| lane.reader.threads())
            .min()
            .unwrap_or(1);
        (reads / READS_PER_HELPER).min(threads - 1)
    }

    /// Looks at the sizes of the files that were read. While a file is being cut, a read of what is
    /// cut off may bring zeros and no error: the kernel looks at the size first and copies then.
    fn look_at_sizes(&self) {
        let mut previous = None;
        for read in &self.scatter.plan.reads {
            if previous.replace(read.file) != Some(read.file) {
                // Where the kernel will not say, the reads have said so.
                let _ = self.scatter.files[read.file as usize].is_whole();
            }
        }
    }

    /// Where each file ends, all rows lying before that; an error if one does not. The ends are
    /// taken first: they only come down, so what lies before a later end lies before these.
    fn whole_rows(&self) -> Result<Vec<u64>> {
        let ends: Vec<u64> = self.scatter.files.iter().map(|file| file.end()).collect();
        if self.scatter.files.iter().any(|file| file.cut().is_some()) {
            proof::refuse_cut(self.scatter.lanes)?;
        }
        Ok(ends)
    }

    /// A reader of this round; all of them are read alike.
    fn reader(&self) -> &Reader {
        let lane = self
            .scatter
            .lanes
            .iter()
            .find(|lane| Way::of(lane).engine == self.scatter.way.engine);
        lane.unwrap_or(&self.scatter.lanes[0]).reader
    }

    /// Names the row that a failed read was for.
    fn locate(&self, error: Error) -> Error {
        let mut error = error;
        let Some(place) = error.place_mut() else {
            return error;
        };
        let (Some(path), Some(offset)) = (place.path.clone(), place.offset) else {
            return error.in_table(&self.scatter.lanes[0].reader.table().name);
        };
        let failed = self.scatter.plan.reads.iter().find(|read| {
            self.scatter.files[read.file as usize].path() == path
                && (read.offset..=read.offset + u64::from(read.len)).contains(&offset)
        });
        let copies = failed.map(|read| (read, self.scatter.plan.copies_of(read)));
        let copy = copies.and_then(|(read, copies)| {
            let hit = copies
                .iter()
                .find(|copy| read.offset + u64::from(copy.within + copy.len) > offset);
            hit.or(copies.first())
        });
        match copy {
            Some(copy) => {
                let lane = &self.scatter.lanes[copy.lane as usize];
                let row = lane.ids[copy.position as usize].cast_unsigned();
                error
                    .in_table(&lane.reader.table().name)
                    .at_row(row, u64::from(copy.position))
            }
            None => error.in_table(&self.scatter.lanes[0].reader.table().name),
        }
    }
}
