//! What `config.json` says about a table. Fields that are absent are not guessed, and nothing is
//! checked that depends on them.

use serde_json::Value;

use super::join::{Joining, Sequence, contradiction};
use crate::error::Result;
use crate::primes::next_prime;
use crate::table::Family;

/// Most primes searched on the word of a configuration; released models need 16.
const MAX_PRIMES: u64 = 1 << 12;

/// Holds rows, pieces and values per row against the configuration.
pub(super) fn check(
    joining: &Joining<'_>,
    weights: &Sequence<'_>,
    rows: u64,
    columns: u64,
) -> Result<()> {
    let Some(config) = joining.surroundings.config().map(Config) else {
        return Ok(());
    };
    match joining.group.family {
        Family::Qwen => pieces_fit_their_number(joining, &config, weights)?,
        Family::LongCat => embedders(joining, &config, weights)?,
        Family::DeepSeek | Family::Gemma | Family::Plain => {}
    }
    if let Some(expected) = config.rows(joining.group.family, joining.group.layer)
        && expected != rows
    {
        return Err(contradiction(format!(
            "config.json implies {expected} rows, but the {} have {rows}: {}",
            tensors(weights),
            if rows < expected {
                "a piece is missing, or the configuration belongs to another checkpoint"
            } else {
                "the configuration belongs to another checkpoint"
            }
        )));
    }
    if let Some(expected) = row_dimension(joining)
        && expected != columns
    {
        return Err(joining.wrong(
            &weights.pieces[0].0,
            format!("holds rows of {columns} values, but config.json implies {expected}"),
        ));
    }
    Ok(())
}

/// Rows of a table by the model's configuration; `None` where it does not have all the numbers.
pub fn expected_rows(config: &Value, family: Family, layer: Option<u32>) -> Option<u64> {
    Config(config).rows(family, layer)
}

/// Values per row by the configuration.
pub(super) fn row_dimension(joining: &Joining<'_>) -> Option<u64> {
    let config = joining.surroundings.config().map(Config)?;
    match joining.group.family {
        Family::Qwen => qwen_row_dimension(&config, config.number("ple_embed_dim")?),
        Family::DeepSeek => config.number("engram_head_dim"),
        Family::LongCat | Family::Gemma | Family::Plain => None,
    }
}

/// Values per row where all heads of a layer together have `embedded`.
pub(super) fn qwen_row_dimension(config: &Config<'_>, embedded: u64) -> Option<u64> {
    let heads = qwen_heads(config)?;
    (embedded.checked_rem(heads) == Some(0)).then(|| embedded / heads)
}

/// The field by which a configuration says that the model has tables, with its value.
pub(super) fn promise(config: Option<&Value>) -> Option<String> {
    let config = Config(config?);
    let of_layers = ["ple_layer_ids", "engram_layer_ids"]
        .into_iter()
        .find(|key| {
            let layers = config.get(key).and_then(Value::as_array);
            layers.is_some_and(|layers| !layers.is_empty())
        });
    let of_model = [
        "hidden_size_per_layer_input",
        "emb_split_num",
        "oe_split_num",
    ]
    .into_iter()
    .find(|key| config.number(key).is_some_and(|value| value > 0));
    let key = of_layers.or(of_model)?;
    Some(format!("{key} is {}", config.get(key)?))
}

fn tensors(weights: &Sequence<'_>) -> String {
    match &weights.pieces[..] {
        [(source, _)] => format!("rows of {:?}", source.name),
        pieces => format!(
            "{} pieces up to {:?}",
            pieces.len(),
            pieces[pieces.len() - 1].0.name
        ),
    }
}

/// A configuration whose language part may be nested.
pub(super) struct Config<'a>(pub(super) &'a Value);

impl<'a> Config<'a> {
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        let nested = self.0.get("text_config").and_then(|text| text.get(key));
        nested.or_else(|| self.0.get(key))
    }

    pub(super) fn rows(&self, family: Family, layer: Option<u32>) -> Option<u64> {
        match family {
            Family::Qwen => qwen_rows(self, layer?),
            Family::DeepSeek => deepseek_rows(self, layer?),
            Family::LongCat => {
                let (embedders, multiple) = longcat_numbers(self)?;
                // Embedder i has m + 2i + 1 rows.
                multiple
                    .checked_add(embedders)
                    .and_then(|mean| mean.checked_mul(embedders))
            }
            Family::Gemma => self.number("vocab_size_per_layer_input"),
            Family::Plain => None,
        }
    }

    pub(super) fn number(&self, key: &str) -> Option<u64> {
        self.get(key)?.as_u64()
    }

    pub(super) fn numbers(&self, key: &str) -> Option<Vec<u64>> {
        self.get(key)?
            .as_array()?
            .iter()
            .map(Value::as_u64)
            .collect()
    }
}

/// Hash heads of one Qwen layer: as many for each order from 2 to `ngram_size`.
fn qwen_heads(config: &Config<'_>) -> Option<u64> {
    let orders = config.number("ngram_size")?.checked_sub(1)?;
    orders.checked_mul(config.number("heads_per_ngram")?)
}

/// Rows of the table of a zero-based layer, padding included, as `qwen4_exp` lays them out: every
/// head has its own prime number of rows, the primes go on from one layer to the next, and the
/// configuration counts layers from one.
pub(super) fn qwen_rows(config: &Config<'_>, layer: u32) -> Option<u64> {
    let heads = qwen_heads(config)?;
    let base = config.number("ngram_vocab_size_base")?;
    let divisor = config.number("make_ngram_vocab_size_divisible_by")?;
    let mut layers = config.numbers("ple_layer_ids")?;
    layers.sort_unstable();
    layers.dedup();
    let place = layers.iter().position(|&id| id == u64::from(layer) + 1)?;
    let before = heads.checked_mul(u64::try_from(place).ok()?)?;
    let through = before
        .checked_add(heads)
        .filter(|&count| count <= MAX_PRIMES)?;
    let mut prime = base.saturating_sub(1);
    let mut total = 0_u64;
    for number in 0..through {
        prime = next_prime(prime)?;
        if number >= before {
            total = total.checked_add(prime)?;
        }
    }
    total.checked_next_multiple_of(divisor)
}

fn deepseek_rows(config: &Config<'_>, layer: u32) -> Option<u64> {
    let layers = config.numbers("engram_layer_ids")?;
    let rows = config.numbers("engram_num_embeddings")?;
    let place = layers.iter().position(|&id| id == u64::from(layer))?;
    rows.get(place).copied()
}

/// No piece may have a number that the configured count of pieces does not reach. Fewer pieces are
/// fine: cutting few rows into many leaves the last ones empty, and writers leave those out.
fn pieces_fit_their_number(
    joining: &Joining<'_>,
    config: &Config<'_>,
    weights: &Sequence<'_>,
) -> Result<()> {
    let Some(parts) = config
        .number("split_ngram_parts")
        .filter(|&parts| parts > 0)
    else {
        return Ok(());
    };
    let found = u64::try_from(weights.pieces.len()).unwrap_or(u64::MAX);
    if found <= parts {
        return Ok(());
    }
    Err(joining.wrong(
        &weights.pieces[weights.pieces.len() - 1].0,
        format!(
            "is piece {} of {parts} by config.json (split_ngram_parts)",
            found - 1
        ),
    ))
}

/// LongCat's embedder `i` has `m + 2i + 1` rows, where `m` is a multiple of the vocabulary.
fn embedders(joining: &Joining<'_>, config: &Config<'_>, weights: &Sequence<'_>) -> Result<()> {
    let Some((count, multiple)) = longcat_numbers(config) else {
        return Ok(());
    };
    let found = u64::try_from(weights.pieces.len()).unwrap_or(u64::MAX);
    if found != count {
        return Err(contradiction(format!(
            "config.json implies {count} embedders, but there are {found}, the last being {:?}",
            weights.pieces[weights.pieces.len() - 1].0.name
        )));
    }
    for (number, (source, rows)) in (0_u64..).zip(&weights.pieces) {
        let expected = multiple.saturating_add(2 * number + 1);
        if *rows != expected {
            return Err(joining.wrong(
                source,
                format!("has {rows} rows, but config.json implies {expected}"),
            ));
        }
    }
    Ok(())
}

/// How many embedders there are, and `m`.
pub(super) fn longcat_numbers(config: &Config<'_>) -> Option<(u64, u64)> {
    let either = |new: &str, old: &str| config.get(new).or_else(|| config.get(old));
    let orders = either("emb_neighbor_num", "oe_neighbor_num")?.as_u64()?;
    let splits = either("emb_split_num", "oe_split_num")?.as_u64()?;
    let vocabulary = either("text_vocab_size", "vocab_size")?.as_u64()?;
    let ratio = either("ngram_vocab_size_ratio", "oe_vocab_size_ratio")?;
    let multiple = match ratio.as_u64() {
        Some(ratio) => ratio.checked_mul(vocabulary)?,
        None => truncated_product(ratio.as_f64()?, vocabulary)?,
    };
    Some((orders.checked_sub(1)?.checked_mul(splits)?, multiple))
}

/// `int(ratio * vocabulary)`, as the model computes it in double precision.
fn truncated_product(ratio: f64, vocabulary: u64) -> Option<u64> {
    let product = ratio * f64::from(u32::try_from(vocabulary).ok()?);
    if !(0.0..=9_007_199_254_740_992.0).contains(&product) {
        return None;
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "within the range above, and dropping the fraction is what is asked"
    )]
    let truncated = product as u64;
    Some(truncated)
}
