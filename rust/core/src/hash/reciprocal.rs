//! Floor modulo by a number that is known in advance, without dividing.
//!
//! ```text
//! reciprocal = floor(2^64 / divisor)
//! quotient   = (value * reciprocal) >> 64      never too large, too small by at most 1
//! remainder  = value - quotient * divisor      in [0, 2 * divisor)
//! ```
//!
//! The quotient falls short by less than `value / 2^64 < 1` before it is cut to an integer, so one
//! conditional subtraction finishes the remainder. A negative value is answered through its
//! complement: with `value = -1 - u`, floor modulo is `divisor - 1 - (u mod divisor)`.

/// A divisor in `1..=i64::MAX` with its reciprocal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reciprocal {
    divisor: u64,
    reciprocal: u64,
}

impl Reciprocal {
    /// Prepares `divisor`; `None` unless it lies in `1..=i64::MAX`.
    pub fn new(divisor: u64) -> Option<Self> {
        if divisor == 0 || i64::try_from(divisor).is_err() {
            return None;
        }
        // A divisor of 1 would need 2^64; 2^64 - 1 is off by less than the correction covers.
        let reciprocal = u64::try_from((1_u128 << 64) / u128::from(divisor)).unwrap_or(u64::MAX);
        Some(Self {
            divisor,
            reciprocal,
        })
    }

    /// The divisor.
    pub fn divisor(self) -> u64 {
        self.divisor
    }

    /// `value` modulo the divisor, in `0..divisor` for negative values too.
    #[inline]
    pub fn floor_modulo(self, value: i64) -> u64 {
        let magnitude = (value ^ (value >> 63)).cast_unsigned();
        let product = u128::from(magnitude) * u128::from(self.reciprocal);
        let quotient = (product >> 64) as u64;
        let mut remainder = magnitude - quotient * self.divisor;
        if remainder >= self.divisor {
            remainder -= self.divisor;
        }
        if value < 0 {
            self.divisor - 1 - remainder
        } else {
            remainder
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Divisors of every magnitude, and values that sit on and beside their multiples.
    fn divisor_and_value() -> impl Strategy<Value = (i64, i64)> {
        let divisor = (0_u32..63).prop_flat_map(|bits| (1_i64 << bits)..=i64::MAX >> (62 - bits));
        (divisor, any::<i64>(), -2_i64..=2, any::<bool>()).prop_map(
            |(divisor, value, beside, snap)| {
                if snap {
                    let multiple = value
                        - value
                            .rem_euclid(divisor)
                            .min(value.saturating_sub(i64::MIN));
                    (divisor, multiple.saturating_add(beside))
                } else {
                    (divisor, value)
                }
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]
        #[test]
        fn equals_euclidean_remainder((divisor, value) in divisor_and_value()) {
            let reciprocal = Reciprocal::new(divisor.cast_unsigned()).unwrap();
            prop_assert_eq!(
                reciprocal.floor_modulo(value),
                value.rem_euclid(divisor).cast_unsigned()
            );
        }
    }

    #[test]
    fn extremes_are_exact() {
        for divisor in [1, 2, 3, 61, 20_000_003, 1 << 32, i64::MAX - 1, i64::MAX] {
            let reciprocal = Reciprocal::new(divisor.cast_unsigned()).unwrap();
            for value in [
                i64::MIN,
                i64::MIN + 1,
                -1,
                0,
                1,
                divisor - 1,
                divisor,
                i64::MAX,
            ] {
                let expected = value.rem_euclid(divisor).cast_unsigned();
                assert_eq!(
                    reciprocal.floor_modulo(value),
                    expected,
                    "{value} mod {divisor}"
                );
            }
        }
    }

    #[test]
    fn divisors_without_a_signed_remainder_are_refused() {
        assert!(Reciprocal::new(0).is_none());
        assert!(Reciprocal::new(1 << 63).is_none());
    }
}
