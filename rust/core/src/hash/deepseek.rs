//! DeepSeek-V4.1 Engram, and the original Engram demo.
//!
//! Tokens are first mapped to compressed ids (tokens whose text normalises to the same string share
//! one). An image token carries no n-gram: its own window is all padding, and the tokens after it
//! see padding from there on. EOS is an ordinary token. What lies beyond a barrier, or before the
//! sequence, is the compressed id of the pad token, and takes part in the mix.

use std::collections::HashSet;

use super::heads::{Heads, MAX_HEADS};
use super::mix::Mix;
use super::pcg64::Pcg64;
use super::step::Step;
use super::walk::{self, MAX_NGRAM, Rule, Symbol};
use super::{Hash, Policy, count_within, within};
use crate::error::{Error, Result};
use crate::primes::next_prime;

const LAYER_PRIME: u64 = 10_007;
const SIGNED_MAX: u64 = i64::MAX.cast_unsigned();

/// What decides ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeepSeekConfig {
    /// Layers with an Engram table, in the configuration's order: primes are handed out along it.
    pub layer_ids: Vec<u64>,
    /// The layer this hash is for; one of `layer_ids`.
    pub layer: u64,
    /// The longest n-gram.
    pub max_ngram: usize,
    /// Heads of each order.
    pub heads_per_order: usize,
    /// For each order from 2 on, a number whose successors are searched for primes.
    pub vocab_sizes: Vec<u64>,
    /// Raw id of the pad token.
    pub pad_token: u64,
    /// Added to the multipliers' seed; 0 for the released model.
    pub seed: u64,
    /// Compressed id of every token.
    pub token_map: Vec<u32>,
    /// The token that carries no n-gram.
    pub image_token: Option<u64>,
    /// The demo hashes negative tokens as they are; the released model has them carry no n-gram.
    pub demo: bool,
}

/// The hash of one Engram layer's table.
#[derive(Debug)]
pub struct DeepSeek {
    heads: Heads,
    mix: Mix,
    token_map: Vec<u32>,
    compressed: u64,
    pad_token: i64,
    pad: i64,
    image_token: Option<i64>,
    demo: bool,
    policy: Policy,
}

impl DeepSeek {
    /// Derives multipliers and head sizes.
    pub fn new(config: DeepSeekConfig, policy: Policy) -> Result<Self> {
        let ngram = count_within("max_ngram_size", config.max_ngram, 2..=MAX_NGRAM)?;
        count_within("heads per n-gram", config.heads_per_order, 1..=MAX_HEADS)?;
        let count = (ngram - 1) * config.heads_per_order;
        count_within("heads of all orders", count, 1..=MAX_HEADS)?;
        count_within(
            "the number of Engram layers",
            config.layer_ids.len(),
            1..=1024,
        )?;
        let Some(place) = config.layer_ids.iter().position(|&id| id == config.layer) else {
            return Err(Error::value(format!(
                "layer {} has no Engram table; layers with one: {:?}",
                config.layer, config.layer_ids
            )));
        };
        if config.vocab_sizes.len() != ngram - 1 {
            return Err(Error::value(format!(
                "engram_vocab_size has {} entries, but n-grams up to {ngram} have {} orders",
                config.vocab_sizes.len(),
                ngram - 1
            )));
        }
        for &size in &config.vocab_sizes {
            within("engram_vocab_size", size, 1..=1 << 40)?;
        }
        let compressed = compressed_size(&config.token_map)?;
        let pad = usize::try_from(config.pad_token)
            .ok()
            .and_then(|token| config.token_map.get(token))
            .ok_or_else(|| outside("pad token", config.pad_token, config.token_map.len()))?;
        let image_token = match config.image_token {
            Some(token) if token >= config.token_map.len() as u64 => {
                return Err(outside("image token", token, config.token_map.len()));
            }
            token => token.map(u64::cast_signed),
        };

        let sizes = head_sizes(&config, place)?;
        let heads = Heads::new(sizes, 1)?;
        let multipliers = multipliers(config.seed, config.layer, compressed, ngram)?;
        Ok(Self {
            mix: Mix::new(multipliers, &heads),
            policy: policy.check(&heads)?,
            heads,
            compressed,
            pad_token: config.pad_token.cast_signed(),
            pad: i64::from(*pad),
            image_token,
            demo: config.demo,
            token_map: config.token_map,
        })
    }

    /// Distinct compressed ids.
    pub fn compressed_vocabulary(&self) -> u64 {
        self.compressed
    }
}

fn outside(what: &str, token: u64, tokens: usize) -> Error {
    Error::value(format!(
        "the {what} {token} is outside the token map of {tokens} tokens"
    ))
}

/// How many compressed ids a map uses; they must be `0..n` without a gap.
fn compressed_size(token_map: &[u32]) -> Result<u64> {
    let size = token_map.iter().max().map_or(0, |&max| u64::from(max) + 1);
    // Multipliers for larger vocabularies would be drawn from 32 bits, which numpy does differently.
    within("the compressed vocabulary's size", size, 1..=1 << 29)?;
    let used: HashSet<u32> = token_map.iter().copied().collect();
    if used.len() as u64 != size {
        return Err(Error::value(format!(
            "the token map uses {} compressed ids, but its largest is {}: ids must be 0..n without a gap",
            used.len(),
            size - 1
        )));
    }
    Ok(size)
}

/// Distinct primes over all layers and orders, each search starting over at its order's size.
fn head_sizes(config: &DeepSeekConfig, place: usize) -> Result<Vec<u64>> {
    let mut seen = HashSet::new();
    let mut sizes = Vec::new();
    for _ in 0..=place {
        sizes.clear();
        for &size in &config.vocab_sizes {
            let mut current = size - 1;
            for _ in 0..config.heads_per_order {
                current = std::iter::successors(next_prime(current), |&last| next_prime(last))
                    .find(|&prime| seen.insert(prime))
                    .ok_or_else(|| Error::value(format!("no 64-bit primes left above {size}")))?;
                sizes.push(current);
            }
        }
    }
    Ok(sizes)
}

/// `numpy.random.default_rng(seed + 10007 * layer).integers(0, bound, ngram) * 2 + 1`.
fn multipliers(seed: u64, layer: u64, compressed: u64, ngram: usize) -> Result<Vec<i64>> {
    let seed = LAYER_PRIME
        .checked_mul(layer)
        .and_then(|layer| layer.checked_add(seed))
        .ok_or_else(|| Error::value(format!("layer {layer} and seed {seed} overflow 64 bits")))?;
    let bound = SIGNED_MAX / compressed / 2;
    let mut generator = Pcg64::new(seed);
    Ok((0..ngram)
        .map(|_| (generator.below(bound) * 2 + 1).cast_signed())
        .collect())
}

impl Rule for DeepSeek {
    fn vocabulary(&self) -> u64 {
        self.token_map.len() as u64
    }

    #[inline]
    fn read(&self, token: i64) -> Symbol {
        if Some(token) == self.image_token {
            return Symbol::Dead;
        }
        let mapped = usize::try_from(token).map(|token| self.token_map.get(token));
        match mapped {
            Ok(Some(&compressed)) => Symbol::Plain(i64::from(compressed)),
            _ if !self.demo => Symbol::Dead,
            Err(_) => Symbol::Plain(token),
            Ok(None) => Symbol::Outside,
        }
    }

    #[inline]
    fn fill(&self) -> i64 {
        self.pad
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

impl Hash for DeepSeek {
    fn heads(&self) -> &Heads {
        &self.heads
    }

    fn context_len(&self) -> usize {
        self.ngram() - 1
    }

    fn filler(&self) -> i64 {
        self.pad_token
    }

    fn vocabulary(&self) -> u64 {
        Rule::vocabulary(self)
    }

    fn multipliers(&self) -> Vec<Vec<i64>> {
        vec![self.mix.multipliers().to_vec()]
    }

    fn ids(&self, step: &Step<'_>, out: &mut [i64], threads: usize) -> Result<()> {
        walk::ids(self, self.policy, step, out, threads)
    }
}
