//! Core errors as Python exceptions: builtin classes where Python has a word for the failure,
//! `engram.CheckpointError` for files that lie. Every exception carries `path`, `table`, `row`,
//! `position` and `offset` (None where unknown).

use std::path::PathBuf;

use engram_core::{Error, Place};
use pyo3::create_exception;
use pyo3::exceptions::{
    PyFileNotFoundError, PyIndexError, PyOSError, PyTimeoutError, PyTypeError, PyValueError,
};
use pyo3::prelude::*;

create_exception!(
    engram,
    CheckpointError,
    PyValueError,
    "A checkpoint's files contradict themselves, their index or their configuration."
);

/// The exception for `error`, attributes set.
pub(crate) fn to_py(py: Python<'_>, error: &Error) -> PyErr {
    let text = error.to_string();
    let (exception, place) = match error {
        Error::Io { errno, place, .. } => {
            let path = place.path.clone().map(PathBuf::into_os_string);
            (PyOSError::new_err((*errno, text, path)), (**place).clone())
        }
        Error::Missing { paths, .. } => {
            let path = paths.first().cloned();
            let name = path.clone().map(PathBuf::into_os_string);
            let exception = PyFileNotFoundError::new_err((ENOENT, text, name));
            (
                exception,
                Place {
                    path,
                    ..Place::default()
                },
            )
        }
        Error::Checkpoint { place, .. } => (CheckpointError::new_err(text), (**place).clone()),
        Error::Id {
            id,
            position,
            table,
            ..
        } => {
            let place = Place {
                table: Some(table.clone()),
                position: Some(*position),
                ..Place::default()
            };
            let exception = PyIndexError::new_err(text);
            set(py, &exception, "row", *id);
            return with_place(py, exception, &place, true);
        }
        Error::Value { place, .. } => (PyValueError::new_err(text), (**place).clone()),
        Error::Type(_) => (PyTypeError::new_err(text), Place::default()),
        Error::Timeout { place, .. } => (PyTimeoutError::new_err(text), (**place).clone()),
        Error::Cancelled => (cancelled(py, text), Place::default()),
        _ => (PyValueError::new_err(text), Place::default()),
    };
    with_place(py, exception, &place, false)
}

const ENOENT: i32 = 2;

/// A `ValueError` about an argument, attributes set.
pub(crate) fn value_error(py: Python<'_>, text: &str) -> PyErr {
    to_py(py, &Error::value(text))
}

fn with_place(py: Python<'_>, exception: PyErr, place: &Place, row_is_set: bool) -> PyErr {
    let path = place.path.as_ref().map(|path| path.as_os_str());
    set(py, &exception, "path", path);
    set(py, &exception, "table", place.table.as_deref());
    if !row_is_set {
        set(py, &exception, "row", place.row);
    }
    set(py, &exception, "position", place.position);
    set(py, &exception, "offset", place.offset);
    exception
}

fn set<'py>(py: Python<'py>, exception: &PyErr, name: &str, value: impl IntoPyObject<'py>) {
    // Every exception class used here has an instance dictionary, so this cannot fail; if it did,
    // the exception itself still matters more than its attribute.
    drop(exception.value(py).setattr(name, value));
}

fn cancelled(py: Python<'_>, text: String) -> PyErr {
    let class = py
        .import("concurrent.futures")
        .and_then(|module| module.getattr("CancelledError"))
        .and_then(|class| class.call1((text,)));
    match class {
        Ok(instance) => PyErr::from_value(instance),
        Err(error) => error,
    }
}

/// `map_err` for a core result.
pub(crate) trait OrRaise<T> {
    /// The value, or the core's error as a Python exception.
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for engram_core::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| to_py(py, &error))
    }
}
