//! The core's bare loops and simulated caches, for the benchmarks; only with the feature `bench`.

use engram_core::bench;
use pyo3::prelude::*;

use crate::buffer::{Ids, Output};
use crate::errors::OrRaise as _;
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

/// Unmaps pages of the first file and forgets that they are resident.
#[pyfunction]
pub(crate) fn bench_forget(
    py: Python<'_>,
    reader: &Reader,
    pages: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let mut flat = Vec::new();
    Ids::new(pages)?.append_to(py, &mut flat);
    reader.with(py, |reader| bench::forget(reader, &flat))
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

/// Batches of lookups, for simulated caches.
#[pyclass(module = "engram._engram")]
pub(crate) struct BenchTrace(bench::Trace);

#[pymethods]
impl BenchTrace {
    #[new]
    fn new(py: Python<'_>, rows: usize) -> PyResult<Self> {
        Ok(Self(bench::Trace::new(rows).or_raise(py)?))
    }

    fn append(&mut self, py: Python<'_>, ids: &Bound<'_, PyAny>, batch: usize) -> PyResult<()> {
        let mut flat = Vec::new();
        Ids::new(ids)?.append_to(py, &mut flat);
        py.detach(|| self.0.append(&flat, batch)).or_raise(py)
    }

    fn lookups(&self) -> Vec<usize> {
        self.0.lookups()
    }

    fn first(&self, py: Python<'_>) -> Vec<usize> {
        py.detach(|| self.0.first())
    }

    fn misses(&self, py: Python<'_>, policy: &str, capacity: usize) -> PyResult<Vec<usize>> {
        py.detach(|| self.0.misses(policy, capacity)).or_raise(py)
    }

    fn optimum(&self, py: Python<'_>, capacity: usize) -> Vec<usize> {
        py.detach(|| self.0.optimum(capacity))
    }
}
