//! The core's bare loops, for the benchmarks; only with the feature `bench`.

use engram_core::bench;
use pyo3::prelude::*;

use crate::buffer::{Ids, Output};
use crate::gather::Reader;

/// Seconds a bare copy of the rows of `ids` into `out` takes.
#[pyfunction]
pub(crate) fn bench_copy(
    py: Python<'_>,
    reader: &Reader,
    ids: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    threads: usize,
) -> PyResult<f64> {
    let mut flat = Vec::new();
    Ids::new(ids)?.append_to(py, &mut flat);
    let out = Output::new(out)?;
    let bytes = reader.first_plane_bytes();
    let sink = out.sink(py, 0, bytes, bytes, flat.len())?;
    let taken = reader.with(py, |reader| bench::copy(reader, &flat, &sink, threads))?;
    Ok(taken.as_secs_f64())
}

/// Seconds bare ring reads of the rows of `ids` take.
#[pyfunction]
pub(crate) fn bench_uring(
    py: Python<'_>,
    reader: &Reader,
    ids: &Bound<'_, PyAny>,
    direct: bool,
    depth: usize,
) -> PyResult<f64> {
    let mut flat = Vec::new();
    Ids::new(ids)?.append_to(py, &mut flat);
    let taken = reader.with(py, |reader| bench::uring(reader, &flat, direct, depth))?;
    Ok(taken.as_secs_f64())
}
