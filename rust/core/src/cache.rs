//! Rows kept in memory within a budget: rows, not pages, all planes of a row together.
//!
//! ```text
//! id --mix--> set: one cache line with the tags and counts of 13 rows
//!             way: the row's slot, all planes side by side
//! ```
//!
//! A row that is in the cache costs that line and its own. Nothing here reads files: a [`Cache`]
//! takes whole rows and gives them back. What a reader has of it, [`RowCache`], outlives a change of
//! the budget.

mod budget;
mod claims;
mod counts;
mod memory;
mod moving;
mod policy;
mod shape;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use memory::{Memory, SET_BYTES, Set, WAYS};
use moving::Filling;
use shape::Shape;

pub use budget::RowCache;
pub(crate) use claims::{Awaited, Claim, Claims, Mine, Waited};
pub use counts::Batch;
pub use policy::Policy;

use crate::buffer::PlaneSink;
use crate::error::{Error, Result};

/// Rows between bringing a set's line near and looking at it, and between that and copying the row.
const AHEAD: usize = 8;

/// Places for rows between their first step and their last: a power of two with room for them.
const RING: usize = 4 * AHEAD;

/// Copies of one row begun before it is taken for missing: a writer made each of them void.
const ATTEMPTS: usize = 4;

/// Sets looked at between two looks at the interrupt check: less than a millisecond's work.
const SETS_PER_CHECK: usize = 1 << 14;

/// What became of a row that was to be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Insertion {
    /// It is in the cache now, in place of the row `evicted` if there is one.
    Kept {
        /// The row that gave way.
        evicted: Option<u64>,
    },
    /// It was there already; what is there stays.
    Present,
    /// It is not kept: the rows it could replace were wanted more, or other threads had its set.
    Refused,
}

/// A cache of rows. All methods may be called from any thread.
#[derive(Debug)]
pub struct Cache {
    memory: Memory,
    shape: Shape,
    policy: Policy,
    budget: u64,
    sets: usize,
    /// Number of the next batch, which goes round and round.
    batches: AtomicU64,
    /// Takes no more rows: another cache has come in its place.
    retired: AtomicBool,
    /// Takes no rows but those that are moved to it: the cache that it replaces still has memory.
    filling: Filling,
}

/// Takes numbers that lie close together far apart, one to one.
#[inline]
fn mix(value: u64) -> u64 {
    let mut mixed = value.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

/// Low and high half of an id: the low one is kept as the tag, the high one moves the row to another
/// set, so that set and tag together are the id.
#[inline]
fn halves(id: u64) -> (u32, u64) {
    #[expect(clippy::cast_possible_truncation, reason = "the low half is wanted")]
    let low = id as u32;
    (low, id >> 32)
}

impl Cache {
    /// The smallest budget, in bytes, for a table of `rows` rows whose planes have these many bytes.
    pub fn least_bytes(plane_bytes: &[usize], rows: u64) -> u64 {
        let sets = (rows >> 32) + 1;
        sets.saturating_mul(Memory::bytes_per_set(&Shape::new(plane_bytes)) as u64)
    }

    /// An empty cache of at most `budget` bytes, index included, for a table of `rows` rows whose
    /// planes have these many bytes.
    pub fn new(budget: u64, plane_bytes: &[usize], rows: u64, policy: Policy) -> Result<Self> {
        let shape = Shape::new(plane_bytes);
        let usable = usize::try_from(budget).map_or(usize::MAX, Memory::usable);
        // Rows fill sets unevenly: with twice the room that a table needs, hardly one overflows.
        let enough = usize::try_from(rows / (WAYS as u64 / 2) + 16).unwrap_or(usize::MAX);
        let sets = (usable / Memory::bytes_per_set(&shape))
            .min(enough)
            .min(u32::MAX as usize);
        if sets == 0 || rows >> 32 >= sets as u64 {
            return Err(Error::value(format!(
                "{budget} bytes are too few to keep rows of {} bytes",
                shape.row_bytes()
            )));
        }
        Ok(Self {
            memory: Memory::new(shape.clone(), sets)?,
            shape,
            policy,
            budget,
            sets,
            batches: AtomicU64::new(0),
            retired: AtomicBool::new(false),
            filling: Filling::default(),
        })
    }

    /// Bytes that were allowed.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Bytes of the index, out of the budget.
    pub fn index_bytes(&self) -> u64 {
        (self.sets * SET_BYTES) as u64
    }

    /// Rows it has room for.
    pub fn capacity(&self) -> u64 {
        (self.sets * WAYS) as u64
    }

    /// Rows in it; counted one by one.
    pub fn len(&self) -> u64 {
        let full = |set: &Set| {
            let tags = set.tags.iter();
            tags.filter(|tag| tag.load(Ordering::Relaxed) != 0).count() as u64
        };
        self.memory.sets().iter().map(full).sum()
    }

    /// Whether there is no row in it.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The set of a row and its tag there; tag 0, which no set holds, for one row in four billion.
    #[inline]
    fn place(&self, id: u64) -> (usize, u32) {
        let (low, high) = halves(id);
        let sets = self.sets as u64;
        let base = ((mix(u64::from(low)) >> 32) * sets) >> 32;
        let set = if high == 0 {
            base
        } else {
            (base + high) % sets
        };
        #[expect(clippy::cast_possible_truncation, reason = "below the number of sets")]
        let set = set as usize;
        (set, low.wrapping_add(1))
    }

    /// The row that `tag` stands for in `set`.
    fn id(&self, set: usize, tag: u32) -> u64 {
        let low = u64::from(tag.wrapping_sub(1));
        let sets = self.sets as u64;
        let base = ((mix(low) >> 32) * sets) >> 32;
        let high = (set as u64 + sets - base) % sets;
        high << 32 | low
    }

    /// A number for a batch of look-ups: within it a row counts as wanted once.
    pub fn batch(&self) -> Batch {
        Batch::new(self.batches.fetch_add(1, Ordering::Relaxed))
    }

    /// Copies the rows of `ids` that are in the cache to their positions, which begin with `first`,
    /// and appends the positions of the others to `missed`. Rows of `pad_id` become zeros. Returns
    /// how many rows were copied.
    pub(crate) fn serve(
        &self,
        ids: &[i64],
        first: usize,
        pad_id: Option<i64>,
        sinks: &[PlaneSink<'_>],
        batch: Batch,
        missed: &mut Vec<u32>,
    ) -> u64 {
        let sets = self.memory.sets();
        let mut places = [(0, 0); RING];
        let mut ways = [WAYS; RING];
        let mut hits = 0;
        // Three rows at a time, each at another step: while one is copied, memory is busy with the
        // lines of those behind it.
        for step in 0..ids.len() + 2 * AHEAD {
            if let Some(&id) = ids.get(step) {
                let place = self.place(id.cast_unsigned());
                places[step % RING] = place;
                self.memory.prefetch_set(place.0);
            }
            let found = step.wrapping_sub(AHEAD);
            if found < ids.len() {
                let (set, tag) = places[found % RING];
                let way = sets[set].find(tag).unwrap_or(WAYS);
                ways[found % RING] = way;
                if way < WAYS {
                    self.memory.prefetch_slot(set * WAYS + way);
                }
            }
            let index = step.wrapping_sub(2 * AHEAD);
            let Some(&id) = ids.get(index) else { continue };
            let position = first + index;
            if pad_id == Some(id) {
                for sink in sinks {
                    sink.zero(position);
                }
                continue;
            }
            let (set, tag) = places[index % RING];
            let line = &sets[set];
            let way = ways[index % RING];
            if let Some(way) = self.copy(line, set, tag, way, sinks, position) {
                self.wanted(line, way, batch);
                hits += 1;
            } else {
                missed.push(u32::try_from(position).unwrap_or(u32::MAX));
            }
        }
        hits
    }

    /// Copies the row `tag`, last seen in `way` of its set, to its position; the way it was found in,
    /// `None` if it is not there.
    #[inline]
    fn copy(
        &self,
        line: &Set,
        set: usize,
        tag: u32,
        mut way: usize,
        sinks: &[PlaneSink<'_>],
        position: usize,
    ) -> Option<usize> {
        if tag == 0 || way >= WAYS {
            return None;
        }
        for _ in 0..ATTEMPTS {
            let Some(state) = line.begin() else {
                std::hint::spin_loop();
                continue;
            };
            if line.tags[way].load(Ordering::Relaxed) != tag {
                way = line.find(tag)?;
            }
            self.memory.copy_to_sinks(set * WAYS + way, sinks, position);
            if line.unchanged(state) {
                return Some(way);
            }
        }
        None
    }

    #[inline]
    fn wanted(&self, line: &Set, way: usize, batch: Batch) {
        // A row that everybody wants is not written to any more.
        if let Some(counts) = line.counts().wanted(way, batch, self.policy.most()) {
            line.set_counts(counts);
        }
    }

    /// Whether the row is in the cache at this moment.
    pub fn contains(&self, id: u64) -> bool {
        let (set, tag) = self.place(id);
        tag != 0 && self.memory.sets()[set].find(tag).is_some()
    }

    /// Copies a row to `planes`, one per plane, if it is in the cache, and counts it as wanted by
    /// `batch`.
    pub fn get(&self, id: u64, planes: &mut [&mut [u8]], batch: Batch) -> bool {
        let (set, tag) = self.place(id);
        let line = &self.memory.sets()[set];
        for _ in 0..ATTEMPTS {
            let Some(state) = line.begin() else { continue };
            let Some(way) = line.find(tag).filter(|_| tag != 0) else {
                return false;
            };
            for (plane, out) in planes.iter_mut().enumerate() {
                self.memory.copy_plane(set * WAYS + way, plane, out);
            }
            if line.unchanged(state) {
                self.wanted(line, way, batch);
                return true;
            }
        }
        false
    }

    /// Whether another cache has come in its place.
    pub(crate) fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Relaxed)
    }

    /// Keeps a row, given plane by plane.
    ///
    /// # Panics
    /// For planes of other lengths than the cache's.
    pub fn insert(&self, id: u64, planes: &[&[u8]]) -> Insertion {
        if self.filling.is_under_way() {
            return Insertion::Refused;
        }
        self.keep(id, planes, None)
    }

    /// Keeps a row that had been counted as wanted `wanted` times, unless all that it could replace
    /// were wanted more.
    pub(crate) fn restore(&self, id: u64, planes: &[&[u8]], wanted: u8) -> Insertion {
        if self.filling.is_under_way() {
            return Insertion::Refused;
        }
        self.keep(id, planes, Some(wanted))
    }

    fn keep(&self, id: u64, planes: &[&[u8]], wanted: Option<u8>) -> Insertion {
        // Before the lock: a panic under it would leave half a row.
        let lengths = self.shape.planes().iter().map(|plane| plane.bytes);
        assert!(
            lengths.eq(planes.iter().map(|bytes| bytes.len())),
            "a row of other planes than the cache's"
        );
        let (place, tag) = self.place(id);
        // A lock would make memory that was given back count again.
        if tag == 0 || self.is_retired() {
            return Insertion::Refused;
        }
        let Some(mut set) = self.memory.sets()[place].lock() else {
            return Insertion::Refused;
        };
        // Looked at under the lock, so that whoever empties a retired cache set by set meets no row
        // that comes in behind him.
        if self.is_retired() {
            return Insertion::Refused;
        }
        let line = set.set();
        if line.find(tag).is_some() {
            return Insertion::Present;
        }
        let way = match (line.find(0), wanted) {
            (Some(empty), _) => empty,
            (None, None) => self.policy.victim(&set),
            (None, Some(wanted)) => match policy::least(&set) {
                (way, least) if least <= wanted => way,
                _ => return Insertion::Refused,
            },
        };
        set.changed(way);
        let line = set.set();
        let old = line.tags[way].load(Ordering::Relaxed);
        line.tags[way].store(tag, Ordering::Relaxed);
        let count = wanted.unwrap_or(0).min(self.policy.most());
        line.set_counts(line.counts().with(way, count));
        for (plane, bytes) in planes.iter().enumerate() {
            self.memory.write_plane(place * WAYS + way, plane, bytes);
        }
        Insertion::Kept {
            evicted: (old != 0).then(|| self.id(place, old)),
        }
    }

    /// Calls `each` with the id and count of every row, in no order. `interrupt` is called now and
    /// then; an error from it ends the work.
    pub fn for_each(
        &self,
        interrupt: &dyn Fn() -> Result<()>,
        each: &mut dyn FnMut(u64, u8),
    ) -> Result<()> {
        for (index, set) in self.memory.sets().iter().enumerate() {
            if index % SETS_PER_CHECK == SETS_PER_CHECK - 1 {
                interrupt()?;
            }
            for (way, tag) in set.tags.iter().enumerate() {
                let tag = tag.load(Ordering::Relaxed);
                if tag != 0 {
                    each(self.id(index, tag), set.counts().of(way));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
