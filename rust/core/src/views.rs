//! Tables from tensors that a loader has already mapped: each is traced back to its file.
//!
//! Loaders of safetensors files hand out views into a mapping. Where such a view lies is all that
//! is needed to read its rows in place, so the views themselves are not kept: the files are opened
//! again, read-only, and what the views show is held against them.

use std::borrow::Cow;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde_json::Value;

use crate::checkpoint::CheckpointFile;
use crate::discover::{self, Group, Source, Surroundings, TableRef};
use crate::error::{Error, Result};
use crate::header::tensor_bytes;
use crate::maps::{FileRange, Maps};
use crate::reader::Located;

/// A tensor in this process's memory.
#[derive(Debug, Clone)]
pub struct View {
    /// Name in the checkpoint, or as a loader has changed it.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first; elements lie one after another.
    pub shape: Vec<u64>,
    /// Address of the first byte.
    pub address: u64,
}

/// What decides how many rows there have to be.
#[derive(Debug, Clone, Copy)]
pub enum Expectation<'a> {
    /// This many.
    Rows(u64),
    /// As many as the model's configuration implies.
    Config(&'a Value),
}

/// Segment of multimodal checkpoints' names that some loaders drop.
const OPTIONAL_SEGMENT: &str = "language_model.";

/// Bytes compared at each of three places of a tensor.
const SAMPLE: u64 = 64;

/// The table that `table` means among the tensors of `views`; those of no table are left out.
///
/// # Errors
/// [`Error::Value`] where a tensor's memory is not a file's, or no such table is there;
/// [`Error::Checkpoint`] where pieces or scales are missing, contradict each other, or do not make
/// the expected rows.
pub fn locate(views: &[View], expected: Expectation<'_>, table: TableRef<'_>) -> Result<Located> {
    let names = common_names(views);
    let maps = Maps::read().map_err(|error| {
        let maps = Path::new("/proc/self/maps");
        Error::io("cannot trace tensors to their files", &error, maps)
    })?;
    let groups = discover::group(views.iter().zip(&names).enumerate().map(
        |(place, (view, name))| Source {
            name,
            dtype: view.dtype,
            shape: &view.shape,
            // Which view, until its file is known.
            file: place,
            offset: 0,
        },
    ));
    let chosen = select(&groups, table, views)?;
    let mut files = Files::new(expected);
    let parts: Vec<Source<'_>> = chosen
        .sources()
        .map(|source| files.trace(source, &views[source.file], &maps))
        .collect::<Result<_>>()
        .map_err(|error| error.in_table(chosen.name))?;
    let located = discover::group(files.in_order(parts));
    let [group] = &located[..] else {
        return Err(Error::value("tensors of one table make several"));
    };
    let mut table = discover::join(group, &files)?;
    require_rows(&table, expected)?;
    let used = table.files();
    let kept = used.iter().map(|&file| files.found[file].clone()).collect();
    table.renumber_files(&used);
    Ok(Located {
        table,
        files: kept,
        handles: Vec::new(),
        shadowed: Vec::new(),
    })
}

/// Names without [`OPTIONAL_SEGMENT`] where only some have it: they belong together all the same.
fn common_names(views: &[View]) -> Vec<Cow<'_, str>> {
    let mixed = views
        .iter()
        .any(|view| view.name.contains(OPTIONAL_SEGMENT))
        && views
            .iter()
            .any(|view| !view.name.contains(OPTIONAL_SEGMENT));
    views
        .iter()
        .map(|view| {
            if mixed {
                Cow::Owned(view.name.replace(OPTIONAL_SEGMENT, ""))
            } else {
                Cow::Borrowed(view.name.as_str())
            }
        })
        .collect()
}

fn select<'g, 'a>(
    groups: &'g [Group<'a>],
    table: TableRef<'_>,
    views: &[View],
) -> Result<&'g Group<'a>> {
    let choices = || {
        let names: Vec<_> = groups
            .iter()
            .enumerate()
            .map(|(place, group)| format!("{place}: {:?}", group.name))
            .collect();
        names.join(", ")
    };
    if groups.is_empty() {
        let given: Vec<_> = views
            .iter()
            .take(3)
            .map(|view| format!("{:?}", view.name))
            .collect();
        return Err(Error::value(if given.is_empty() {
            "no tensor was added, so there is no table to bind".to_owned()
        } else {
            format!(
                "none of the {} tensors added belongs to an n-gram or per-layer table; among them \
                 are {}",
                views.len(),
                given.join(", ")
            )
        }));
    }
    let found = match table {
        TableRef::Only if groups.len() == 1 => groups.first(),
        TableRef::Only => {
            return Err(Error::value(format!(
                "the tensors added belong to {} tables: name one of {}",
                groups.len(),
                choices()
            )));
        }
        TableRef::Layer(place) => groups.get(place),
        TableRef::Name(name) => {
            let without = name.replace(OPTIONAL_SEGMENT, "");
            groups
                .iter()
                .find(|group| group.name == name)
                .or_else(|| groups.iter().find(|group| group.name == without))
        }
    };
    found.ok_or_else(|| {
        Error::value(format!(
            "no tensor of table {table:?} was added: there are {}",
            choices()
        ))
    })
}

/// The pieces must make up the table exactly: a missing last piece shows in nothing else.
fn require_rows(table: &crate::table::Table, expected: Expectation<'_>) -> Result<()> {
    let (rows, wanted_by) = match expected {
        Expectation::Rows(rows) => (rows, "num_rows says"),
        Expectation::Config(config) => {
            match discover::expected_rows(config, table.family, table.layer) {
                Some(rows) => (rows, "the configuration implies"),
                None => {
                    return Err(Error::value(format!(
                        "the configuration does not say how many rows table {:?} has, so a missing \
                         piece would go unnoticed; pass num_rows",
                        table.name
                    )));
                }
            }
        }
    };
    if table.rows() == rows {
        return Ok(());
    }
    let last = table.planes[0].pieces().last();
    Err(Error::Checkpoint {
        message: format!(
            "{wanted_by} {rows} rows, but the pieces up to {:?} have {}: {}",
            last.map_or("", |piece| piece.tensor.as_str()),
            table.rows(),
            if table.rows() < rows {
                "a piece has not been added"
            } else {
                "they belong to another table"
            }
        ),
        place: Box::default(),
    }
    .in_table(&table.name))
}

/// The files traced so far.
struct Files<'a> {
    found: Vec<CheckpointFile>,
    named: Vec<PathBuf>,
    config: Option<&'a Value>,
    memory: Option<File>,
}

impl<'a> Files<'a> {
    fn new(expected: Expectation<'a>) -> Self {
        Self {
            found: Vec::new(),
            named: Vec::new(),
            config: match expected {
                Expectation::Config(config) => Some(config),
                Expectation::Rows(_) => None,
            },
            memory: File::open("/proc/self/mem").ok(),
        }
    }

    /// `source` with the file and offset its memory is mapped from.
    fn trace<'s>(&mut self, source: Source<'s>, view: &View, maps: &Maps) -> Result<Source<'s>> {
        let bytes = tensor_bytes(source.dtype, source.shape)
            .map_err(|problem| Error::value(format!("tensor {:?}: {problem}", source.name)))?;
        if bytes == 0 {
            // It has no place; nothing will be read from it.
            return Ok(Source { file: 0, ..source });
        }
        let addresses = view.address..view.address.saturating_add(bytes);
        let range = maps.file_range(addresses).map_err(|backing| {
            Error::value(format!(
                "tensor {:?} is backed by {}, not by a checkpoint file: its loader made a copy of \
                 it. Hand over the views that safetensors' safe_open gives, or open the checkpoint \
                 by its path: engram.FileGather(path)",
                source.name, backing.0
            ))
        })?;
        let file = self.file(&range, source.name)?;
        self.compare(&range, bytes, view)?;
        Ok(Source {
            file,
            offset: range.offset,
            ..source
        })
    }

    /// Sorts the files by path, so that the order of views does not show, and renumbers `parts`.
    fn in_order<'s>(&mut self, mut parts: Vec<Source<'s>>) -> Vec<Source<'s>> {
        let mut order: Vec<usize> = (0..self.found.len()).collect();
        order.sort_by(|&one, &other| self.found[one].path.cmp(&self.found[other].path));
        let mut places = vec![0; order.len()];
        for (place, &file) in order.iter().enumerate() {
            places[file] = place;
        }
        self.found = order.iter().map(|&file| self.found[file].clone()).collect();
        for part in &mut parts {
            // A piece without rows has no file.
            part.file = places.get(part.file).copied().unwrap_or(0);
        }
        parts
    }

    /// Index of the file in `found`.
    fn file(&mut self, range: &FileRange, tensor: &str) -> Result<usize> {
        if let Some(known) = self.named.iter().position(|path| *path == range.path) {
            return Ok(known);
        }
        let file = CheckpointFile::of(&range.path).map_err(|error| match error {
            Error::Io {
                doing,
                errno,
                place,
            } => Error::Io {
                doing: format!("{doing} the file behind tensor {tensor:?}"),
                errno,
                place,
            },
            other => other,
        })?;
        self.found.push(file);
        self.named.push(range.path.clone());
        Ok(self.found.len() - 1)
    }

    /// Holds a few bytes of the tensor's memory against the file. They differ if another file has
    /// taken the path since, or if a private mapping was written to: rows read from the file would
    /// then not be what the loader prepared.
    fn compare(&self, range: &FileRange, bytes: u64, view: &View) -> Result<()> {
        let Some(memory) = &self.memory else {
            return Ok(());
        };
        let refuse = |error: &std::io::Error| Error::io("cannot read", error, &range.path);
        let file = File::open(&range.path).map_err(|error| refuse(&error))?;
        let length = bytes.min(SAMPLE);
        let mut seen = [[0_u8; 64]; 2];
        let count = usize::try_from(length).unwrap_or(0).min(64);
        for at in [0, (bytes - length) / 2, bytes - length] {
            let [in_memory, in_file] = &mut seen;
            if memory
                .read_exact_at(&mut in_memory[..count], view.address + at)
                .is_err()
            {
                // Some sandboxes forbid it; the mapping itself was found all the same.
                return Ok(());
            }
            file.read_exact_at(&mut in_file[..count], range.offset + at)
                .map_err(|error| refuse(&error))?;
            if in_memory[..count] != in_file[..count] {
                return Err(Error::checkpoint(
                    format!(
                        "tensor {:?} differs from the file it is mapped from, at byte {at} of the \
                         tensor: it was changed in memory, or the file was replaced; bind views \
                         as the loader hands them out",
                        view.name
                    ),
                    &range.path,
                )
                .at_offset(range.offset + at));
            }
        }
        Ok(())
    }
}

impl Surroundings for Files<'_> {
    fn read(&self, source: &Source<'_>, max_bytes: u64) -> Result<Vec<u8>> {
        let path = &self.found[source.file].resolved;
        let bytes = tensor_bytes(source.dtype, source.shape)
            .ok()
            .filter(|&bytes| bytes <= max_bytes)
            .and_then(|bytes| usize::try_from(bytes).ok())
            .ok_or_else(|| {
                Error::checkpoint(format!("tensor {:?} is too large", source.name), path)
            })?;
        let mut buffer = vec![0; bytes];
        File::open(path)
            .and_then(|file| file.read_exact_at(&mut buffer, source.offset))
            .map_err(|error| Error::io("cannot read", &error, path).at_offset(source.offset))?;
        Ok(buffer)
    }

    fn path(&self, file: usize) -> Option<&Path> {
        self.found.get(file).map(|file| &*file.path)
    }

    fn config(&self) -> Option<&Value> {
        self.config
    }
}

#[cfg(test)]
mod tests;
