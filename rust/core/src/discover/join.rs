//! The parts of one table become planes: numeric order, one dtype, one width, no gaps.

use std::collections::BTreeMap;

use safetensors::Dtype;

use super::names::{Extent, Group, Leaf, Part};
use super::{Source, Surroundings, encoding, expected};
use crate::error::{Error, Place, Result};
use crate::table::{Piece, Plane, PlaneName, Table};

/// The tensors of one plane in row order, checked against each other.
#[derive(Debug)]
pub(super) struct Sequence<'a> {
    pub(super) leaf: Leaf,
    pub(super) dtype: Dtype,
    pub(super) columns: u64,
    /// Tensor and its rows.
    pub(super) pieces: Vec<(Source<'a>, u64)>,
}

impl Sequence<'_> {
    pub(super) fn rows(&self) -> Option<u64> {
        self.pieces
            .iter()
            .try_fold(0_u64, |sum, (_, rows)| sum.checked_add(*rows))
    }

    /// The plane of these tensors; `dtype` is how their bytes are to be understood.
    fn plane(&self, name: PlaneName, dtype: Dtype) -> Result<Plane> {
        let mut first_row = 0;
        let pieces = self
            .pieces
            .iter()
            .map(|(source, rows)| {
                let piece = Piece {
                    tensor: source.name.to_owned(),
                    file: source.file,
                    offset: source.offset,
                    first_row,
                    rows: *rows,
                };
                first_row += rows;
                piece
            })
            .collect();
        Plane::new(name, dtype, self.columns, pieces)
    }
}

/// A table's tensors by role.
pub(super) struct Joined<'a> {
    pub(super) weights: Sequence<'a>,
    /// Planes beside the weights.
    pub(super) companions: BTreeMap<Leaf, Sequence<'a>>,
    /// Single numbers, by leaf.
    pub(super) scalars: BTreeMap<Leaf, Vec<Part<'a>>>,
}

/// A group on its way to a table: what every step needs for its work and its errors.
pub(super) struct Joining<'a> {
    pub(super) group: &'a Group<'a>,
    pub(super) surroundings: &'a dyn Surroundings,
}

impl Joining<'_> {
    /// An error about one tensor.
    pub(super) fn wrong(&self, source: &Source<'_>, problem: impl AsRef<str>) -> Error {
        Error::Checkpoint {
            message: format!("tensor {:?} {}", source.name, problem.as_ref()),
            place: Box::new(Place {
                path: self.surroundings.path(source.file).map(ToOwned::to_owned),
                ..Place::default()
            }),
        }
    }
}

/// An error about a table as a whole.
pub(super) fn contradiction(message: impl Into<String>) -> Error {
    Error::Checkpoint {
        message: message.into(),
        place: Box::default(),
    }
}

/// Joins the tensors of one table.
///
/// # Errors
/// [`Error::Checkpoint`] where the tensors contradict each other, the configuration, or leave out
/// something that the encoding needs; reading a scale may also fail.
pub fn join(group: &Group<'_>, surroundings: &dyn Surroundings) -> Result<Table> {
    let joining = Joining {
        group,
        surroundings,
    };
    table(&joining).map_err(|error| error.in_table(group.name))
}

fn table(joining: &Joining<'_>) -> Result<Table> {
    let joined = parts_by_role(joining)?;
    let resolved = encoding::resolve(joining, &joined)?;
    let rows = joined
        .weights
        .rows()
        .ok_or_else(|| contradiction("the row count overflows 64 bits"))?;
    expected::check(joining, &joined.weights, rows, resolved.columns)?;
    let too_wide = |error: Error| contradiction(error.to_string());
    let mut planes = vec![
        joined
            .weights
            .plane(PlaneName::Weight, joined.weights.dtype)
            .map_err(too_wide)?,
    ];
    for (name, leaf, dtype) in resolved.companions {
        planes.push(
            joined.companions[&leaf]
                .plane(name, dtype)
                .map_err(too_wide)?,
        );
    }
    Ok(Table {
        name: joining.group.name.to_owned(),
        family: joining.group.family,
        layer: joining.group.layer,
        encoding: resolved.encoding,
        planes,
        logical_shape: vec![resolved.columns],
        constants: resolved.constants,
    })
}

fn parts_by_role<'a>(joining: &Joining<'a>) -> Result<Joined<'a>> {
    let mut by_leaf: BTreeMap<Leaf, Vec<Part<'a>>> = BTreeMap::new();
    for part in &joining.group.parts {
        if let Extent::Malformed(number) = part.extent {
            return Err(joining.wrong(
                &part.source,
                format!("has the piece number {number:?}, which is no plain decimal number"),
            ));
        }
        by_leaf.entry(part.leaf).or_default().push(*part);
    }
    let spellings: Vec<Leaf> = by_leaf
        .keys()
        .copied()
        .filter(|leaf| leaf.is_weight())
        .collect();
    let weight_leaf = match spellings[..] {
        [leaf] => leaf,
        [] => {
            let found = joining
                .group
                .parts
                .first()
                .map_or("", |part| part.source.name);
            return Err(contradiction(format!(
                "the rows themselves are missing: there is {found:?}, but neither {name}.weight \
                 nor {name}.shard_0.weight or the like; the file with the table may be missing",
                name = joining.group.name,
            )));
        }
        [first, second, ..] => {
            let (first, second) = (&by_leaf[&first][0].source, &by_leaf[&second][0].source);
            return Err(joining.wrong(
                second,
                format!(
                    "and tensor {:?} store the same rows in two ways; remove one of them",
                    first.name
                ),
            ));
        }
    };
    let weights = by_leaf.remove(&weight_leaf).unwrap_or_default();
    let (weights, numbered) = in_order(joining, weights)?;
    let weights = sequence(joining, weight_leaf, &weights)?;

    let (mut companions, mut scalars) = (BTreeMap::new(), BTreeMap::new());
    for (leaf, parts) in by_leaf {
        let (single, rowwise): (Vec<_>, Vec<_>) = parts
            .into_iter()
            .partition(|part| is_scalar(part.source.shape));
        let pieces = u64::try_from(weights.pieces.len()).unwrap_or(u64::MAX);
        for part in &single {
            if matches!(part.extent, Extent::Piece(number) if number >= pieces) {
                return Err(
                    joining.wrong(&part.source, "belongs to a piece whose rows are missing")
                );
            }
        }
        if !single.is_empty() {
            scalars.insert(leaf, single);
        }
        if !rowwise.is_empty() {
            companions.insert(leaf, companion(joining, leaf, rowwise, &weights, numbered)?);
        }
    }
    Ok(Joined {
        weights,
        companions,
        scalars,
    })
}

/// One number, stored as `[]` or `[1]`.
fn is_scalar(shape: &[u64]) -> bool {
    matches!(shape, [] | [1])
}

/// Sorts parts by piece number and refuses gaps, repeats and a whole tensor beside pieces. The
/// second value says whether the table is cut into numbered pieces at all.
fn in_order<'a>(joining: &Joining<'_>, mut parts: Vec<Part<'a>>) -> Result<(Vec<Part<'a>>, bool)> {
    let number = |part: &Part<'_>| match part.extent {
        Extent::Piece(number) => Some(number),
        Extent::Whole | Extent::Malformed(_) => None,
    };
    parts.sort_by_key(number);
    for pair in parts.windows(2) {
        if number(&pair[0]) == number(&pair[1]) {
            return Err(joining.wrong(
                &pair[1].source,
                format!(
                    "repeats the rows of tensor {:?}: both claim to be {}",
                    pair[0].source.name,
                    number(&pair[0]).map_or("the whole table".to_owned(), |number| format!(
                        "piece {number}"
                    ))
                ),
            ));
        }
    }
    let (first, last) = (&parts[0], &parts[parts.len() - 1]);
    if number(first).is_none() {
        if parts.len() > 1 {
            return Err(joining.wrong(
                &first.source,
                format!(
                    "holds the whole table, but there are pieces too, such as {:?}; remove one \
                     form or the other",
                    parts[1].source.name
                ),
            ));
        }
        return Ok((parts, false));
    }
    for (expected, part) in (0_u64..).zip(&parts) {
        if number(part) != Some(expected) {
            return Err(joining.wrong(
                &part.source,
                format!(
                    "follows a gap: piece {expected} is missing ({} pieces are there, the last is \
                     {:?}); pieces in other files are found when the directory or the index is \
                     passed",
                    parts.len(),
                    last.source.name
                ),
            ));
        }
    }
    Ok((parts, true))
}

/// Checks that tensors in row order have two dimensions, one dtype and one width.
fn sequence<'a>(joining: &Joining<'_>, leaf: Leaf, parts: &[Part<'a>]) -> Result<Sequence<'a>> {
    let mut pieces: Vec<(Source<'a>, u64)> = Vec::with_capacity(parts.len());
    let mut columns = 0;
    for part in parts {
        let source = part.source;
        let &[rows, width] = source.shape else {
            return Err(joining.wrong(
                &source,
                format!(
                    "has shape {:?} where two dimensions, rows and columns, were expected",
                    source.shape
                ),
            ));
        };
        if let Some((first, _)) = pieces.first() {
            if source.dtype != first.dtype {
                return Err(joining.wrong(
                    &source,
                    format!(
                        "is {}, but {:?} is {}",
                        source.dtype, first.name, first.dtype
                    ),
                ));
            }
            if width != columns {
                return Err(joining.wrong(
                    &source,
                    format!("has {width} columns, but {:?} has {columns}", first.name),
                ));
            }
        }
        columns = width;
        pieces.push((source, rows));
    }
    let first = pieces[0].0;
    if columns == 0 {
        return Err(joining.wrong(&first, "has rows without columns"));
    }
    Ok(Sequence {
        leaf,
        dtype: first.dtype,
        columns,
        pieces,
    })
}

/// A plane beside the weights: cut into the same pieces, with the same rows in each.
fn companion<'a>(
    joining: &Joining<'_>,
    leaf: Leaf,
    parts: Vec<Part<'a>>,
    weights: &Sequence<'_>,
    numbered: bool,
) -> Result<Sequence<'a>> {
    let (parts, companion_numbered) = in_order(joining, parts)?;
    let found = sequence(joining, leaf, &parts)?;
    if companion_numbered != numbered {
        return Err(joining.wrong(
            &found.pieces[0].0,
            format!(
                "and {:?} are not cut into the same pieces",
                weights.pieces[0].0.name
            ),
        ));
    }
    for ((weight, rows), (source, companion_rows)) in weights.pieces.iter().zip(&found.pieces) {
        if rows != companion_rows {
            return Err(joining.wrong(
                source,
                format!(
                    "has {companion_rows} rows, but {:?} has {rows}",
                    weight.name
                ),
            ));
        }
    }
    let (many, few) = (weights.pieces.len(), found.pieces.len());
    if many > few {
        let weight = weights.pieces[few].0;
        // Empty pieces at the end may be written for one plane and left out for the other.
        if weights.pieces[few..].iter().any(|(_, rows)| *rows > 0) {
            return Err(joining.wrong(
                &weight,
                format!(
                    "has no {}: looked for {:?}",
                    leaf.name(),
                    sibling(weight.name, leaf)
                ),
            ));
        }
    } else if let Some((source, _)) = found.pieces[many..].iter().find(|(_, rows)| *rows > 0) {
        return Err(joining.wrong(source, "belongs to a piece whose rows are missing"));
    }
    Ok(found)
}

/// The name of a tensor beside `name`, with another last segment.
pub(super) fn sibling(name: &str, leaf: Leaf) -> String {
    let path = name.rsplit_once('.').map_or("", |(path, _)| path);
    format!("{path}.{}", leaf.name())
}
