//! How rows stand for values, from the dtypes and widths of their planes.

use safetensors::Dtype;
use serde_json::Value;

use super::Surroundings;
use super::expected;
use super::join::{Joined, Joining, Sequence, contradiction, sibling};
use super::names::{Extent, Leaf, Part};
use crate::error::{Error, Result};
use crate::table::{Constant, Encoding, Family, PlaneName};

/// Columns that share one E8M0 scale.
const E8M0_BLOCK: u64 = 32;
/// Columns that share one E4M3 scale in NVFP4.
const NVFP4_BLOCK: u64 = 16;

/// A table's encoding and what it is made of.
pub(super) struct Resolved {
    pub(super) encoding: Encoding,
    /// Values per row.
    pub(super) columns: u64,
    /// Planes beside the weights, in order, with the dtype their bytes have.
    pub(super) companions: Vec<(PlaneName, Leaf, Dtype)>,
    pub(super) constants: Vec<Constant>,
}

pub(super) fn resolve(joining: &Joining<'_>, joined: &Joined<'_>) -> Result<Resolved> {
    let weights = &joined.weights;
    let resolved = match (weights.leaf, weights.dtype) {
        (Leaf::Weight, Dtype::BF16 | Dtype::F16 | Dtype::F32 | Dtype::F64) => Resolved {
            encoding: Encoding::Plain(weights.dtype),
            columns: weights.columns,
            companions: Vec::new(),
            // A scale that a conversion to floating point left behind is already applied.
            constants: Vec::new(),
        },
        (Leaf::Weight, Dtype::F8_E4M3) => fp8(joining, joined)?,
        (Leaf::Weight | Leaf::WeightPacked, Dtype::U8) => fp4(joining, joined)?,
        (Leaf::Weight, Dtype::U32) => mlx(joining, joined)?,
        (Leaf::Trellis, Dtype::I16) => exl3(joining, joined)?,
        (_, dtype) => {
            return Err(joining.wrong(
                &weights.pieces[0].0,
                format!(
                    "is {dtype}, and no known table stores {} tensors so; known are weight as \
                     BF16, F16, F32, F64, F8_E4M3, U8 (4-bit pairs) and U32 (MLX), weight_packed \
                     as U8 and trellis as I16",
                    weights.leaf.name()
                ),
            ));
        }
    };
    for (leaf, companion) in &joined.companions {
        if !resolved.companions.iter().any(|(_, used, _)| used == leaf) {
            return Err(joining.wrong(
                &companion.pieces[0].0,
                format!(
                    "has no meaning beside {:?}, which is {} of {} columns",
                    weights.pieces[0].0.name, weights.dtype, weights.columns
                ),
            ));
        }
    }
    Ok(resolved)
}

/// FP8 rows: a scale per 32 columns, or one for the whole table.
fn fp8(joining: &Joining<'_>, joined: &Joined<'_>) -> Result<Resolved> {
    let weights = &joined.weights;
    if let Some(scale) = block_scale(joined)
        && is_e8m0(scale.dtype)
    {
        return block_scaled(
            joining,
            weights,
            scale,
            (weights.columns, E8M0_BLOCK),
            Encoding::Fp8E4m3E8m0Block32,
        );
    }
    if joined.scalars.contains_key(&Leaf::WeightScale) {
        return Ok(Resolved {
            encoding: Encoding::Fp8E4m3,
            columns: weights.columns,
            companions: Vec::new(),
            constants: vec![constant(joining, joined, &[Leaf::WeightScale])?],
        });
    }
    Err(missing_scale(
        joining,
        joined,
        &match joining.group.family {
            Family::DeepSeek => sibling(weights.pieces[0].0.name, deepseek_scale(joining)),
            _ => format!("{}.{}", joining.group.name, Leaf::WeightScale.name()),
        },
    ))
}

/// Two 4-bit values a byte: NVFP4 or MXFP4, by the dtype of the scales.
fn fp4(joining: &Joining<'_>, joined: &Joined<'_>) -> Result<Resolved> {
    let weights = &joined.weights;
    let columns = weights.columns.saturating_mul(2);
    let Some(scale) = block_scale(joined) else {
        let leaf = match joining.group.family {
            Family::DeepSeek => deepseek_scale(joining),
            _ => Leaf::WeightScale,
        };
        return Err(missing_scale(
            joining,
            joined,
            &sibling(weights.pieces[0].0.name, leaf),
        ));
    };
    if is_e8m0(scale.dtype) {
        return block_scaled(
            joining,
            weights,
            scale,
            (columns, E8M0_BLOCK),
            Encoding::Mxfp4,
        );
    }
    if scale.dtype != Dtype::F8_E4M3 {
        return Err(joining.wrong(
            &scale.pieces[0].0,
            format!(
                "is {}; scales of 4-bit rows are F8_E4M3 or F8_E8M0",
                scale.dtype
            ),
        ));
    }
    let global = [Leaf::WeightScale2, Leaf::WeightGlobalScale];
    if !global.iter().any(|leaf| joined.scalars.contains_key(leaf)) {
        let leaf = if weights.leaf == Leaf::WeightPacked {
            Leaf::WeightGlobalScale
        } else {
            Leaf::WeightScale2
        };
        let looked_for = format!("{}.{}", joining.group.name, leaf.name());
        return Err(missing_scale(joining, joined, &looked_for));
    }
    let mut resolved = block_scaled(
        joining,
        weights,
        scale,
        (columns, NVFP4_BLOCK),
        Encoding::Nvfp4,
    )?;
    resolved.constants.push(constant(joining, joined, &global)?);
    Ok(resolved)
}

/// 4-bit integers in 32-bit words, with scales and biases per group of columns.
fn mlx(joining: &Joining<'_>, joined: &Joined<'_>) -> Result<Resolved> {
    let weights = &joined.weights;
    let first = &weights.pieces[0].0;
    let plane = |leaf| {
        joined
            .companions
            .get(&leaf)
            .ok_or_else(|| missing_scale(joining, joined, &sibling(first.name, leaf)))
    };
    let (scales, biases) = (plane(Leaf::Scales)?, plane(Leaf::Biases)?);
    for companion in [scales, biases] {
        if !matches!(companion.dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32) {
            return Err(joining.wrong(
                &companion.pieces[0].0,
                format!("is {}; it has to be BF16, F16 or F32", companion.dtype),
            ));
        }
    }
    let (scale, bias) = (&scales.pieces[0].0, &biases.pieces[0].0);
    if scales.dtype != biases.dtype || scales.columns != biases.columns {
        return Err(joining.wrong(
            bias,
            format!(
                "is {} of {} columns, but {:?} is {} of {}",
                biases.dtype, biases.columns, scale.name, scales.dtype, scales.columns
            ),
        ));
    }
    let module = first.name.rsplit_once('.').map_or("", |(module, _)| module);
    if let Some(bits) = mlx_bits(
        joining.surroundings,
        module,
        weights.columns,
        scales.columns,
    ) && bits != 4
    {
        return Err(joining.wrong(
            first,
            format!("holds {bits}-bit values by config.json; only 4-bit tables can be served"),
        ));
    }
    let columns = weights.columns.saturating_mul(8);
    let group = columns / scales.columns;
    let group = u32::try_from(group).ok().filter(|group| {
        columns.is_multiple_of(scales.columns) && [16, 32, 64, 128].contains(group)
    });
    let Some(group) = group else {
        return Err(joining.wrong(
            scale,
            format!(
                "has {} columns for {columns} 4-bit values a row in {:?}, which makes no group \
                 of 16, 32, 64 or 128",
                scales.columns, first.name
            ),
        ));
    };
    Ok(Resolved {
        encoding: Encoding::MlxAffine4(group),
        columns,
        companions: vec![
            (PlaneName::Scale, Leaf::Scales, scales.dtype),
            (PlaneName::Bias, Leaf::Biases, biases.dtype),
        ],
        constants: Vec::new(),
    })
}

/// Bits per value that `config.json` gives for a module, if that agrees with its shapes: a setting
/// for the whole model does not apply to a table whose own setting has another name.
fn mlx_bits(surroundings: &dyn Surroundings, module: &str, words: u64, groups: u64) -> Option<u64> {
    let settings = surroundings.config().and_then(|config| {
        config
            .get("quantization")
            .or_else(|| config.get("quantization_config"))
    })?;
    [settings.get(module), Some(settings)]
        .into_iter()
        .flatten()
        .find_map(|setting| {
            let number = |key| setting.get(key).and_then(Value::as_u64);
            let (bits, group) = (number("bits")?, number("group_size")?);
            let fits = words.checked_mul(32)? == groups.checked_mul(group)?.checked_mul(bits)?;
            fits.then_some(bits)
        })
}

/// Trellis words; only their decoder knows what a row holds, so the writer's note is believed.
fn exl3(joining: &Joining<'_>, joined: &Joined<'_>) -> Result<Resolved> {
    let weights = &joined.weights;
    let (source, rows) = &weights.pieces[0];
    let metadata = joining.surroundings.metadata(source.file);
    let note = |key| metadata.and_then(|entries| entries.get(key)?.parse::<u64>().ok());
    if let Some(noted) = note("rows")
        && weights.pieces.len() == 1
        && noted != *rows
    {
        return Err(joining.wrong(
            source,
            format!("has {rows} rows, but the metadata of its file says {noted}"),
        ));
    }
    let columns = note("row_dim")
        .or_else(|| expected::row_dimension(joining))
        .unwrap_or(weights.columns);
    Ok(Resolved {
        encoding: Encoding::Exl3Trellis,
        columns,
        companions: Vec::new(),
        constants: Vec::new(),
    })
}

/// The plane of block scales, under whichever name.
fn block_scale<'a, 'b>(joined: &'b Joined<'a>) -> Option<&'b Sequence<'a>> {
    [Leaf::Scale, Leaf::WeightScaleInv, Leaf::WeightScale]
        .iter()
        .find_map(|leaf| joined.companions.get(leaf))
}

/// Some runtimes view E8M0 scales as bytes; their bytes are the same.
fn is_e8m0(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F8_E8M0 | Dtype::U8)
}

fn deepseek_scale(joining: &Joining<'_>) -> Leaf {
    if joining.group.name.ends_with(".embed_tokens") {
        Leaf::WeightScaleInv
    } else {
        Leaf::Scale
    }
}

fn block_scaled(
    joining: &Joining<'_>,
    weights: &Sequence<'_>,
    scale: &Sequence<'_>,
    (columns, block): (u64, u64),
    encoding: Encoding,
) -> Result<Resolved> {
    if scale.columns.checked_mul(block) != Some(columns) {
        return Err(joining.wrong(
            &scale.pieces[0].0,
            format!(
                "has {} scales a row; the {columns} values a row of {:?} need one per {block}",
                scale.columns, weights.pieces[0].0.name
            ),
        ));
    }
    let dtype = if is_e8m0(scale.dtype) {
        Dtype::F8_E8M0
    } else {
        scale.dtype
    };
    Ok(Resolved {
        encoding,
        columns,
        companions: vec![(PlaneName::Scale, scale.leaf, dtype)],
        constants: Vec::new(),
    })
}

fn missing_scale(joining: &Joining<'_>, joined: &Joined<'_>, looked_for: &str) -> Error {
    let weight = &joined.weights.pieces[0].0;
    joining.wrong(
        weight,
        format!(
            "is {} and cannot be understood without its scale: looked for {looked_for:?}, which no \
             file contains",
            weight.dtype
        ),
    )
}

/// The one number stored under these leaves: once for the table, or equal beside every piece.
fn constant(joining: &Joining<'_>, joined: &Joined<'_>, leaves: &[Leaf]) -> Result<Constant> {
    let parts: Vec<&Part<'_>> = leaves
        .iter()
        .filter_map(|leaf| joined.scalars.get(leaf))
        .flatten()
        .collect();
    let for_all = parts.iter().any(|part| part.extent == Extent::Whole);
    if !for_all {
        for (number, (weight, rows)) in (0..).zip(&joined.weights.pieces) {
            let present = parts
                .iter()
                .any(|part| part.extent == Extent::Piece(number));
            if *rows > 0 && !present {
                return Err(joining.wrong(
                    weight,
                    format!(
                        "has no scale: looked for {:?}",
                        sibling(weight.name, parts[0].leaf)
                    ),
                ));
            }
        }
    }
    let mut found: Option<(&Part<'_>, f64)> = None;
    for part in parts {
        let value = number(joining, part)?;
        match found {
            None => found = Some((part, value)),
            Some((first, before)) if before.to_bits() != value.to_bits() => {
                return Err(joining.wrong(
                    &part.source,
                    format!(
                        "is {value}, but {:?} is {before}; one table has one such scale",
                        first.source.name
                    ),
                ));
            }
            Some(_) => {}
        }
    }
    let (part, value) = found.ok_or_else(|| contradiction("no scale"))?;
    Ok(Constant {
        name: part.leaf.name().to_owned(),
        tensor: part.source.name.to_owned(),
        value,
    })
}

/// Reads a positive, finite number; anything else is a scale that was never set.
fn number(joining: &Joining<'_>, part: &Part<'_>) -> Result<f64> {
    let source = &part.source;
    let bytes = joining.surroundings.read(source, 8)?;
    let value = match source.dtype {
        Dtype::F64 => bytes.try_into().ok().map(f64::from_le_bytes),
        Dtype::F32 => bytes.try_into().ok().map(f32::from_le_bytes).map(f64::from),
        Dtype::F16 => bytes.try_into().ok().map(u16::from_le_bytes).map(half),
        Dtype::BF16 => bytes
            .try_into()
            .ok()
            .map(|[low, high]: [u8; 2]| f64::from(f32::from_le_bytes([0, 0, low, high]))),
        dtype => {
            return Err(joining.wrong(
                source,
                format!("is {dtype}; a scale is BF16, F16, F32 or F64"),
            ));
        }
    };
    let value = value.ok_or_else(|| joining.wrong(source, "is not a single number"))?;
    if value.is_finite() && value > 0.0 {
        Ok(value)
    } else {
        Err(joining.wrong(
            source,
            format!("is {value}, which is no usable scale; it may never have been written"),
        ))
    }
}

/// The value of an IEEE half-precision number.
fn half(bits: u16) -> f64 {
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    let fraction = f64::from(bits & 0x3FF) / 1024.0;
    match (bits >> 10) & 0x1F {
        0 => sign * fraction * 2.0_f64.powi(-14),
        31 if fraction == 0.0 => sign * f64::INFINITY,
        31 => f64::NAN,
        exponent => sign * (1.0 + fraction) * 2.0_f64.powi(i32::from(exponent) - 15),
    }
}
