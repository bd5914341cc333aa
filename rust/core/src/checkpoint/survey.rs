//! Everything that is wrong with a checkpoint's files, where opening it stops at the first.
//!
//! A flaw of a file does not hide those of the others: after an interrupted download somebody wants
//! the whole list. Nothing is accepted here that opening would refuse; files and names go through
//! the same functions.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::location::{self, Directory, Found, Located};
use super::packed::Packed;
use super::{Checkpoint, index, reading};
use crate::error::{Error, Result};
use crate::header::tensor_bytes;

/// What is wrong with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlawKind {
    /// The index names it, or a link leads to it, and it is not there.
    Missing,
    /// It has fewer bytes than its header says.
    Short,
    /// The kernel does not let it be read.
    Unreadable,
    /// It is not what its name says, or contradicts itself.
    Malformed,
    /// It does not hold what the index says, or the index contradicts itself.
    Index,
}

impl FlawKind {
    /// Name in the Python API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Short => "short",
            Self::Unreadable => "unreadable",
            Self::Malformed => "malformed",
            Self::Index => "index",
        }
    }
}

/// Something wrong with a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flaw {
    /// What kind.
    pub kind: FlawKind,
    /// The file.
    pub path: PathBuf,
    /// Bytes it should have, where that is known; at least so many where its header is cut off.
    pub expected: Option<u64>,
    /// Bytes it has.
    pub found: Option<u64>,
    /// The whole sentence.
    pub message: String,
}

/// What was looked at, and what is wrong.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Survey {
    /// Files that are part of the checkpoint or lie beside it, those missing included.
    pub files: u64,
    /// Bytes of those that are there.
    pub bytes: u64,
    /// Tensors in the headers that could be read.
    pub tensors: u64,
    /// The index, where there is one.
    pub index: Option<PathBuf>,
    /// What is wrong: at most a thousand, in the order of the files.
    pub flaws: Vec<Flaw>,
    /// Flaws beyond those.
    pub more: u64,
}

/// Flaws listed one by one. A checkpoint of released size has fewer files, not fewer tensors.
const MOST: usize = 1000;

/// Looks at every file of the checkpoint at `path`: headers against lengths, and the index against
/// headers.
///
/// # Errors
/// There is nothing at `path` to look at, or it cannot be listed.
pub fn survey(path: &Path) -> Result<Survey> {
    let mut survey = Survey::default();
    if location::status(path)?.is_dir() {
        let directory = Directory::open(path)?;
        match directory.index()? {
            Some(index) => survey.indexed(&directory, &index)?,
            None if directory.safetensors_names()?.is_empty() => {
                return Err(directory.nothing_to_read());
            }
            None => survey.whole(&directory)?,
        }
    } else if path
        .extension()
        .is_some_and(|extension| extension == "json")
    {
        let parent = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        survey.indexed(&Directory::open(parent)?, path)?;
    } else {
        survey.files = 1;
        let found = Found::by_argument(path)?;
        survey.header(&found);
    }
    if survey.flaws.is_empty()
        && let Err(error) = Checkpoint::open(path)
    {
        // Between files: a tensor that is in two of them, a configuration that cannot be read.
        survey.refused(error, path, FlawKind::Malformed);
    }
    Ok(survey)
}

/// What became of the header of a file.
enum Header {
    Read(Packed),
    /// The file is too short; bytes of tensors it should hold, where the header is whole.
    Short(Option<u64>),
    Refused,
    /// There is no file.
    Absent,
}

impl Header {
    /// Bytes of tensors that the file holds, or should.
    fn data_bytes(&self) -> Option<u64> {
        match self {
            Self::Read(pack) => {
                let mut cursor = pack.cursor();
                let mut bytes = 0_u64;
                while let Some((_, record)) = cursor.next() {
                    let (dtype, shape) = pack.kind(record.kind);
                    bytes = bytes.checked_add(tensor_bytes(dtype, shape).ok()?)?;
                }
                Some(bytes)
            }
            Self::Short(data) => *data,
            Self::Refused => None,
            Self::Absent => Some(0),
        }
    }
}

impl Survey {
    fn add(&mut self, flaw: Flaw) {
        if self.flaws.len() < MOST {
            self.flaws.push(flaw);
        } else {
            self.more += 1;
        }
    }

    /// Adds what `error` says of `path`; `kind` unless the kernel said it.
    fn refused(&mut self, error: Error, path: &Path, kind: FlawKind) {
        let message = error.to_string();
        let (kind, named) = match error {
            Error::Io { place, .. } => (FlawKind::Unreadable, place.path),
            Error::Missing { paths, .. } => (FlawKind::Missing, paths.into_iter().next()),
            Error::Checkpoint { place, .. } => (kind, place.path),
            _ => (kind, None),
        };
        self.add(Flaw {
            kind,
            path: named.unwrap_or_else(|| path.to_owned()),
            expected: None,
            found: None,
            message,
        });
    }

    fn missing(&mut self, path: PathBuf, message: String) {
        self.add(Flaw {
            kind: FlawKind::Missing,
            path,
            expected: None,
            found: None,
            message,
        });
    }

    /// The header of one file, or what is wrong with it.
    fn header(&mut self, file: &Found) -> Header {
        let error = match reading::headers(vec![file.clone()], None, false) {
            Ok((files, contents)) => {
                self.bytes += files.iter().map(|file| file.identity.len).sum::<u64>();
                let Some(contents) = contents.into_iter().next() else {
                    return Header::Refused;
                };
                self.tensors += contents.pack.len() as u64;
                return Header::Read(contents.pack);
            }
            Err(error) => error,
        };
        let promised = matches!(error, Error::Checkpoint { .. })
            .then(|| reading::promise(&file.resolved))
            .flatten();
        match promised {
            Some(promise) if promise.found < promise.expected => {
                self.bytes += promise.found;
                self.add(Flaw {
                    kind: FlawKind::Short,
                    path: file.path.to_path_buf(),
                    expected: Some(promise.expected),
                    found: Some(promise.found),
                    message: error.to_string(),
                });
                Header::Short(promise.data)
            }
            _ => {
                self.refused(error, &file.path, FlawKind::Malformed);
                Header::Refused
            }
        }
    }

    /// A directory without an index, or with one that says nothing.
    fn whole(&mut self, directory: &Directory) -> Result<()> {
        for name in directory.safetensors_names()? {
            if let Some(file) = self.locate(directory, &name) {
                self.header(&file);
            }
        }
        Ok(())
    }

    /// The file at a name in the directory, unless there is something else or nothing.
    fn locate(&mut self, directory: &Directory, name: &Path) -> Option<Found> {
        let path = directory.path().join(name);
        match directory.locate(name) {
            Ok(Located::File(file)) => {
                self.files += 1;
                return Some(file);
            }
            // Directories are no files, and what is absent was removed since it was listed.
            Ok(Located::Directory | Located::Absent) => {}
            Ok(Located::Dangling(target)) => {
                self.files += 1;
                let message = format!(
                    "{} is a symbolic link to {}, which does not exist",
                    path.display(),
                    target.display()
                );
                self.missing(path, message);
            }
            Err(error) => {
                self.files += 1;
                self.refused(error, &path, FlawKind::Malformed);
            }
        }
        None
    }

    /// The files an index names, and those beside them.
    fn indexed(&mut self, directory: &Directory, index_path: &Path) -> Result<()> {
        self.index = Some(index_path.to_owned());
        let text = index::text(index_path)?;
        let index = match index::parse(&text, index_path) {
            Ok(index) => index,
            Err(error) => {
                self.refused(error, index_path, FlawKind::Index);
                return self.whole(directory);
            }
        };
        let mut known = HashSet::new();
        let mut headers = Vec::with_capacity(index.files.len());
        for name in &index.files {
            headers.push(self.named(directory, name, index_path, &mut known));
        }
        self.expect_missing(&text, &headers);
        for (name, file) in &index.entries {
            let Header::Read(pack) = &headers[*file as usize] else {
                continue;
            };
            if pack.find(name).is_empty() {
                let path = directory.path().join(&*index.files[*file as usize]);
                self.add(Flaw {
                    kind: FlawKind::Index,
                    path: path.clone(),
                    expected: None,
                    found: None,
                    message: format!(
                        "the index says that tensor {name:?} is in {}, which does not contain it",
                        path.display()
                    ),
                });
            }
        }
        for name in directory.safetensors_names()? {
            if !known.contains(&name)
                && let Some(file) = self.locate(directory, &name)
            {
                self.header(&file.beside_index());
            }
        }
        Ok(())
    }

    /// A file that the index names: its tensors and its path, unless something is wrong with it.
    fn named(
        &mut self,
        directory: &Directory,
        name: &str,
        index_path: &Path,
        known: &mut HashSet<PathBuf>,
    ) -> Header {
        let relative = match location::relative(name) {
            Ok(relative) => relative,
            Err(problem) => {
                let message = format!("the index names the file {name:?}, which {problem}");
                self.refused(
                    Error::checkpoint(message, index_path),
                    index_path,
                    FlawKind::Index,
                );
                return Header::Refused;
            }
        };
        known.insert(relative.clone());
        let path = directory.path().join(&relative);
        match directory.locate(&relative) {
            Ok(Located::Absent) => {
                self.files += 1;
                let message = format!("{} is missing; the index names it", path.display());
                self.missing(path, message);
                Header::Absent
            }
            Ok(Located::Directory) => {
                let message = format!("the index names {name:?} as a file, and it is a directory");
                let error = Error::checkpoint(message, index_path);
                self.refused(error, index_path, FlawKind::Index);
                Header::Refused
            }
            Ok(Located::Dangling(_)) => {
                self.locate(directory, &relative);
                Header::Absent
            }
            _ => self
                .locate(directory, &relative)
                .map_or(Header::Refused, |file| self.header(&file)),
        }
    }

    /// Where exactly one file is missing, what the index counts and the others do not hold is its
    /// tensors.
    fn expect_missing(&mut self, index: &str, headers: &[Header]) {
        let here = headers
            .iter()
            .try_fold(0_u64, |sum, header| sum.checked_add(header.data_bytes()?));
        let mut missing = self
            .flaws
            .iter_mut()
            .filter(|flaw| flaw.kind == FlawKind::Missing);
        let (Some(flaw), None) = (missing.next(), missing.next()) else {
            return;
        };
        flaw.expected = total_size(index)
            .zip(here)
            .and_then(|(total, here)| total.checked_sub(here))
            .filter(|&bytes| bytes > 0);
        if let Some(bytes) = flaw.expected {
            flaw.message = format!(
                "{}, with {bytes} bytes of tensors by the index's total",
                flaw.message
            );
        }
    }
}

/// Bytes of all tensors, as an index counts them.
fn total_size(index: &str) -> Option<u64> {
    #[derive(Deserialize)]
    struct Root {
        metadata: Total,
    }
    #[derive(Deserialize)]
    struct Total {
        total_size: u64,
    }
    let root: Root = serde_json::from_str(index).ok()?;
    Some(root.metadata.total_size)
}

#[cfg(test)]
mod tests;
