//! Primality for every 64-bit number, exactly: row counts of hashed tables are sums of primes.

/// Trial divisors, and the Miller-Rabin bases that leave no 64-bit composite undetected
/// (Sorenson and Webster, "Strong pseudoprimes to twelve prime bases", 2015).
const BASES: [u64; 12] = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37];

/// Below this number the first four bases leave none undetected (Jaeschke, "On strong pseudoprimes to
/// several bases", 1993); the rows of a head are that few.
const FOUR_SUFFICE: u64 = 3_215_031_751;

/// Whether `number` is prime.
pub fn is_prime(number: u64) -> bool {
    if number < 2 {
        return false;
    }
    for base in BASES {
        if number.is_multiple_of(base) {
            return number == base;
        }
    }
    let twos = (number - 1).trailing_zeros();
    let odd = (number - 1) >> twos;
    let bases = if number < FOUR_SUFFICE {
        &BASES[..4]
    } else {
        &BASES[..]
    };
    bases.iter().all(|&base| {
        let mut power = power_modulo(base, odd, number);
        if power == 1 || power == number - 1 {
            return true;
        }
        for _ in 1..twos {
            power = multiply_modulo(power, power, number);
            if power == number - 1 {
                return true;
            }
        }
        false
    })
}

/// The smallest prime above `number`; `None` when it does not fit 64 bits.
pub fn next_prime(number: u64) -> Option<u64> {
    let mut candidate = number.checked_add(1)?;
    if candidate <= 2 {
        return Some(2);
    }
    candidate |= 1;
    while !is_prime(candidate) {
        candidate = candidate.checked_add(2)?;
    }
    Some(candidate)
}

fn power_modulo(base: u64, mut exponent: u64, modulus: u64) -> u64 {
    let mut base = base % modulus;
    let mut result = 1;
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = multiply_modulo(result, base, modulus);
        }
        base = multiply_modulo(base, base, modulus);
        exponent >>= 1;
    }
    result
}

/// `left * right % modulus` for factors below the modulus.
fn multiply_modulo(left: u64, right: u64, modulus: u64) -> u64 {
    if modulus <= 1 << 32 {
        return left * right % modulus;
    }
    let remainder = u128::from(left) * u128::from(right) % u128::from(modulus);
    u64::try_from(remainder).unwrap_or_else(|_| unreachable!("a remainder is below its modulus"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn has_divisor(number: u64) -> bool {
        (2..=number.isqrt()).any(|divisor| number.is_multiple_of(divisor))
    }

    #[test]
    fn small_numbers_agree_with_trial_division() {
        for number in 0..20_000 {
            assert_eq!(
                is_prime(number),
                number >= 2 && !has_divisor(number),
                "{number}"
            );
        }
    }

    proptest! {
        #[test]
        fn numbers_around_table_sizes_agree_with_trial_division(number in 0_u64..400_000_000) {
            prop_assert_eq!(is_prime(number), number >= 2 && !has_divisor(number));
        }

        #[test]
        fn products_are_composite(left in 2_u64..1 << 32, right in 2_u64..1 << 32) {
            prop_assert!(!is_prime(left * right));
        }

        #[test]
        fn nothing_prime_is_skipped(start in any::<u64>()) {
            if let Some(prime) = next_prime(start) {
                prop_assert!(is_prime(prime) && prime > start);
                prop_assert!((start + 1..prime).all(|between| !is_prime(between)));
            } else {
                prop_assert!(start >= 18_446_744_073_709_551_557);
            }
        }
    }

    #[test]
    fn known_hard_numbers() {
        // Smallest strong pseudoprimes to the first 1, 2, ... bases, then Carmichael numbers and
        // the square of a prime.
        for composite in [
            2_047,
            1_373_653,
            25_326_001,
            3_215_031_751,
            2_152_302_898_747,
            3_474_749_660_383,
            341_550_071_728_321,
            3_825_123_056_546_413_051,
            561,
            41_041,
            825_265,
            4_294_967_291 * 4_294_967_291,
            u64::MAX,
        ] {
            assert!(!is_prime(composite), "{composite}");
        }
        // 61 is a base that some deterministic tests mistake for a composite.
        for prime in [61, 4_294_967_291, 4_294_967_311, 18_446_744_073_709_551_557] {
            assert!(is_prime(prime), "{prime}");
        }
    }

    #[test]
    fn ends_of_the_range() {
        assert_eq!(next_prime(0), Some(2));
        assert_eq!(next_prime(2), Some(3));
        assert_eq!(next_prime(19_999_999), Some(20_000_003));
        assert_eq!(next_prime(18_446_744_073_709_551_557), None);
        assert_eq!(next_prime(u64::MAX), None);
    }
}
