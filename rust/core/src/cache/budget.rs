//! What a reader has of a cache: the budget, which may change, and what came of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwapOption;

use super::{Cache, Claims, Insertion, Policy};
use crate::cgroup;
use crate::error::{Error, Result};
use crate::stats::Counter;

/// The policy of readers' caches.
const POLICY: Policy = Policy::Counted;

/// How long a change of the budget, or a list of the rows, waits for another one before it looks for
/// an interrupt.
const PAUSE: Duration = Duration::from_millis(5);

/// What a reader's caches have done since it was opened.
#[derive(Debug, Default)]
pub struct CacheStats {
    /// Rows looked up that were in the cache.
    pub hits: Counter,
    /// Rows looked up that were not.
    pub misses: Counter,
    /// Rows put into the cache.
    pub insertions: Counter,
    /// Rows that gave way to others.
    pub evictions: Counter,
    /// Rows not put in: those they could replace were wanted more, or other threads had their set.
    pub admission_refusals: Counter,
    /// Missing rows that were not read because another call was reading them.
    pub waited: Counter,
}

/// The cache of one reader, or none: its budget may be changed at any time.
#[derive(Debug)]
pub struct RowCache {
    current: ArcSwapOption<Cache>,
    active: AtomicBool,
    plane_bytes: Vec<usize>,
    rows: u64,
    claims: Claims,
    /// Who is changing the budget or listing the rows, as [`who`] names him; 0 for nobody.
    busy: AtomicU64,
    stats: CacheStats,
}

/// The calling thread: its process in the upper half, and a number of its own, from 1 on.
fn who() -> u64 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    thread_local! {
        static NUMBER: u32 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    u64::from(std::process::id()) << 32 | u64::from(NUMBER.with(|number| *number))
}

/// Whoever changes the budget or lists the rows, until it is dropped.
pub(crate) struct Turn<'a>(&'a AtomicU64);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

impl RowCache {
    /// No cache, for a table of `rows` rows whose planes have these many bytes.
    pub(crate) fn new(plane_bytes: Vec<usize>, rows: u64) -> Self {
        Self {
            current: ArcSwapOption::const_empty(),
            active: AtomicBool::new(false),
            plane_bytes,
            rows,
            claims: Claims::new(),
            busy: AtomicU64::new(0),
            stats: CacheStats::default(),
        }
    }

    /// Whether there is a budget.
    #[inline]
    pub fn is_active(&self) -> bool {
        self.active.load(Ordering::Relaxed)
    }

    /// The cache, if there is a budget.
    pub fn current(&self) -> Option<Arc<Cache>> {
        self.current.load_full()
    }

    /// The budget in bytes; 0 for none.
    pub fn budget(&self) -> u64 {
        self.current
            .load()
            .as_ref()
            .map_or(0, |cache| cache.budget())
    }

    /// What was done.
    pub fn stats(&self) -> &CacheStats {
        &self.stats
    }

    pub(crate) fn claims(&self) -> &Claims {
        &self.claims
    }

    /// Counts what became of a row.
    pub(crate) fn note(&self, insertion: Insertion) {
        match insertion {
            Insertion::Kept { evicted } => {
                self.stats.insertions.add(1);
                self.stats.evictions.add(u64::from(evicted.is_some()));
            }
            Insertion::Refused => self.stats.admission_refusals.add(1),
            Insertion::Present => {}
        }
    }

    /// Changes the budget, from now on, to `bytes`, 0 for none. Rows that were in the cache stay as
    /// far as they fit, those wanted most first; meanwhile the two caches together take no more than
    /// the larger budget and some pages, and rows that are read are not kept. `interrupt` is called
    /// now and then; an error from it leaves the new budget with the rows moved so far.
    ///
    /// # Errors
    /// A budget too small for any row, or larger than the memory there is; a call from inside
    /// another one, by its `interrupt`.
    pub fn resize(&self, bytes: u64, interrupt: &dyn Fn() -> Result<()>) -> Result<()> {
        self.check(bytes)?;
        let _turn = self.turn(interrupt)?;
        let old = self.current();
        if old.as_ref().map_or(0, |cache| cache.budget()) == bytes {
            return Ok(());
        }
        if bytes == 0 {
            self.current.store(None);
            self.active.store(false, Ordering::Relaxed);
            return old.map_or(Ok(()), |old| old.retire(interrupt));
        }
        let new = Arc::new(Cache::new(bytes, &self.plane_bytes, self.rows, POLICY)?);
        if old.is_some() {
            // Before anybody can put a row into it.
            new.begin_filling();
        }
        // In this order: a fork between the two must not leave a cache that nobody looks into.
        self.active.store(true, Ordering::Relaxed);
        self.current.store(Some(Arc::clone(&new)));
        old.map_or(Ok(()), |old| old.move_to(&new, interrupt))
    }

    /// Refuses a budget that no cache can have.
    fn check(&self, bytes: u64) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let row: usize = self.plane_bytes.iter().sum();
        let least = Cache::least_bytes(&self.plane_bytes, self.rows);
        if bytes < least {
            return Err(Error::value(format!(
                "cache_bytes={bytes} is too small to keep rows of {row} bytes: the minimum is \
                 {least} bytes; pass at least that, or 0 for no cache"
            )));
        }
        let memory = cgroup::memory_limit();
        if bytes > memory {
            return Err(Error::value(format!(
                "cache_bytes={bytes} is more than the {memory} bytes of memory that this process \
                 may use; pass less, or a share such as \"25%\""
            )));
        }
        Ok(())
    }

    /// Waits until nobody else changes the budget or lists the rows.
    ///
    /// # Errors
    /// A call from inside another one, by its `interrupt`.
    pub(crate) fn turn(&self, interrupt: &dyn Fn() -> Result<()>) -> Result<Turn<'_>> {
        let own = who();
        loop {
            let holder = self.busy.load(Ordering::Relaxed);
            if holder == own {
                return Err(Error::value(
                    "this very thread is in resize or save_hot of this cache, and a signal handler that \
                     runs meanwhile can call neither; do so when the call has returned",
                ));
            }
            // A holder of another process was a thread of the parent, which is not here.
            if holder >> 32 != own >> 32
                && self
                    .busy
                    .compare_exchange(holder, own, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
            {
                return Ok(Turn(&self.busy));
            }
            std::thread::sleep(PAUSE);
            interrupt()?;
        }
    }
}
