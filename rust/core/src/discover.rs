//! The naming rules of each model family: tensors of a checkpoint become tables.
//!
//! A name says which table a tensor belongs to and which part of it it is (`names.rs`); the parts
//! of one table are put in order and become planes (`join.rs`); dtypes and widths, never names or
//! configuration, say how values are encoded (`encoding.rs`); and where `config.json` has the
//! numbers, the result has to agree with them (`expected.rs`).

use std::collections::HashMap;
use std::path::Path;

use safetensors::Dtype;
use serde_json::Value;

use crate::checkpoint::{Checkpoint, Listing, TensorInfo};
use crate::error::{Error, Result};
use crate::table::{Encoding, Family, Piece, Plane, PlaneName, Table};

mod configured;
mod encoding;
mod expected;
mod join;
mod names;

pub use configured::configured_tables;
pub use expected::expected_rows;
pub use join::join;
pub use names::{Group, group, table_of};

/// Which table is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableRef<'a> {
    /// The one n-gram or per-layer table there is.
    Only,
    /// A table's name, the full name of its only weight tensor, or the full name of any
    /// two-dimensional tensor.
    Name(&'a str),
    /// Place in layer order.
    Layer(usize),
}

/// A tensor as discovery sees it; whether it lies in a checkpoint or was handed over is the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source<'a> {
    /// Full name.
    pub name: &'a str,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: &'a [u64],
    /// Index into the caller's list of files.
    pub file: usize,
    /// Absolute byte offset in that file.
    pub offset: u64,
}

/// The element type of that name in safetensors headers, e.g. `F8_E4M3`.
pub fn dtype_of(name: &str) -> Result<Dtype> {
    serde_json::from_value(Value::String(name.to_owned()))
        .map_err(|_| Error::Type(format!("{name:?} is no element type of safetensors files")))
}

/// A model's configuration from the text of its `config.json`.
pub fn parse_config(text: &str) -> Result<Value> {
    crate::checkpoint::parse_config(text)
        .map_err(|error| Error::value(format!("the configuration is not valid JSON: {error}")))
}

/// What discovery may ask for beyond names, dtypes and shapes.
pub trait Surroundings {
    /// All bytes of a tensor that must not have more than `max_bytes` of them.
    fn read(&self, source: &Source<'_>, max_bytes: u64) -> Result<Vec<u8>>;

    /// The path to name when something is wrong with a file.
    fn path(&self, _file: usize) -> Option<&Path> {
        None
    }

    /// The model's configuration.
    fn config(&self) -> Option<&Value> {
        None
    }

    /// The `__metadata__` of a file.
    fn metadata(&self, _file: usize) -> Option<&HashMap<String, String>> {
        None
    }
}

impl Surroundings for Checkpoint {
    fn read(&self, source: &Source<'_>, max_bytes: u64) -> Result<Vec<u8>> {
        self.read_tensor(source.name, max_bytes)
    }

    fn path(&self, file: usize) -> Option<&Path> {
        self.files.get(file).map(|file| &*file.path)
    }

    fn config(&self) -> Option<&Value> {
        self.config.as_ref()
    }

    fn metadata(&self, file: usize) -> Option<&HashMap<String, String>> {
        Self::metadata(self, file)
    }
}

/// Every n-gram and per-layer table in layer order; with `plain`, every other two-dimensional
/// tensor after them, in the order of names.
pub fn tables(checkpoint: &Checkpoint, plain: bool) -> Result<Vec<Table>> {
    let parts = table_parts(checkpoint)?;
    let groups = group(parts.iter().map(|(name, info)| source(name, info)));
    let mut tables = groups
        .iter()
        .map(|group| joined(group, checkpoint))
        .collect::<Result<Vec<_>>>()?;
    if plain {
        for (name, info) in checkpoint.tensors() {
            let counts = match info.listing {
                Listing::Named => true,
                Listing::Unlisted => checkpoint.copies(&name).len() == 1,
                Listing::SideFile => false,
            };
            if counts && names::parse(&name).is_none() && is_openable(&info) {
                tables.push(plain_table(checkpoint, &name)?);
            }
        }
    }
    Ok(tables)
}

/// The table that `table` means.
pub fn select(checkpoint: &Checkpoint, table: TableRef<'_>) -> Result<Table> {
    let parts = table_parts(checkpoint)?;
    let groups = group(parts.iter().map(|(name, info)| source(name, info)));
    match table {
        TableRef::Only => match &groups[..] {
            [group] => joined(group, checkpoint),
            [] => Err(no_table(checkpoint)),
            _ => Err(Error::value(format!(
                "{} has {} tables: name one of {}",
                checkpoint.path.display(),
                groups.len(),
                choices(&groups)
            ))),
        },
        TableRef::Layer(place) => match groups.get(place) {
            Some(group) => joined(group, checkpoint),
            None if groups.is_empty() => Err(no_table(checkpoint)),
            None => Err(Error::value(format!(
                "{} has no table {place}: there are {}",
                checkpoint.path.display(),
                choices(&groups)
            ))),
        },
        TableRef::Name(name) => {
            let named = groups.iter().find(|group| group.name == name).or_else(|| {
                groups
                    .iter()
                    .find(|group| group.only_weight() == Some(name))
            });
            match named {
                Some(group) => joined(group, checkpoint),
                None if checkpoint.tensor(name).is_some() => plain_table(checkpoint, name),
                None if groups.is_empty() => Err(Error::value(format!(
                    "{} has no tensor {name:?}; {}",
                    checkpoint.path.display(),
                    plain_examples(checkpoint)
                ))),
                None => Err(Error::value(format!(
                    "{} has no table and no tensor {name:?}: there are {}",
                    checkpoint.path.display(),
                    choices(&groups)
                ))),
            }
        }
    }
}

/// Joins a group; an error about no file in particular is about the checkpoint.
fn joined(group: &Group<'_>, checkpoint: &Checkpoint) -> Result<Table> {
    join(group, checkpoint).map_err(|mut error| {
        if let Some(place) = error.place_mut() {
            place.path.get_or_insert_with(|| checkpoint.path.clone());
        }
        error
    })
}

/// Every tensor that is part of a table by its name, held against the index.
fn table_parts(checkpoint: &Checkpoint) -> Result<Vec<(String, TensorInfo<'_>)>> {
    let mut parts: Vec<(String, TensorInfo<'_>)> = Vec::new();
    checkpoint.each_tensor(|name, info| {
        if names::parse(name).is_some() {
            parts.push((name.to_owned(), info));
        }
    });
    let path = |info: &TensorInfo<'_>| &*checkpoint.files[info.file].path;
    if let Some((name, info)) = parts
        .iter()
        .find(|(_, info)| info.listing == Listing::Unlisted)
    {
        return Err(Error::checkpoint(
            format!(
                "stale index: this file holds {name:?}, a part of a table, but the index does not \
                 name it; write the index again"
            ),
            path(info),
        ));
    }
    if let Some([(name, first), (_, second)]) = parts.windows(2).find(|pair| pair[0].0 == pair[1].0)
    {
        return Err(Error::checkpoint(
            format!(
                "tensor {name:?} is in this file and in {}, and the index names neither; remove \
                 the one that does not belong here",
                path(first).display()
            ),
            path(second),
        ));
    }
    Ok(parts)
}

fn source<'a>(name: &'a str, info: &TensorInfo<'a>) -> Source<'a> {
    Source {
        name,
        dtype: info.dtype,
        shape: info.shape,
        file: info.file,
        offset: info.offset,
    }
}

/// Whether a tensor consists of rows of at least one whole byte.
fn is_openable(info: &TensorInfo<'_>) -> bool {
    matches!(info.shape, &[_, columns] if row_plane(info.dtype, columns).is_ok())
}

fn row_plane(dtype: Dtype, columns: u64) -> Result<()> {
    if columns == 0 {
        return Err(Error::value("its rows are empty"));
    }
    Plane::new(PlaneName::Weight, dtype, columns, Vec::new()).map(drop)
}

/// One tensor as a table of its own.
fn plain_table(checkpoint: &Checkpoint, name: &str) -> Result<Table> {
    let copies = checkpoint.copies(name);
    let file = |info: &TensorInfo<'_>| checkpoint.files[info.file].path.display();
    let info = match &copies[..] {
        [info] => info,
        [first, second, ..] => {
            return Err(Error::value(format!(
                "tensor {name:?} is in {} and in {}, and the index names neither",
                file(first),
                file(second)
            )));
        }
        [] => return Err(Error::value(format!("there is no tensor {name:?}"))),
    };
    if info.listing == Listing::SideFile {
        return Err(Error::value(format!(
            "tensor {name:?} is only in {}, which the index does not name; pass that file as the \
             path to open it",
            file(info)
        )));
    }
    let &[rows, columns] = info.shape else {
        return Err(Error::value(format!(
            "tensor {name:?} has shape {:?}; a table has two dimensions, rows and columns",
            info.shape
        )));
    };
    let unusable = |error: Error| {
        Error::value(format!(
            "tensor {name:?} cannot be opened as a table: {error}"
        ))
    };
    row_plane(info.dtype, columns).map_err(unusable)?;
    let piece = Piece {
        tensor: name.to_owned(),
        file: info.file,
        offset: info.offset,
        first_row: 0,
        rows,
    };
    let plane =
        Plane::new(PlaneName::Weight, info.dtype, columns, vec![piece]).map_err(unusable)?;
    Ok(Table {
        name: name.to_owned(),
        family: Family::Plain,
        layer: names::layer(name),
        encoding: Encoding::Plain(info.dtype),
        planes: vec![plane],
        logical_shape: vec![columns],
        constants: Vec::new(),
    })
}

fn choices(groups: &[Group<'_>]) -> String {
    let list: Vec<_> = groups
        .iter()
        .enumerate()
        .map(|(place, group)| format!("{place}: {:?}", group.name))
        .collect();
    list.join(", ")
}

fn no_table(checkpoint: &Checkpoint) -> Error {
    let examples = plain_examples(checkpoint);
    match expected::promise(checkpoint.config.as_ref()) {
        Some(field) => Error::checkpoint(
            format!(
                "config.json describes a model with such tables ({field}), but no file has one: a \
                 file is missing, for example one beside the index; {examples}"
            ),
            &checkpoint.path,
        ),
        None => Error::value(format!(
            "{} has no n-gram or per-layer embedding table; {examples}",
            checkpoint.path.display()
        )),
    }
}

/// Names a few tensors that could be opened, likely embedding tables first.
fn plain_examples(checkpoint: &Checkpoint) -> String {
    const SHOWN: usize = 3;
    let (mut likely, mut others) = (Vec::new(), Vec::new());
    checkpoint.each_tensor(|name, info| {
        if info.listing != Listing::SideFile && is_openable(&info) {
            let list = if name.contains("embed") {
                &mut likely
            } else {
                &mut others
            };
            if list.len() < SHOWN {
                list.push(format!("{name:?}"));
            }
        }
    });
    likely.append(&mut others);
    likely.truncate(SHOWN);
    if likely.is_empty() {
        "it has no two-dimensional tensor either".to_owned()
    } else {
        format!(
            "any two-dimensional tensor can be opened by its full name, for example {}",
            likely.join(", ")
        )
    }
}

#[cfg(test)]
mod tests;
