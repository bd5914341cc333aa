//! What the command line asks of a machine and of a checkpoint.

use std::path::PathBuf;
use std::time::Duration;

use engram_core::checkpoint;
use engram_core::probe;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{OrRaise as _, value_error};
use crate::gather::Reader;
use crate::interrupts::Interrupts;

/// The error number with which the kernel refuses a ring; None where it gives one.
#[pyfunction]
pub(crate) fn ring_refusal(py: Python<'_>) -> Option<i32> {
    py.detach(refusal)
}

fn refusal() -> Option<i32> {
    let error = engram_core::fetch::uring::probe().err()?;
    Some(error.raw_os_error().unwrap_or(ENOSYS))
}

/// "Function not implemented".
const ENOSYS: i32 = 38;

/// Reads rows at random for some seconds, with at most `depth` reads in flight, in the way the
/// reader was opened for.
#[pyfunction]
pub(crate) fn random_reads<'py>(
    py: Python<'py>,
    reader: &Reader,
    depth: usize,
    seconds: f64,
    seed: u64,
) -> PyResult<Bound<'py, PyDict>> {
    let duration = Duration::try_from_secs_f64(seconds)
        .map_err(|error| value_error(py, &format!("seconds={seconds}: {error}")))?;
    let interrupts = Interrupts::new(py, None)?;
    let entered = reader.enter(py)?;
    let core = &*entered;
    let outcome = py.detach(|| {
        interrupts.run(|control| probe::measure(core, depth, duration, seed, control.interrupt))
    });
    drop(entered);
    let rate = interrupts.raise(py, outcome)?;
    let dict = PyDict::new(py);
    dict.set_item("depth", rate.depth)?;
    dict.set_item("reads", rate.reads)?;
    dict.set_item("bytes", rate.bytes)?;
    dict.set_item("seconds", rate.elapsed.as_secs_f64())?;
    dict.set_item("gap_p50", rate.gaps.p50)?;
    dict.set_item("gap_p99", rate.gaps.p99)?;
    Ok(dict)
}

/// Everything that is wrong with the files of a checkpoint.
#[pyfunction]
pub(crate) fn survey(py: Python<'_>, path: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    let found = py.detach(|| checkpoint::survey(&path)).or_raise(py)?;
    let dict = PyDict::new(py);
    dict.set_item("files", found.files)?;
    dict.set_item("bytes", found.bytes)?;
    dict.set_item("tensors", found.tensors)?;
    dict.set_item("index", found.index.map(PathBuf::into_os_string))?;
    dict.set_item("more", found.more)?;
    let flaws: Vec<_> = found
        .flaws
        .into_iter()
        .map(|flaw| {
            (
                flaw.kind.name(),
                flaw.path.into_os_string(),
                flaw.expected,
                flaw.found,
                flaw.message,
            )
        })
        .collect();
    dict.set_item("flaws", flaws)?;
    Ok(dict)
}
