//! What a verification found, as a dictionary.

use engram_core::verify::Verification;
use pyo3::prelude::*;
use pyo3::types::PyDict;

pub(crate) fn into_dict<'py>(
    py: Python<'py>,
    found: &Verification,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("rows", found.rows)?;
    dict.set_item("ways", (&found.ways[0], &found.ways[1]))?;
    dict.set_item("more", found.more)?;
    let problems: Vec<_> = found
        .problems
        .iter()
        .map(|problem| {
            (
                problem.kind.name(),
                problem.path.to_string_lossy().into_owned(),
                problem.row,
                problem.offset,
                &problem.message,
            )
        })
        .collect();
    dict.set_item("problems", problems)?;
    let shadowed: Vec<_> = found
        .shadowed
        .iter()
        .map(|copy| (&copy.tensor, copy.file.to_string_lossy().into_owned()))
        .collect();
    dict.set_item("shadowed", shadowed)?;
    Ok(dict)
}
