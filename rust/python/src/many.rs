//! Gathers over several tables, and those that hash their ids first.

use engram_core::gather::{Request, gather};
use pyo3::prelude::*;
use smallvec::SmallVec;

use crate::buffer::{Ids, Output};
use crate::errors::OrRaise as _;
use crate::gather::{IDS, Reader};
use crate::hash::{Inputs, NgramHash, threads_for};
use crate::interrupts::Interrupts;
use crate::news;

/// One request of [`gather_many`]: reader, int64 ids, per plane the memory with offset and stride.
type ManyItem<'py> = (
    Bound<'py, Reader>,
    Bound<'py, PyAny>,
    Vec<(Bound<'py, PyAny>, usize, usize)>,
    Option<i64>,
);

/// Gathers rows of several tables in one round of reads.
#[pyfunction]
#[pyo3(signature = (requests, timeout = None))]
pub(crate) fn gather_many(
    py: Python<'_>,
    requests: Vec<ManyItem<'_>>,
    timeout: Option<f64>,
) -> PyResult<()> {
    let interrupts = Interrupts::new(py, timeout)?;
    let mut flats = Vec::with_capacity(requests.len());
    let mut outputs = Vec::with_capacity(requests.len());
    for (reader, ids, planes, _) in &requests {
        reader.get().require_planes(py, planes.len())?;
        let mut flat = Vec::new();
        Ids::new(ids)?.append_to(py, &mut flat);
        flats.push(flat);
        outputs.push(
            planes
                .iter()
                .map(|(out, _, _)| Output::new(out))
                .collect::<PyResult<Vec<_>>>()?,
        );
    }
    let entered = requests
        .iter()
        .map(|(reader, ..)| reader.get().enter(py))
        .collect::<PyResult<Vec<_>>>()?;
    let mut prepared = Vec::with_capacity(requests.len());
    for ((((reader, _, planes, pad_id), ids), outs), entered) in
        requests.iter().zip(&flats).zip(&outputs).zip(&entered)
    {
        let mut sinks = engram_core::gather::Sinks::new();
        for (((_, offset, stride), out), bytes) in
            planes.iter().zip(outs).zip(&reader.get().plane_bytes)
        {
            sinks.push(out.sink(py, *offset, *stride, *bytes, ids.len())?);
        }
        prepared.push(Request {
            reader: entered,
            ids,
            sinks,
            pad_id: *pad_id,
        });
    }
    let outcome = py.detach(|| interrupts.run(|control| gather(&prepared, control)));
    drop(prepared);
    let news: SmallVec<[_; 4]> = entered.iter().map(|entered| news::of(entered)).collect();
    drop(entered);
    let mut told = Ok(());
    for ((reader, ..), news) in requests.iter().zip(news) {
        told = told.and(news::tell(reader.as_any(), news));
    }
    interrupts.raise(py, outcome)?;
    told
}

/// Hashes a step's tokens and gathers the rows of their ids, which never leave this side.
///
/// `planes` is per plane of the table the memory with offset and stride, a place per id.
#[pyfunction]
#[expect(
    clippy::too_many_arguments,
    clippy::needless_pass_by_value,
    reason = "a step and where its rows go, as Python hands them over"
)]
pub(crate) fn gather_tokens(
    py: Python<'_>,
    hash: &NgramHash,
    reader: &Bound<'_, Reader>,
    tokens: &Bound<'_, PyAny>,
    query_start_loc: Option<&Bound<'_, PyAny>>,
    context: Option<&Bound<'_, PyAny>>,
    planes: Vec<(Bound<'_, PyAny>, usize, usize)>,
    pad_id: Option<i64>,
) -> PyResult<()> {
    let this = reader;
    let reader = this.get();
    reader.require_planes(py, planes.len())?;
    let inputs = Inputs::read(py, tokens, query_start_loc, context)?;
    let step = inputs.step(hash.core().context_len()).or_raise(py)?;
    let count = step.tokens().len() * hash.core().heads().count();
    let outputs = planes
        .iter()
        .map(|(out, _, _)| Output::new(out))
        .collect::<PyResult<Vec<_>>>()?;
    let mut sinks = engram_core::gather::Sinks::new();
    for (((_, offset, stride), out), bytes) in planes.iter().zip(&outputs).zip(&reader.plane_bytes)
    {
        sinks.push(out.sink(py, *offset, *stride, *bytes, count)?);
    }
    let interrupts = Interrupts::new(py, None)?;
    let entered = reader.enter(py)?;
    let mut ids = IDS.take();
    ids.clear();
    ids.resize(count, 0);
    let outcome = py.detach(|| {
        hash.core().ids(&step, &mut ids, threads_for(count))?;
        let request = Request {
            reader: &entered,
            ids: &ids,
            sinks,
            pad_id,
        };
        interrupts.run(|control| gather(&[request], control))
    });
    let news = news::of(&entered);
    drop(entered);
    IDS.replace(ids);
    let told = news::tell(this.as_any(), news);
    interrupts.raise(py, outcome)?;
    told
}
