//! Policies within small sets of places: a row can be in one set only, and the set decides alone.

use super::lists::NONE;
use super::policy::{Policy, Settings};
use super::{mix, narrow};

/// Sets of `ways=` places with a counter each.
///
/// `bits=` is the size of a counter (0: the time of the last hit instead, which is LRU), `insert=`
/// what it begins with, `max=1` makes a hit set it to the most instead of adding one, `repeats=1`
/// adds one for every time that a batch wants the row. Who has the least leaves; among equals the first from a hand on. Counters are lowered by the least of the
/// set when somebody has to leave, or with `halve=N` halved after N insertions per way. With
/// `ghosts=` a set remembers that many rows that left, by a fingerprint of `fingerprint=` bits;
/// one that comes back begins with `again=`.
pub(super) struct Sets {
    ways: usize,
    count: u64,
    rows: Vec<u32>,
    counters: Vec<u32>,
    hands: Vec<u8>,
    since: Vec<u32>,
    ghosts: Vec<u32>,
    ghost_hands: Vec<u8>,
    ghosts_per_set: usize,
    fingerprint: u32,
    most: u32,
    begin: u32,
    again: u32,
    hit_is_most: bool,
    halve: u32,
    repeats: bool,
    by_time: bool,
    now: u32,
}

impl Sets {
    pub(super) fn new(capacity: usize, settings: &Settings) -> Self {
        let ways = settings.number("ways", 16);
        let count = (capacity / ways).max(1);
        let bits = settings.number("bits", 3);
        let most = narrow((1 << bits) - 1);
        let ghosts = settings.number("ghosts", 0);
        Self {
            ways,
            count: count as u64,
            rows: vec![NONE; count * ways],
            counters: vec![0; count * ways],
            hands: vec![0; count],
            since: vec![0; count],
            ghosts: vec![NONE; count * ghosts],
            ghost_hands: vec![0; count],
            ghosts_per_set: ghosts,
            fingerprint: narrow((1 << settings.number("fingerprint", 8)) - 1),
            most,
            begin: narrow(settings.number("insert", 0)),
            again: narrow(settings.number("again", 1)).min(most),
            hit_is_most: settings.number("max", 0) > 0,
            halve: narrow(settings.number("halve", 0) * ways),
            repeats: settings.number("repeats", 0) > 0,
            by_time: bits == 0,
            now: 0,
        }
    }

    fn set(&self, row: u32) -> (usize, u32) {
        let mixed = mix(u64::from(row));
        let set = (u128::from(mixed) * u128::from(self.count)) >> 64;
        let fingerprint = narrow((mixed & 0xffff) as usize) & self.fingerprint;
        (usize::try_from(set).unwrap_or(0), fingerprint)
    }

    /// The place in `set` whose row leaves next, or an empty one.
    fn place(&mut self, set: usize) -> usize {
        let first = set * self.ways;
        let hand = usize::from(self.hands[set]);
        let mut found = (u32::MAX, first);
        for step in 0..self.ways {
            let way = (hand + step) % self.ways;
            if self.rows[first + way] == NONE {
                return first + way;
            }
            let counter = self.counters[first + way];
            if counter < found.0 {
                found = (counter, first + way);
            }
        }
        found.1
    }

    /// Lowers the counters of a set that has to let a row go.
    fn age(&mut self, set: usize, least: u32) {
        let first = set * self.ways;
        let counters = &mut self.counters[first..first + self.ways];
        if self.by_time {
            return;
        }
        if self.halve == 0 {
            for counter in counters {
                *counter -= least;
            }
            return;
        }
        self.since[set] += 1;
        if self.since[set] >= self.halve {
            self.since[set] = 0;
            for counter in counters {
                *counter /= 2;
            }
        }
    }

    fn was_here(&mut self, set: usize, fingerprint: u32) -> bool {
        let first = set * self.ghosts_per_set;
        let ghosts = &mut self.ghosts[first..first + self.ghosts_per_set];
        let found = ghosts.iter().position(|&ghost| ghost == fingerprint);
        if let Some(place) = found {
            ghosts[place] = NONE;
        }
        found.is_some()
    }

    fn remember(&mut self, set: usize, row: u32) {
        if self.ghosts_per_set == 0 {
            return;
        }
        let hand = usize::from(self.ghost_hands[set]);
        let (_, fingerprint) = self.set(row);
        self.ghosts[set * self.ghosts_per_set + hand] = fingerprint;
        self.ghost_hands[set] = u8::try_from((hand + 1) % self.ghosts_per_set).unwrap_or(0);
    }
}

impl Policy for Sets {
    fn lookup(&mut self, row: u32, times: u32) -> bool {
        let first = self.set(row).0 * self.ways;
        let rows = &self.rows[first..first + self.ways];
        let Some(way) = rows.iter().position(|&there| there == row) else {
            return false;
        };
        let counter = &mut self.counters[first + way];
        if self.by_time {
            self.now += 1;
            *counter = self.now;
        } else if self.hit_is_most {
            *counter = self.most;
        } else {
            let hits = if self.repeats { times } else { 1 };
            *counter = (*counter + hits).min(self.most);
        }
        true
    }

    fn victim(&mut self, row: u32) -> Option<u32> {
        let (set, _) = self.set(row);
        let place = self.place(set);
        let there = self.rows[place];
        (there != NONE).then_some(there)
    }

    fn insert(&mut self, row: u32) {
        let (set, fingerprint) = self.set(row);
        let place = self.place(set);
        let leaving = self.rows[place];
        if leaving != NONE {
            self.age(set, self.counters[place]);
        }
        let mut begin = self.begin;
        if self.was_here(set, fingerprint) {
            begin = self.again;
        }
        if leaving != NONE {
            self.remember(set, leaving);
        }
        if self.by_time {
            self.now += 1;
            begin = self.now;
        }
        self.rows[place] = row;
        self.counters[place] = begin;
        let way = place - set * self.ways;
        self.hands[set] = u8::try_from((way + 1) % self.ways).unwrap_or(0);
    }
}
