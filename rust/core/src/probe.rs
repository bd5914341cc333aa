//! How many random reads per second a table's files give, with so many in flight.
//!
//! The reads are those of a gather: rows at random, planned and performed by the engine that the
//! reader uses. A reader with direct I/O so measures the device, whatever the page cache holds.

use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::fetch::unread::Unread;
use crate::fetch::{Batch, Cost, Fetch, pool};
use crate::latency::{Latency, Summary};
use crate::mode::Engine;
use crate::plan::{Coalesce, Plan, Want};
use crate::reader::Reader;

/// Reads planned at once, per read in flight: the queue runs empty once per plan.
const ROUNDS: usize = 64;

/// What was measured.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    /// Reads that were in flight at once.
    pub depth: u64,
    /// Reads completed.
    pub reads: u64,
    /// Bytes they brought.
    pub bytes: u64,
    /// How long that took.
    pub elapsed: Duration,
    /// Time from one completion to the next: with one read in flight, what a read takes.
    pub gaps: Summary,
}

/// Reads rows of the first plane, at random by `seed`, for about `duration`, with at most `depth`
/// reads in flight. `interrupt` is called now and then; an error from it stops the work.
pub fn measure(
    reader: &Reader,
    depth: usize,
    duration: Duration,
    seed: u64,
    interrupt: &dyn Fn() -> Result<()>,
) -> Result<Rate> {
    let plane = &reader.table().planes[0];
    let rows = plane.rows();
    if rows == 0 {
        return Err(Error::value(format!(
            "table {:?} has no rows to read",
            reader.table().name
        )));
    }
    let depth = depth.max(1);
    let rule = Coalesce {
        // Rows of a small table often share a page; here each is a read of its own.
        limit: 0,
        ..reader
            .mode()
            .direct
            .map_or_else(Coalesce::page_cache, Coalesce::direct)
    };
    let ends: Vec<u64> = reader.files().iter().map(|file| file.end()).collect();
    let gaps = Latency::default();
    let (mut reads, mut bytes, mut reached) = (0_u64, 0_u64, 0);
    let mut random = Random(seed);
    let started = Instant::now();
    // Beyond the clock's range there is none.
    let deadline = started.checked_add(duration);
    let mut last = started;
    while deadline.is_none_or(|deadline| last < deadline) {
        // A batch of reads that are quick ends before it would look.
        interrupt()?;
        let mut wants: Vec<Want> = (0..depth * ROUNDS)
            .map(|_| {
                let span = plane.span(random.below(rows));
                Want {
                    file: u32::try_from(span.file).unwrap_or(u32::MAX),
                    len: u32::try_from(plane.row_bytes()).unwrap_or(u32::MAX),
                    offset: span.offset,
                    lane: 0,
                    position: 0,
                }
            })
            .collect();
        let plan = Plan::new(&mut wants, rule);
        let batch = Batch {
            reads: &plan.reads,
            files: reader.files(),
            ends: &ends,
            direct: reader.mode().direct.is_some(),
            deadline,
            interrupt,
            unread: &Unread::new(plan.reads.len()),
        };
        last = Instant::now();
        let mut done = |_: usize, arrived: &[u8]| {
            reads += 1;
            bytes += arrived.len() as u64;
            let now = Instant::now();
            gaps.record(now - last);
            last = now;
        };
        let mut cost = Cost::default();
        let outcome = engine(reader, depth)?.fetch(&batch, &mut done, &mut || false, &mut cost);
        match outcome {
            Ok(()) => reached = reached.max(cost.depth),
            Err(Error::Timeout { .. }) => break,
            Err(error) => return Err(error.in_table(&reader.table().name)),
        }
        last = Instant::now();
    }
    Ok(Rate {
        depth: if reached == 0 { depth as u64 } else { reached },
        reads,
        bytes,
        elapsed: started.elapsed(),
        gaps: gaps.summary(),
    })
}

fn engine(reader: &Reader, depth: usize) -> Result<Box<dyn Fetch>> {
    use crate::fetch::uring::{self, Uring};
    if reader.mode().engine == Engine::Pool {
        return Ok(Box::new(pool::Narrow(depth)));
    }
    let ring = uring::acquire().map_err(|error| Error::Io {
        doing: "cannot make a ring".to_owned(),
        errno: error.raw_os_error().unwrap_or(libc::EIO),
        place: Box::default(),
    })?;
    Ok(Box::new(Uring::with_depth(ring, depth)))
}

/// `SplitMix64`.
struct Random(u64);

impl Random {
    /// A number below `end`; for the sizes of tables its bias is far below what a rate can show.
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::TableRef;
    use crate::mode::Io;
    use crate::reader::{Located, Options};
    use crate::testing::{Folder, tensor};

    fn open(folder: &Folder, rows: u64, io: Io) -> Option<Reader> {
        let path = folder.tensors("t.safetensors", &[tensor("t", "U8", &[rows, 160])]);
        let located = Located::find(&path, TableRef::Name("t")).unwrap();
        let options = Options {
            io,
            ..Options::default()
        };
        // Where rings are refused there is none to measure with.
        Reader::open(located, options).ok()
    }

    #[test]
    fn reads_are_made_in_every_way_and_counted() {
        for io in [Io::Direct, Io::Uring, Io::Pread] {
            for depth in [1, 16] {
                let folder = Folder::new();
                let Some(reader) = open(&folder, 5000, io) else {
                    continue;
                };
                let time = Duration::from_millis(200);
                let rate = measure(&reader, depth, time, 7, &|| Ok(())).unwrap();
                assert!(rate.reads > 0, "{io:?} {rate:?}");
                assert!(rate.bytes >= rate.reads * 160);
                assert!((1..=depth as u64).contains(&rate.depth), "{io:?} {rate:?}");
                assert!(rate.elapsed >= Duration::from_millis(100));
                assert_eq!(rate.gaps.count, rate.reads);
            }
        }
    }

    #[test]
    fn a_duration_beyond_the_clock_is_ended_by_an_interrupt() {
        let folder = Folder::new();
        let Some(reader) = open(&folder, 5000, Io::Pread) else {
            return;
        };
        let stop = || Err(Error::Cancelled);
        let outcome = measure(&reader, 4, Duration::MAX, 7, &stop);
        assert!(matches!(outcome, Err(Error::Cancelled)));
    }

    #[test]
    fn an_interrupt_stops_it() {
        let folder = Folder::new();
        let Some(reader) = open(&folder, 5000, Io::Pread) else {
            return;
        };
        let stop = || Err(Error::Cancelled);
        let outcome = measure(&reader, 4, Duration::from_secs(60), 7, &stop);
        assert!(matches!(outcome, Err(Error::Cancelled)));
    }

    #[test]
    fn a_table_without_rows_is_refused() {
        let folder = Folder::new();
        let Some(reader) = open(&folder, 0, Io::Pread) else {
            return;
        };
        let outcome = measure(&reader, 1, Duration::from_secs(1), 7, &|| Ok(()));
        assert!(outcome.unwrap_err().to_string().contains("no rows"));
    }
}
