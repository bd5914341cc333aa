//! A sequence of lookups, and how many of them a cache would miss.

use crate::error::{Error, Result};

use super::lists::NONE;
use super::policy::named;
use super::{mix, narrow};

/// Batches of rows, each row once per batch.
pub struct Trace {
    universe: usize,
    rows: Vec<u32>,
    times: Vec<u32>,
    ends: Vec<usize>,
    seen: Vec<u32>,
}

impl Trace {
    /// A trace of rows below `universe`.
    pub fn new(universe: usize) -> Result<Self> {
        if universe == 0 || u32::try_from(universe).is_err() || universe >= NONE as usize {
            return Err(Error::value(format!("cannot simulate {universe} rows")));
        }
        Ok(Self {
            universe,
            rows: Vec::new(),
            times: Vec::new(),
            ends: Vec::new(),
            seen: Vec::new(),
        })
    }

    /// Adds batches of `batch` lookups each; a row counts once per batch, -1 not at all.
    pub fn append(&mut self, ids: &[i64], batch: usize) -> Result<()> {
        let size = (4 * batch).next_power_of_two();
        self.seen.resize(size, NONE);
        for part in ids.chunks(batch.max(1)) {
            self.seen.fill(NONE);
            for &id in part.iter().filter(|&&id| id != -1) {
                let row = u32::try_from(id)
                    .ok()
                    .filter(|&row| (row as usize) < self.universe)
                    .ok_or_else(|| Error::value(format!("row {id} of {}", self.universe)))?;
                let mut place = usize::try_from(mix(u64::from(row))).unwrap_or(0) & (size - 1);
                while self.seen[place] != NONE && self.rows[self.seen[place] as usize] != row {
                    place = (place + 1) & (size - 1);
                }
                match self.seen[place] {
                    NONE => {
                        self.seen[place] = narrow(self.rows.len());
                        self.rows.push(row);
                        self.times.push(1);
                    }
                    known => self.times[known as usize] += 1,
                }
            }
            self.ends.push(self.rows.len());
        }
        Ok(())
    }

    fn batches(&self) -> impl DoubleEndedIterator<Item = &[u32]> + ExactSizeIterator {
        (0..self.ends.len()).map(|batch| {
            let first = if batch == 0 { 0 } else { self.ends[batch - 1] };
            &self.rows[first..self.ends[batch]]
        })
    }

    /// Lookups of each batch.
    pub fn lookups(&self) -> Vec<usize> {
        self.batches().map(<[u32]>::len).collect()
    }

    /// Lookups of each batch that are the first of their row.
    pub fn first(&self) -> Vec<usize> {
        let mut seen = vec![false; self.universe];
        self.batches()
            .map(|rows| {
                rows.iter()
                    .filter(|&&row| !std::mem::replace(&mut seen[row as usize], true))
                    .count()
            })
            .collect()
    }

    /// Misses of each batch with a cache of `capacity` rows: a batch is looked up, then what it
    /// missed is taken in.
    pub fn misses(&self, policy: &str, capacity: usize) -> Result<Vec<usize>> {
        if capacity == 0 {
            return Err(Error::value("a cache of no rows".to_owned()));
        }
        let mut policy = named(policy, capacity, self.universe)?;
        let mut missed = Vec::new();
        let mut first = 0;
        Ok(self
            .ends
            .iter()
            .map(|&end| {
                missed.clear();
                for at in first..end {
                    if !policy.lookup(self.rows[at], self.times[at]) {
                        missed.push(at);
                    }
                }
                for &at in &missed {
                    policy.insert(self.rows[at]);
                }
                first = end;
                missed.len()
            })
            .collect())
    }

    /// Misses of each batch if what is needed last never takes room from what is needed before:
    /// no cache of `capacity` rows can do better.
    pub fn optimum(&self, capacity: usize) -> Vec<usize> {
        let mut next = vec![NONE; self.rows.len()];
        let mut following = vec![NONE; self.universe];
        for (batch, rows) in self.batches().enumerate().rev() {
            let first = self.ends[batch] - rows.len();
            for (at, &row) in rows.iter().enumerate() {
                next[first + at] = following[row as usize];
                following[row as usize] = narrow(batch);
            }
        }
        // Of what is kept only the batch that needs it next matters.
        let mut needed = vec![0_usize; self.ends.len()];
        let (mut kept, mut furthest) = (0_usize, 0_usize);
        self.batches()
            .enumerate()
            .map(|(batch, rows)| {
                let hits = std::mem::take(&mut needed[batch]);
                kept -= hits;
                let first = self.ends[batch] - rows.len();
                for &batch in &next[first..self.ends[batch]] {
                    if batch != NONE {
                        needed[batch as usize] += 1;
                        furthest = furthest.max(batch as usize);
                        kept += 1;
                    }
                }
                while kept > capacity {
                    let gone = needed[furthest].min(kept - capacity);
                    needed[furthest] -= gone;
                    kept -= gone;
                    if kept > capacity {
                        furthest -= 1;
                    }
                }
                rows.len() - hits
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const POLICIES: [&str; 14] = [
        "lru",
        "clock",
        "clock:bits=2",
        "sieve",
        "s3fifo",
        "s3fifo:small=30,promote=1",
        "wtinylfu",
        "wtinylfu:window=30",
        "lru:filter=1",
        "s3fifo:filter=1",
        "set:ways=4",
        "set:ways=4,bits=0,filter=1",
        "set:ways=4,ghosts=4,fingerprint=16",
        "set:ways=4,halve=2,insert=1,max=1",
    ];

    fn trace(batches: &[Vec<i64>]) -> Trace {
        let mut trace = Trace::new(40).expect("small");
        for ids in batches {
            trace.append(ids, ids.len().max(1)).expect("in range");
        }
        trace
    }

    fn sum(misses: &[usize]) -> usize {
        misses.iter().sum()
    }

    /// LRU as one writes it down first.
    fn naive_lru(batches: &[Vec<i64>], capacity: usize) -> Vec<usize> {
        let mut kept: Vec<i64> = Vec::new();
        batches
            .iter()
            .map(|ids| {
                let mut distinct = Vec::new();
                for &id in ids {
                    if !distinct.contains(&id) {
                        distinct.push(id);
                    }
                }
                let (hit, missed): (Vec<i64>, Vec<i64>) =
                    distinct.iter().partition(|id| kept.contains(id));
                for id in hit.iter().chain(&missed) {
                    kept.retain(|other| other != id);
                    kept.push(*id);
                    if kept.len() > capacity {
                        kept.remove(0);
                    }
                }
                missed.len()
            })
            .collect()
    }

    /// The fewest misses there can be from here on: every choice of what to keep is tried.
    fn fewest(batches: &[Vec<i64>], kept: &[i64], capacity: usize) -> usize {
        let Some((ids, rest)) = batches.split_first() else {
            return 0;
        };
        let missed = ids.iter().filter(|id| !kept.contains(id)).count();
        let mut all: Vec<i64> = kept.iter().chain(ids).copied().collect();
        all.sort_unstable();
        all.dedup();
        (0_u32..1 << all.len())
            .filter(|choice| choice.count_ones() as usize == capacity.min(all.len()))
            .map(|choice| {
                let kept: Vec<i64> = (0..all.len())
                    .filter(|at| (choice >> at) & 1 == 1)
                    .map(|at| all[at])
                    .collect();
                missed + fewest(rest, &kept, capacity)
            })
            .min()
            .unwrap_or(missed)
    }

    fn batches(rows: i64, longest: usize, most: usize) -> impl Strategy<Value = Vec<Vec<i64>>> {
        let batch = prop::collection::vec(0..rows, 1..=longest);
        prop::collection::vec(batch, 1..=most)
    }

    proptest! {
        #[test]
        fn lru_is_lru(batches in batches(40, 8, 60), capacity in 1_usize..30) {
            let misses = trace(&batches).misses("lru", capacity).expect("known");
            prop_assert_eq!(misses, naive_lru(&batches, capacity));
            let one_set = format!("set:bits=0,ways={capacity}");
            let misses = trace(&batches).misses(&one_set, capacity).expect("known");
            prop_assert_eq!(misses, naive_lru(&batches, capacity));
        }

        #[test]
        fn nothing_beats_the_optimum(batches in batches(40, 12, 80), capacity in 4_usize..30) {
            let trace = trace(&batches);
            let optimum = sum(&trace.optimum(capacity));
            prop_assert!(sum(&trace.first()) <= optimum);
            for policy in POLICIES {
                let misses = trace.misses(policy, capacity).expect("known");
                prop_assert!(sum(&misses) >= optimum, "{} beats the optimum", policy);
            }
            prop_assert_eq!(sum(&trace.optimum(40)), sum(&trace.first()));
        }

        #[test]
        fn the_optimum_is_the_best_of_all_choices(
            batches in batches(5, 3, 5), capacity in 1_usize..3,
        ) {
            let distinct: Vec<Vec<i64>> = batches
                .iter()
                .map(|ids| ids.iter().copied().collect::<std::collections::BTreeSet<_>>())
                .map(|ids| ids.into_iter().collect())
                .collect();
            let optimum = sum(&trace(&batches).optimum(capacity));
            prop_assert_eq!(optimum, fewest(&distinct, &[], capacity));
        }

        #[test]
        fn what_fits_is_missed_once(rows in 1_i64..20, turns in 2_usize..6) {
            let all = vec![(0..rows).collect::<Vec<_>>(); turns];
            let capacity = usize::try_from(rows).expect("positive");
            for policy in POLICIES.iter().filter(|name| !name.starts_with("set")) {
                let misses = trace(&all).misses(policy, capacity).expect("known");
                prop_assert_eq!(sum(&misses), capacity, "{}", policy);
            }
        }
    }

    #[test]
    fn a_scan_leaves_frequent_rows_alone() {
        let hot: Vec<i64> = (0..4).collect();
        let mut batches = vec![hot.clone(); 5];
        batches.extend((4..40).map(|id| vec![id]));
        batches.push(hot);
        for (policy, lost) in [
            ("lru", 4),
            ("set:ways=8", 0),
            ("set:ways=8,ghosts=8", 0),
            ("s3fifo", 0),
        ] {
            let misses = trace(&batches).misses(policy, 8).expect("known");
            assert_eq!(misses.last(), Some(&lost), "{policy}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        assert!(Trace::new(0).is_err());
        let mut trace = Trace::new(40).expect("small");
        assert!(trace.append(&[40], 1).is_err());
        assert!(trace.append(&[-2], 1).is_err());
        trace.append(&[3, 3, 4, -1, -1], 2).expect("in range");
        assert_eq!(trace.lookups(), [1, 1, 0]);
        for wrong in ["fifo", "set:ways", "set:ways=many"] {
            assert!(trace.misses(wrong, 4).is_err(), "{wrong}");
        }
        assert!(trace.misses("lru", 0).is_err());
    }
}
