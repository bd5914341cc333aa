//! What a policy is, and policies by name.

use crate::error::{Error, Result};

use super::queues::{Clock, Lru, S3Fifo, Sieve, WindowTinyLfu};
use super::sets::Sets;
use super::sketch::Sketch;

/// Decides which rows stay.
pub(super) trait Policy {
    /// Whether `row` is there; a hit is remembered. A batch wants the row `times` times.
    fn lookup(&mut self, row: u32, times: u32) -> bool;

    /// The row that would leave for `row`; None while there is room. Asking again gives the same.
    fn victim(&mut self, row: u32) -> Option<u32>;

    /// Takes `row` in, which is not there, and lets the victim go if there is no room.
    fn insert(&mut self, row: u32);
}

/// A policy's name and numbers: `"set:ways=16,bits=3"`.
pub(super) struct Settings {
    name: String,
    numbers: Vec<(String, usize)>,
}

impl Settings {
    fn parse(text: &str) -> Result<Self> {
        let (name, rest) = text.split_once(':').unwrap_or((text, ""));
        let wrong = || Error::value(format!("policy {text:?}: expected name:key=number,..."));
        let numbers = rest
            .split(',')
            .filter(|part| !part.is_empty())
            .map(|part| {
                let (key, value) = part.split_once('=').ok_or_else(wrong)?;
                Ok((key.to_owned(), value.parse().map_err(|_| wrong())?))
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            name: name.to_owned(),
            numbers,
        })
    }

    pub(super) fn number(&self, key: &str, otherwise: usize) -> usize {
        self.numbers
            .iter()
            .find(|(name, _)| name == key)
            .map_or(otherwise, |&(_, value)| value)
    }
}

/// The policy `text` names, for `capacity` rows of `universe`.
pub(super) fn named(text: &str, capacity: usize, universe: usize) -> Result<Box<dyn Policy>> {
    let settings = Settings::parse(text)?;
    let policy: Box<dyn Policy> = match settings.name.as_str() {
        "lru" => Box::new(Lru::new(capacity, universe)),
        "clock" => Box::new(Clock::new(capacity, universe, &settings)),
        "sieve" => Box::new(Sieve::new(capacity, universe)),
        "s3fifo" => Box::new(S3Fifo::new(capacity, universe, &settings)),
        "wtinylfu" => Box::new(WindowTinyLfu::new(capacity, universe, &settings)),
        "set" => Box::new(Sets::new(capacity, &settings)),
        other => return Err(Error::value(format!("no policy is called {other:?}"))),
    };
    if settings.number("filter", 0) == 0 {
        return Ok(policy);
    }
    Ok(Box::new(Filtered {
        policy,
        sketch: Sketch::new(capacity, &settings),
    }))
}

/// A policy that takes in only what was looked up more often lately than what it would replace.
struct Filtered {
    policy: Box<dyn Policy>,
    sketch: Sketch,
}

impl Policy for Filtered {
    fn lookup(&mut self, row: u32, times: u32) -> bool {
        self.sketch.add(row);
        self.policy.lookup(row, times)
    }

    fn victim(&mut self, row: u32) -> Option<u32> {
        self.policy.victim(row)
    }

    fn insert(&mut self, row: u32) {
        let rarer = self
            .policy
            .victim(row)
            .is_some_and(|victim| self.sketch.estimate(row) <= self.sketch.estimate(victim));
        if !rarer {
            self.policy.insert(row);
        }
    }
}
