//! Tables as a model's configuration describes them, with no file in sight.
//!
//! For servers that run without weights (profiling, tests): shapes and dtypes have to be those that
//! the real checkpoint of this configuration would have. A configuration does not always tell how
//! rows are quantised; where it does not, they count as BF16, which is what the families release.

use safetensors::Dtype;
use serde_json::Value;

use super::expected::{Config, longcat_numbers, qwen_row_dimension};
use crate::error::{Error, Result};
use crate::table::{Constant, Encoding, Family, Piece, Plane, PlaneName, Table};

/// What is known of a table before it is put together.
struct Outline {
    name: String,
    family: Family,
    layer: Option<u32>,
    columns: u64,
    format: Format,
}

#[derive(Clone, Copy)]
enum Format {
    Bf16,
    Fp8,
    Fp8Blocks,
    Nvfp4,
}

/// The tables of a model, in layer order; empty where the configuration announces none.
///
/// Their one piece per plane stands for the rows as a whole: it lies in no file.
///
/// # Errors
/// [`Error::Value`] where tables are announced but their size is not.
pub fn configured_tables(config: &Value) -> Result<Vec<Table>> {
    let config = Config(config);
    let outlines = qwen(&config)
        .or_else(|| deepseek(&config))
        .or_else(|| longcat(&config))
        .or_else(|| gemma(&config));
    outlines
        .unwrap_or_default()
        .into_iter()
        .map(|outline| {
            let incomplete = || {
                Error::value(format!(
                    "the configuration announces table {:?}, but not all the numbers that give \
                     its rows and columns are there",
                    outline.name
                ))
            };
            let rows = config
                .rows(outline.family, outline.layer)
                .filter(|_| outline.columns > 0)
                .ok_or_else(incomplete)?;
            table(&outline, rows)
        })
        .collect()
}

fn qwen(config: &Config<'_>) -> Option<Vec<Outline>> {
    let mut layers = config.numbers("ple_layer_ids")?;
    layers.sort_unstable();
    layers.dedup();
    let embedded = config
        .number("ple_embed_dim")
        .or_else(|| config.number("hidden_size"));
    let columns = embedded
        .and_then(|embedded| qwen_row_dimension(config, embedded))
        .unwrap_or(0);
    let format = qwen_format(config);
    let prefix = prefix(config);
    let outlines = layers
        .iter()
        // The configuration counts layers from one.
        .filter_map(|layer| u32::try_from(layer.checked_sub(1)?).ok())
        .map(|layer| Outline {
            name: format!("{prefix}layers.{layer}.ple.ple_embedding.ngram_embedding"),
            family: Family::Qwen,
            layer: Some(layer),
            columns,
            format,
        })
        .collect();
    Some(outlines)
}

fn qwen_format(config: &Config<'_>) -> Format {
    let named = config.get("ple_embedding_dtype").and_then(Value::as_str);
    let method = config
        .get("quantization_config")
        .and_then(|settings| settings.get("quant_method"))
        .and_then(Value::as_str);
    match (named, method) {
        (Some("nvfp4"), _) => Format::Nvfp4,
        (Some("float8_e4m3fn" | "fp8"), _) | (None, Some("fp8")) => Format::Fp8,
        _ => Format::Bf16,
    }
}

fn deepseek(config: &Config<'_>) -> Option<Vec<Outline>> {
    let layers = config.numbers("engram_layer_ids")?;
    let columns = config.number("engram_head_dim").unwrap_or(0);
    let outlines = layers
        .iter()
        .filter_map(|&layer| u32::try_from(layer).ok())
        .map(|layer| Outline {
            name: format!("layers.{layer}.engram.embed"),
            family: Family::DeepSeek,
            layer: Some(layer),
            columns,
            format: Format::Fp8Blocks,
        })
        .collect();
    Some(outlines)
}

fn longcat(config: &Config<'_>) -> Option<Vec<Outline>> {
    let (embedders, _) = longcat_numbers(config)?;
    // The embedders' values, side by side, are as many as the model's hidden size.
    let columns = config
        .number("hidden_size")
        .and_then(|hidden| hidden.checked_div(embedders))
        .unwrap_or(0);
    Some(vec![Outline {
        name: "model.ngram_embeddings.embedders".to_owned(),
        family: Family::LongCat,
        layer: None,
        columns,
        format: Format::Bf16,
    }])
}

fn gemma(config: &Config<'_>) -> Option<Vec<Outline>> {
    let per_layer = config
        .number("hidden_size_per_layer_input")
        .filter(|&values| values > 0)?;
    let columns = config
        .number("num_hidden_layers")
        .and_then(|layers| layers.checked_mul(per_layer))
        .unwrap_or(0);
    Some(vec![Outline {
        name: format!("{}embed_tokens_per_layer", prefix(config)),
        family: Family::Gemma,
        layer: None,
        columns,
        format: Format::Bf16,
    }])
}

/// Multimodal models nest their language model, in names as in the configuration.
fn prefix(config: &Config<'_>) -> &'static str {
    if config.0.get("text_config").is_some() {
        "model.language_model."
    } else {
        "model."
    }
}

fn table(outline: &Outline, rows: u64) -> Result<Table> {
    let Outline { columns, .. } = *outline;
    let (encoding, weight, scale, constant) = match outline.format {
        Format::Bf16 => (
            Encoding::Plain(Dtype::BF16),
            (Dtype::BF16, columns),
            None,
            None,
        ),
        Format::Fp8 => (
            Encoding::Fp8E4m3,
            (Dtype::F8_E4M3, columns),
            None,
            Some("weight_scale"),
        ),
        Format::Fp8Blocks => (
            Encoding::Fp8E4m3E8m0Block32,
            (Dtype::F8_E4M3, columns),
            Some((Dtype::F8_E8M0, columns.div_ceil(32))),
            None,
        ),
        Format::Nvfp4 => (
            Encoding::Nvfp4,
            (Dtype::U8, columns.div_ceil(2)),
            Some((Dtype::F8_E4M3, columns.div_ceil(16))),
            Some("weight_scale_2"),
        ),
    };
    let plane = |name: PlaneName, (dtype, columns): (Dtype, u64)| {
        let piece = Piece {
            tensor: format!("{}.{}", outline.name, name.name()),
            file: 0,
            offset: 0,
            first_row: 0,
            rows,
        };
        Plane::new(name, dtype, columns, vec![piece])
    };
    let mut planes = vec![plane(PlaneName::Weight, weight)?];
    if let Some(scale) = scale {
        planes.push(plane(PlaneName::Scale, scale)?);
    }
    Ok(Table {
        name: outline.name.clone(),
        family: outline.family,
        layer: outline.layer,
        encoding,
        planes,
        logical_shape: vec![columns],
        constants: constant
            .map(|name| Constant {
                name: name.to_owned(),
                tensor: format!("{}.{name}", outline.name),
                // Zeros stay zeros, whatever they are scaled by.
                value: 1.0,
            })
            .into_iter()
            .collect(),
    })
}
