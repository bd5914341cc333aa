//! Which table a tensor belongs to, and as which part, by its name alone.
//!
//! Names are read from their end: prefixes differ between converters
//! (`model.language_model.`, `model.`, `language_model.model.`), endings hardly do.

use std::collections::HashMap;

use super::Source;
use crate::table::Family;

/// The last segment of a part's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Leaf {
    Weight,
    WeightPacked,
    Trellis,
    Scale,
    Scales,
    WeightScale,
    WeightScaleInv,
    WeightScale2,
    WeightGlobalScale,
    Biases,
}

impl Leaf {
    const ALL: [Self; 10] = [
        Self::Weight,
        Self::WeightPacked,
        Self::Trellis,
        Self::Scale,
        Self::Scales,
        Self::WeightScale,
        Self::WeightScaleInv,
        Self::WeightScale2,
        Self::WeightGlobalScale,
        Self::Biases,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Weight => "weight",
            Self::WeightPacked => "weight_packed",
            Self::Trellis => "trellis",
            Self::Scale => "scale",
            Self::Scales => "scales",
            Self::WeightScale => "weight_scale",
            Self::WeightScaleInv => "weight_scale_inv",
            Self::WeightScale2 => "weight_scale_2",
            Self::WeightGlobalScale => "weight_global_scale",
            Self::Biases => "biases",
        }
    }

    fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|leaf| leaf.name() == text)
    }

    /// Whether tensors of this name hold the values themselves.
    pub(super) fn is_weight(self) -> bool {
        matches!(self, Self::Weight | Self::WeightPacked | Self::Trellis)
    }
}

/// Which rows of the table a tensor covers, by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Extent<'a> {
    /// The whole table.
    Whole,
    /// The piece of this number.
    Piece(u64),
    /// A piece whose number is not written as a plain decimal number.
    Malformed(&'a str),
}

/// What a tensor's name says about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Parsed<'a> {
    pub(super) table: &'a str,
    pub(super) family: Family,
    pub(super) extent: Extent<'a>,
    pub(super) leaf: Leaf,
}

/// One tensor of a table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part<'a> {
    pub(super) extent: Extent<'a>,
    pub(super) leaf: Leaf,
    pub(super) source: Source<'a>,
}

/// The tensors of one table.
#[derive(Debug, Clone)]
pub struct Group<'a> {
    /// The table's name: the common prefix of its tensors.
    pub name: &'a str,
    /// Family whose naming rule matched.
    pub family: Family,
    /// Zero-based decoder layer in the name.
    pub layer: Option<u32>,
    pub(super) parts: Vec<Part<'a>>,
}

impl<'a> Group<'a> {
    /// Full name of the weight tensor, if there is exactly one.
    pub fn only_weight(&self) -> Option<&'a str> {
        let mut weights = self.parts.iter().filter(|part| part.leaf.is_weight());
        match (weights.next(), weights.next()) {
            (Some(part), None) => Some(part.source.name),
            _ => None,
        }
    }
}

/// Sorts tensors into tables, in layer order; tensors that are no part of one are left out.
pub fn group<'a>(tensors: impl IntoIterator<Item = Source<'a>>) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'a>> = Vec::new();
    let mut places: HashMap<&'a str, usize> = HashMap::new();
    for source in tensors {
        let Some(parsed) = parse(source.name) else {
            continue;
        };
        let place = *places.entry(parsed.table).or_insert_with(|| {
            groups.push(Group {
                name: parsed.table,
                family: parsed.family,
                layer: layer(parsed.table),
                parts: Vec::new(),
            });
            groups.len() - 1
        });
        groups[place].parts.push(Part {
            extent: parsed.extent,
            leaf: parsed.leaf,
            source,
        });
    }
    groups.sort_by_key(|group| (group.layer.is_none(), group.layer, group.name));
    groups
}

/// Reads a tensor's name; `None` when it is no part of a table.
pub(super) fn parse(name: &str) -> Option<Parsed<'_>> {
    let (path, last) = name.rsplit_once('.')?;
    let leaf = Leaf::parse(last)?;
    let (before, segment) = split_last(path);
    let whole = |family| {
        Some(Parsed {
            table: path,
            family,
            extent: Extent::Whole,
            leaf,
        })
    };
    let piece = |table, family, number| {
        Some(Parsed {
            table,
            family,
            extent: extent(number),
            leaf,
        })
    };
    match segment {
        "ngram_embedding" => return whole(Family::Qwen),
        "embed_tokens_per_layer" => return whole(Family::Gemma),
        "embed" | "embed_tokens" if split_last(before).1 == "engram" => {
            return whole(Family::DeepSeek);
        }
        "embedding" => {
            let (before, module) = split_last(before);
            if module == "multi_head_embedding" && split_last(before).1 == "engram" {
                return whole(Family::DeepSeek);
            }
        }
        _ => {}
    }
    if let Some(number) = segment.strip_prefix("shard_")
        && split_last(before).1 == "ngram_embedding"
    {
        return piece(before, Family::Qwen, number);
    }
    let (table, container) = split_last(before);
    match (container, split_last(table).1) {
        ("shards", "ngram_embedding") => piece(table, Family::Qwen, segment),
        ("embedders", "ngram_embeddings") => piece(before, Family::LongCat, segment),
        _ => None,
    }
}

/// The part of a dotted name before its last segment, and that segment.
fn split_last(path: &str) -> (&str, &str) {
    path.rsplit_once('.').unwrap_or(("", path))
}

fn extent(number: &str) -> Extent<'_> {
    decimal(number).map_or(Extent::Malformed(number), Extent::Piece)
}

/// A number written in the one way it can be: digits without leading zeros.
fn decimal(text: &str) -> Option<u64> {
    let canonical =
        text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    text.parse().ok().filter(|_| canonical)
}

/// The decoder layer in a name: the number after the last segment `layers`.
pub(super) fn layer(name: &str) -> Option<u32> {
    let mut layer = None;
    let mut segments = name.split('.').peekable();
    while let Some(segment) = segments.next() {
        if segment == "layers"
            && let Some(number) = segments.peek().and_then(|next| decimal(next))
        {
            layer = u32::try_from(number).ok();
        }
    }
    layer
}
