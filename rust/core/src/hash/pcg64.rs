//! `numpy.random.default_rng(seed).integers(0, bound, dtype=int64)`, from the algorithms numpy
//! documents: `SeedSequence` spreads the seed, PCG64 (XSL-RR, 128-bit state) draws, Lemire's
//! multiplication maps a draw into the bound without bias.
//!
//! DeepSeek's hash multipliers are such draws, so they have to come out bit for bit.

const POOL: usize = 4;
const INIT_A: u32 = 0x43b0_d7e5;
const MULT_A: u32 = 0x931e_8875;
const INIT_B: u32 = 0x8b51_f9dd;
const MULT_B: u32 = 0x58f3_8ded;
const MIX_LEFT: u32 = 0xca01_f9dd;
const MIX_RIGHT: u32 = 0x4973_f715;
const PCG_MULTIPLIER: u128 = 0x2360_ed05_1fc6_5da4_4385_df64_9fcc_f645;

/// Eight words of `SeedSequence(seed).generate_state`.
fn seed_sequence(seed: u64) -> [u32; 2 * POOL] {
    let entropy = [low(seed), low(seed >> 32)];
    let mut multiplier = INIT_A;
    let mut spread = |word: u32| {
        let mut word = word ^ multiplier;
        multiplier = multiplier.wrapping_mul(MULT_A);
        word = word.wrapping_mul(multiplier);
        word ^ (word >> 16)
    };
    // Words the seed does not have count as 0, which is also what a high half of 0 is worth.
    let mut pool = [0_u32; POOL];
    for (index, word) in pool.iter_mut().enumerate() {
        *word = spread(entropy.get(index).copied().unwrap_or(0));
    }
    for source in 0..POOL {
        for target in 0..POOL {
            if source != target {
                let mixed = MIX_LEFT
                    .wrapping_mul(pool[target])
                    .wrapping_sub(MIX_RIGHT.wrapping_mul(spread(pool[source])));
                pool[target] = mixed ^ (mixed >> 16);
            }
        }
    }
    let mut multiplier = INIT_B;
    std::array::from_fn(|index| {
        let mut word = pool[index % POOL] ^ multiplier;
        multiplier = multiplier.wrapping_mul(MULT_B);
        word = word.wrapping_mul(multiplier);
        word ^ (word >> 16)
    })
}

/// numpy's default generator.
#[derive(Debug, Clone)]
pub struct Pcg64 {
    state: u128,
    increment: u128,
}

impl Pcg64 {
    /// `numpy.random.default_rng(seed)`.
    pub fn new(seed: u64) -> Self {
        let words = seed_sequence(seed);
        let pair = |index: usize| u128::from(words[index]) | u128::from(words[index + 1]) << 32;
        let initial = pair(0) << 64 | pair(2);
        let increment = (pair(4) << 64 | pair(6)) << 1 | 1;
        let mut generator = Self {
            state: 0,
            increment,
        };
        generator.step();
        generator.state = generator.state.wrapping_add(initial);
        generator.step();
        generator
    }

    fn step(&mut self) {
        self.state = self
            .state
            .wrapping_mul(PCG_MULTIPLIER)
            .wrapping_add(self.increment);
    }

    /// The next 64 random bits (`random_raw`).
    pub fn next_u64(&mut self) -> u64 {
        self.step();
        let (high, low) = halves(self.state);
        // XSL-RR: fold the halves, rotate by the top six bits.
        (high ^ low).rotate_right(u32::from(high.to_be_bytes()[0] >> 2))
    }

    /// A number in `0..bound`, as `integers(0, bound)` draws it.
    ///
    /// numpy draws 32 bits at a time for smaller bounds; those are not reproduced here, so `bound`
    /// must exceed 2^32.
    pub fn below(&mut self, bound: u64) -> u64 {
        debug_assert!(bound > 1 << 32, "numpy draws {bound} from 32 bits");
        let threshold = bound.wrapping_neg() % bound;
        loop {
            let (value, rest) = halves(u128::from(self.next_u64()) * u128::from(bound));
            if rest >= threshold {
                return value;
            }
        }
    }
}

fn low(word: u64) -> u32 {
    (word & 0xffff_ffff) as u32
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "the halves are what is wanted"
)]
fn halves(wide: u128) -> (u64, u64) {
    ((wide >> 64) as u64, wide as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    // numpy 2: SeedSequence(seed).generate_state(4, uint64), PCG64(seed).random_raw(4) and
    // default_rng(seed).integers(0, 46539438283891, 4).
    #[test]
    fn seed_10007_equals_numpy() {
        let words = seed_sequence(10_007);
        let first = u64::from(words[0]) | u64::from(words[1]) << 32;
        assert_eq!(first, 8_634_291_315_755_388_167);
        let mut generator = Pcg64::new(10_007);
        assert_eq!(
            generator.state,
            78_698_009_995_358_412_790_897_477_648_799_726_887
        );
        let raw: Vec<u64> = (0..4).map(|_| generator.next_u64()).collect();
        assert_eq!(
            raw,
            [
                15_187_255_322_829_266_483,
                959_186_003_677_246_517,
                7_126_631_698_937_927_467,
                14_663_106_486_854_050_627
            ]
        );
        let mut generator = Pcg64::new(10_007);
        let drawn: Vec<u64> = (0..4)
            .map(|_| generator.below(46_539_438_283_891))
            .collect();
        assert_eq!(
            drawn,
            [
                38_316_048_023_122,
                2_419_938_046_656,
                17_979_836_159_674,
                36_993_668_729_195
            ]
        );
    }

    #[test]
    fn a_seed_of_two_words_equals_numpy() {
        let mut generator = Pcg64::new(0x1234_5678_9abc_def0);
        assert_eq!(generator.next_u64(), 3_766_508_136_411_593_918);
    }

    #[test]
    fn redraws_equal_numpy() {
        // Three eighths of 2^64 is left over by this bound, so many draws are rejected; seed 1
        // loses the first three.
        let mut generator = Pcg64::new(1);
        let drawn: Vec<u64> = (0..4)
            .map(|_| generator.below((1 << 62) + (1 << 61) + 1))
            .collect();
        assert_eq!(
            drawn,
            [
                6_562_310_087_627_549_167,
                2_157_103_121_014_000_383,
                2_928_372_998_936_013_339,
                5_725_656_719_006_722_286
            ]
        );
    }
}
