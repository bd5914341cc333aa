//! Doubly linked lists over numbered slots, and which row is in which slot.

use super::narrow;

pub(super) const NONE: u32 = u32::MAX;

/// Rows by slot and slots by row.
pub(super) struct Slots {
    of: Vec<u32>,
    rows: Vec<u32>,
    used: usize,
    free: Vec<u32>,
}

impl Slots {
    pub(super) fn new(capacity: usize, universe: usize) -> Self {
        Self {
            of: vec![NONE; universe],
            rows: vec![NONE; capacity],
            used: 0,
            free: Vec::new(),
        }
    }

    pub(super) fn get(&self, row: u32) -> Option<u32> {
        let slot = self.of[row as usize];
        (slot != NONE).then_some(slot)
    }

    pub(super) fn row(&self, slot: u32) -> u32 {
        self.rows[slot as usize]
    }

    pub(super) fn is_full(&self) -> bool {
        self.used == self.rows.len() && self.free.is_empty()
    }

    pub(super) fn capacity(&self) -> usize {
        self.rows.len()
    }

    /// Gives `row` a slot; there must be one.
    pub(super) fn take(&mut self, row: u32) -> u32 {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.used += 1;
            narrow(self.used - 1)
        });
        self.rows[slot as usize] = row;
        self.of[row as usize] = slot;
        slot
    }

    pub(super) fn release(&mut self, slot: u32) {
        self.of[self.rows[slot as usize] as usize] = NONE;
        self.free.push(slot);
    }
}

/// The links of lists that share their slots; a slot is in one list at most.
pub(super) struct Links {
    before: Vec<u32>,
    after: Vec<u32>,
}

impl Links {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            before: vec![NONE; capacity],
            after: vec![NONE; capacity],
        }
    }
}

/// Newest first.
pub(super) struct List {
    first: u32,
    last: u32,
    len: usize,
}

impl List {
    pub(super) const fn new() -> Self {
        Self {
            first: NONE,
            last: NONE,
            len: 0,
        }
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    pub(super) const fn last(&self) -> u32 {
        self.last
    }

    pub(super) fn push(&mut self, links: &mut Links, slot: u32) {
        links.before[slot as usize] = NONE;
        links.after[slot as usize] = self.first;
        match self.first {
            NONE => self.last = slot,
            first => links.before[first as usize] = slot,
        }
        self.first = slot;
        self.len += 1;
    }

    pub(super) fn remove(&mut self, links: &mut Links, slot: u32) {
        let (before, after) = (links.before[slot as usize], links.after[slot as usize]);
        match before {
            NONE => self.first = after,
            before => links.after[before as usize] = after,
        }
        match after {
            NONE => self.last = before,
            after => links.before[after as usize] = before,
        }
        self.len -= 1;
    }

    pub(super) fn renew(&mut self, links: &mut Links, slot: u32) {
        if self.first != slot {
            self.remove(links, slot);
            self.push(links, slot);
        }
    }

    /// The slot that was pushed after `slot`.
    pub(super) fn newer(links: &Links, slot: u32) -> u32 {
        links.before[slot as usize]
    }
}
