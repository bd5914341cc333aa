//! Bytes of a checkpoint's files: headers at opening, small tensors and configuration later.
//! Every file is opened for one purpose and closed again, unless its rows are wanted next.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;

use serde_json::Value;

use super::catalogue;
use super::location::{Found, require_regular};
use super::packed::Packed;
use super::{CheckpointFile, Identity};
use crate::error::{Error, Result};
use crate::header;
use crate::system;

/// Longest `config.json` read.
const MAX_CONFIG_BYTES: u64 = 64 << 20;

/// Longest value of a `__metadata__` entry that is kept: settings are short, training logs are not.
const MAX_METADATA_VALUE: usize = 256;

/// Threads that read headers; parsing is the larger part of the work.
const MAX_THREADS: usize = 4;

/// Below this many files a second thread costs more than it saves.
const FILES_PER_THREAD: usize = 8;

/// Bytes of a file read at first.
const FIRST_READ: usize = 4096;

/// Bytes of the header's length, which come before it.
const PREFIX: usize = 8;

/// What a file's header says, in compact form.
#[derive(Debug)]
pub(super) struct Contents {
    pub(super) pack: Packed,
    pub(super) metadata: Option<HashMap<String, String>>,
    /// The file itself, where it was to stay open.
    pub(super) handle: Option<Arc<File>>,
}

/// Opens a regular file read-only; never waits for the other end of a pipe.
fn open(path: &Path, doing: &str) -> Result<(File, Identity)> {
    let refuse = |error: std::io::Error| Error::io(doing, &error, path);
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) => {
            // A socket refuses to be opened with an error that names no socket.
            if let Ok(status) = std::fs::metadata(path) {
                require_regular(&status, path)?;
            }
            return Err(refuse(error));
        }
    };
    let status = file.metadata().map_err(refuse)?;
    require_regular(&status, path)?;
    let identity = Identity::of(&status);
    Ok((file, identity))
}

/// Headers of a directory's files, read on a few threads while an index says which are wanted.
///
/// A header costs some microseconds and an index a hundred or more, so waiting for the one before
/// the other begins would leave all threads but one with nothing to do. What turns out not to be
/// wanted, or could not be read, is as if it had never been looked at.
pub(super) struct Early {
    found: Vec<Found>,
    keep: bool,
    next: AtomicUsize,
    read: Vec<OnceLock<(Identity, Contents)>>,
}

impl Early {
    /// For `found`, with nothing read yet. With `keep` the files stay open.
    pub(super) fn new(found: Vec<Found>, keep: bool) -> Self {
        Self {
            read: found.iter().map(|_| OnceLock::new()).collect(),
            found,
            keep,
            next: AtomicUsize::new(0),
        }
    }

    /// Runs `body` while other threads read, where that is worth it, and hands it what they share.
    pub(super) fn around<T>(self, body: impl FnOnce(&Self) -> T) -> (T, Self) {
        let helpers = threads_for(self.found.len()) - 1;
        let outcome = thread::scope(|scope| {
            for _ in 0..helpers {
                // A refused thread is no failure: the caller does the work that is left.
                drop(thread::Builder::new().spawn_scoped(scope, || self.work()));
            }
            let outcome = body(&self);
            self.next.store(self.found.len(), Ordering::Relaxed);
            outcome
        });
        (outcome, self)
    }

    /// Reads headers until none is left.
    pub(super) fn work(&self) {
        let mut buffer = Vec::new();
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(file) = self.found.get(number) else {
                return;
            };
            // An error is met again by whoever wants this file.
            if let Ok(read) = header_of(file, number, self.keep, &mut buffer) {
                drop(self.read[number].set(read));
            }
        }
    }

    /// What was read of `file`, if it has the same number here and comes from the same listing.
    fn take(&mut self, number: usize, file: &Found) -> Option<(Identity, Contents)> {
        let same = self
            .found
            .get(number)
            .is_some_and(|found| Arc::ptr_eq(&found.path, &file.path));
        if same { self.read[number].take() } else { None }
    }
}

/// Reads the headers of all files that `early` has not, on a few threads when there are many;
/// results and the first error are those of reading them in order. With `keep` the files stay open,
/// unless that is more than the process may hold.
pub(super) fn headers(
    found: Vec<Found>,
    early: Option<Early>,
    keep: bool,
) -> Result<(Vec<CheckpointFile>, Vec<Contents>)> {
    let read = match read_headers(&found, early, keep) {
        Err(Error::Io { errno, .. }) if keep && errno == libc::EMFILE => {
            read_headers(&found, None, false)
        }
        result => result,
    }?;
    let files = found.into_iter().zip(read);
    let files = files.map(|(found, (identity, content))| {
        let file = CheckpointFile {
            path: found.path,
            resolved: found.resolved,
            identity,
        };
        (file, content)
    });
    Ok(files.unzip())
}

/// Threads that read so many headers, the calling one included.
fn threads_for(files: usize) -> usize {
    let wanted = files.div_ceil(FILES_PER_THREAD).min(MAX_THREADS);
    if wanted > 1 {
        wanted.min(system::processors())
    } else {
        1
    }
}

fn read_headers(
    found: &[Found],
    early: Option<Early>,
    keep: bool,
) -> Result<Vec<(Identity, Contents)>> {
    let mut early = early;
    let mut read: Vec<_> = found
        .iter()
        .enumerate()
        .map(|(number, file)| early.as_mut()?.take(number, file))
        .collect();
    let left: Vec<_> = (0..found.len())
        .filter(|&number| read[number].is_none())
        .collect();
    for (number, result) in read_these(found, &left, keep) {
        read[number] = Some(result?);
    }
    Ok(read.into_iter().flatten().collect())
}

/// Reads the headers of the files with these numbers; results come in order, none after an error.
fn read_these(
    found: &[Found],
    numbers: &[usize],
    keep: bool,
) -> Vec<(usize, Result<(Identity, Contents)>)> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut buffer = Vec::new();
        let mut done = Vec::new();
        loop {
            let Some(&number) = numbers.get(next.fetch_add(1, Ordering::Relaxed)) else {
                return done;
            };
            let result = header_of(&found[number], number, keep, &mut buffer);
            let failed = result.is_err();
            done.push((number, result));
            if failed {
                // Files before this one are taken by now, those after it no longer matter.
                next.fetch_max(numbers.len(), Ordering::Relaxed);
            }
        }
    };
    let mut results = thread::scope(|scope| {
        // A refused thread is no failure: this one does the work that is left.
        let helpers: Vec<_> = (1..threads_for(numbers.len()))
            .map_while(|_| thread::Builder::new().spawn_scoped(scope, work).ok())
            .collect();
        let mut results = work();
        for helper in helpers {
            match helper.join() {
                Ok(more) => results.extend(more),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        results
    });
    results.sort_unstable_by_key(|&(number, _)| number);
    results
}

fn header_of(
    file: &Found,
    number: usize,
    keep: bool,
    buffer: &mut Vec<u8>,
) -> Result<(Identity, Contents)> {
    read_header(file, number, keep, buffer).map_err(|error| match error {
        Error::Checkpoint { message, place } if file.beside_index => Error::Checkpoint {
            message: format!(
                "{message} (the index does not name this file: if it is no part of the \
                 checkpoint, move it elsewhere)"
            ),
            place,
        },
        other => other,
    })
}

fn read_header(
    file: &Found,
    number: usize,
    keep: bool,
    buffer: &mut Vec<u8>,
) -> Result<(Identity, Contents)> {
    let path = &file.path;
    let (handle, identity) = open(&file.resolved, "cannot open")?;
    if identity.len < header::LENGTH_BYTES {
        return Err(header::too_short(identity.len, path));
    }
    let refuse = |error: std::io::Error| read_failure(&error, path, 0);
    // One read brings the length and most headers whole.
    buffer.clear();
    buffer.resize(FIRST_READ, 0);
    let first = usize::try_from(identity.len).map_or(FIRST_READ, |len| len.min(FIRST_READ));
    handle
        .read_exact_at(&mut buffer[..first], 0)
        .map_err(refuse)?;
    let mut first8 = [0; PREFIX];
    first8.copy_from_slice(&buffer[..PREFIX]);
    let length = header::header_length(first8, identity.len, path)?;
    let length = usize::try_from(length)
        .map_err(|_| Error::checkpoint("the header does not fit this machine", path))?;
    let end = PREFIX + length;
    if end > first {
        buffer.resize(end, 0);
        handle
            .read_exact_at(&mut buffer[first..end], first as u64)
            .map_err(refuse)?;
    }
    let header = header::parse(&buffer[PREFIX..end], identity.len, path)?;
    let metadata = header.metadata.map(|mut entries| {
        entries.retain(|_, value| value.len() <= MAX_METADATA_VALUE);
        entries
    });
    let pack = catalogue::pack(&header.tensors, number);
    // Rows are in tensors of two dimensions; a file that has none is better closed here, by as many
    // threads as read.
    let may_hold_rows = header.tensors.iter().any(|tensor| tensor.shape.len() > 1);
    let handle = (keep && may_hold_rows).then(|| Arc::new(handle));
    let contents = Contents {
        pack,
        metadata,
        handle,
    };
    Ok((identity, contents))
}

/// What a file that was refused says of its own size.
pub(super) struct Promise {
    /// Bytes it should have; at least so many where the header is cut off.
    pub(super) expected: u64,
    /// Bytes it has.
    pub(super) found: u64,
    /// Bytes of tensors in it, where the header is whole.
    pub(super) data: Option<u64>,
}

/// What a file's header says of its size; nothing else in it is believed.
pub(super) fn promise(path: &Path) -> Option<Promise> {
    #[derive(serde::Deserialize)]
    struct Tensor {
        data_offsets: (u64, u64),
    }
    let (handle, identity) = open(path, "cannot open").ok()?;
    let mut first8 = [0; PREFIX];
    handle.read_exact_at(&mut first8, 0).ok()?;
    let length = u64::from_le_bytes(first8);
    if !(1..=header::MAX_HEADER_BYTES).contains(&length) {
        return None;
    }
    let data = header::LENGTH_BYTES + length;
    if identity.len < data {
        return Some(Promise {
            expected: data,
            found: identity.len,
            data: None,
        });
    }
    let mut text = vec![0; usize::try_from(length).ok()?];
    handle.read_exact_at(&mut text, header::LENGTH_BYTES).ok()?;
    let entries: HashMap<String, Value> = serde_json::from_slice(&text).ok()?;
    let end = entries
        .into_iter()
        .filter(|(name, _)| name != "__metadata__")
        .filter_map(|(_, entry)| serde_json::from_value::<Tensor>(entry).ok())
        .map(|tensor| tensor.data_offsets.1)
        .max()
        .unwrap_or(0);
    Some(Promise {
        expected: data.checked_add(end)?,
        found: identity.len,
        data: Some(end),
    })
}

fn read_failure(error: &std::io::Error, path: &Path, offset: u64) -> Error {
    if error.kind() == ErrorKind::UnexpectedEof {
        Error::checkpoint("the file became shorter while it was being read", path).at_offset(offset)
    } else {
        Error::io("cannot read", error, path).at_offset(offset)
    }
}

/// Reads `bytes` bytes of a file that must still be the one that was opened.
pub(super) fn bytes(
    file: &CheckpointFile,
    offset: u64,
    bytes: u64,
    tensor: &str,
) -> Result<Vec<u8>> {
    let (handle, identity) = open(&file.resolved, "cannot open")?;
    if identity != file.identity {
        return Err(Error::checkpoint(
            format!(
                "the file has changed since the checkpoint was opened, so tensor {tensor:?} cannot be read; open it again"
            ),
            &file.path,
        ));
    }
    let length = usize::try_from(bytes).map_err(|_| {
        Error::checkpoint(
            format!("tensor {tensor:?} does not fit this machine"),
            &file.path,
        )
    })?;
    let mut buffer = vec![0; length];
    handle
        .read_exact_at(&mut buffer, offset)
        .map_err(|error| read_failure(&error, &file.path, offset))?;
    Ok(buffer)
}

/// The text of a small file; `None` when there is no such file.
pub(super) fn small_text(path: &Path, max_bytes: u64, what: &str) -> Result<Option<String>> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io(format!("cannot open {what}"), &error, path)),
        Ok(_) => {}
    }
    // A link that leads nowhere is an error, not an absent file.
    super::location::status(path)?;
    let (handle, identity) = open(path, &format!("cannot open {what}"))?;
    if identity.len > max_bytes {
        return Err(Error::checkpoint(
            format!(
                "the {what} has {} bytes; the limit is {max_bytes}",
                identity.len
            ),
            path,
        ));
    }
    // One more than there should be, so that the end is seen without another allocation.
    let mut bytes = Vec::with_capacity(usize::try_from(identity.len).unwrap_or(0) + 1);
    (&handle)
        .take(max_bytes)
        .read_to_end(&mut bytes)
        .map_err(|error| Error::io(format!("cannot read {what}"), &error, path))?;
    String::from_utf8(bytes).map(Some).map_err(|error| {
        Error::checkpoint(
            format!(
                "the {what} is not UTF-8 text from byte {} on",
                error.utf8_error().valid_up_to()
            ),
            path,
        )
    })
}

/// The configuration at `path`; `None` when there is none.
pub(super) fn config(path: &Path) -> Result<Option<Value>> {
    let Some(text) = small_text(path, MAX_CONFIG_BYTES, "configuration")? else {
        return Ok(None);
    };
    match parse_config(&text) {
        Ok(config @ Value::Object(_)) => Ok(Some(config)),
        Ok(_) => Err(Error::checkpoint(
            "the configuration is not a JSON object",
            path,
        )),
        Err(error) => Err(Error::checkpoint(
            format!("the configuration is not valid JSON: {error}"),
            path,
        )),
    }
}

/// Parses the text of a `config.json`.
pub(crate) fn parse_config(text: &str) -> serde_json::Result<Value> {
    serde_json::from_str(text)
        .or_else(|error| serde_json::from_str(&without_special_numbers(text)).map_err(|_| error))
}

/// Replaces `NaN` and `Infinity`, which Python's JSON writer produces and JSON does not have, by
/// null. No field that engram reads holds them.
fn without_special_numbers(text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    let mut in_string = false;
    while let Some(character) = rest.chars().next() {
        let special = ["-Infinity", "Infinity", "NaN"]
            .into_iter()
            .find(|word| !in_string && rest.starts_with(word));
        let taken = if let Some(word) = special {
            result.push_str("null");
            word.len()
        } else if in_string && character == '\\' {
            let escaped = rest[1..].chars().next().map_or(0, char::len_utf8);
            result.push_str(&rest[..=escaped]);
            1 + escaped
        } else {
            in_string ^= character == '"';
            result.push(character);
            character.len_utf8()
        };
        rest = &rest[taken..];
    }
    result
}
