//! Whether a table's files still are what they were, and say the same whichever way they are read.

use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::path::PathBuf;
use std::sync::PoisonError;

use crate::buffer::PlaneSink;
use crate::checkpoint::{Identity, Shadowed};
use crate::error::{Error, Result};
use crate::file::OpenFile;
use crate::gather::{Control, Request, gather};
use crate::reader::Reader;
use crate::reread::Again;

/// What is wrong with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It was modified in place: rows may be new bytes.
    Overwritten,
    /// Another file lies at its path; the one that was opened is still served.
    Replaced,
    /// No file lies at its path; the one that was opened is still served.
    Removed,
    /// It has become shorter.
    Truncated,
    /// A row reads differently in two ways.
    Rotted,
    /// A row cannot be read.
    Unreadable,
}

impl Kind {
    /// Name in the Python API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Overwritten => "overwritten",
            Self::Replaced => "replaced",
            Self::Removed => "removed",
            Self::Truncated => "truncated",
            Self::Rotted => "rotted",
            Self::Unreadable => "unreadable",
        }
    }
}

/// Something wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// What kind.
    pub kind: Kind,
    /// The file.
    pub path: PathBuf,
    /// The row, where it is one row's.
    pub row: Option<u64>,
    /// Where in the file, where it is one place.
    pub offset: Option<u64>,
    /// The whole sentence.
    pub message: String,
}

/// What was looked at, and what was found.
#[derive(Debug, Clone, Default)]
pub struct Verification {
    /// Rows read twice.
    pub rows: u64,
    /// The two ways they were read in.
    pub ways: [String; 2],
    /// What is wrong: at most [`MOST`], files first.
    pub problems: Vec<Problem>,
    /// Problems found beyond those.
    pub more: u64,
    /// Second copies of tensors, which are never read.
    pub shadowed: Vec<Shadowed>,
}

/// Problems listed one by one.
pub const MOST: usize = 100;

/// Rows handled between two looks at the interrupt check.
const STEP: usize = 1024;

/// Largest sample whose rows are remembered, to be compared by the next verification.
const REMEMBERED: usize = 1 << 16;

impl Verification {
    fn add(&mut self, problem: Problem) {
        if self.problems.len() < MOST {
            self.problems.push(problem);
        } else {
            self.more += 1;
        }
    }
}

/// Looks at every file of `reader`, and reads `count` rows (all for `None`), spread evenly over the
/// table by `seed`, in two ways. `progress` is called with rows done and rows to do; an error from
/// it stops the work.
pub fn verify(
    reader: &Reader,
    count: Option<u64>,
    seed: u64,
    progress: &mut dyn FnMut(u64, u64) -> Result<()>,
) -> Result<Verification> {
    let mut again = Again::new(reader)?;
    let mut found = Verification {
        ways: [reader.runs(), again.name().to_owned()],
        shadowed: reader.shadowed().to_vec(),
        ..Verification::default()
    };
    for file in reader.files() {
        if let Some(problem) = changed(file) {
            found.add(problem);
        }
    }
    let rows = reader.table().rows();
    let total = count.unwrap_or(rows).min(rows);
    let mut ids = Vec::with_capacity(STEP);
    let mut done = 0;
    progress(0, total)?;
    while done < total {
        let end = total.min(done + STEP as u64);
        ids.clear();
        ids.extend((done..end).map(|index| sample(index, total, rows, seed)));
        let remember = usize::try_from(total).is_ok_and(|total| total <= REMEMBERED);
        compare(reader, &ids, &mut again, remember, &mut found)?;
        done = end;
        found.rows = done;
        progress(done, total)?;
    }
    Ok(found)
}

/// The row at `index` of a sample of `total` out of `rows`: one out of each of `total` equal parts.
fn sample(index: u64, total: u64, rows: u64, seed: u64) -> i64 {
    let part = |index: u64| u128::from(index) * u128::from(rows) / u128::from(total);
    let (first, end) = (part(index), part(index + 1));
    // SplitMix64's finaliser, which takes neighbouring numbers far apart.
    let mut mixed = (seed ^ index).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    let row = first + u128::from(mixed ^ (mixed >> 31)) % (end - first).max(1);
    i64::try_from(row).unwrap_or(i64::MAX)
}

/// What happened to a file since it was opened, by its metadata.
fn changed(file: &OpenFile) -> Option<Problem> {
    let problem = |kind, offset, message: String| Problem {
        kind,
        path: file.path().to_owned(),
        row: None,
        offset,
        message: format!("{}: {message}", file.path().display()),
    };
    let unreadable = |error: &io::Error| problem(Kind::Unreadable, None, error.to_string());
    let opened = file.identity();
    let now = match file.identity_now() {
        Ok(now) => now,
        Err(error) => return Some(unreadable(&error)),
    };
    let left = now.len.min(file.cut().unwrap_or(u64::MAX));
    if left < opened.len {
        let message = format!(
            "cut to {left} bytes while open, of {}; rows beyond are refused until it is put back and reopened",
            opened.len
        );
        return Some(problem(Kind::Truncated, Some(left), message));
    }
    if now != opened {
        let message = "modified in place while open; its rows may be new bytes".to_owned();
        return Some(problem(Kind::Overwritten, None, message));
    }
    match fs::metadata(file.path()).map(|metadata| Identity::of(&metadata)) {
        Ok(there) if there == opened => None,
        Ok(_) => {
            let message =
                "another file lies at its path; the old one is served until a reopen".to_owned();
            Some(problem(Kind::Replaced, None, message))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let message = "no file lies at its path; the one that was opened is still served";
            Some(problem(Kind::Removed, None, message.to_owned()))
        }
        Err(error) => Some(unreadable(&error)),
    }
}

/// The rows as they are served, plane by plane.
fn served(reader: &Reader, ids: &[i64]) -> Result<Vec<Vec<u8>>> {
    let planes = &reader.table().planes;
    let mut out: Vec<Vec<u8>> = planes
        .iter()
        .map(|plane| vec![0; plane.row_bytes() * ids.len()])
        .collect();
    let sinks = out
        .iter_mut()
        .zip(planes)
        .map(|(out, plane)| PlaneSink::new(out, 0, plane.row_bytes(), plane.row_bytes(), ids.len()))
        .collect::<Result<_>>()?;
    let request = Request {
        reader,
        ids,
        sinks,
        pad_id: None,
    };
    gather(&[request], &Control::NONE)?;
    Ok(out)
}

fn compare(
    reader: &Reader,
    ids: &[i64],
    again: &mut Again,
    remember: bool,
    found: &mut Verification,
) -> Result<()> {
    let out = match served(reader, ids) {
        Ok(out) => out,
        // One row that cannot be read must not hide the others.
        Err(Error::Io { .. }) if ids.len() > 1 => {
            for part in ids.chunks(ids.len().div_ceil(2)) {
                compare(reader, part, again, remember, found)?;
            }
            return Ok(());
        }
        Err(error @ Error::Io { .. }) => {
            found.add(unreadable(reader, ids[0], &error));
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    for (index, plane) in reader.table().planes.iter().enumerate() {
        let row_bytes = plane.row_bytes();
        for (&id, row) in ids.iter().zip(out[index].chunks(row_bytes.max(1))) {
            let span = plane.span(id.cast_unsigned());
            let file = &reader.files()[span.file];
            let problem = |kind, what: &str| Problem {
                kind,
                path: file.path().to_owned(),
                row: Some(id.cast_unsigned()),
                offset: Some(span.offset),
                message: format!(
                    "{}: row {id} of table {:?} ({} at offset {}): {what}",
                    file.path().display(),
                    reader.table().name,
                    plane.name().name(),
                    span.offset
                ),
            };
            match again.read(file, span.offset, row_bytes) {
                Ok(second) if second == row => {}
                Ok(_) => {
                    let what = format!(
                        "read as {} and as {} it differs",
                        found.ways[0], found.ways[1]
                    );
                    found.add(problem(Kind::Rotted, &what));
                    continue;
                }
                Err(error @ Error::Io { .. }) => {
                    found.add(unreadable(reader, id, &error));
                    continue;
                }
                Err(error) => return Err(error),
            }
            let mut hasher = DefaultHasher::new();
            row.hash(&mut hasher);
            let digest = hasher.finish();
            let mut digests = reader
                .digests()
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let key = (index, id.cast_unsigned());
            match digests.get(&key) {
                Some(&known) if known != digest => {
                    found.add(problem(
                        Kind::Overwritten,
                        "differs from what an earlier verification read",
                    ));
                }
                None if remember && digests.len() < 4 * REMEMBERED => {
                    digests.insert(key, digest);
                }
                _ => {}
            }
        }
    }
    Ok(())
}

fn unreadable(reader: &Reader, id: i64, error: &Error) -> Problem {
    let place = match error {
        Error::Io { place, .. } => (**place).clone(),
        _ => crate::error::Place::default(),
    };
    Problem {
        kind: Kind::Unreadable,
        path: place
            .path
            .unwrap_or_else(|| reader.files()[0].path().to_owned()),
        row: Some(id.cast_unsigned()),
        offset: place.offset,
        message: error.to_string(),
    }
}
