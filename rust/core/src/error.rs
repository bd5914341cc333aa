//! One error type for the whole core.
//!
//! A failure keeps what the kernel said (errno) and where it happened ([`Place`]), so that the
//! binding can raise the exception Python has a word for, with `path`, `table`, `row`, `position`
//! and `offset` on it. Messages are written for the person who has to act: they name the file,
//! tensor, row or id, and say what to do where that is known.

use std::io;
use std::path::{Path, PathBuf};

/// Result with the core's [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Where a failure happened; what is not known is `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    /// File that was being read.
    pub path: Option<PathBuf>,
    /// Table being served.
    pub table: Option<String>,
    /// Row id inside the table.
    pub row: Option<u64>,
    /// Position of the id in the flattened request.
    pub position: Option<u64>,
    /// Byte offset inside `path`.
    pub offset: Option<u64>,
}

/// Everything that can go wrong in the core.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel refused an operation.
    #[error("{doing}: {}{}", describe_errno(*errno), at(place))]
    Io {
        /// What was being attempted, e.g. `cannot open`.
        doing: String,
        /// The kernel's error number.
        errno: i32,
        /// Where.
        place: Box<Place>,
    },
    /// Files the checkpoint names are not on disk; every one of them is listed.
    #[error("{message}")]
    Missing {
        /// The whole sentence, hint included.
        message: String,
        /// Every missing file.
        paths: Vec<PathBuf>,
    },
    /// A file contradicts itself, its index or its configuration.
    #[error("{message}{}", at(place))]
    Checkpoint {
        /// What is contradictory, naming the tensor.
        message: String,
        /// Where.
        place: Box<Place>,
    },
    /// An id outside the table.
    #[error(
        "row id {id} at position {position} is outside table {table:?} with {rows} rows (valid ids: 0 to {}){}",
        rows.saturating_sub(1),
        padding(*id)
    )]
    Id {
        /// The id as given.
        id: i128,
        /// Its position in the flattened request.
        position: u64,
        /// Rows in the table.
        rows: u64,
        /// The table's name.
        table: String,
    },
    /// A value the caller passed cannot be used.
    #[error("{message}")]
    Value {
        /// What is wrong and what would be right.
        message: String,
        /// Where, if the value concerns a place.
        place: Box<Place>,
    },
    /// An argument of the wrong type or dtype.
    #[error("{0}")]
    Type(String),
    /// The deadline passed before all rows were there.
    #[error("{message}{}", at(place))]
    Timeout {
        /// What was still missing.
        message: String,
        /// Where.
        place: Box<Place>,
    },
    /// The caller gave up (a signal handler raised, or the ticket was cancelled).
    #[error("cancelled before all rows were read")]
    Cancelled,
}

impl Error {
    /// What ends a call in a child that was forked inside it, by a callback or a signal handler.
    pub fn forked() -> Self {
        Self::value(
            "the process forked while this call was running; the rows come in the parent, so call \
             again in the child",
        )
    }

    /// A kernel error on `path`.
    pub fn io(doing: impl Into<String>, source: &io::Error, path: &Path) -> Self {
        Self::os(doing, source.raw_os_error().unwrap_or(libc::EIO), path)
    }

    /// A kernel error number on `path`.
    pub fn os(doing: impl Into<String>, errno: i32, path: &Path) -> Self {
        Self::Io {
            doing: doing.into(),
            errno,
            place: Box::new(Place {
                path: Some(path.to_owned()),
                ..Place::default()
            }),
        }
    }

    /// A file that contradicts itself or its neighbours.
    pub fn checkpoint(message: impl Into<String>, path: &Path) -> Self {
        Self::Checkpoint {
            message: message.into(),
            place: Box::new(Place {
                path: Some(path.to_owned()),
                ..Place::default()
            }),
        }
    }

    /// An unusable argument.
    pub fn value(message: impl Into<String>) -> Self {
        Self::Value {
            message: message.into(),
            place: Box::default(),
        }
    }

    /// The place this error carries, for filling in what an outer layer knows.
    pub fn place_mut(&mut self) -> Option<&mut Place> {
        match self {
            Self::Io { place, .. }
            | Self::Checkpoint { place, .. }
            | Self::Value { place, .. }
            | Self::Timeout { place, .. } => Some(place),
            Self::Missing { .. } | Self::Id { .. } | Self::Type(_) | Self::Cancelled => None,
        }
    }

    /// Names the table this error belongs to, if it does not carry one yet.
    #[must_use]
    pub fn in_table(mut self, table: &str) -> Self {
        if let Some(place) = self.place_mut() {
            place.table.get_or_insert_with(|| table.to_owned());
        }
        self
    }

    /// Names the row and its position in the request.
    #[must_use]
    pub fn at_row(mut self, row: u64, position: u64) -> Self {
        if let Some(place) = self.place_mut() {
            place.row = Some(row);
            place.position = Some(position);
        }
        self
    }

    /// Names the byte offset.
    #[must_use]
    pub fn at_offset(mut self, offset: u64) -> Self {
        if let Some(place) = self.place_mut() {
            place.offset = Some(offset);
        }
        self
    }
}

fn describe_errno(errno: i32) -> String {
    // `io::Error` ends with "(os error N)"; the number travels in `errno`, so it is not repeated.
    let text = io::Error::from_raw_os_error(errno).to_string();
    text.split(" (os error").next().unwrap_or(&text).to_owned()
}

/// What to do about an id that looks like padding: those beyond the table are mistakes.
fn padding(id: i128) -> String {
    if id < 0 {
        format!("; pass pad_id={id} if this id marks padding")
    } else {
        String::new()
    }
}

/// ", in table .. row .. of file .. at offset ..": the parts of a place that are known.
fn at(place: &Place) -> String {
    use std::fmt::Write as _;
    let mut text = String::new();
    if let Some(table) = &place.table {
        let _ = write!(text, ", table {table:?}");
    }
    if let Some(row) = place.row {
        let _ = write!(text, ", row {row}");
    }
    if let Some(position) = place.position {
        let _ = write!(text, " (position {position})");
    }
    if let Some(path) = &place.path {
        let _ = write!(text, ", file {}", path.display());
    }
    if let Some(offset) = place.offset {
        let _ = write!(text, ", offset {offset}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_names_everything_that_is_known() {
        let error = Error::os("cannot read", libc::EIO, Path::new("a.safetensors"))
            .in_table("t")
            .at_row(7, 3)
            .at_offset(4096);
        assert_eq!(
            error.to_string(),
            "cannot read: Input/output error, table \"t\", row 7 (position 3), \
             file a.safetensors, offset 4096"
        );
    }

    #[test]
    fn id_error_names_id_position_and_rows() {
        let error = Error::Id {
            id: -1,
            position: 4,
            rows: 10,
            table: "t".into(),
        };
        let text = error.to_string();
        assert!(text.contains("row id -1 at position 4"));
        assert!(text.contains("10 rows"));
        assert!(text.contains("pad_id=-1"));
        let error = Error::Id {
            id: 10,
            position: 4,
            rows: 10,
            table: "t".into(),
        };
        assert!(!error.to_string().contains("pad_id"), "no padding: {error}");
    }
}
