//! Tables as dictionaries, for the Python classes to wrap.

use std::path::PathBuf;

use engram_core::checkpoint::Checkpoint;
use engram_core::discover;
use engram_core::reader::Located;
use engram_core::table::{Table, dtype_name};
use pyo3::IntoPyObjectExt as _;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

use crate::errors::OrRaise as _;

/// Every table of the checkpoint at `path`, in layer order; with `plain` every other 2-D tensor too.
#[pyfunction]
pub(crate) fn tables(py: Python<'_>, path: PathBuf, plain: bool) -> PyResult<Bound<'_, PyList>> {
    let found = py
        .detach(|| {
            let checkpoint = Checkpoint::open(&path)?;
            let tables = discover::tables(&checkpoint, plain)?;
            Ok(tables
                .into_iter()
                .map(|table| Located::new(&checkpoint, table))
                .collect::<Vec<_>>())
        })
        .or_raise(py)?;
    let list = PyList::empty(py);
    for located in &found {
        list.append(describe(py, &located.table, &located.paths())?)?;
    }
    Ok(list)
}

/// One table; its pieces index `files`.
pub(crate) fn describe<'py>(
    py: Python<'py>,
    table: &Table,
    files: &[PathBuf],
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("name", &table.name)?;
    dict.set_item("family", table.family.name())?;
    dict.set_item("layer", table.layer)?;
    dict.set_item("rows", table.rows())?;
    dict.set_item("encoding", table.encoding.name())?;
    dict.set_item("logical_shape", &table.logical_shape)?;
    let constants = PyDict::new(py);
    for constant in &table.constants {
        constants.set_item(&constant.name, constant.value)?;
    }
    dict.set_item("constants", constants)?;
    let files: Vec<Bound<'py, PyAny>> = files
        .iter()
        .map(|file| file.as_os_str().into_bound_py_any(py))
        .collect::<PyResult<_>>()?;
    let planes = PyList::empty(py);
    for plane in &table.planes {
        let item = PyDict::new(py);
        item.set_item("name", plane.name().name())?;
        item.set_item("dtype", dtype_name(plane.dtype()))?;
        item.set_item("columns", plane.columns())?;
        item.set_item("row_bytes", plane.row_bytes())?;
        let pieces: Vec<_> = plane
            .pieces()
            .iter()
            .map(|piece| {
                (
                    PyString::new(py, &piece.tensor),
                    &files[piece.file],
                    piece.offset,
                    piece.first_row,
                    piece.rows,
                )
            })
            .collect();
        item.set_item("pieces", pieces)?;
        planes.append(item)?;
    }
    dict.set_item("planes", planes)?;
    dict.set_item("files", files)?;
    Ok(dict)
}

/// The tables that a model's configuration, the text of a `config.json`, describes.
#[pyfunction]
pub(crate) fn configured_tables<'py>(
    py: Python<'py>,
    config: &str,
) -> PyResult<Bound<'py, PyList>> {
    let tables = py
        .detach(|| discover::configured_tables(&discover::parse_config(config)?))
        .or_raise(py)?;
    let list = PyList::empty(py);
    for table in &tables {
        list.append(describe(py, table, &[PathBuf::new()])?)?;
    }
    Ok(list)
}
