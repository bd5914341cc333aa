//! Which missing rows are being read, so that those who want the same row wait for it.
//!
//! Whoever claims a row first reads it. Others register as waiters, read what they have claimed
//! themselves, and then wait: nobody waits while somebody waits for him. A row that was waited for
//! is handed over here, whether the cache keeps it or not; if its reader fails or gives up, those
//! who wait claim it anew. A wait ends when nothing has come for a while: the reader may be a call
//! further up the same stack, which a signal handler has interrupted, or wait for one that is.
//!
//! The table belongs to one process. A forked child has its own, and waits for no thread that only
//! its parent has.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::mix;
use crate::error::Result;
use crate::process::PerProcess;

/// Parts of the table, each with a lock of its own.
const SHARDS: u64 = 64;

/// The rows of all planes, one after another.
type Row = Arc<[u8]>;

#[derive(Debug)]
enum State {
    Reading,
    Arrived(Row),
    Failed,
}

#[derive(Debug)]
struct Reading {
    state: State,
    waiters: u32,
}

#[derive(Debug, Default)]
struct Shard {
    rows: Mutex<HashMap<u64, Reading>>,
    settled: Condvar,
}

#[derive(Debug)]
pub(crate) struct Table {
    shards: Vec<Shard>,
}

impl Table {
    fn shard(&self, row: u64) -> (&Shard, MutexGuard<'_, HashMap<u64, Reading>>) {
        let index = usize::try_from(mix(row) % SHARDS).unwrap_or(0);
        let shard = &self.shards[index];
        // Every state between two changes is a valid one.
        let rows = shard.rows.lock().unwrap_or_else(PoisonError::into_inner);
        (shard, rows)
    }

    fn settle(&self, row: u64, arrived: Option<&dyn Fn() -> Row>) {
        let (shard, mut rows) = self.shard(row);
        let Entry::Occupied(mut entry) = rows.entry(row) else {
            return;
        };
        if entry.get().waiters == 0 {
            entry.remove();
            return;
        }
        entry.get_mut().state = arrived.map_or(State::Failed, |row| State::Arrived(row()));
        shard.settled.notify_all();
    }

    fn leave(rows: &mut HashMap<u64, Reading>, row: u64) {
        if let Entry::Occupied(mut entry) = rows.entry(row) {
            let reading = entry.get_mut();
            reading.waiters -= 1;
            if reading.waiters == 0 && !matches!(reading.state, State::Reading) {
                entry.remove();
            }
        }
    }
}

/// The rows of one table that are being read.
pub(crate) struct Claims(PerProcess<Table>);

impl std::fmt::Debug for Claims {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Claims")
    }
}

/// What a claim came to.
pub(crate) enum Claim {
    /// The row is the caller's to read.
    Mine,
    /// Another call reads it, and the caller is among those who wait.
    Another,
}

/// What a wait came to.
pub(crate) enum Waited {
    /// The row, plane after plane.
    Row(Row),
    /// Nobody reads it any more.
    Failed,
    /// It has not come in time.
    Late,
}

impl Claims {
    pub(crate) const fn new() -> Self {
        Self(PerProcess::new())
    }

    /// This process's table.
    pub(crate) fn table(&self) -> Result<Arc<(u32, Table)>> {
        self.0.get(|| {
            Ok(Table {
                shards: (0..SHARDS).map(|_| Shard::default()).collect(),
            })
        })
    }
}

/// Whether the table is that of the process that this one was forked from, inside a call: its locks
/// may be held by threads that are not here, and nobody waits there.
fn is_of_another_process(table: &(u32, Table)) -> bool {
    table.0 != std::process::id()
}

/// The claims of one call: what it did not settle when this is dropped has failed, and what it did
/// not wait for is left.
pub(crate) struct Mine {
    table: Arc<(u32, Table)>,
    rows: Vec<Option<u64>>,
}

/// The rows that one call waits for.
pub(crate) struct Awaited {
    table: Arc<(u32, Table)>,
    rows: Vec<u64>,
}

impl Mine {
    pub(crate) fn new(table: Arc<(u32, Table)>) -> Self {
        Self {
            table,
            rows: Vec::new(),
        }
    }

    /// Claims `row`. Claims are numbered from 0.
    pub(crate) fn claim(&mut self, row: u64, awaited: &mut Awaited) -> Claim {
        let (_, mut rows) = self.table.1.shard(row);
        let mine = match rows.entry(row) {
            Entry::Vacant(entry) => {
                entry.insert(Reading {
                    state: State::Reading,
                    waiters: 0,
                });
                true
            }
            Entry::Occupied(mut entry) => {
                let reading = entry.get_mut();
                if matches!(reading.state, State::Failed) {
                    // Those who have not noticed the failure wait for this call instead.
                    reading.state = State::Reading;
                    true
                } else {
                    reading.waiters += 1;
                    false
                }
            }
        };
        drop(rows);
        if mine {
            self.rows.push(Some(row));
            Claim::Mine
        } else {
            awaited.rows.push(row);
            Claim::Another
        }
    }

    /// The row of claim `number` is there: hands it to those who wait.
    pub(crate) fn arrived(&mut self, number: usize, row: &dyn Fn() -> Row) {
        if let Some(id) = self.rows.get_mut(number).and_then(Option::take) {
            self.table.1.settle(id, Some(row));
        }
    }
}

impl Mine {
    /// Numbers a row that is read without a claim, whoever else reads it.
    pub(crate) fn unclaimed(&mut self) -> Claim {
        self.rows.push(None);
        Claim::Mine
    }

    /// The claim made last is settled and does not count.
    pub(crate) fn forget_last(&mut self) {
        self.rows.pop();
    }
}

impl Drop for Mine {
    fn drop(&mut self) {
        if is_of_another_process(&self.table) {
            return;
        }
        for row in self.rows.iter().flatten() {
            self.table.1.settle(*row, None);
        }
    }
}

impl Awaited {
    pub(crate) fn new(table: Arc<(u32, Table)>) -> Self {
        Self {
            table,
            rows: Vec::new(),
        }
    }

    /// Waits for the row claimed last and not waited for; `None` when there is none. A row that has
    /// not come when `patience` is over is late. `check` is called every `period`; after an error
    /// from it nothing is waited for any more.
    pub(crate) fn next(
        &mut self,
        period: Duration,
        patience: Duration,
        check: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Option<(u64, Waited)>> {
        let Some(&row) = self.rows.last() else {
            return Ok(None);
        };
        let (shard, mut rows) = self.table.1.shard(row);
        let begun = Instant::now();
        let mut looked = begun;
        let outcome = loop {
            match rows.get(&row).map(|reading| &reading.state) {
                Some(State::Arrived(bytes)) => break Waited::Row(Arc::clone(bytes)),
                Some(State::Failed) | None => break Waited::Failed,
                Some(State::Reading) => {}
            }
            if begun.elapsed() >= patience {
                break Waited::Late;
            }
            if looked.elapsed() >= period {
                drop(rows);
                check()?;
                looked = Instant::now();
                rows = self.table.1.shard(row).1;
                continue;
            }
            (rows, _) = shard
                .settled
                .wait_timeout(rows, period)
                .unwrap_or_else(PoisonError::into_inner);
        };
        Table::leave(&mut rows, row);
        drop(rows);
        self.rows.pop();
        Ok(Some((row, outcome)))
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        if is_of_another_process(&self.table) {
            return;
        }
        for row in &self.rows {
            Table::leave(&mut self.table.1.shard(*row).1, *row);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Arc<(u32, Table)> {
        Claims::new().table().unwrap()
    }

    fn next(awaited: &mut Awaited, patience: Duration) -> Waited {
        let period = Duration::from_millis(1);
        let next = awaited.next(period, patience, &mut || Ok(())).unwrap();
        next.unwrap().1
    }

    #[test]
    fn a_wait_for_a_call_that_does_not_go_on_ends() {
        let table = table();
        let mut first = Mine::new(Arc::clone(&table));
        let mut nothing = Awaited::new(Arc::clone(&table));
        assert!(matches!(first.claim(7, &mut nothing), Claim::Mine));
        let mut second = Mine::new(Arc::clone(&table));
        let mut awaited = Awaited::new(Arc::clone(&table));
        assert!(matches!(second.claim(7, &mut awaited), Claim::Another));
        let patience = Duration::from_millis(20);
        assert!(matches!(next(&mut awaited, patience), Waited::Late));
        assert!(awaited.rows.is_empty());
        assert!(matches!(second.unclaimed(), Claim::Mine));
        second.arrived(0, &|| unreachable!("nobody waits for what was not claimed"));
        drop(second);
        // The claim is still the first one's.
        let mut third = Mine::new(Arc::clone(&table));
        assert!(matches!(third.claim(7, &mut awaited), Claim::Another));
        first.arrived(0, &|| Arc::from([9]));
        let Waited::Row(row) = next(&mut awaited, Duration::ZERO) else {
            panic!("it has arrived");
        };
        assert_eq!(row[..], [9]);
        assert!(table.1.shard(7).1.is_empty());
    }

    /// A call that was forked in its middle ends in the child without the parent's locks.
    #[test]
    fn what_a_child_has_of_its_parents_claims_is_left_alone() {
        let parents = Table {
            shards: (0..SHARDS).map(|_| Shard::default()).collect(),
        };
        let parents = Arc::new((std::process::id().wrapping_add(1), parents));
        let mut mine = Mine::new(Arc::clone(&parents));
        let mut awaited = Awaited::new(Arc::clone(&parents));
        assert!(matches!(mine.claim(1, &mut awaited), Claim::Mine));
        assert!(matches!(mine.claim(1, &mut awaited), Claim::Another));
        // Held for ever by a thread that is not here: whoever wants it would wait for ever.
        let held = parents.1.shard(1).1;
        drop((mine, awaited));
        assert_eq!(held.get(&1).map(|reading| reading.waiters), Some(1));
    }
}
