//! The verb: rows for ids.
//!
//! ```text
//! sweep    each id -> its span; pages believed resident: copy from the map; else: wanted
//! plan     wanted spans -> distinct reads, in file order
//! fetch    many reads in flight; meanwhile copy what is resident; scatter what arrives
//! prove    nothing was copied from a page that could not be read, or from a file cut meanwhile
//! ```
//!
//! A batch whose rows are all resident knows only the first step and the last, and a small one never
//! leaves the calling thread.

mod account;
mod ask;
mod cached;
mod faults;
mod fill;
mod prefetch;
mod proof;
mod scatter;
mod sweep;

pub(crate) use cached::{Wanted, restore};
pub(crate) use faults::forget_faults;
pub use prefetch::prefetch;

use std::time::{Duration, Instant};

use cached::{Arrivals, Keeper};
use smallvec::SmallVec;

use crate::buffer::PlaneSink;
use crate::crew::Crew;
use crate::cuts::Cuts;
use crate::error::{Error, Result};
use crate::mode::Io;
use crate::reader::Reader;
use crate::table::Plane;

/// The sinks of one request, one per plane.
pub type Sinks<'a> = SmallVec<[PlaneSink<'a>; 3]>;

/// Rows wanted from one table.
pub struct Request<'r, 'm> {
    /// The table.
    pub reader: &'r Reader,
    /// Row ids, flattened.
    pub ids: &'r [i64],
    /// One sink per plane of the table, each with a place per id.
    pub sinks: Sinks<'m>,
    /// The id that stands for a row of zeros.
    pub pad_id: Option<i64>,
}

/// How to run a gather.
pub struct Control<'a> {
    /// Give up at this instant. Rows not proven resident are then read, never faulted in.
    pub deadline: Option<Instant>,
    /// Called now and then from the calling thread; an error stops the gather.
    pub interrupt: &'a (dyn Fn() -> Result<()> + 'a),
}

impl Control<'_> {
    /// Looks at the clock; and for an interrupt, where the last look was some time ago: that may
    /// have to wait for the interpreter.
    fn check(&self, checked: &mut Instant) -> Result<()> {
        self.check_while("copying resident rows", checked)
    }

    /// The same in the middle of something else.
    fn check_while(&self, doing: &str, checked: &mut Instant) -> Result<()> {
        let now = Instant::now();
        if self.deadline.is_some_and(|deadline| now >= deadline) {
            return Err(Error::Timeout {
                message: format!("timed out while {doing}"),
                place: Box::default(),
            });
        }
        if now.duration_since(*checked) < CHECK_PERIOD {
            return Ok(());
        }
        *checked = now;
        (self.interrupt)()
    }

    /// No deadline, no interrupts.
    pub const NONE: Control<'static> = Control {
        deadline: None,
        interrupt: &|| Ok(()),
    };
}

/// What one gather did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Report {
    /// Rows asked for.
    pub rows: u64,
    /// Rows of zeros for the pad id.
    pub padded: u64,
    /// Row parts (one per plane) that had to be read.
    pub fetched: u64,
    /// Distinct row parts among those.
    pub unique_fetched: u64,
    /// Reads issued.
    pub reads: u64,
    /// Bytes read.
    pub bytes_read: u64,
}

/// One plane of one request: the unit the steps work on.
#[derive(Clone, Copy)]
struct Lane<'a> {
    reader: &'a Reader,
    plane: &'a Plane,
    sink: &'a PlaneSink<'a>,
    ids: &'a [i64],
    pad_id: Option<i64>,
    /// Where this reader's files begin in the gather's list of files.
    first_file: u32,
    /// The short way to this plane's mapped rows; needed unless all rows are read.
    cuts: Option<&'a Cuts>,
    belief: Belief,
    /// Every row may be copied, without a look at its pages.
    whole: bool,
    /// Rows that are not copied at once are advised of first and copied then, rather than read.
    advised: bool,
    /// Alignment of direct reads; `None` for reads through the page cache.
    direct: Option<u64>,
    /// Where rows go on to, which are kept in a cache.
    keeper: Option<Keeper<'a>>,
}

/// Which rows a sweep may copy from the mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Belief {
    /// None: all are read.
    Nothing,
    /// Those whose pages are believed resident.
    Pages,
    /// All: what is not resident is waited for.
    All,
}

type Lanes<'a> = SmallVec<[Lane<'a>; 4]>;

/// Threads that have been called to help with a gather.
#[derive(Default)]
pub struct Helpers(Option<Crew>);

/// Calls threads to help with a gather of `rows` rows, if it is large enough to be shared. They take
/// a while to come, which the caller may use to get it ready.
#[must_use]
pub fn call(reader: &Reader, rows: usize) -> Helpers {
    Helpers(sweep::call(reader, rows))
}

/// Gathers the rows of all `requests`: one plan, one round of reads.
///
/// On an error what the sinks hold is unspecified; nothing is written to them after the return.
pub fn gather(requests: &[Request<'_, '_>], control: &Control<'_>) -> Result<Report> {
    let largest = requests.iter().max_by_key(|request| request.ids.len());
    let helpers = largest.map_or_else(Helpers::default, |request| {
        call(request.reader, request.ids.len())
    });
    gather_with(helpers, requests, control)
}

/// As [`gather`], with `helpers` who are on their way.
pub fn gather_with(
    helpers: Helpers,
    requests: &[Request<'_, '_>],
    control: &Control<'_>,
) -> Result<Report> {
    let started = Instant::now();
    for request in requests {
        request.reader.stats().calls.add(1);
    }
    let outcome = run(requests, control, started, helpers.0);
    let elapsed = started.elapsed();
    for request in requests {
        let stats = request.reader.stats();
        stats.call.record(elapsed);
        stats.errors.add(u64::from(outcome.is_err()));
        request.reader.trim(request.ids.len() as u64);
    }
    outcome
}

fn run(
    requests: &[Request<'_, '_>],
    control: &Control<'_>,
    started: Instant,
    crew: Option<Crew>,
) -> Result<Report> {
    let mut report = Report::default();
    let mut kept = false;
    for request in requests {
        report.padded += check(request)?;
        report.rows += request.ids.len() as u64;
        let reader = request.reader;
        kept |= reader.row_cache().is_active();
        let stats = reader.stats();
        stats.rows.add(request.ids.len() as u64);
        stats
            .bytes_wanted
            .add(request.ids.len() as u64 * reader.table().row_bytes() as u64);
    }
    if kept {
        cached::run(requests, control, started, crew, &mut report)?;
    } else {
        Round::new(requests, control, started)?.run(requests, &[], crew, &mut report)?;
    }
    Ok(report)
}

/// One round of a gather.
struct Round<'a> {
    /// Whether rows may be copied from mappings.
    armed: bool,
    control: &'a Control<'a>,
    started: Instant,
}

impl<'a> Round<'a> {
    /// A round for `requests`, the first at `started` or a later one: what holds of mappings and
    /// signal handlers may change between two.
    fn new(
        requests: &[Request<'_, '_>],
        control: &'a Control<'a>,
        started: Instant,
    ) -> Result<Self> {
        Ok(Self {
            armed: proof::arm(requests, started)?,
            control,
            started,
        })
    }

    /// Gets the rows of all `requests`, whose ids have been checked. `arrivals` are told of the rows
    /// of those requests whose places they stand at.
    fn run(
        &self,
        requests: &[Request<'_, '_>],
        arrivals: &[Option<&Arrivals<'_>>],
        crew: Option<Crew>,
        report: &mut Report,
    ) -> Result<()> {
        let mut lanes = Lanes::new();
        let mut first_file = 0;
        for (place, request) in requests.iter().enumerate() {
            let reader = request.reader;
            let arrivals = arrivals.get(place).copied().flatten();
            let mapped = reader.mode().mapped && self.armed;
            // Advice is followed by copies that wait as long as the device takes.
            let advised =
                mapped && reader.mode().asked == Io::Mmap && self.control.deadline.is_none();
            let direct = match arrivals {
                None => reader.mode().direct,
                Some(_) => reader.cached_direct(),
            };
            for (index, (plane, sink)) in
                reader.table().planes.iter().zip(&request.sinks).enumerate()
            {
                let cuts = reader.cuts(index);
                lanes.push(Lane {
                    cuts,
                    whole: cuts.is_some_and(Cuts::is_whole),
                    reader,
                    plane,
                    sink,
                    ids: request.ids,
                    pad_id: request.pad_id,
                    first_file,
                    belief: if mapped && !advised {
                        Belief::Pages
                    } else {
                        Belief::Nothing
                    },
                    advised,
                    direct,
                    keeper: arrivals.map(|arrivals| arrivals.of_plane(index)),
                });
            }
            first_file += u32::try_from(reader.files().len()).unwrap_or(u32::MAX);
        }
        let mut rest = sweep::sweep(&lanes, self.control, self.started, crew)?;
        if !rest.is_empty() {
            fill::fill(
                &lanes,
                &mut rest,
                requests,
                self.control,
                self.started,
                report,
            )?;
        }
        proof::prove(&lanes, &rest, requests, self.control, report)
    }
}

/// Refuses ids outside the table before any row moves; counts the padded ones.
fn check(request: &Request<'_, '_>) -> Result<u64> {
    let table = request.reader.table();
    let count = request.ids.len();
    if u32::try_from(count).is_err() {
        return Err(Error::value(format!(
            "{count} ids in one call; at most {} are allowed",
            u32::MAX
        )));
    }
    if request.sinks.len() != table.planes.len() {
        return Err(Error::value(format!(
            "{} sinks for the {} planes of table {:?}",
            request.sinks.len(),
            table.planes.len(),
            table.name
        )));
    }
    for (plane, sink) in table.planes.iter().zip(&request.sinks) {
        if sink.rows() != count || sink.row_bytes() != plane.row_bytes() {
            return Err(Error::value(format!(
                "out has {} places of {} bytes for {count} {} rows of {} bytes",
                sink.rows(),
                sink.row_bytes(),
                plane.name().name(),
                plane.row_bytes()
            )));
        }
    }
    let padded = check_ids(&table.name, table.rows(), request.ids, request.pad_id)?;
    request.reader.stats().rows_padded.add(padded);
    Ok(padded)
}

/// Refuses ids outside a table of `rows` rows, naming the first; counts those that are the pad id.
pub(crate) fn check_ids(table: &str, rows: u64, ids: &[i64], pad_id: Option<i64>) -> Result<u64> {
    // A negative id is a huge unsigned one, so one comparison covers both ends; without a branch
    // per id the loop runs at several ids per cycle.
    let outside = ids.iter().filter(|&&id| id.cast_unsigned() >= rows).count();
    if outside == 0 && pad_id.is_none_or(|pad| pad.cast_unsigned() >= rows) {
        return Ok(0);
    }
    let mut padded = 0;
    for (&id, position) in ids.iter().zip(0_u64..) {
        if Some(id) == pad_id {
            padded += 1;
        } else if id.cast_unsigned() >= rows {
            return Err(Error::Id {
                id: i128::from(id),
                position,
                rows,
                table: table.to_owned(),
            });
        }
    }
    Ok(padded)
}

impl Lane<'_> {
    /// Whether `id` stands for a row of zeros.
    #[inline]
    fn is_pad(&self, id: i64) -> bool {
        self.pad_id == Some(id)
    }

    /// Whether rows go to a caller, rather than to the cache alone.
    #[inline]
    fn serves(&self) -> bool {
        self.keeper.is_none_or(|keeper| keeper.serves())
    }

    /// Counts positions as copied from memory.
    #[inline]
    fn count_resident(&self, positions: u64) {
        // Where all are copied, whatever is in memory, they count as read.
        if self.belief != Belief::All && self.serves() {
            self.reader.stats().rows_resident.add(positions);
        }
    }
}

/// How often the calling thread looks at the interrupt check while it copies.
const CHECK_PERIOD: Duration = Duration::from_millis(20);

#[cfg(test)]
mod proof_tests;
#[cfg(test)]
mod tests;
