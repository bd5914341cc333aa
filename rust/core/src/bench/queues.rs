//! Policies over queues of all rows: any row can take any place.

use super::lists::{Links, List, NONE, Slots};
use super::policy::{Policy, Settings};
use super::sketch::Sketch;
use super::{narrow, share};

/// Least recently used leaves.
pub(super) struct Lru {
    slots: Slots,
    links: Links,
    list: List,
}

impl Lru {
    pub(super) fn new(capacity: usize, universe: usize) -> Self {
        Self {
            slots: Slots::new(capacity, universe),
            links: Links::new(capacity),
            list: List::new(),
        }
    }
}

impl Policy for Lru {
    fn lookup(&mut self, row: u32, _times: u32) -> bool {
        let Some(slot) = self.slots.get(row) else {
            return false;
        };
        self.list.renew(&mut self.links, slot);
        true
    }

    fn victim(&mut self, _row: u32) -> Option<u32> {
        self.slots
            .is_full()
            .then(|| self.slots.row(self.list.last()))
    }

    fn insert(&mut self, row: u32) {
        if self.slots.is_full() {
            let slot = self.list.last();
            self.list.remove(&mut self.links, slot);
            self.slots.release(slot);
        }
        let slot = self.slots.take(row);
        self.list.push(&mut self.links, slot);
    }
}

/// A hand goes round; a row that was hit since is spared, as often as its counter says.
pub(super) struct Clock {
    slots: Slots,
    hits: Vec<u8>,
    most: u8,
    hand: usize,
}

impl Clock {
    pub(super) fn new(capacity: usize, universe: usize, settings: &Settings) -> Self {
        Self {
            slots: Slots::new(capacity, universe),
            hits: vec![0; capacity],
            most: u8::try_from((1_usize << settings.number("bits", 1)) - 1).unwrap_or(u8::MAX),
            hand: 0,
        }
    }

    fn turn(&mut self) -> u32 {
        while self.hits[self.hand] > 0 {
            self.hits[self.hand] -= 1;
            self.hand = (self.hand + 1) % self.hits.len();
        }
        narrow(self.hand)
    }
}

impl Policy for Clock {
    fn lookup(&mut self, row: u32, _times: u32) -> bool {
        let Some(slot) = self.slots.get(row) else {
            return false;
        };
        let hits = &mut self.hits[slot as usize];
        *hits = (*hits + 1).min(self.most);
        true
    }

    fn victim(&mut self, _row: u32) -> Option<u32> {
        if !self.slots.is_full() {
            return None;
        }
        let slot = self.turn();
        Some(self.slots.row(slot))
    }

    fn insert(&mut self, row: u32) {
        if self.slots.is_full() {
            let slot = self.turn();
            self.slots.release(slot);
            self.hand = (self.hand + 1) % self.hits.len();
        }
        let slot = self.slots.take(row);
        self.hits[slot as usize] = 0;
    }
}

/// SIEVE: a hand goes from old to new and never moves what it spares.
pub(super) struct Sieve {
    slots: Slots,
    links: Links,
    list: List,
    visited: Vec<bool>,
    hand: u32,
}

impl Sieve {
    pub(super) fn new(capacity: usize, universe: usize) -> Self {
        Self {
            slots: Slots::new(capacity, universe),
            links: Links::new(capacity),
            list: List::new(),
            visited: vec![false; capacity],
            hand: NONE,
        }
    }

    fn turn(&mut self) -> u32 {
        loop {
            if self.hand == NONE {
                self.hand = self.list.last();
            }
            let visited = &mut self.visited[self.hand as usize];
            if !*visited {
                return self.hand;
            }
            *visited = false;
            self.hand = List::newer(&self.links, self.hand);
        }
    }
}

impl Policy for Sieve {
    fn lookup(&mut self, row: u32, _times: u32) -> bool {
        let Some(slot) = self.slots.get(row) else {
            return false;
        };
        self.visited[slot as usize] = true;
        true
    }

    fn victim(&mut self, _row: u32) -> Option<u32> {
        if !self.slots.is_full() {
            return None;
        }
        let slot = self.turn();
        Some(self.slots.row(slot))
    }

    fn insert(&mut self, row: u32) {
        if self.slots.is_full() {
            let slot = self.turn();
            self.hand = List::newer(&self.links, slot);
            self.list.remove(&mut self.links, slot);
            self.slots.release(slot);
        }
        let slot = self.slots.take(row);
        self.visited[slot as usize] = false;
        self.list.push(&mut self.links, slot);
    }
}

/// S3-FIFO: a small queue for what is new, a main queue with second chances, and ghosts: names of
/// rows that left the small queue, which go to the main one should they come back.
pub(super) struct S3Fifo {
    slots: Slots,
    links: Links,
    small: List,
    main: List,
    is_main: Vec<bool>,
    hits: Vec<u8>,
    small_most: usize,
    promoted_from: u8,
    ghosts: Ghosts,
}

/// The last rows that left.
struct Ghosts {
    left: Vec<u32>,
    now: u32,
    kept: u32,
}

impl Ghosts {
    fn new(kept: usize, universe: usize) -> Self {
        Self {
            left: vec![0; universe],
            now: 0,
            kept: narrow(kept),
        }
    }

    fn add(&mut self, row: u32) {
        self.now += 1;
        self.left[row as usize] = self.now;
    }

    fn has(&self, row: u32) -> bool {
        let left = self.left[row as usize];
        left > 0 && self.now - left < self.kept
    }
}

impl S3Fifo {
    pub(super) fn new(capacity: usize, universe: usize, settings: &Settings) -> Self {
        Self {
            slots: Slots::new(capacity, universe),
            links: Links::new(capacity),
            small: List::new(),
            main: List::new(),
            is_main: vec![false; capacity],
            hits: vec![0; capacity],
            small_most: share(capacity, settings.number("small", 10)).max(1),
            promoted_from: u8::try_from(settings.number("promote", 2)).unwrap_or(2),
            ghosts: Ghosts::new(share(capacity, settings.number("ghosts", 90)), universe),
        }
    }

    /// Moves rows until one is found that leaves: the last of the small or of the main queue.
    fn turn(&mut self) -> u32 {
        loop {
            if self.small.len() >= self.small_most || self.main.len() == 0 {
                let slot = self.small.last();
                let hits = &mut self.hits[slot as usize];
                if *hits < self.promoted_from {
                    return slot;
                }
                *hits = 0;
                self.small.remove(&mut self.links, slot);
                self.main.push(&mut self.links, slot);
                self.is_main[slot as usize] = true;
            } else {
                let slot = self.main.last();
                let hits = &mut self.hits[slot as usize];
                if *hits == 0 {
                    return slot;
                }
                *hits -= 1;
                self.main.renew(&mut self.links, slot);
            }
        }
    }
}

impl Policy for S3Fifo {
    fn lookup(&mut self, row: u32, _times: u32) -> bool {
        let Some(slot) = self.slots.get(row) else {
            return false;
        };
        let hits = &mut self.hits[slot as usize];
        *hits = (*hits + 1).min(3);
        true
    }

    fn victim(&mut self, _row: u32) -> Option<u32> {
        if !self.slots.is_full() {
            return None;
        }
        let slot = self.turn();
        Some(self.slots.row(slot))
    }

    fn insert(&mut self, row: u32) {
        if self.slots.is_full() {
            let slot = self.turn();
            if self.is_main[slot as usize] {
                self.main.remove(&mut self.links, slot);
            } else {
                self.small.remove(&mut self.links, slot);
                self.ghosts.add(self.slots.row(slot));
            }
            self.slots.release(slot);
        }
        let slot = self.slots.take(row);
        self.hits[slot as usize] = 0;
        let main = self.ghosts.has(row);
        self.is_main[slot as usize] = main;
        let list = if main {
            &mut self.main
        } else {
            &mut self.small
        };
        list.push(&mut self.links, slot);
    }
}

/// W-TinyLFU: a window of what is new before a segmented LRU, and a sketch of frequencies that
/// decides whether what leaves the window replaces what would leave the rest.
pub(super) struct WindowTinyLfu {
    slots: Slots,
    links: Links,
    lists: [List; 3],
    place: Vec<u8>,
    window_most: usize,
    protected_most: usize,
    sketch: Sketch,
}

const WINDOW: usize = 0;
const PROBATION: usize = 1;
const PROTECTED: usize = 2;

impl WindowTinyLfu {
    pub(super) fn new(capacity: usize, universe: usize, settings: &Settings) -> Self {
        let window_most = share(capacity, settings.number("window", 1)).max(1);
        Self {
            slots: Slots::new(capacity, universe),
            links: Links::new(capacity),
            lists: [List::new(), List::new(), List::new()],
            place: vec![0; capacity],
            window_most,
            protected_most: share(capacity - window_most, 80),
            sketch: Sketch::new(capacity, settings),
        }
    }

    fn go(&mut self, slot: u32, to: usize) {
        let from = usize::from(self.place[slot as usize]);
        self.lists[from].remove(&mut self.links, slot);
        self.enter(slot, to);
    }

    fn enter(&mut self, slot: u32, to: usize) {
        self.place[slot as usize] = u8::try_from(to).unwrap_or(0);
        self.lists[to].push(&mut self.links, slot);
    }
}

impl Policy for WindowTinyLfu {
    fn lookup(&mut self, row: u32, _times: u32) -> bool {
        self.sketch.add(row);
        let Some(slot) = self.slots.get(row) else {
            return false;
        };
        match usize::from(self.place[slot as usize]) {
            PROBATION => {
                self.go(slot, PROTECTED);
                if self.lists[PROTECTED].len() > self.protected_most {
                    let demoted = self.lists[PROTECTED].last();
                    self.go(demoted, PROBATION);
                }
            }
            place => self.lists[place].renew(&mut self.links, slot),
        }
        true
    }

    fn victim(&mut self, _row: u32) -> Option<u32> {
        None
    }

    fn insert(&mut self, row: u32) {
        if self.slots.is_full() {
            let candidate = self.lists[WINDOW].last();
            let victim = match self.lists[PROBATION].last() {
                NONE => self.lists[PROTECTED].last(),
                slot => slot,
            };
            let wins = victim != NONE
                && self.sketch.estimate(self.slots.row(candidate))
                    > self.sketch.estimate(self.slots.row(victim));
            let leaves = if wins { victim } else { candidate };
            let from = usize::from(self.place[leaves as usize]);
            self.lists[from].remove(&mut self.links, leaves);
            self.slots.release(leaves);
            if wins {
                self.go(candidate, PROBATION);
            }
        } else if self.lists[WINDOW].len() >= self.window_most {
            let candidate = self.lists[WINDOW].last();
            self.go(candidate, PROBATION);
        }
        let slot = self.slots.take(row);
        self.enter(slot, WINDOW);
        debug_assert!(self.lists[WINDOW].len() <= self.slots.capacity());
    }
}
