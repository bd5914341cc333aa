//! The walk every family shares: over requests and their tokens, keeping the last few in a window.
//!
//! The families differ in what a token stands for ([`Rule::read`]), in what an n-gram sees beyond
//! the start of its segment ([`Rule::fill`]) and in how a window becomes ids ([`Rule::fold`] and
//! [`Rule::reduce`]). They agree on the window itself:
//!
//! ```text
//! for each request: an empty window (all fill), then its context is pushed, oldest first
//! push(token):  older symbols move on by one, or turn into fill if the last token ended a segment;
//!               a blank token turns the whole window into fill
//! ```
//!
//! Windows are collected in blocks of [`BLOCK`] tokens, which may span requests, so that decode
//! steps of many one-token requests reduce as fast as a prefill of one.

use std::ops::Range;

use rayon::prelude::*;

use super::step::Step;
use super::{OutOfVocab, Policy};
use crate::error::{Error, Result};
use crate::threads;

/// Windows reduced together.
pub(super) const BLOCK: usize = 64;

/// Fewer ids than this are not worth waking another thread for.
const IDS_PER_THREAD: usize = 1 << 16;

/// Longest n-gram a hash may look at.
pub(super) const MAX_NGRAM: usize = 16;

/// What a token stands for in an n-gram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Symbol {
    /// This value.
    Plain(i64),
    /// This value; the tokens after it do not see it, nor anything before.
    Last(i64),
    /// Nothing: neither it nor the tokens after it see anything up to here.
    Blank,
    /// Blank, and its own ids are replaced by the dead id where the caller chose one.
    Dead,
    /// Outside the vocabulary, without a rule of its own.
    Outside,
}

/// One family's part of the hash.
pub(super) trait Rule: Send + Sync {
    /// Tokens `0..vocabulary()` are inside the vocabulary.
    fn vocabulary(&self) -> u64;
    /// What `token` stands for. Tokens outside the vocabulary come here only if they are to wrap.
    fn read(&self, token: i64) -> Symbol;
    /// The symbol outside a segment.
    fn fill(&self) -> i64;
    /// Longest n-gram.
    fn ngram(&self) -> usize;
    /// Ids per token.
    fn heads(&self) -> usize;
    /// What is collected of a token's window, the token's own symbol first; `N` may exceed the
    /// longest n-gram.
    fn fold<const N: usize>(&self, window: [i64; N]) -> [i64; N];
    /// Writes the ids of a block of tokens: `folded[j]` holds the tokens' `j`-th folded values.
    fn reduce(&self, folded: &[&[i64]], out: &mut [i64]);
}

/// The ids of `step`, row after row into `out`.
pub(super) fn ids<R: Rule>(
    rule: &R,
    policy: Policy,
    step: &Step<'_>,
    out: &mut [i64],
    threads: usize,
) -> Result<()> {
    let (tokens, heads) = (step.tokens().len(), rule.heads());
    if tokens.checked_mul(heads) != Some(out.len()) {
        return Err(Error::value(format!(
            "out holds {} ids, but {tokens} tokens have {heads} each",
            out.len()
        )));
    }
    let shares = threads.min(out.len() / IDS_PER_THREAD).max(1);
    if shares == 1 {
        return part(rule, policy, step, 0..tokens, out);
    }
    let share = tokens.div_ceil(shares);
    let Some(pool) = threads::compute() else {
        return part(rule, policy, step, 0..tokens, out);
    };
    let parts: Vec<Result<()>> = pool.1.install(|| {
        out.par_chunks_mut(share * heads)
            .enumerate()
            .map(|(index, out)| {
                let first = index * share;
                part(rule, policy, step, first..first + out.len() / heads, out)
            })
            .collect()
    });
    // In order, so that the first token at fault is the one reported.
    parts.into_iter().collect()
}

fn part<R: Rule>(
    rule: &R,
    policy: Policy,
    step: &Step<'_>,
    range: Range<usize>,
    out: &mut [i64],
) -> Result<()> {
    // The windows of the released models stay in registers.
    match rule.ngram() {
        ..=3 => Walk::<R, 3>::new(rule, policy, step, out).run(range),
        4 => Walk::<R, 4>::new(rule, policy, step, out).run(range),
        _ => Walk::<R, MAX_NGRAM>::new(rule, policy, step, out).run(range),
    }
}

/// The current token's symbol, then older ones; whether the current token ended its segment.
#[derive(Clone, Copy)]
struct Window<const N: usize> {
    symbols: [i64; N],
    ended: bool,
}

impl<const N: usize> Window<N> {
    fn empty(rule: &impl Rule) -> Self {
        Self {
            symbols: [rule.fill(); N],
            ended: false,
        }
    }

    /// Moves on by `token`: whether it is dead, or `None` if it must be refused.
    #[inline]
    fn push(&mut self, rule: &impl Rule, policy: Policy, token: i64) -> Option<bool> {
        let inside = token.cast_unsigned() < rule.vocabulary();
        if !inside && policy.out_of_vocab == OutOfVocab::Refuse {
            return None;
        }
        let mut next = [rule.fill(); N];
        if !self.ended {
            next[1..].copy_from_slice(&self.symbols[..N - 1]);
        }
        let symbol = rule.read(token);
        match symbol {
            Symbol::Plain(value) | Symbol::Last(value) => next[0] = value,
            Symbol::Blank | Symbol::Dead => next = [rule.fill(); N],
            Symbol::Outside => return None,
        }
        self.symbols = next;
        self.ended = matches!(symbol, Symbol::Last(_));
        Some(symbol == Symbol::Dead)
    }
}

struct Walk<'a, R, const N: usize> {
    rule: &'a R,
    policy: Policy,
    step: &'a Step<'a>,
    /// Rows not written yet.
    out: &'a mut [i64],
    window: Window<N>,
    /// Folded windows, one list per place.
    block: [[i64; BLOCK]; N],
    collected: usize,
    /// Bit i: the i-th collected token is dead.
    dead: u64,
}

impl<'a, R: Rule, const N: usize> Walk<'a, R, N> {
    fn new(rule: &'a R, policy: Policy, step: &'a Step<'a>, out: &'a mut [i64]) -> Self {
        Self {
            rule,
            policy,
            step,
            out,
            window: Window::empty(rule),
            block: [[0; BLOCK]; N],
            collected: 0,
            dead: 0,
        }
    }

    fn run(mut self, range: Range<usize>) -> Result<()> {
        let owned = range.start..range.end.min(self.step.owned());
        let mut position = owned.start;
        if !owned.is_empty() {
            let mut request = self.step.request_of(position);
            while position < owned.end {
                let tokens = self.step.range(request);
                if position < tokens.end {
                    self.enter(request, tokens.start, position)?;
                    let end = tokens.end.min(owned.end);
                    self.hash(request, position..end)?;
                    position = end;
                }
                request += 1;
            }
        }
        self.window = Window::empty(self.rule);
        for _ in owned.end.max(range.start)..range.end {
            self.collect_dead();
        }
        self.flush();
        Ok(())
    }

    /// Fills the window with what precedes `position` in `request`, whose tokens begin at `start`.
    fn enter(&mut self, request: usize, start: usize, position: usize) -> Result<()> {
        self.window = Window::empty(self.rule);
        let before = self.rule.ngram() - 1;
        let within = (position - start).min(before);
        if let Some(context) = self.step.context(request) {
            for column in within..before {
                let pushed = self.window.push(self.rule, self.policy, context(column));
                pushed.ok_or_else(|| {
                    let vocabulary = self.rule.vocabulary();
                    self.step.outside_context(column, request, vocabulary)
                })?;
            }
        }
        for position in position - within..position {
            let token = self.step.tokens().get(position);
            let pushed = self.window.push(self.rule, self.policy, token);
            pushed.ok_or_else(|| self.outside(request, position))?;
        }
        Ok(())
    }

    /// Collects the windows of tokens of one request that follow the last one pushed.
    fn hash(&mut self, request: usize, positions: Range<usize>) -> Result<()> {
        let mut buffer = [0; BLOCK];
        let mut position = positions.start;
        while position < positions.end {
            let count = (positions.end - position).min(BLOCK - self.collected);
            let tokens = &mut buffer[..count];
            self.step.tokens().copy_to(position, tokens);
            // A local copy stays in registers.
            let mut window = self.window;
            let mut lists = self
                .block
                .each_mut()
                .map(|list| list[self.collected..].iter_mut());
            for (index, &token) in tokens.iter().enumerate() {
                let Some(dead) = window.push(self.rule, self.policy, token) else {
                    return Err(self.outside(request, position + index));
                };
                self.dead |= u64::from(dead) << (self.collected + index);
                for (list, value) in lists.iter_mut().zip(self.rule.fold(window.symbols)) {
                    if let Some(place) = list.next() {
                        *place = value;
                    }
                }
            }
            self.window = window;
            position += count;
            self.collected += count;
            self.flush_if_full();
        }
        Ok(())
    }

    #[cold]
    fn outside(&self, request: usize, position: usize) -> Error {
        let vocabulary = self.rule.vocabulary();
        self.step.outside_token(position, request, vocabulary)
    }

    /// Collects the current window for a token that belongs to no request.
    fn collect_dead(&mut self) {
        for (list, value) in self
            .block
            .iter_mut()
            .zip(self.rule.fold(self.window.symbols))
        {
            list[self.collected] = value;
        }
        self.dead |= 1 << self.collected;
        self.collected += 1;
        self.flush_if_full();
    }

    fn flush_if_full(&mut self) {
        if self.collected == BLOCK {
            self.flush();
        }
    }

    fn flush(&mut self) {
        let heads = self.rule.heads();
        let rest = std::mem::take(&mut self.out);
        let (rows, rest) = rest.split_at_mut(self.collected * heads);
        let lists: [&[i64]; N] = self.block.each_ref().map(|list| &list[..self.collected]);
        self.rule.reduce(&lists[..self.rule.ngram()], rows);
        if let Some(dead_id) = self.policy.dead_id {
            while self.dead != 0 {
                let row = self.dead.trailing_zeros() as usize * heads;
                rows[row..row + heads].fill(dead_id);
                self.dead &= self.dead - 1;
            }
        }
        self.out = rest;
        self.collected = 0;
        self.dead = 0;
    }
}
