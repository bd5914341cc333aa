//! LongCat-Flash n-gram embeddings: a polynomial in the vocabulary size, modulo odd numbers.
//!
//! ```text
//! id = (token + sum over d >= 1 of token[-d] * (vocabulary ^ d mod size)) mod size
//! ```
//!
//! The sum ends where the segment does; an EOS token belongs to the segment it ends. The engines
//! differ on EOS itself, see [`EosRule`].

use super::heads::{Heads, MAX_HEADS};
use super::reciprocal::Reciprocal;
use super::step::Step;
use super::walk::{self, BLOCK, MAX_NGRAM, Rule, Symbol};
use super::{Hash, Policy, count_within, within};
use crate::error::{Error, Result};

/// What the n-grams that end in an EOS token see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EosRule {
    /// The EOS token and its segment, as the model's own code has it.
    #[default]
    HuggingFace,
    /// Nothing, not even the EOS token: every id is its head's first row, as in vLLM.
    Vllm,
}

/// What decides ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LongCatConfig {
    /// The polynomial's base: `text_vocab_size` where there is one, else `vocab_size`.
    pub vocab_size: u64,
    /// Tokens below this are valid; at least `vocab_size`.
    pub valid_tokens: u64,
    /// Rows of the first head, less one: `int(ngram_vocab_size_ratio * vocab_size)`.
    pub base_size: u64,
    /// `emb_neighbor_num`: the longest n-gram.
    pub ngram: usize,
    /// `emb_split_num`: heads of each order.
    pub splits: usize,
    /// `eos_token_id`.
    pub eos: u64,
    /// What an n-gram sees when it ends in EOS.
    pub eos_rule: EosRule,
    /// `oe_ignored_token_ids`: hashed as token 0.
    pub ignored: Vec<u64>,
}

/// The hash of the model's one n-gram table.
#[derive(Debug)]
pub struct LongCat {
    heads: Heads,
    columns: Vec<Column>,
    ngram: usize,
    valid_tokens: u64,
    eos: i64,
    eos_rule: EosRule,
    /// Sorted.
    ignored: Vec<i64>,
    policy: Policy,
}

#[derive(Debug)]
struct Column {
    /// Powers of the vocabulary size: for the current token, the one before, and so on.
    powers: Vec<i64>,
    modulus: Reciprocal,
    offset: i64,
}

impl LongCat {
    /// Derives head sizes and powers.
    pub fn new(config: &LongCatConfig, policy: Policy) -> Result<Self> {
        let vocabulary = within("vocab_size", config.vocab_size, 1..=1 << 31)?;
        let valid_tokens = within("valid tokens", config.valid_tokens, vocabulary..=1 << 31)?;
        let ngram = count_within("emb_neighbor_num", config.ngram, 2..=MAX_NGRAM)?;
        let splits = count_within("emb_split_num", config.splits, 1..=MAX_HEADS)?;
        let count = (ngram - 1) * splits;
        count_within(
            "(emb_neighbor_num - 1) * emb_split_num",
            count,
            1..=MAX_HEADS,
        )?;
        let base = within(
            "ngram_vocab_size_ratio * vocab_size",
            config.base_size,
            1..=1 << 40,
        )?;
        let eos = within("eos_token_id", config.eos, 0..=valid_tokens - 1)?;

        let sizes: Vec<u64> = (0..count as u64).map(|head| base + 2 * head + 1).collect();
        let largest = u128::from(base + 2 * count as u64) * u128::from(valid_tokens);
        if largest * ngram as u128 > i64::MAX as u128 {
            return Err(Error::value(format!(
                "tables of {base} rows and {valid_tokens} tokens make sums beyond 63 bits"
            )));
        }
        let heads = Heads::new(sizes, 1)?;
        let mut columns = Vec::with_capacity(count);
        for (head, (&size, &offset)) in heads.sizes().iter().zip(heads.offsets()).enumerate() {
            let order = head / splits + 2;
            columns.push(Column {
                powers: powers(vocabulary, size, order),
                modulus: Reciprocal::new(size)
                    .ok_or_else(|| Error::value(format!("a head of {size} rows")))?,
                offset: offset.cast_signed(),
            });
        }
        let mut ignored: Vec<i64> = config.ignored.iter().map(|id| id.cast_signed()).collect();
        ignored.sort_unstable();
        Ok(Self {
            policy: policy.check(&heads)?,
            heads,
            columns,
            ngram,
            valid_tokens,
            eos: eos.cast_signed(),
            eos_rule: config.eos_rule,
            ignored,
        })
    }
}

/// `vocabulary ^ d mod size` for `d` in `0..order`; 1 itself is not reduced. Both are below 2^41.
fn powers(vocabulary: u64, size: u64, order: usize) -> Vec<i64> {
    let next = |&power: &u128| Some(power * u128::from(vocabulary) % u128::from(size));
    std::iter::successors(Some(1), next)
        .take(order)
        .map(|power| i64::try_from(power).unwrap_or(i64::MAX))
        .collect()
}

impl Rule for LongCat {
    fn vocabulary(&self) -> u64 {
        self.valid_tokens
    }

    #[inline]
    fn read(&self, token: i64) -> Symbol {
        let token = match self.ignored.binary_search(&token) {
            Ok(_) => 0,
            Err(_) => token,
        };
        match self.eos_rule {
            EosRule::HuggingFace if token == self.eos => Symbol::Last(token),
            EosRule::Vllm if token == self.eos || token < 0 => Symbol::Blank,
            _ => Symbol::Plain(token),
        }
    }

    #[inline]
    fn fill(&self) -> i64 {
        0
    }

    fn ngram(&self) -> usize {
        self.ngram
    }

    fn heads(&self) -> usize {
        self.columns.len()
    }

    #[inline]
    fn fold<const N: usize>(&self, window: [i64; N]) -> [i64; N] {
        window
    }

    fn reduce(&self, window: &[&[i64]], out: &mut [i64]) {
        let heads = self.columns.len();
        let mut buffer = [0_i64; BLOCK];
        let sums = &mut buffer[..window[0].len()];
        for (index, column) in self.columns.iter().enumerate() {
            sums.fill(0);
            for (symbols, power) in window.iter().zip(&column.powers) {
                for (sum, symbol) in sums.iter_mut().zip(*symbols) {
                    *sum = sum.wrapping_add(symbol.wrapping_mul(*power));
                }
            }
            for (sum, row) in sums.iter().zip(out.chunks_exact_mut(heads)) {
                row[index] = column.offset + column.modulus.floor_modulo(*sum).cast_signed();
            }
        }
    }
}

impl Hash for LongCat {
    fn heads(&self) -> &Heads {
        &self.heads
    }

    fn context_len(&self) -> usize {
        self.ngram - 1
    }

    fn filler(&self) -> i64 {
        self.eos
    }

    fn vocabulary(&self) -> u64 {
        self.valid_tokens
    }

    fn multipliers(&self) -> Vec<Vec<i64>> {
        self.columns
            .iter()
            .map(|column| column.powers.clone())
            .collect()
    }

    fn ids(&self, step: &Step<'_>, out: &mut [i64], threads: usize) -> Result<()> {
        walk::ids(self, self.policy, step, out, threads)
    }
}
