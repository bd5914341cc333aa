//! The mix Qwen and DeepSeek share: symbols times odd multipliers, joined by XOR.
//!
//! The n-gram of order `n` mixes its newest `n` symbols; its heads reduce that one mix by their own
//! sizes. Columns are order-major: all heads of order 2, then all of order 3, and so on.

use super::heads::{Columns, Heads};
use super::walk::BLOCK;

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

    /// Ids of a block of windows; see [`super::walk::Rule::reduce`].
    pub(super) fn reduce(&self, window: &[&[i64]], out: &mut [i64]) {
        let mut buffer = [0_i64; BLOCK];
        let mixes = &mut buffer[..window[0].len()];
        for (order, (symbols, multiplier)) in window.iter().zip(&self.multipliers).enumerate() {
            for (mix, symbol) in mixes.iter_mut().zip(*symbols) {
                *mix ^= symbol.wrapping_mul(*multiplier);
            }
            if let Some(columns) = order
                .checked_sub(1)
                .and_then(|order| self.orders.get(order))
            {
                columns.reduce(mixes, out);
            }
        }
    }
}
