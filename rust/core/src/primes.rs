//! Prime numbers of 64 bits: a deterministic test and the search the hash families size heads with.

/// The first twelve primes: as Miller-Rabin bases they decide every number below 3.3e24.
const BASES: [u64; 12] = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37];

/// Whether `n` is prime; right for every 64-bit number.
pub fn is_prime(n: u64) -> bool {
    if n < 2 {
        return false;
    }
    for base in BASES {
        if n.is_multiple_of(base) {
            return n == base;
        }
    }
    let twos = (n - 1).trailing_zeros();
    let odd = (n - 1) >> twos;
    BASES.iter().all(|&base| {
        let mut power = power_modulo(base, odd, n);
        if power == 1 || power == n - 1 {
            return true;
        }
        for _ in 1..twos {
            power = multiply_modulo(power, power, n);
            if power == n - 1 {
                return true;
            }
        }
        false
    })
}

/// The smallest prime greater than `above`.
///
/// # Panics
///
/// When `above` is 2^64 - 59 (the largest 64-bit prime) or more: there is none to return.
pub fn next_prime(above: u64) -> u64 {
    if above < 2 {
        return 2;
    }
    let mut candidate = (above + 1) | 1;
    while !is_prime(candidate) {
        candidate = candidate
            .checked_add(2)
            .expect("a 64-bit prime above the bound");
    }
    candidate
}

/// `base ^ exponent` modulo `modulus`, which must not be 0.
pub fn power_modulo(base: u64, mut exponent: u64, modulus: u64) -> u64 {
    let mut base = base % modulus;
    let mut power = 1 % modulus;
    while exponent > 0 {
        if exponent & 1 == 1 {
            power = multiply_modulo(power, base, modulus);
        }
        base = multiply_modulo(base, base, modulus);
        exponent >>= 1;
    }
    power
}

fn multiply_modulo(a: u64, b: u64, modulus: u64) -> u64 {
    let product = u128::from(a) * u128::from(b) % u128::from(modulus);
    // A remainder is below the modulus, which has 64 bits.
    u64::try_from(product).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn is_prime_by_division(n: u64) -> bool {
        n >= 2 && (2..=n.isqrt()).all(|divisor| !n.is_multiple_of(divisor))
    }

    #[test]
    fn small_numbers_agree_with_trial_division() {
        for n in 0..20_000 {
            assert_eq!(is_prime(n), is_prime_by_division(n), "{n}");
        }
    }

    #[test]
    fn numbers_that_fool_weaker_tests_are_classified() {
        // 61 is itself a base of some implementations; the composites are strong pseudoprimes to
        // the first 1, 4, 9 and 11 prime bases; the last two frame the top of the 64-bit range.
        assert!(is_prime(61));
        for composite in [
            2_047,
            3_215_031_751,
            3_825_123_056_546_413_051,
            18_446_744_073_709_551_615,
        ] {
            assert!(!is_prime(composite), "{composite}");
        }
        assert!(is_prime(18_446_744_073_709_551_557));
        assert!(is_prime(9_223_372_036_854_775_783));
    }

    #[test]
    fn the_search_is_strict_and_starts_at_two() {
        assert_eq!(next_prime(0), 2);
        assert_eq!(next_prime(2), 3);
        assert_eq!(next_prime(3), 5);
        assert_eq!(next_prime(19_999_999), 20_000_003);
        assert_eq!(
            next_prime(18_446_744_073_709_551_556),
            18_446_744_073_709_551_557
        );
    }

    proptest! {
        #[test]
        fn no_prime_lies_between_a_number_and_its_next_prime(above in 0_u64..1 << 30) {
            let prime = next_prime(above);
            prop_assert!(is_prime_by_division(prime));
            for between in above + 1..prime {
                prop_assert!(!is_prime_by_division(between));
            }
        }

        #[test]
        fn products_are_never_prime(a in 2_u64..1 << 32, b in 2_u64..1 << 32) {
            prop_assert!(!is_prime(a * b));
        }

        #[test]
        fn powers_agree_with_repeated_multiplication(
            base in any::<u64>(), exponent in 0_u64..40, modulus in 1_u64..,
        ) {
            let naive = (0..exponent).fold(1 % u128::from(modulus), |power, _| {
                power * u128::from(base) % u128::from(modulus)
            });
            prop_assert_eq!(u128::from(power_modulo(base, exponent, modulus)), naive);
        }
    }
}
