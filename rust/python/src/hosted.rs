//! Tables held in host memory: filled from files, and gathered from.

use std::cell::RefCell;

use engram_core::cgroup;
use engram_core::hosted::{Hosted as CoreHosted, HostedPlane, HostedRows};
use engram_core::load;
use engram_core::maps;
use pyo3::prelude::*;

use crate::buffer::{HostBuffer, Ids, Output};
use crate::errors::{OrRaise as _, value_error};
use crate::gather::Reader;
use crate::interrupts::Interrupts;

thread_local! {
    /// Ids of the running call, kept so that a step allocates nothing.
    static IDS: RefCell<Vec<i64>> = const { RefCell::new(Vec::new()) };
}

/// A table, or one rank's part of it, in a [`HostBuffer`].
#[pyclass(frozen, module = "engram._engram")]
pub(crate) struct Hosted {
    table: CoreHosted,
}

#[pymethods]
impl Hosted {
    /// `planes` are the offset of each plane's first row and the bytes of its rows.
    #[new]
    #[pyo3(signature = (buffer, table, rows, first_row, held, planes, threads = None))]
    #[expect(clippy::too_many_arguments, reason = "they describe one table")]
    fn new(
        py: Python<'_>,
        buffer: &HostBuffer,
        table: String,
        rows: u64,
        first_row: u64,
        held: u64,
        planes: Vec<(usize, usize)>,
        threads: Option<usize>,
    ) -> PyResult<Self> {
        let held = HostedRows {
            table,
            rows,
            first_row,
            held,
        };
        let planes = planes
            .into_iter()
            .map(|(offset, row_bytes)| HostedPlane { offset, row_bytes })
            .collect();
        let table = CoreHosted::new(buffer.memory.clone(), held, planes, threads).or_raise(py)?;
        Ok(Self { table })
    }

    /// Copies rows into one buffer of shape `[*ids.shape, row]`, planes of a row side by side.
    #[pyo3(signature = (ids, out, pad_id = None))]
    fn gather(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        pad_id: Option<i64>,
    ) -> PyResult<()> {
        let ids = Ids::new(ids)?;
        let out = Output::new(out)?;
        let row_bytes: usize = self.table.row_bytes().sum();
        out.require_shape(&ids, row_bytes)?;
        let mut offset = 0;
        let mut targets = Vec::new();
        for bytes in self.table.row_bytes() {
            targets.push((&out, offset, row_bytes));
            offset += bytes;
        }
        self.copy(py, &ids, &targets, pad_id)
    }

    /// Copies rows, per plane into the memory given with the offset of the first row and the bytes
    /// from one to the next.
    #[pyo3(signature = (ids, targets, pad_id = None))]
    fn gather_planes(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        targets: Vec<(Bound<'_, PyAny>, usize, usize)>,
        pad_id: Option<i64>,
    ) -> PyResult<()> {
        let ids = Ids::new(ids)?;
        let outs = targets
            .iter()
            .map(|(out, offset, stride)| Ok((Output::new(out)?, *offset, *stride)))
            .collect::<PyResult<Vec<_>>>()?;
        let targets: Vec<_> = outs
            .iter()
            .map(|(out, offset, stride)| (out, *offset, *stride))
            .collect();
        self.copy(py, &ids, &targets, pad_id)
    }
}

impl Hosted {
    fn copy(
        &self,
        py: Python<'_>,
        ids: &Ids,
        targets: &[(&Output, usize, usize)],
        pad_id: Option<i64>,
    ) -> PyResult<()> {
        if targets.len() != self.table.row_bytes().count() {
            let planes = self.table.row_bytes().count();
            let text = format!("{} outputs for a table of {planes} planes", targets.len());
            return Err(value_error(py, &text));
        }
        let mut flat = IDS.take();
        flat.clear();
        ids.append_to(py, &mut flat);
        let mut sinks = engram_core::gather::Sinks::new();
        for ((out, offset, stride), bytes) in targets.iter().zip(self.table.row_bytes()) {
            sinks.push(out.sink(py, *offset, *stride, bytes, flat.len())?);
        }
        let outcome = py.detach(|| self.table.gather(&flat, pad_id, &sinks));
        IDS.replace(flat);
        outcome.or_raise(py)
    }
}

/// Reads rows from `first_row` on, `rows` of them, into each plane's memory, given with the offset
/// of the first; rows follow one another without gaps.
#[pyfunction]
pub(crate) fn load_rows(
    py: Python<'_>,
    reader: &Reader,
    first_row: u64,
    rows: u64,
    targets: Vec<(Bound<'_, PyAny>, usize)>,
    progress: Option<Py<PyAny>>,
) -> PyResult<()> {
    let count = usize::try_from(rows)?;
    let end = first_row
        .checked_add(rows)
        .ok_or_else(|| value_error(py, "more rows than ids"))?;
    reader.require_planes(py, targets.len())?;
    let outs = targets
        .iter()
        .map(|(out, offset)| Ok((Output::new(out)?, *offset)))
        .collect::<PyResult<Vec<_>>>()?;
    let mut sinks = engram_core::gather::Sinks::new();
    for ((out, offset), &bytes) in outs.iter().zip(&reader.plane_bytes) {
        sinks.push(out.sink(py, *offset, bytes, bytes, count)?);
    }
    let interrupts = Interrupts::new(py, None)?;
    let entered = reader.enter(py)?;
    let reader = &*entered;
    let outcome = py.detach(|| {
        load::load(reader, first_row..end, &sinks, &mut |done, total| {
            interrupts.attached(|py| match &progress {
                Some(progress) => progress.call1(py, (done, total)).map(drop),
                None => Ok(()),
            })
        })
    });
    interrupts.raise(py, outcome)
}

/// Bytes in memory, and of those the bytes in huge pages, of the mappings in a range of addresses.
#[pyfunction]
pub(crate) fn huge_page_bytes(py: Python<'_>, address: u64, nbytes: u64) -> PyResult<(u64, u64)> {
    let counted = py.detach(|| maps::huge_pages(address..address.saturating_add(nbytes)))?;
    Ok((counted.resident, counted.huge))
}

/// Bytes of memory that may still be used, and that this process could ever use.
#[pyfunction]
pub(crate) fn memory_bytes() -> (u64, u64) {
    (cgroup::available_memory(), cgroup::memory_limit())
}
