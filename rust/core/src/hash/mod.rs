//! Row ids from token ids, bit for bit as the models were trained with.
//!
//! Three families of models address n-gram tables by hashing the last few tokens. Each has its
//! constants and its reading of a token; what they share is in `walk` (windows over requests),
//! `heads` (the modulo into each head's rows) and, for the two that mix by multiply and XOR, `mix`.
//!
//! ```text
//! step -> walk -> { qwen | deepseek | longcat } -> heads -> ids [tokens, heads]
//! ```
//!
//! A hash is stateless: the tokens before a step come with it, as [`Context`]. Rolling back rejected
//! drafts, resuming a preempted request or starting from a cached prefix is a matter of passing the
//! right context and nothing else.

mod deepseek;
mod heads;
mod longcat;
mod mix;
mod pcg64;
mod qwen;
mod reciprocal;
mod step;
mod walk;

use std::fmt;

pub use deepseek::{DeepSeek, DeepSeekConfig};
pub use heads::{Heads, MAX_HEADS};
pub use longcat::{EosRule, LongCat, LongCatConfig};
pub use pcg64::Pcg64;
pub use qwen::{Qwen, QwenConfig, splitmix64};
pub use reciprocal::Reciprocal;
pub use step::{Context, Ints, Step};

use crate::error::{Error, Result};

/// One table's rule from tokens to row ids.
pub trait Hash: fmt::Debug + Send + Sync {
    /// The table's heads: one id per token each, in column order.
    fn heads(&self) -> &Heads;

    /// How many tokens before the current one an n-gram may see.
    fn context_len(&self) -> usize;

    /// The token to put into a context where a request has nothing before.
    fn filler(&self) -> i64;

    /// Tokens `0..vocabulary()` are valid.
    fn vocabulary(&self) -> u64;

    /// What symbols are multiplied with: one list, newest token first, where all heads share it,
    /// otherwise one list per head.
    fn multipliers(&self) -> Vec<Vec<i64>>;

    /// Writes the ids of `step`, a row of `heads().count()` per token, padding tokens included.
    ///
    /// Long steps are shared among up to `threads` threads. After an error the contents of `out`
    /// are unspecified.
    fn ids(&self, step: &Step<'_>, out: &mut [i64], threads: usize) -> Result<()>;
}

/// What to do with a token or context entry outside the vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OutOfVocab {
    /// Refuse the step, naming request and position.
    #[default]
    Refuse,
    /// Hash it as the engines do: wrapping multiplication and floor modulo, so that ids stay inside
    /// their head.
    Wrap,
}

/// The caller's choices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Policy {
    /// What to do outside the vocabulary.
    pub out_of_vocab: OutOfVocab,
    /// Written for tokens that carry no n-gram and for padding, instead of an all-fill window's ids.
    pub dead_id: Option<i64>,
}

impl Policy {
    /// Refuses a dead id that is a row of the table.
    fn check(self, heads: &Heads) -> Result<Self> {
        match self.dead_id {
            Some(id) if (0..heads.padded_rows().cast_signed()).contains(&id) => {
                Err(Error::value(format!(
                    "dead_id is {id}, a row of this table: choose a number outside 0..{}, such as -1",
                    heads.padded_rows()
                )))
            }
            _ => Ok(self),
        }
    }
}

/// Refuses `value` outside `bounds`, naming the configuration's field.
fn within(field: &str, value: u64, bounds: std::ops::RangeInclusive<u64>) -> Result<u64> {
    if bounds.contains(&value) {
        return Ok(value);
    }
    Err(Error::value(format!(
        "{field} is {value}, outside {}..={}",
        bounds.start(),
        bounds.end()
    )))
}

/// [`within`] for counts.
fn count_within(
    field: &str,
    value: usize,
    bounds: std::ops::RangeInclusive<usize>,
) -> Result<usize> {
    if bounds.contains(&value) {
        return Ok(value);
    }
    Err(Error::value(format!(
        "{field} is {value}, outside {}..={}",
        bounds.start(),
        bounds.end()
    )))
}
