//! The rows that one request misses: claimed, brought to their places, waited for.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::super::{Control, Sinks};
use crate::buffer::PlaneSink;
use crate::cache::{Awaited, Cache, Claim, Mine, RowCache, Waited};
use crate::error::Result;
use crate::reader::Reader;

/// Bytes of rows that one call reads before they are handed on, at most: some thousands of reads,
/// whose beginning and end without enough in flight do not matter.
const ROUND_BYTES: usize = 2 << 20;

/// How long a call waits for rows that another reads before it looks at its interrupt check.
const PERIOD: Duration = Duration::from_millis(50);

/// The same for a call with a deadline.
const SHORT_PERIOD: Duration = Duration::from_millis(1);

/// How long a call waits for rows that another reads when none comes.
const PATIENCE: Duration = Duration::from_secs(1);

/// A missing row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Missing {
    pub(super) id: i64,
    /// Its position in the request; of rows that only the cache wants, how often they were wanted.
    pub(super) position: u32,
}

/// What becomes of rows that were read.
#[derive(Clone, Copy)]
pub(super) enum Use<'r> {
    /// They go to these sinks and to the cache.
    Serve(&'r [PlaneSink<'r>]),
    /// They go to the cache.
    Fill,
    /// They go to the cache, where they have been before.
    Restore,
}

/// One request of a table with a cache.
pub(super) struct Part<'r> {
    pub(super) reader: &'r Reader,
    pub(super) cache: Arc<Cache>,
    pub(super) wanted_for: Use<'r>,
    /// By id, then position.
    pub(super) missing: Vec<Missing>,
    /// Those before have had their round.
    pub(super) next: usize,
    pub(super) awaited: Awaited,
    /// Others had their time: rows are read whoever else does.
    impatient: bool,
}

/// The rows that one round reads for a part.
pub(super) struct Slice {
    pub(super) ids: Vec<i64>,
    /// Per row its places, in [`Part::missing`].
    pub(super) groups: Vec<Range<usize>>,
    pub(super) mine: Mutex<Mine>,
}

impl<'r> Part<'r> {
    pub(super) fn new(
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
            impatient: false,
        })
    }

    pub(super) fn row_cache(&self) -> &RowCache {
        self.reader.row_cache()
    }

    /// Claims the next rows that are missing.
    pub(super) fn take(&mut self) -> Result<Slice> {
        if self.cache.is_retired()
            && let Some(current) = self.row_cache().current()
        {
            self.cache = current;
        }
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
            let claim = if self.impatient {
                mine.unclaimed()
            } else {
                mine.claim(id.cast_unsigned(), &mut self.awaited)
            };
            match claim {
                Claim::Another => self.row_cache().stats().waited.add(1),
                Claim::Mine => {
                    slice.ids.push(id);
                    slice.groups.push(group);
                    // Whoever read it last may have been through just before the claim.
                    if self.cache.contains(id.cast_unsigned()) && self.get(id, &mut row) {
                        let number = slice.ids.len() - 1;
                        self.received(&slice.groups[number], &row);
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

    /// Counts row parts as copied from memory, where a caller gets them.
    pub(super) fn count_resident(&self, parts: u64) {
        if matches!(self.wanted_for, Use::Serve(_)) {
            self.reader.stats().rows_resident.add(parts);
        }
    }

    /// Copies a row that another call has read to its places.
    fn received(&self, group: &Range<usize>, row: &[u8]) {
        self.scatter(group, row);
        self.count_resident((group.len() * self.reader.table().planes.len()) as u64);
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
    pub(super) fn planes<'b>(&self, row: &'b [u8]) -> SmallVec<[&'b [u8]; 3]> {
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
    pub(super) fn scatter(&self, group: &Range<usize>, row: &[u8]) {
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
    pub(super) fn scratch<'m>(&self, memory: &'m mut [u8], count: usize) -> Result<Sinks<'m>> {
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
    pub(super) fn wait(&mut self, control: &Control<'_>) -> Result<bool> {
        let mut again = Vec::new();
        if !matches!(self.wanted_for, Use::Serve(_)) {
            // Whoever reads them puts them into the cache.
            return Ok(false);
        }
        let period = if control.deadline.is_none() {
            PERIOD
        } else {
            SHORT_PERIOD
        };
        let mut checked = Instant::now();
        let doing = "waiting for rows that another call reads";
        loop {
            let patience = if self.impatient {
                Duration::ZERO
            } else {
                PATIENCE
            };
            let next = self
                .awaited
                .next(period, patience, &mut || {
                    control.check_while(doing, &mut checked)
                })
                .map_err(|error| error.in_table(&self.reader.table().name))?;
            let Some((row, outcome)) = next else { break };
            let id = row.cast_signed();
            let start = self.missing.partition_point(|missing| missing.id < id);
            let group = self.group(start);
            match outcome {
                Waited::Row(bytes) => self.received(&group, &bytes),
                Waited::Failed => again.extend_from_slice(&self.missing[group]),
                Waited::Late => {
                    self.impatient = true;
                    again.extend_from_slice(&self.missing[group]);
                }
            }
        }
        again.sort_unstable();
        self.missing = again;
        self.next = 0;
        Ok(!self.missing.is_empty())
    }
}
