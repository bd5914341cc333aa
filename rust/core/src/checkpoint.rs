//! A checkpoint: which tensors are in which file.
//!
//! A path is a `.safetensors` file, a directory of them, or an index. Opening reads every header
//! once and keeps one record per tensor; data is never touched. What an
//! index says is held against what the files contain before anything is served.

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::Dtype;
use serde_json::Value;

use crate::error::{Error, Result};
use crate::header::tensor_bytes;

mod catalogue;
mod index;
mod location;
mod packed;
mod reading;
mod survey;

use location::Directory;
use packed::{Packed, Record};
pub(crate) use reading::parse_config;
pub use survey::{Flaw, FlawKind, Survey, survey};

/// What a file was when it was opened; a change means that its rows can no longer be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// Device number.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Length in bytes.
    pub len: u64,
    /// Time of the last modification, in nanoseconds since 1970.
    pub modified_ns: i128,
}

impl Identity {
    /// What `metadata` says of a file.
    pub fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            len: metadata.len(),
            modified_ns: i128::from(metadata.mtime()) * 1_000_000_000
                + i128::from(metadata.mtime_nsec()),
        }
    }
}

/// One file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointFile {
    /// The path as reached from the argument.
    pub path: Arc<Path>,
    /// The same with every symbolic link followed, once, when the checkpoint was opened.
    pub resolved: Arc<Path>,
    /// What it was then.
    pub identity: Identity,
}

impl CheckpointFile {
    /// The file at `path` as it is now, its header unread.
    pub fn of(path: &Path) -> Result<Self> {
        let refuse = |error: std::io::Error| Error::io("cannot stat", &error, path);
        let resolved = path.canonicalize().map_err(refuse)?;
        let identity = Identity::of(&std::fs::metadata(&resolved).map_err(refuse)?);
        Ok(Self {
            path: path.into(),
            resolved: resolved.into(),
            identity,
        })
    }
}

/// How a tensor came into the checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listing {
    /// The index names it, or there is no index.
    Named,
    /// It lies in an indexed file, but the index does not name it.
    Unlisted,
    /// It lies in a file that the index does not mention.
    SideFile,
}

impl Listing {
    const ALL: [Self; 3] = [Self::Named, Self::Unlisted, Self::SideFile];
}

/// Where one tensor lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: &'a [u64],
    /// Index into [`Checkpoint::files`].
    pub file: usize,
    /// Absolute byte offset in that file.
    pub offset: u64,
    /// Bytes of data.
    pub bytes: u64,
    /// How it came into the checkpoint.
    pub listing: Listing,
}

/// A second copy of a tensor that the index places elsewhere; it is never read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shadowed {
    /// The tensor's name.
    pub tensor: String,
    /// The file with the ignored copy.
    pub file: PathBuf,
}

/// An opened checkpoint. It holds no descriptor unless it was opened for rows.
#[derive(Debug)]
pub struct Checkpoint {
    /// The path it was opened by.
    pub path: PathBuf,
    /// Every file whose header was read: those that an index names first, each part by path.
    pub files: Vec<CheckpointFile>,
    /// The `config.json` beside the files, where there is one.
    pub config: Option<Value>,
    /// Second copies of indexed tensors, ignored.
    pub shadowed: Vec<Shadowed>,
    metadata: Vec<Option<HashMap<String, String>>>,
    handles: Vec<Option<Arc<File>>>,
    tensors: Packed,
}

impl Checkpoint {
    /// Opens a `.safetensors` file, a checkpoint directory or an index JSON.
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_keeping(path, false)
    }

    /// As [`Checkpoint::open`], for reading rows next: files stay open, so that rows come from the
    /// very files whose headers were read.
    pub fn open_for_rows(path: &Path) -> Result<Self> {
        Self::open_keeping(path, true)
    }

    fn open_keeping(path: &Path, keep: bool) -> Result<Self> {
        let status = location::status(path)?;
        if status.is_dir() {
            let directory = Directory::open(path)?;
            return match directory.index()? {
                Some(index) => Self::open_indexed(path, &directory, &index, keep),
                None => Self::open_all(path, &directory, keep),
            };
        }
        if path
            .extension()
            .is_some_and(|extension| extension == "json")
        {
            let parent = match path.parent() {
                Some(parent) if !parent.as_os_str().is_empty() => parent,
                _ => Path::new("."),
            };
            return Self::open_indexed(path, &Directory::open(parent)?, path, keep);
        }
        let file = location::Found::by_argument(path)?;
        let config = reading::config(&path.with_file_name("config.json"))?;
        let (files, opened) = reading::headers(vec![file], None, keep)?;
        Self::assemble(path, files, opened, config, None)
    }

    /// A directory without an index: every safetensors file in it, each tensor once.
    fn open_all(path: &Path, directory: &Directory, keep: bool) -> Result<Self> {
        let found = directory.safetensors_files(|_| false)?;
        if found.is_empty() {
            return Err(directory.nothing_to_read());
        }
        let config = reading::config(&directory.path().join("config.json"))?;
        let (files, opened) = reading::headers(found, None, keep)?;
        Self::assemble(path, files, opened, config, None)
    }

    /// The files an index names, and the headers of those beside them.
    fn open_indexed(
        path: &Path,
        directory: &Directory,
        index_path: &Path,
        keep: bool,
    ) -> Result<Self> {
        let text = OnceCell::new();
        let early = reading::Early::new(directory.regular_safetensors_files()?, keep);
        let (wanted, early) = early.around(|early| {
            let read = index::text(index_path)?;
            let wanted = Self::wanted(directory, index_path, text.get_or_init(|| read))?;
            early.work();
            Ok::<_, Error>(wanted)
        });
        let (wanted, early) = match wanted {
            // Files that were kept open may have left none for the index or the configuration.
            Err(Error::Io { errno, .. }) if keep && errno == libc::EMFILE => {
                drop(early);
                let read = index::text(index_path)?;
                let text = text.get_or_init(|| read);
                (Self::wanted(directory, index_path, text)?, None)
            }
            wanted => (wanted?, Some(early)),
        };
        let (index, found, named, config) = wanted;
        let (files, opened) = reading::headers(found, early, keep)?;
        let listed = catalogue::Listed {
            entries: &index.entries,
            files: named,
            path: index_path,
        };
        Self::assemble(path, files, opened, config, Some(&listed))
    }

    /// What the index in `text` says, the files that it names and those beside them, how many it
    /// names, and the model's configuration.
    fn wanted<'t>(
        directory: &Directory,
        index_path: &Path,
        text: &'t str,
    ) -> Result<(index::Index<'t>, Vec<location::Found>, usize, Option<Value>)> {
        let index = index::parse(text, index_path)?;
        let mut found = directory.named_files(&index.files, index_path)?;
        let named = found.len();
        let is_named = |name: &OsStr| {
            let name = name.to_string_lossy();
            index.files.binary_search(&name).is_ok()
        };
        let mut side_files = directory.safetensors_files(is_named)?;
        if !side_files.is_empty() {
            let resolved: HashSet<&Path> = found.iter().map(|file| &*file.resolved).collect();
            side_files.retain(|file| !resolved.contains(&*file.resolved));
        }
        found.extend(side_files.into_iter().map(location::Found::beside_index));
        let config = reading::config(&directory.path().join("config.json"))?;
        Ok((index, found, named, config))
    }

    fn assemble(
        path: &Path,
        files: Vec<CheckpointFile>,
        opened: Vec<reading::Contents>,
        config: Option<Value>,
        listed: Option<&catalogue::Listed<'_>>,
    ) -> Result<Self> {
        let mut packs = Vec::with_capacity(opened.len());
        let mut metadata = Vec::with_capacity(opened.len());
        let mut handles = Vec::with_capacity(opened.len());
        for contents in opened {
            packs.push(contents.pack);
            metadata.push(contents.metadata);
            handles.push(contents.handle);
        }
        let (tensors, copies) = catalogue::merge(&packs, &files, listed)?;
        let shadowed = copies
            .into_iter()
            .map(|(tensor, file)| Shadowed {
                tensor,
                file: files[file].path.to_path_buf(),
            })
            .collect();
        Ok(Self {
            path: path.to_owned(),
            files,
            config,
            shadowed,
            metadata,
            handles,
            tensors,
        })
    }

    /// The open file at this index, where the checkpoint was opened for rows.
    pub(crate) fn handle(&self, file: usize) -> Option<Arc<File>> {
        self.handles.get(file)?.clone()
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<TensorInfo<'_>> {
        self.copies(name).first().copied()
    }

    /// Every tensor called `name`: more than one only where the index names none of them.
    pub(crate) fn copies(&self, name: &str) -> Vec<TensorInfo<'_>> {
        let records = self.tensors.find(name);
        records.iter().map(|record| self.info(record)).collect()
    }

    /// Every tensor, in the order of their names. A name is there twice only where the index
    /// leaves it out and several files have it.
    pub fn tensors(&self) -> impl Iterator<Item = (String, TensorInfo<'_>)> {
        let mut cursor = self.tensors.cursor();
        std::iter::from_fn(move || {
            let (name, record) = cursor.next()?;
            Some((name.to_owned(), self.info(&record)))
        })
    }

    /// Calls `visit` with every tensor in the order of their names, without keeping a name.
    pub(crate) fn each_tensor<'a>(&'a self, mut visit: impl FnMut(&str, TensorInfo<'a>)) {
        let mut cursor = self.tensors.cursor();
        while let Some((name, record)) = cursor.next() {
            visit(name, self.info(&record));
        }
    }

    fn info(&self, record: &Record) -> TensorInfo<'_> {
        let (dtype, shape) = self.tensors.kind(record.kind);
        TensorInfo {
            dtype,
            shape,
            file: record.file,
            offset: record.offset,
            bytes: tensor_bytes(dtype, shape)
                .unwrap_or_else(|problem| unreachable!("its header was accepted: {problem}")),
            listing: record.listing,
        }
    }

    /// How many tensors there are.
    pub fn tensor_count(&self) -> usize {
        self.tensors.len()
    }

    /// Short entries of the `__metadata__` of the file at this index.
    pub fn metadata(&self, file: usize) -> Option<&HashMap<String, String>> {
        self.metadata.get(file)?.as_ref()
    }

    /// The bytes of a small tensor, such as a scale or a hash constant; more than `max_bytes` is
    /// refused before anything is read.
    pub fn read_tensor(&self, name: &str, max_bytes: u64) -> Result<Vec<u8>> {
        let tensor = self
            .tensor(name)
            .ok_or_else(|| Error::checkpoint(format!("there is no tensor {name:?}"), &self.path))?;
        let file = &self.files[tensor.file];
        if tensor.bytes > max_bytes {
            return Err(Error::checkpoint(
                format!(
                    "tensor {name:?} has {} bytes where at most {max_bytes} were expected",
                    tensor.bytes
                ),
                &file.path,
            ));
        }
        reading::bytes(file, tensor.offset, tensor.bytes, name)
    }
}

#[cfg(test)]
mod tests;
