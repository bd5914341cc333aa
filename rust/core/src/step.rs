//! A whole step in one call: the ids of every table, then one gather over all of them.
//!
//! Ids live in memory that is kept from step to step, so that a step of the usual size allocates
//! nothing.

use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::gather::{Control, Report, Request, Sinks, gather};
use crate::hash::{Hash, Step};
use crate::reader::Reader;

/// One table of a step.
pub struct StepTable<'r, 'm> {
    /// From tokens to ids.
    pub hash: &'r dyn Hash,
    /// The table.
    pub reader: &'r Reader,
    /// One sink per plane, each with a place per token and head.
    pub sinks: Sinks<'m>,
    /// The id that stands for a row of zeros.
    pub pad_id: Option<i64>,
}

/// The tables of one step.
pub type StepTables<'r, 'm> = SmallVec<[StepTable<'r, 'm>; 4]>;

/// Ids of the tables of the last step.
#[derive(Debug, Default)]
pub struct Ids {
    memory: Vec<i64>,
}

impl Ids {
    /// Ids of every table of `step`, one table after another.
    fn of<'i>(
        &'i mut self,
        hashes: impl Iterator<Item = &'i dyn Hash> + Clone,
        step: &Step<'_>,
        threads: usize,
    ) -> Result<&'i [i64]> {
        let tokens = step.tokens().len();
        let count = hashes
            .clone()
            .map(|hash| hash.heads().count())
            .sum::<usize>()
            .checked_mul(tokens)
            .ok_or_else(|| Error::value(format!("{tokens} tokens in one step are too many")))?;
        self.memory.resize(count, 0);
        let mut rest = &mut self.memory[..];
        for hash in hashes {
            let (own, after) = rest.split_at_mut(hash.heads().count() * tokens);
            hash.ids(step, own, threads)?;
            rest = after;
        }
        Ok(&self.memory)
    }
}

/// Hashes `step` for every table and gathers all their rows in one round of reads. All hashes look
/// equally far back. On an error what the sinks hold is unspecified.
pub fn gather_step(
    tables: StepTables<'_, '_>,
    step: &Step<'_>,
    ids: &mut Ids,
    threads: usize,
    control: &Control<'_>,
) -> Result<Report> {
    let mut rest = ids.of(tables.iter().map(|table| table.hash), step, threads)?;
    let tokens = step.tokens().len();
    let mut requests: SmallVec<[Request<'_, '_>; 4]> = SmallVec::new();
    for table in tables {
        let (own, after) = rest.split_at(table.hash.heads().count() * tokens);
        rest = after;
        requests.push(Request {
            reader: table.reader,
            ids: own,
            sinks: table.sinks,
            pad_id: table.pad_id,
        });
    }
    gather(&requests, control)
}
