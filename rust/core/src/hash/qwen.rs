//! Qwen4-Exp / Qwen3.8-Flash-Next: per-layer n-gram embeddings (PLE).
//!
//! An EOS token belongs to the segment it ends; what lies beyond a segment's start, or before the
//! sequence, is EOS too, and takes part in the mix. Image placeholders hash as ordinary tokens.

use super::heads::{Heads, MAX_HEADS};
use super::mix::Mix;
use super::step::Step;
use super::walk::{self, MAX_NGRAM, Rule, Symbol};
use super::{Hash, Policy, count_within, within};
use crate::error::Result;
use crate::primes::next_prime;

const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
const LAYER_PRIME: u64 = 10_007;
const SIGNED_MAX: u64 = i64::MAX.cast_unsigned();

/// The fields of `config.json` that decide ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QwenConfig {
    /// `vocab_size`: bounds the multipliers.
    pub vocab_size: u64,
    /// `ngram_size`: the longest n-gram.
    pub ngram_size: usize,
    /// `heads_per_ngram`: heads of each order.
    pub heads_per_ngram: usize,
    /// `ngram_vocab_size_base`: no head is smaller.
    pub vocab_size_base: u64,
    /// `make_ngram_vocab_size_divisible_by`: the table's rows are padded to a multiple.
    pub divisor: u64,
    /// `seed` of the multipliers.
    pub seed: u64,
    /// Place of the layer among the sorted `ple_layer_ids`.
    pub ple_index: usize,
    /// `eos_token_id`.
    pub eos: u64,
}

/// The hash of one PLE layer's table.
#[derive(Debug)]
pub struct Qwen {
    heads: Heads,
    mix: Mix,
    vocabulary: u64,
    eos: i64,
    policy: Policy,
}

impl Qwen {
    /// Derives multipliers and head sizes.
    pub fn new(config: &QwenConfig, policy: Policy) -> Result<Self> {
        let vocabulary = within("vocab_size", config.vocab_size, 1..=1 << 31)?;
        let ngram = count_within("ngram_size", config.ngram_size, 2..=MAX_NGRAM)?;
        let per_order = count_within("heads_per_ngram", config.heads_per_ngram, 1..=MAX_HEADS)?;
        let base = within("ngram_vocab_size_base", config.vocab_size_base, 1..=1 << 40)?;
        let eos = within("eos_token_id", config.eos, 0..=vocabulary - 1)?;
        within(
            "make_ngram_vocab_size_divisible_by",
            config.divisor,
            1..=1 << 40,
        )?;
        let count = (ngram - 1) * per_order;
        count_within("(ngram_size - 1) * heads_per_ngram", count, 1..=MAX_HEADS)?;
        count_within(
            "the layer's place in ple_layer_ids",
            config.ple_index,
            0..=1023,
        )?;

        // Primes continue from one PLE layer to the next.
        let primes = std::iter::successors(next_prime(base - 1), |&last| next_prime(last));
        let sizes = primes.skip(config.ple_index * count).take(count).collect();
        let heads = Heads::new(sizes, config.divisor)?;
        let multipliers = multipliers(config.seed, config.ple_index as u64, vocabulary, ngram);
        Ok(Self {
            mix: Mix::new(multipliers, &heads),
            policy: policy.check(&heads)?,
            heads,
            vocabulary,
            eos: eos.cast_signed(),
        })
    }
}

/// Odd multipliers small enough that no product with a token of the vocabulary leaves 63 bits.
fn multipliers(seed: u64, ple_index: u64, vocabulary: u64, ngram: usize) -> Vec<i64> {
    let half = (SIGNED_MAX / vocabulary / 2).max(1);
    let base = seed.wrapping_add(LAYER_PRIME.wrapping_mul(ple_index));
    (1..)
        .take(ngram)
        .map(|place: u64| splitmix64(base.wrapping_add(GAMMA.wrapping_mul(place))) % half)
        .map(|value| (2 * value + 1).cast_signed())
        .collect()
}

/// The `SplitMix64` finaliser, its own increment included.
pub fn splitmix64(value: u64) -> u64 {
    let value = value.wrapping_add(GAMMA);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

impl Rule for Qwen {
    fn vocabulary(&self) -> u64 {
        self.vocabulary
    }

    #[inline]
    fn read(&self, token: i64) -> Symbol {
        if token == self.eos {
            Symbol::Last(token)
        } else {
            Symbol::Plain(token)
        }
    }

    #[inline]
    fn fill(&self) -> i64 {
        self.eos
    }

    fn ngram(&self) -> usize {
        self.mix.multipliers().len()
    }

    fn heads(&self) -> usize {
        self.heads.count()
    }

    #[inline]
    fn fold<const N: usize>(&self, window: [i64; N]) -> [i64; N] {
        self.mix.fold(window)
    }

    fn reduce(&self, folded: &[&[i64]], out: &mut [i64]) {
        self.mix.reduce(folded, out);
    }
}

impl Hash for Qwen {
    fn heads(&self) -> &Heads {
        &self.heads
    }

    fn context_len(&self) -> usize {
        self.ngram() - 1
    }

    fn filler(&self) -> i64 {
        self.eos
    }

    fn vocabulary(&self) -> u64 {
        self.vocabulary
    }

    fn multipliers(&self) -> Vec<Vec<i64>> {
        vec![self.mix.multipliers().to_vec()]
    }

    fn ids(&self, step: &Step<'_>, out: &mut [i64], threads: usize) -> Result<()> {
        walk::ids(self, self.policy, step, out, threads)
    }
}
