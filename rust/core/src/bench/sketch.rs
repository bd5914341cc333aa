//! How often rows were looked up lately, roughly.

use super::policy::Settings;
use super::{mix, narrow};

/// Four-bit counters; a row has four of them, in one block of 64 bytes. Halved again and again.
pub(super) struct Sketch {
    words: Vec<u64>,
    blocks: u64,
    added: usize,
    period: usize,
}

const WORDS: usize = 8;

impl Sketch {
    /// `sketch=` is its size in bytes per row of capacity, `sample=` the lookups per row of
    /// capacity after which counters are halved.
    pub(super) fn new(capacity: usize, settings: &Settings) -> Self {
        let bytes = capacity * settings.number("sketch", 2);
        let blocks = bytes.div_ceil(8 * WORDS).max(1);
        Self {
            words: vec![0; blocks * WORDS],
            blocks: blocks as u64,
            added: 0,
            period: (capacity * settings.number("sample", 10)).max(1),
        }
    }

    /// The word and the bit at which each counter of a row begins.
    fn places(&self, row: u32) -> [(usize, u32); 4] {
        let mixed = mix(u64::from(row) ^ 0x5bd1_e995);
        let block = (u128::from(mixed) * u128::from(self.blocks)) >> 64;
        let first = usize::try_from(block).unwrap_or(0) * WORDS;
        let low = mix(mixed);
        std::array::from_fn(|index| {
            let bits = (low >> (index * 8)) & 0xff;
            let word = 2 * index + usize::from(bits & 1 == 1);
            (first + word, narrow((bits as usize >> 1) % 16) * 4)
        })
    }

    pub(super) fn add(&mut self, row: u32) {
        let places = self.places(row);
        let least = self.estimate_at(places);
        if least < 15 {
            for (word, bit) in places {
                if (self.words[word] >> bit) & 15 == u64::from(least) {
                    self.words[word] += 1 << bit;
                }
            }
        }
        self.added += 1;
        if self.added == self.period {
            self.added = 0;
            for word in &mut self.words {
                *word = (*word >> 1) & 0x7777_7777_7777_7777;
            }
        }
    }

    pub(super) fn estimate(&self, row: u32) -> u32 {
        self.estimate_at(self.places(row))
    }

    fn estimate_at(&self, places: [(usize, u32); 4]) -> u32 {
        let counters = places.map(|(word, bit)| (self.words[word] >> bit) & 15);
        narrow(usize::try_from(counters.into_iter().min().unwrap_or(0)).unwrap_or(0))
    }
}
