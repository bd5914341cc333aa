//! The heads of a table: how many rows each one owns, where they start, and the reduction of mixed
//! values into them.
//!
//! An id is `floor_modulo(mix, size) + offset`, and all heads of an n-gram order share one mix. That
//! makes the modulo worth doing eight at a time. With `inverse = 1 / size` rounded to a double:
//!
//! ```text
//! quotient  = round(double(mix) * inverse)
//! remainder = mix - quotient * size, plus size when negative
//! ```
//!
//! Three roundings (`mix` to a double, `inverse`, the product) put the product within
//! `3 * 2^-53 * 2^63 / size` of the true quotient: less than 0.19 for sizes of 2^14 and more. Rounded
//! to the nearest integer, the remainder then lies within 0.69 sizes of zero on either side, whatever
//! the sign of `mix`, so adding the size to a negative remainder completes a floor modulo. A size
//! below 2^31 keeps that remainder in 32 bits, which is why only the low 32 bits of the quotient and
//! of the product are ever needed: two's complement takes care of the rest. Compilers turn the loop
//! into SIMD code on any 64-bit target. Other sizes go through [`Reciprocal`].

use std::array::from_fn;
use std::ops::Range;

use super::reciprocal::Reciprocal;
use crate::error::{Error, Result};

/// Most heads a table may have; a bound that no model comes near, against hostile configurations.
pub const MAX_HEADS: usize = 4096;

/// Heads in column order: their sizes, and their first rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heads {
    sizes: Vec<u64>,
    offsets: Vec<u64>,
    rows: u64,
    padded_rows: u64,
}

impl Heads {
    /// Heads of these sizes, one after another; the table is padded to a multiple of `divisor` rows.
    pub fn new(sizes: Vec<u64>, divisor: u64) -> Result<Self> {
        if sizes.is_empty() || sizes.len() > MAX_HEADS {
            return Err(Error::value(format!(
                "a table with {} heads: 1 to {MAX_HEADS} are possible",
                sizes.len()
            )));
        }
        let mut offsets = Vec::with_capacity(sizes.len());
        let mut rows = 0_u64;
        for (head, &size) in sizes.iter().enumerate() {
            offsets.push(rows);
            rows = rows
                .checked_add(size)
                .filter(|&rows| size > 0 && i64::try_from(rows).is_ok())
                .ok_or_else(|| {
                    Error::value(format!(
                        "head {head} of size {size}: sizes must be positive and rows must fit 63 bits"
                    ))
                })?;
        }
        let padded_rows = rows
            .checked_next_multiple_of(divisor)
            .filter(|&rows| i64::try_from(rows).is_ok())
            .ok_or_else(|| {
                Error::value(format!(
                    "{rows} rows cannot be padded to a multiple of {divisor}"
                ))
            })?;
        Ok(Self {
            sizes,
            offsets,
            rows,
            padded_rows,
        })
    }

    /// Number of heads: ids per token.
    pub fn count(&self) -> usize {
        self.sizes.len()
    }

    /// Rows of each head.
    pub fn sizes(&self) -> &[u64] {
        &self.sizes
    }

    /// First row of each head.
    pub fn offsets(&self) -> &[u64] {
        &self.offsets
    }

    /// Rows that ids can address.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Rows of the stored table.
    pub fn padded_rows(&self) -> u64 {
        self.padded_rows
    }

    /// The reduction for a run of columns that share their mixes.
    pub(super) fn columns(&self, columns: Range<usize>) -> Columns {
        let mut first = columns.start;
        let mut parts = Vec::new();
        while first < columns.end {
            let width = if columns.end - first >= LANES {
                LANES
            } else {
                1
            };
            let sizes = &self.sizes[first..first + width];
            let offsets = &self.offsets[first..first + width];
            parts.push(Part {
                first,
                kernel: Kernel::new(sizes, offsets),
            });
            first += width;
        }
        Columns {
            heads: self.count(),
            parts,
        }
    }
}

const LANES: usize = 8;

/// Columns of the id matrix that share one mix per token.
#[derive(Debug)]
pub(super) struct Columns {
    heads: usize,
    parts: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    first: usize,
    kernel: Kernel,
}

#[derive(Debug)]
enum Kernel {
    Eight(Box<Lanes<LANES>>),
    One(Lanes<1>),
    Exact(Vec<(Reciprocal, i64)>),
}

#[derive(Debug)]
struct Lanes<const N: usize> {
    inverses: [f64; N],
    sizes: [u32; N],
    offsets: [i64; N],
}

impl Columns {
    /// Writes this group's columns of the rows in `out` (`mixes.len()` rows of all heads).
    pub(super) fn reduce(&self, mixes: &[i64], out: &mut [i64]) {
        for part in &self.parts {
            match &part.kernel {
                Kernel::Eight(lanes) => lanes.reduce(mixes, out, self.heads, part.first),
                Kernel::One(lanes) => lanes.reduce(mixes, out, self.heads, part.first),
                Kernel::Exact(columns) => {
                    for (&mix, row) in mixes.iter().zip(out.chunks_exact_mut(self.heads)) {
                        for ((reciprocal, offset), id) in columns.iter().zip(&mut row[part.first..])
                        {
                            *id = offset + reciprocal.floor_modulo(mix).cast_signed();
                        }
                    }
                }
            }
        }
    }
}

impl Kernel {
    fn new(sizes: &[u64], offsets: &[u64]) -> Self {
        let lanes = Lanes::<LANES>::new(sizes, offsets).map(|lanes| Self::Eight(Box::new(lanes)));
        let lane = || Lanes::<1>::new(sizes, offsets).map(Self::One);
        lanes.or_else(lane).unwrap_or_else(|| {
            let exact = sizes.iter().zip(offsets).filter_map(|(&size, offset)| {
                Reciprocal::new(size).map(|reciprocal| (reciprocal, offset.cast_signed()))
            });
            Self::Exact(exact.collect())
        })
    }
}

/// 1.5 * 2^52: added to a double below 2^51, it leaves the nearest integer in the low bits.
const ROUND: f64 = 6_755_399_441_055_744.0;
const SMALLEST: u64 = 1 << 14;
const LARGEST: u64 = (1 << 31) - 1;

impl<const N: usize> Lanes<N> {
    /// `None` unless there are `N` sizes, all within the bounds the module's argument needs.
    fn new(sizes: &[u64], offsets: &[u64]) -> Option<Self> {
        let sizes: &[u64; N] = sizes.try_into().ok()?;
        let offsets: &[u64; N] = offsets.try_into().ok()?;
        if !sizes.iter().all(|size| (SMALLEST..=LARGEST).contains(size)) {
            return None;
        }
        let sizes = sizes.map(low);
        Some(Self {
            inverses: sizes.map(|size| 1.0 / f64::from(size)),
            sizes,
            offsets: offsets.map(u64::cast_signed),
        })
    }

    // A loop of its own, so that the constants stay in registers over a whole block.
    #[inline(never)]
    fn reduce(&self, mixes: &[i64], out: &mut [i64], heads: usize, first: usize) {
        for (&mix, row) in mixes.iter().zip(out.chunks_exact_mut(heads)) {
            let Some(ids) = row[first..].first_chunk_mut::<N>() else {
                return;
            };
            #[expect(clippy::cast_precision_loss, reason = "the error bound allows for it")]
            let double = mix as f64;
            let remainders: [u32; N] = from_fn(|lane| {
                let quotient = low((double * self.inverses[lane] + ROUND).to_bits());
                let product = u64::from(quotient) * u64::from(self.sizes[lane]);
                low(mix.cast_unsigned().wrapping_sub(product))
            });
            *ids = from_fn(|lane| {
                let negative = (remainders[lane].cast_signed() >> 31).cast_unsigned();
                let correction = self.sizes[lane] & negative;
                self.offsets[lane] + i64::from(remainders[lane].wrapping_add(correction))
            });
        }
    }
}

#[inline]
fn low(word: u64) -> u32 {
    (word & 0xffff_ffff) as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn naive(heads: &Heads, mix: i64) -> Vec<i64> {
        let ids = heads.sizes().iter().zip(heads.offsets());
        ids.map(|(size, offset)| mix.rem_euclid(size.cast_signed()) + offset.cast_signed())
            .collect()
    }

    /// Values where rounding could matter: near multiples and near odd halves of the size.
    fn near_quotients(size: u64) -> impl Strategy<Value = i64> {
        (any::<i64>(), 0_u8..3, -2_i64..=2).prop_map(move |(value, kind, beside)| {
            let size = size.cast_signed();
            let floor = value.saturating_sub(value.rem_euclid(size));
            match kind {
                0 => value,
                1 => floor.saturating_add(beside),
                _ => floor.saturating_add(size / 2).saturating_add(beside),
            }
        })
    }

    fn sizes_and_mixes() -> impl Strategy<Value = (Vec<u64>, Vec<i64>)> {
        let size = prop_oneof![
            1_u64..100,
            SMALLEST - 2..SMALLEST + 3,
            SMALLEST..=LARGEST,
            LARGEST - 2..LARGEST + 3,
            1_u64 << 32..1 << 40,
        ];
        prop::collection::vec(size, 1..20).prop_flat_map(|sizes| {
            let mixes = prop::collection::vec(near_quotients(sizes[0]), 1..40);
            (Just(sizes), mixes)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2048))]
        #[test]
        fn every_kernel_equals_euclidean_remainder((sizes, mixes) in sizes_and_mixes()) {
            let heads = Heads::new(sizes, 1).unwrap();
            let columns = heads.columns(0..heads.count());
            let mut out = vec![i64::MIN; mixes.len() * heads.count()];
            columns.reduce(&mixes, &mut out);
            for (mix, row) in mixes.iter().zip(out.chunks_exact(heads.count())) {
                prop_assert_eq!(row, &naive(&heads, *mix)[..]);
            }
        }
    }

    #[test]
    fn extreme_values_reach_the_eight_lane_kernel_exactly() {
        for size in [SMALLEST, SMALLEST + 1, 20_000_003, LARGEST - 1, LARGEST] {
            let heads = Heads::new(vec![size; LANES], 1).unwrap();
            let columns = heads.columns(0..LANES);
            assert!(matches!(columns.parts[0].kernel, Kernel::Eight(_)));
            let top = i64::MAX - i64::MAX.rem_euclid(size.cast_signed());
            for mix in [i64::MIN, i64::MIN + 1, -1, 0, 1, top - 1, top, i64::MAX] {
                let mut out = [0; LANES];
                columns.reduce(&[mix], &mut out);
                assert_eq!(&out[..], &naive(&heads, mix)[..], "{mix} mod {size}");
            }
        }
    }

    #[test]
    fn groups_leave_other_columns_alone() {
        let heads = Heads::new(vec![20_011; 10], 1).unwrap();
        let mut out = [-7; 20];
        heads.columns(1..10).reduce(&[5, 6], &mut out);
        assert_eq!((out[0], out[10]), (-7, -7));
        assert_eq!(out[11..].iter().filter(|&&id| id < 0).count(), 0);
    }

    #[test]
    fn offsets_are_prefix_sums_and_padding_is_at_the_end() {
        let heads = Heads::new(vec![53, 59, 61, 67], 16).unwrap();
        assert_eq!(heads.offsets(), [0, 53, 112, 173]);
        assert_eq!((heads.rows(), heads.padded_rows()), (240, 240));
        assert_eq!(Heads::new(vec![53], 16).unwrap().padded_rows(), 64);
    }

    #[test]
    fn sizes_that_overflow_are_refused() {
        assert!(Heads::new(vec![], 1).is_err());
        assert!(Heads::new(vec![1 << 62, 1 << 62], 1).is_err());
        assert!(Heads::new(vec![5, 0], 1).is_err());
        assert!(Heads::new(vec![5], 1 << 63).is_err());
        assert!(Heads::new(vec![5], 0).is_err());
    }
}
