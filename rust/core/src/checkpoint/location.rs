//! Which files a path stands for: directory listings, symbolic links and names from an index.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::ffi::{OsStr, OsString};
use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Result};

const INDEX_SUFFIX: &[u8] = b".safetensors.index.json";

/// A file to be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    /// As reached from the argument.
    pub(super) path: Arc<Path>,
    /// With every link followed.
    pub(super) resolved: Arc<Path>,
    /// Whether an index beside it leaves it out.
    pub(super) beside_index: bool,
}

impl Found {
    /// A file the caller named: its links may lead anywhere.
    pub(super) fn by_argument(path: &Path) -> Result<Self> {
        Ok(Self {
            path: path.into(),
            resolved: follow(path)?.into(),
            beside_index: false,
        })
    }

    /// The same file, left out by the index beside it.
    pub(super) fn beside_index(self) -> Self {
        Self {
            beside_index: true,
            ..self
        }
    }
}

/// What is at `path`, links followed.
pub(super) fn status(path: &Path) -> Result<Metadata> {
    fs::metadata(path).map_err(|error| {
        if let Some(target) = dangling(path) {
            return missing_targets(&[(path.to_owned(), target)]);
        }
        let doing = if error.kind() == ErrorKind::NotFound && looks_like_a_repository(path) {
            "cannot open checkpoint (engram reads local files: if this is the name of a hub \
             repository, download it first and pass the directory)"
        } else {
            "cannot open checkpoint"
        };
        Error::io(doing, &error, path)
    })
}

/// `owner/name`, the form of a repository on a model hub.
fn looks_like_a_repository(path: &Path) -> bool {
    let mut parts = path.components();
    let plain = |part: Option<Component<'_>>| matches!(part, Some(Component::Normal(_)));
    plain(parts.next())
        && plain(parts.next())
        && parts.next().is_none()
        && path
            .extension()
            .is_none_or(|extension| extension != "safetensors" && extension != "json")
}

/// Refuses what is not a regular file, by name of what it is.
pub(super) fn require_regular(status: &Metadata, path: &Path) -> Result<()> {
    let kind = status.file_type();
    if kind.is_file() {
        return Ok(());
    }
    let what = if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a named pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    };
    Err(Error::checkpoint(
        format!("rows are read in place from regular files, and this is {what}"),
        path,
    ))
}

fn follow(path: &Path) -> Result<PathBuf> {
    fs::canonicalize(path).map_err(|error| match dangling(path) {
        Some(target) => missing_targets(&[(path.to_owned(), target)]),
        None => Error::io("cannot resolve", &error, path),
    })
}

/// The target of a link, or of the last link in a chain, that leads nowhere.
fn dangling(path: &Path) -> Option<PathBuf> {
    /// The kernel follows no more links than this either.
    const MOST_LINKS: usize = 40;
    let mut here = path.to_owned();
    for followed in 0..MOST_LINKS {
        match fs::symlink_metadata(&here) {
            Ok(status) if status.is_symlink() => {
                let target = fs::read_link(&here).ok()?;
                here = here.parent().unwrap_or(Path::new("")).join(target);
            }
            Err(error) if error.kind() == ErrorKind::NotFound && followed > 0 => return Some(here),
            _ => return None,
        }
    }
    None
}

fn missing_targets(links: &[(PathBuf, PathBuf)]) -> Error {
    let list: Vec<String> = links
        .iter()
        .map(|(link, target)| format!("{} -> {}", link.display(), target.display()))
        .collect();
    Error::Missing {
        message: format!(
            "symbolic link{} to a file that does not exist: {}. A hub cache keeps the files in its \
             blobs directory: mount or copy blobs together with snapshots, or copy with links \
             followed (cp -L)",
            if links.len() == 1 { "" } else { "s" },
            list.join(", ")
        ),
        paths: links.iter().map(|(link, _)| link.clone()).collect(),
    }
}

/// A checkpoint directory.
pub(super) struct Directory {
    path: PathBuf,
    resolved: PathBuf,
    /// Where the files are if this is a snapshot in a hub cache.
    blobs: Option<PathBuf>,
    entries: OnceCell<Vec<Entry>>,
}

/// A name in a directory.
struct Entry {
    name: OsString,
    /// The safetensors file of that name, where the listing itself says that it is a regular file: no
    /// link, nothing to ask about.
    file: Option<Found>,
}

impl Directory {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let resolved = follow(path)?;
        let blobs = resolved
            .ancestors()
            .skip(1)
            .find(|ancestor| ancestor.file_name() == Some(OsStr::new("snapshots")))
            .and_then(|snapshots| fs::canonicalize(snapshots.with_file_name("blobs")).ok());
        Ok(Self {
            path: path.to_owned(),
            resolved,
            blobs,
            entries: OnceCell::new(),
        })
    }

    /// As reached from the argument.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// What the directory lists, once, sorted by name; hidden names are left out (among them the
    /// `._*` companions that some systems write beside each file).
    fn entries(&self) -> Result<&[Entry]> {
        if let Some(entries) = self.entries.get() {
            return Ok(entries);
        }
        let fail = |error: std::io::Error| Error::io("cannot list directory", &error, &self.path);
        let mut entries = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            let name = entry.file_name();
            if !name.as_bytes().starts_with(b".") {
                let regular = entry.file_type().is_ok_and(|kind| kind.is_file());
                let file = (regular && is_safetensors(&name)).then(|| self.found(&name));
                entries.push(Entry { name, file });
            }
        }
        entries.sort_unstable_by(|left, right| left.name.cmp(&right.name));
        Ok(self.entries.get_or_init(|| entries))
    }

    /// Names in the directory that `keep` accepts, sorted.
    fn names(&self, keep: impl Fn(&OsStr) -> bool) -> Result<Vec<PathBuf>> {
        let entries = self.entries()?.iter();
        let kept = entries.filter(|entry| keep(&entry.name));
        Ok(kept.map(|entry| PathBuf::from(&entry.name)).collect())
    }

    /// The safetensors file of that name, if the listing says that it is a regular file right in the
    /// directory.
    fn listed(&self, name: &OsStr) -> Option<Found> {
        let entries = self.entries().ok()?;
        let place = entries
            .binary_search_by(|entry| entry.name.as_os_str().cmp(name))
            .ok()?;
        entries[place].file.clone()
    }

    fn found(&self, name: &OsStr) -> Found {
        let path: Arc<Path> = self.path.join(name).into();
        let resolved = if self.path.as_os_str() == self.resolved.as_os_str() {
            Arc::clone(&path)
        } else {
            self.resolved.join(name).into()
        };
        Found {
            path,
            resolved,
            beside_index: false,
        }
    }

    /// The index of this directory, where there is one.
    pub(super) fn index(&self) -> Result<Option<PathBuf>> {
        let mut names = self.names(|name| name.as_bytes().ends_with(INDEX_SUFFIX))?;
        let usual = Path::new("model.safetensors.index.json");
        if names.iter().any(|name| name == usual) {
            return Ok(Some(self.path.join(usual)));
        }
        if names.len() > 1 {
            let list: Vec<_> = names
                .iter()
                .map(|name| name.display().to_string())
                .collect();
            return Err(Error::checkpoint(
                format!(
                    "several indices ({}): pass the path of the one to use",
                    list.join(", ")
                ),
                &self.path,
            ));
        }
        Ok(names.pop().map(|name| self.path.join(name)))
    }

    /// Names of every safetensors file of the directory, sorted.
    pub(super) fn safetensors_names(&self) -> Result<Vec<PathBuf>> {
        self.names(is_safetensors)
    }

    /// Every safetensors file of the directory that the listing says is a regular file, sorted by name.
    pub(super) fn regular_safetensors_files(&self) -> Result<Vec<Found>> {
        let entries = self.entries()?.iter();
        Ok(entries.filter_map(|entry| entry.file.clone()).collect())
    }

    /// Every safetensors file of the directory but those whose names are known; sub-directories are
    /// not searched.
    pub(super) fn safetensors_files(
        &self,
        is_known: impl Fn(&OsStr) -> bool,
    ) -> Result<Vec<Found>> {
        let mut found = Vec::new();
        for Entry { name, .. } in self.entries()? {
            if !is_safetensors(name) || is_known(name) {
                continue;
            }
            match self.locate(Path::new(name))? {
                Located::File(file) => found.push(file),
                Located::Dangling(target) => {
                    return Err(missing_targets(&[(self.path.join(name), target)]));
                }
                // A file that is absent was removed after the directory was listed.
                Located::Directory | Located::Absent => {}
            }
        }
        Ok(found)
    }

    /// The files an index names, in the order of `names`; all that are missing are reported at once.
    pub(super) fn named_files(&self, names: &[Cow<'_, str>], index: &Path) -> Result<Vec<Found>> {
        let mut found = Vec::with_capacity(names.len());
        let mut absent = Vec::new();
        let mut links = Vec::new();
        for name in names {
            // A file may really be called so, and is refused below all the same.
            if !name.contains('\\')
                && let Some(file) = self.listed(OsStr::new(name.as_ref()))
            {
                found.push(file);
                continue;
            }
            let relative = relative(name).map_err(|problem| {
                Error::checkpoint(
                    format!("the index names the file {name:?}, which {problem}"),
                    index,
                )
            })?;
            match self.locate(&relative)? {
                Located::File(file) => found.push(file),
                Located::Directory => {
                    return Err(Error::checkpoint(
                        format!("the index names {name:?} as a file, and it is a directory"),
                        index,
                    ));
                }
                Located::Dangling(target) => links.push((self.path.join(relative), target)),
                Located::Absent => absent.push(self.path.join(relative)),
            }
        }
        if absent.is_empty() && links.is_empty() {
            return Ok(found);
        }
        if absent.is_empty() {
            return Err(missing_targets(&links));
        }
        absent.extend(links.into_iter().map(|(link, _)| link));
        let list: Vec<_> = absent
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        Err(Error::Missing {
            message: format!(
                "{} of the {} files that {} names are missing: {}. The download is incomplete: run \
                 it again before serving",
                absent.len(),
                names.len(),
                index.display(),
                list.join(", ")
            ),
            paths: absent,
        })
    }

    /// Follows the links of one file below the directory.
    pub(super) fn locate(&self, relative: &Path) -> Result<Located> {
        if let Some(file) = self.listed(relative.as_os_str()) {
            return Ok(Located::File(file));
        }
        let path = self.path.join(relative);
        let status = match fs::symlink_metadata(&path) {
            Ok(status) => status,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Located::Absent),
            Err(error) => return Err(Error::io("cannot open", &error, &path)),
        };
        if status.is_dir() {
            return Ok(Located::Directory);
        }
        let nested = relative.components().count() > 1;
        let resolved = if status.is_symlink() || nested {
            match fs::canonicalize(&path) {
                Ok(resolved) => resolved,
                Err(error) => match dangling(&path) {
                    Some(target) => return Ok(Located::Dangling(target)),
                    None => return Err(Error::io("cannot resolve", &error, &path)),
                },
            }
        } else {
            self.resolved.join(relative)
        };
        if status.is_symlink() && resolved.is_dir() {
            return Ok(Located::Directory);
        }
        let is_blob = self.blobs.is_some() && resolved.parent() == self.blobs.as_deref();
        if !resolved.starts_with(&self.resolved) && !is_blob {
            return Err(Error::checkpoint(
                format!(
                    "symbolic link to {}, outside the checkpoint directory {}: only a hub cache's \
                     own links (snapshots to blobs) may leave it, so pass the directory the files \
                     are in, or replace the link by the file",
                    resolved.display(),
                    self.resolved.display()
                ),
                &path,
            ));
        }
        Ok(Located::File(Found {
            path: path.into(),
            resolved: resolved.into(),
            beside_index: false,
        }))
    }

    /// The error for a directory without a safetensors file, with a guess at what was meant.
    pub(super) fn nothing_to_read(&self) -> Error {
        let has = |suffix: &str| {
            self.names(|name| name.as_bytes().ends_with(suffix.as_bytes()))
                .is_ok_and(|names| !names.is_empty())
        };
        let hint = if self.path.join("snapshots").is_dir() {
            "; this is the root of a hub cache entry: pass one of the directories in snapshots"
        } else if has(".gguf") {
            "; there are GGUF files, but engram reads safetensors: pass the original checkpoint"
        } else if has(".bin") || has(".pt") || has(".pth") {
            "; there are PyTorch files, but engram reads safetensors: convert them first"
        } else {
            "; sub-directories are not searched"
        };
        Error::Missing {
            message: format!("no .safetensors file in {}{hint}", self.path.display()),
            paths: vec![self.path.clone()],
        }
    }
}

fn is_safetensors(name: &OsStr) -> bool {
    Path::new(name).extension() == Some(OsStr::new("safetensors"))
}

/// What is at a name in a checkpoint directory.
pub(super) enum Located {
    File(Found),
    Directory,
    Dangling(PathBuf),
    Absent,
}

/// A file name from an index as a path below its directory, or what is wrong with it.
pub(super) fn relative(name: &str) -> std::result::Result<PathBuf, &'static str> {
    if name.contains('\\') {
        return Err("contains a backslash");
    }
    if name.contains('\0') {
        return Err("contains a NUL byte");
    }
    let mut path = PathBuf::new();
    for component in Path::new(name).components() {
        match component {
            Component::Normal(part) => path.push(part),
            Component::CurDir => {}
            Component::ParentDir => return Err("leaves the checkpoint directory"),
            Component::RootDir | Component::Prefix(_) => {
                return Err("is absolute; only files below the index's directory are read");
            }
        }
    }
    if path.extension() == Some(OsStr::new("safetensors")) {
        Ok(path)
    } else {
        Err("is no .safetensors file")
    }
}
