//! The hash families against a naive reading of their rules, and against published numbers.
//!
//! The naive reading looks up every predecessor of every token anew in the request's whole history;
//! it knows nothing of windows, blocks, reciprocals or threads.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that cannot go on fails its test"
)]

use engram_core::hash::{
    Context, DeepSeek, DeepSeekConfig, EosRule, Hash, Ints, LongCat, LongCatConfig, OutOfVocab,
    Policy, Qwen, QwenConfig, Step, splitmix64,
};
use proptest::prelude::*;

mod golden;

const WRAP: Policy = Policy {
    out_of_vocab: OutOfVocab::Wrap,
    dead_id: None,
};

/// Requests as lists of tokens with what came before them.
#[derive(Debug, Clone)]
struct Batch {
    requests: Vec<Request>,
    padding: usize,
}

#[derive(Debug, Clone)]
struct Request {
    before: Vec<i64>,
    tokens: Vec<i64>,
}

fn run(hash: &dyn Hash, batch: &Batch, threads: usize) -> engram_core::Result<Vec<Vec<i64>>> {
    let width = hash.context_len();
    let mut tokens = Vec::new();
    let mut starts = vec![0_i64];
    let mut context = Vec::new();
    for request in &batch.requests {
        tokens.extend_from_slice(&request.tokens);
        starts.push(i64::try_from(tokens.len()).unwrap());
        let before = request.before.iter().rev().take(width);
        let mut row: Vec<i64> = before.copied().collect();
        row.resize(width, hash.filler());
        context.extend(row.into_iter().rev());
    }
    // Padding is never looked at, so it holds what would be refused.
    tokens.resize(tokens.len() + batch.padding, i64::MIN);
    let context = Context {
        values: Ints::I64(&context),
        rows: batch.requests.len(),
        width,
    };
    let step = Step::new(
        Ints::I64(&tokens),
        Some(Ints::I64(&starts)),
        Some(context),
        width,
    )?;
    let heads = hash.heads().count();
    let mut out = vec![i64::MIN; tokens.len() * heads];
    hash.ids(&step, &mut out, threads)?;
    Ok(out.chunks(heads).map(<[i64]>::to_vec).collect())
}

/// `rule` gives a token's ids from the history up to and including it.
fn naive(batch: &Batch, rule: impl Fn(&[i64]) -> Vec<i64>) -> Vec<Vec<i64>> {
    let mut rows = Vec::new();
    for request in &batch.requests {
        let history = [&request.before[..], &request.tokens[..]].concat();
        for end in request.before.len()..history.len() {
            rows.push(rule(&history[..=end]));
        }
    }
    rows
}

/// The token `distance` before the last one of `history`.
fn back(history: &[i64], distance: usize) -> Option<i64> {
    history.iter().rev().nth(distance).copied()
}

fn mixed(symbols: &[i64], hash: &dyn Hash, per_order: usize) -> Vec<i64> {
    let multipliers = &hash.multipliers()[0];
    let mut ids = Vec::new();
    for order in 2..=multipliers.len() {
        let mix = (0..order).fold(0_i64, |mix, place| {
            mix ^ symbols[place].wrapping_mul(multipliers[place])
        });
        for head in (order - 2) * per_order..(order - 1) * per_order {
            let size = hash.heads().sizes()[head].cast_signed();
            ids.push(mix.rem_euclid(size) + hash.heads().offsets()[head].cast_signed());
        }
    }
    ids
}

fn naive_qwen(history: &[i64], hash: &dyn Hash, eos: i64, per_order: usize) -> Vec<i64> {
    let mut crossed = false;
    let symbols: Vec<i64> = (0..=hash.context_len())
        .map(|distance| {
            let token = back(history, distance).filter(|_| !crossed).unwrap_or(eos);
            crossed |= distance > 0 && token == eos;
            token
        })
        .collect();
    mixed(&symbols, hash, per_order)
}

fn naive_deepseek(history: &[i64], hash: &dyn Hash, config: &DeepSeekConfig) -> Vec<i64> {
    let mapped = |token: i64| {
        let carries = Some(token.cast_unsigned()) != config.image_token;
        let place = usize::try_from(token).ok().filter(|_| carries)?;
        config.token_map.get(place).map(|&id| i64::from(id))
    };
    let pad = mapped(config.pad_token.cast_signed()).unwrap();
    let mut blocked = false;
    let symbols: Vec<i64> = (0..=hash.context_len())
        .map(|distance| {
            let id = back(history, distance).and_then(mapped);
            blocked |= id.is_none();
            if blocked { pad } else { id.unwrap() }
        })
        .collect();
    mixed(&symbols, hash, config.heads_per_order)
}

fn naive_longcat(history: &[i64], config: &LongCatConfig) -> Vec<i64> {
    let eos = config.eos.cast_signed();
    let vllm = config.eos_rule == EosRule::Vllm;
    let mut ids = Vec::new();
    let mut offset = 0;
    for head in 0..(config.ngram - 1) * config.splits {
        let size = i128::from(config.base_size + 2 * head as u64 + 1);
        let mut sum = 0;
        for distance in 0..head / config.splits + 2 {
            let Some(token) = back(history, distance) else {
                break;
            };
            let stops = token == eos || (vllm && token < 0);
            if stops && (distance > 0 || vllm) {
                break;
            }
            let ignored = config.ignored.contains(&token.cast_unsigned());
            let power =
                (0..distance).fold(1, |power, _| power * i128::from(config.vocab_size) % size);
            sum += if ignored {
                0
            } else {
                i128::from(token) * power
            };
        }
        ids.push(i64::try_from(sum.rem_euclid(size) + offset).unwrap());
        offset += size;
    }
    ids
}

fn batches(token: impl Strategy<Value = i64> + Clone) -> impl Strategy<Value = Batch> {
    let request = (
        prop::collection::vec(token.clone(), 0..6),
        prop::collection::vec(token, 0..90),
    )
        .prop_map(|(before, tokens)| Request { before, tokens });
    (prop::collection::vec(request, 0..6), 0_usize..70)
        .prop_map(|(requests, padding)| Batch { requests, padding })
}

fn qwen_config() -> impl Strategy<Value = QwenConfig> {
    let base = prop_oneof![1_u64..200, 16_000_u64..40_000, 1_u64 << 31..1 << 33];
    (
        2_u64..300,
        2_usize..7,
        1_usize..10,
        base,
        1_u64..200,
        any::<u64>(),
        0_usize..3,
    )
        .prop_flat_map(
            |(
                vocab_size,
                ngram_size,
                heads_per_ngram,
                vocab_size_base,
                divisor,
                seed,
                ple_index,
            )| {
                (0..vocab_size).prop_map(move |eos| QwenConfig {
                    vocab_size,
                    ngram_size,
                    heads_per_ngram,
                    vocab_size_base,
                    divisor,
                    seed,
                    ple_index,
                    eos,
                })
            },
        )
}

/// Tokens of a small vocabulary, `special` often among them.
fn tokens(vocabulary: u64, special: u64) -> impl Strategy<Value = i64> + Clone {
    let special = special.cast_signed();
    prop_oneof![3 => 0..vocabulary.cast_signed(), 1 => Just(special)]
}

/// The same with tokens no vocabulary has.
fn any_tokens(vocabulary: u64, special: u64) -> impl Strategy<Value = i64> + Clone {
    prop_oneof![4 => tokens(vocabulary, special), 1 => Just(-1_i64), 1 => any::<i64>()]
}

fn check(hash: &dyn Hash, batch: &Batch, expected: &[Vec<i64>]) -> Result<(), TestCaseError> {
    let ids = run(hash, batch, 1).unwrap();
    let (owned, padding) = ids.split_at(expected.len());
    prop_assert_eq!(owned, expected);
    prop_assert_eq!(padding.len(), batch.padding);
    let rows = hash.heads();
    for row in &ids {
        for (id, (offset, size)) in row.iter().zip(rows.offsets().iter().zip(rows.sizes())) {
            let first = offset.cast_signed();
            prop_assert!((first..first + size.cast_signed()).contains(id));
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn qwen_equals_the_naive_reading(
        (config, batch) in qwen_config().prop_flat_map(|config| {
            let batch = batches(any_tokens(config.vocab_size, config.eos));
            (Just(config), batch)
        }),
    ) {
        let hash = Qwen::new(&config, WRAP).unwrap();
        let rule = |history: &[i64]| {
            naive_qwen(history, &hash, config.eos.cast_signed(), config.heads_per_ngram)
        };
        check(&hash, &batch, &naive(&batch, rule))?;
    }

    #[test]
    fn deepseek_equals_the_naive_reading(
        max_ngram in 2_usize..6,
        heads_per_order in 1_usize..10,
        place in 0_usize..3,
        seed in any::<u32>(),
        image in prop::option::of(20_u64..24),
        batch in batches(any_tokens(24, 22)),
    ) {
        let layer_ids = vec![1, 7, 3];
        let config = DeepSeekConfig {
            layer: layer_ids[place],
            layer_ids,
            max_ngram,
            heads_per_order,
            vocab_sizes: vec![16_500; max_ngram - 1],
            pad_token: 2,
            seed: u64::from(seed),
            token_map: (0..24).map(|token| token % 10).collect(),
            image_token: image,
            demo: false,
        };
        let hash = DeepSeek::new(config.clone(), WRAP).unwrap();
        let rule = |history: &[i64]| naive_deepseek(history, &hash, &config);
        check(&hash, &batch, &naive(&batch, rule))?;
    }

    #[test]
    fn longcat_equals_the_naive_reading(
        ngram in 2_usize..6,
        splits in 1_usize..5,
        base_size in 20_u64..300_000,
        vllm in any::<bool>(),
        ignored in prop::collection::vec(5_u64..31, 0..4),
        batch in batches(prop_oneof![5 => tokens(31, 2), 1 => -3_i64..1 << 20]),
    ) {
        let config = LongCatConfig {
            vocab_size: 31,
            valid_tokens: 31,
            base_size,
            ngram,
            splits,
            eos: 2,
            eos_rule: if vllm { EosRule::Vllm } else { EosRule::HuggingFace },
            ignored,
        };
        let hash = LongCat::new(&config, WRAP).unwrap();
        check(&hash, &batch, &naive(&batch, |history| naive_longcat(history, &config)))?;
    }

    #[test]
    fn cutting_a_sequence_anywhere_changes_nothing(
        (config, tokens, cuts) in qwen_config().prop_flat_map(|config| {
            let tokens = prop::collection::vec(tokens(config.vocab_size, config.eos), 1..200);
            (Just(config), tokens, prop::collection::vec(0_usize..200, 0..8))
        }),
    ) {
        let hash = Qwen::new(&config, Policy::default()).unwrap();
        let whole = Batch {
            requests: vec![Request { before: vec![], tokens: tokens.clone() }],
            padding: 0,
        };
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(tokens.len())).collect();
        cuts.extend([0, tokens.len()]);
        cuts.sort_unstable();
        let requests = cuts.windows(2).map(|cut| Request {
            before: tokens[..cut[0]].to_vec(),
            tokens: tokens[cut[0]..cut[1]].to_vec(),
        });
        let pieces = Batch { requests: requests.collect(), padding: 0 };
        prop_assert_eq!(run(&hash, &whole, 1).unwrap(), run(&hash, &pieces, 1).unwrap());
    }
}

fn real_qwen() -> QwenConfig {
    QwenConfig {
        vocab_size: 248_320,
        ngram_size: 3,
        heads_per_ngram: 8,
        vocab_size_base: 20_000_000,
        divisor: 128,
        seed: 1234,
        ple_index: 0,
        eos: 248_044,
    }
}

/// A step long enough to be shared by threads, over requests of uneven length.
fn long_batch() -> Batch {
    let mut seed = 1;
    let mut token = || {
        seed = splitmix64(seed);
        if seed.is_multiple_of(7) {
            248_044
        } else {
            (seed % 248_320).cast_signed()
        }
    };
    let requests = [0, 1, 20_000, 1, 0, 3, 9_001, 5].map(|length| Request {
        before: (0..2).map(|_| token()).collect(),
        tokens: (0..length).map(|_| token()).collect(),
    });
    Batch {
        requests: requests.to_vec(),
        padding: 3_000,
    }
}

#[test]
fn threads_change_nothing() {
    let hash = Qwen::new(&real_qwen(), Policy::default()).unwrap();
    let batch = long_batch();
    let alone = run(&hash, &batch, 1).unwrap();
    for threads in [2, 3, 7, 64] {
        assert!(
            run(&hash, &batch, threads).unwrap() == alone,
            "{threads} threads"
        );
    }
}

#[test]
fn the_first_token_at_fault_is_named_whatever_the_threads() {
    let hash = Qwen::new(&real_qwen(), Policy::default()).unwrap();
    let mut batch = long_batch();
    batch.requests[6].tokens[8_000] = -1;
    batch.requests[2].tokens[123] = 248_320;
    for threads in [1, 5] {
        let error = run(&hash, &batch, threads).unwrap_err().to_string();
        assert!(
            error.contains("token 248320 at position 123 of request 2 (tokens[124])"),
            "{error}"
        );
    }
}

#[test]
fn a_context_outside_the_vocabulary_is_refused_unless_its_request_is_empty() {
    let hash = Qwen::new(&real_qwen(), Policy::default()).unwrap();
    let mut batch = Batch {
        requests: vec![
            Request {
                before: vec![-1, 248_044],
                tokens: vec![],
            },
            Request {
                before: vec![-1, 248_044],
                tokens: vec![5],
            },
        ],
        padding: 0,
    };
    let error = run(&hash, &batch, 1).unwrap_err().to_string();
    assert!(
        error.contains("context token -1 of request 1 (context[1, 0])"),
        "{error}"
    );
    batch.requests.pop();
    assert_eq!(run(&hash, &batch, 1).unwrap(), Vec::<Vec<i64>>::new());
}

#[test]
fn dead_tokens_and_padding_take_the_dead_id() {
    let config = DeepSeekConfig {
        layer_ids: vec![1],
        layer: 1,
        max_ngram: 3,
        heads_per_order: 2,
        vocab_sizes: vec![70, 70],
        pad_token: 2,
        seed: 0,
        token_map: (0..10).collect(),
        image_token: Some(9),
        demo: false,
    };
    let batch = Batch {
        requests: vec![Request {
            before: vec![],
            tokens: vec![4, 9, 4],
        }],
        padding: 1,
    };
    let filled = DeepSeek::new(config.clone(), Policy::default()).unwrap();
    let ids = run(&filled, &batch, 1).unwrap();
    assert_eq!(ids[1], ids[3]);
    assert_eq!(ids[0], ids[2]);
    let policy = Policy {
        dead_id: Some(-1),
        ..Policy::default()
    };
    let marked = run(&DeepSeek::new(config.clone(), policy).unwrap(), &batch, 1).unwrap();
    assert_eq!(
        marked,
        [ids[0].clone(), vec![-1; 4], ids[2].clone(), vec![-1; 4]]
    );

    let policy = Policy {
        dead_id: Some(3),
        ..Policy::default()
    };
    let error = DeepSeek::new(config, policy).unwrap_err().to_string();
    assert!(error.contains("dead_id is 3, a row of this table"));
}

#[test]
fn an_output_of_another_size_is_refused() {
    let hash = Qwen::new(&real_qwen(), Policy::default()).unwrap();
    let tokens = [1, 2, 3];
    let step = Step::new(Ints::I32(&tokens), None, None, 2).unwrap();
    let error = hash.ids(&step, &mut [0; 47], 1).unwrap_err().to_string();
    assert_eq!(error, "out holds 47 ids, but 3 tokens have 16 each");
}
