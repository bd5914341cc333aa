//! The mix Qwen and DeepSeek share: symbols times odd multipliers, joined by XOR.
//!
//! The n-gram of order `n` mixes its newest `n` symbols; its heads reduce that one mix by their own
//! sizes. Columns are order-major: all heads of order 2, then all of order 3, and so on.

use super::heads::{Columns, Heads};

/// Multipliers and the columns of each order.
#[derive(Debug)]
pub(super) struct Mix {
    /// Newest symbol first.
    multipliers: Vec<i64>,
    orders: Vec<Columns>,
}

impl Mix {
    /// `heads` holds `multipliers.len() - 1` orders of equally many heads.
    pub(super) fn new(multipliers: Vec<i64>, heads: &Heads) -> Self {
        let orders = multipliers.len() - 1;
        let per_order = heads.count() / orders;
        let orders = (0..orders)
            .map(|order| heads.columns(order * per_order..(order + 1) * per_order))
            .collect();
        Self {
            multipliers,
            orders,
        }
    }

    /// Multipliers, newest symbol first.
    pub(super) fn multipliers(&self) -> &[i64] {
        &self.multipliers
    }

    /// Mixes of a window: at place `j`, that of its newest `j + 1` symbols.
    #[inline]
    pub(super) fn fold<const N: usize>(&self, mut window: [i64; N]) -> [i64; N] {
        let mut mix = 0;
        for (symbol, multiplier) in window.iter_mut().zip(&self.multipliers) {
            mix ^= symbol.wrapping_mul(*multiplier);
            *symbol = mix;
        }
        window
    }

    /// Ids of a block of folded windows; see [`super::walk::Rule::reduce`].
    pub(super) fn reduce(&self, folded: &[&[i64]], out: &mut [i64]) {
        for (mixes, columns) in folded.iter().skip(1).zip(&self.orders) {
            columns.reduce(mixes, out);
        }
    }
}
