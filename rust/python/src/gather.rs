//! `Reader`: an opened table, and what is done with it.
//!
//! The open table sits behind a gate: gathers share it, closing waits for them.

use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::Arc;

use engram_core::discover::TableRef;
use engram_core::gather::{self, Request};
use engram_core::mode::Io;
use engram_core::reader::{Advice, Located, Options, Reader as CoreReader};
use engram_core::ticket::drain;
use engram_core::{hot, verify, warm};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt};

use crate::array::Pair;
use crate::buffer::Ids;
use crate::errors::{OrRaise as _, value_error};
use crate::gate::{Entered, Gate};
use crate::interrupts::Interrupts;
use crate::news;
use crate::table;

/// `table` as Python passes it: a name, a place in layer order, or None for the only one.
#[derive(FromPyObject)]
pub(crate) enum TableArgument {
    Layer(usize),
    Name(String),
}

impl TableArgument {
    pub(crate) fn as_ref(argument: Option<&Self>) -> TableRef<'_> {
        match argument {
            None => TableRef::Only,
            Some(Self::Layer(index)) => TableRef::Layer(*index),
            Some(Self::Name(name)) => TableRef::Name(name),
        }
    }
}

/// A table opened for reading.
#[pyclass(frozen, weakref, module = "engram._engram")]
pub(crate) struct Reader {
    reader: Gate<CoreReader>,
    /// Bytes of a row, per plane; kept outside the gate.
    pub(crate) plane_bytes: Vec<usize>,
}

/// The table and its files, as a dictionary.
fn describe<'py>(py: Python<'py>, reader: &CoreReader) -> PyResult<Bound<'py, PyDict>> {
    let files: Vec<_> = reader
        .files()
        .iter()
        .map(|file| file.path().to_owned())
        .collect();
    table::describe(py, reader.table(), &files)
}

/// Changes the budget for cached rows.
fn resize(py: Python<'_>, reader: &CoreReader, cache_bytes: u64) -> PyResult<()> {
    let interrupts = Interrupts::new(py, None)?;
    let outcome =
        py.detach(|| interrupts.run(|control| reader.resize_cache(cache_bytes, control.interrupt)));
    interrupts.raise(py, outcome)
}

fn closed(py: Python<'_>) -> PyErr {
    value_error(py, "this FileGather is closed; open a new one")
}

thread_local! {
    /// Ids of the running call, kept so that a step allocates nothing.
    pub(crate) static IDS: RefCell<Vec<i64>> = const { RefCell::new(Vec::new()) };
}

impl Reader {
    /// The open table, for Python.
    pub(crate) fn over(reader: CoreReader) -> Self {
        let plane_bytes = reader
            .table()
            .planes
            .iter()
            .map(engram_core::table::Plane::row_bytes)
            .collect();
        Self {
            reader: Gate::new(Arc::new(reader)),
            plane_bytes,
        }
    }

    pub(crate) fn enter(&self, py: Python<'_>) -> PyResult<Entered<'_, CoreReader>> {
        self.reader.enter(py).ok_or_else(|| closed(py))
    }

    /// Refuses a number of outputs other than that of planes.
    pub(crate) fn require_planes(&self, py: Python<'_>, count: usize) -> PyResult<()> {
        let planes = self.plane_bytes.len();
        if count == planes {
            return Ok(());
        }
        let text = format!("{count} outputs for a table of {planes} planes");
        Err(value_error(py, &text))
    }

    /// Bytes of a row, per plane.
    pub(crate) fn plane_bytes(&self) -> &[usize] {
        &self.plane_bytes
    }

    /// Bytes of the first plane's rows.
    #[cfg(feature = "bench")]
    pub(crate) fn first_plane_bytes(&self) -> usize {
        self.plane_bytes[0]
    }

    /// Runs `body` on the open reader, the interpreter released.
    pub(crate) fn with<T: Send>(
        &self,
        py: Python<'_>,
        body: impl Send + FnOnce(&Arc<CoreReader>) -> engram_core::Result<T>,
    ) -> PyResult<T> {
        let entered = self.enter(py)?;
        let reader = &*entered;
        py.detach(|| body(reader)).or_raise(py)
    }
}

#[pymethods]
impl Reader {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "they are FileGather's")]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        table: Option<TableArgument>,
        io: &str,
        threads: Option<usize>,
        advice: &str,
        max_mapped_bytes: Option<u64>,
        cache_bytes: u64,
    ) -> PyResult<Self> {
        let io = Io::from_name(io).or_raise(py)?;
        let advice = Advice::from_name(advice).or_raise(py)?;
        let options = Options {
            io,
            threads,
            advice,
            max_mapped_bytes,
            cache_bytes,
        };
        let reader = py
            .detach(|| {
                let located = Located::find(&path, TableArgument::as_ref(table.as_ref()))?;
                CoreReader::open(located, options)
            })
            .or_raise(py)?;
        Ok(Self::over(reader))
    }

    /// The table, as a dictionary.
    fn table<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        describe(py, &*self.enter(py)?)
    }

    /// Gathers rows into an array of shape `[*ids.shape, row_bytes]`, planes of a row side by side;
    /// false, and nothing done, unless ids and out are arrays that need no conversion.
    #[pyo3(signature = (ids, out, pad_id = None, timeout = None))]
    fn gather(
        this: &Bound<'_, Self>,
        ids: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        pad_id: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<bool> {
        let py = this.py();
        let own = this.get();
        // Other numbers, and what is none, are looked at where ids are.
        if pad_id.is_some_and(|pad_id| !pad_id.is_exact_instance_of::<PyInt>()) {
            return Ok(false);
        }
        let pad_id = pad_id.map(PyAnyMethods::extract).transpose()?;
        let row_bytes = own.plane_bytes.iter().sum();
        let Some(pair) = Pair::new(ids, out, row_bytes)? else {
            return Ok(false);
        };
        let interrupts = Interrupts::new(py, timeout)?;
        let entered = own.enter(py)?;
        let helpers = gather::call(&entered, pair.count());
        let mut flat = IDS.take();
        flat.clear();
        pair.append_ids(&mut flat);
        let mut offset = 0;
        let mut sinks = engram_core::gather::Sinks::new();
        for &bytes in &own.plane_bytes {
            sinks.push(pair.sink(offset, row_bytes, bytes).or_raise(py)?);
            offset += bytes;
        }
        let request = Request {
            reader: &entered,
            ids: &flat,
            sinks,
            pad_id,
        };
        let outcome = py
            .detach(|| interrupts.run(|control| gather::gather_with(helpers, &[request], control)));
        let news = news::of(&entered);
        drop(entered);
        IDS.replace(flat);
        let told = news::tell(this.as_any(), news);
        interrupts.raise(py, outcome)?;
        told.map(|()| true)
    }

    /// What it fell back from at open and since.
    fn fallbacks(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.with(py, |reader| Ok(reader.fallbacks()))
    }

    /// What runs, what it fell back from, counters and latencies.
    fn stats<'py>(this: &Bound<'py, Self>) -> PyResult<Bound<'py, PyDict>> {
        let py = this.py();
        let entered = this.get().enter(py)?;
        let reader = &*entered;
        let collected = py.detach(|| crate::stats::collect(reader));
        let news = news::of(reader);
        drop(entered);
        news::tell(this.as_any(), news)?;
        collected.into_dict(py)
    }

    /// Starts reading rows that will be wanted soon; returns at once.
    fn prefetch(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut flat = Vec::new();
        Ids::new(ids)?.append_to(py, &mut flat);
        self.with(py, |reader| gather::prefetch(reader, flat))
    }

    /// Reads the table into memory; returns the bytes made resident.
    fn prewarm(
        &self,
        py: Python<'_>,
        max_bytes: Option<u64>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<u64> {
        let interrupts = Interrupts::new(py, None)?;
        let entered = self.enter(py)?;
        let reader = &*entered;
        let outcome = py.detach(|| {
            warm::prewarm(reader, max_bytes, &mut |done, total| {
                interrupts.attached(|py| match &progress {
                    Some(progress) => progress.call1(py, (done, total)).map(drop),
                    None => Ok(()),
                })
            })
        });
        interrupts.raise(py, outcome)
    }

    /// Pages of the table, those in memory (None if the kernel does not tell), those believed to
    /// be, and bytes of a page.
    fn residency(&self, py: Python<'_>) -> PyResult<(u64, Option<u64>, u64, u64)> {
        let interrupts = Interrupts::new(py, None)?;
        let entered = self.enter(py)?;
        let reader = &*entered;
        let outcome = py.detach(|| interrupts.run(|control| warm::residency(reader, control)));
        let resident = interrupts.raise(py, outcome)?;
        Ok((
            resident.pages,
            resident.resident,
            resident.believed,
            resident.page_bytes,
        ))
    }

    /// Changes the budget for cached rows, 0 for none.
    fn resize(&self, py: Python<'_>, cache_bytes: u64) -> PyResult<()> {
        loop {
            let entered = self.enter(py)?;
            resize(py, &entered, cache_bytes)?;
            // Reopened meanwhile: the new files have the budget of before.
            match self.reader.enter(py) {
                Some(now) if !Arc::ptr_eq(&now, &entered) => {}
                _ => return Ok(()),
            }
        }
    }

    /// Writes the ids of the cached rows to a file; returns how many there are.
    fn save_hot(&self, py: Python<'_>, path: PathBuf) -> PyResult<u64> {
        let interrupts = Interrupts::new(py, None)?;
        let entered = self.enter(py)?;
        let reader = &*entered;
        let outcome =
            py.detach(|| interrupts.run(|control| hot::save(reader, &path, control.interrupt)));
        interrupts.raise(py, outcome)
    }

    /// Reads the rows listed in such a file into the cache; returns how many are there then.
    fn load_hot(
        &self,
        py: Python<'_>,
        path: PathBuf,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<u64> {
        let interrupts = Interrupts::new(py, None)?;
        let entered = self.enter(py)?;
        let reader = &*entered;
        let outcome = py.detach(|| {
            interrupts.run(|control| {
                hot::load(reader, &path, control, &mut |done, total| {
                    interrupts.attached(|py| match &progress {
                        Some(progress) => progress.call1(py, (done, total)).map(drop),
                        None => Ok(()),
                    })
                })
            })
        });
        interrupts.raise(py, outcome)
    }

    /// Closes after running calls and tickets in flight have ended.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let mut open = None;
        if let Ok(entered) = self.enter(py) {
            open = Some(Arc::clone(&entered));
        }
        self.reader.close(py, CoreReader::close)?;
        let Some(reader) = open else { return Ok(()) };
        let interrupts = Interrupts::new(py, None)?;
        let outcome = py.detach(|| {
            let outcome = drain(&reader, &|| interrupts.attached(|_| Ok(())));
            // The last holder closes the files.
            drop(reader);
            outcome
        });
        interrupts.raise(py, outcome)
    }

    /// Serves the table of the same name at `path` from now on; describes it. Calls under way end
    /// with the files they began with.
    fn reopen<'py>(&self, py: Python<'py>, path: PathBuf) -> PyResult<Bound<'py, PyDict>> {
        let new = Arc::new(self.with(py, |reader| reader.reopen(&path))?);
        let description = describe(py, &new)?;
        let mut budget = 0;
        self.reader
            .exchange(py, Arc::clone(&new), |old| {
                budget = old.row_cache().budget();
                old.close();
            })
            .ok_or_else(|| closed(py))?;
        if new.row_cache().budget() != budget {
            // Changed while the files were opened.
            resize(py, &new, budget)?;
        }
        Ok(description)
    }

    /// Compares `rows` rows (all for None), each read in two ways, and what the files are with what
    /// they were.
    fn verify<'py>(
        &self,
        py: Python<'py>,
        rows: Option<u64>,
        seed: u64,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let interrupts = Interrupts::new(py, None)?;
        let entered = self.enter(py)?;
        let reader = &*entered;
        let outcome = py.detach(|| {
            verify::verify(reader, rows, seed, &mut |done, total| {
                interrupts.attached(|py| match &progress {
                    Some(progress) => progress.call1(py, (done, total)).map(drop),
                    None => Ok(()),
                })
            })
        });
        let found = interrupts.raise(py, outcome)?;
        crate::verification::into_dict(py, &found)
    }

    /// Name of what runs.
    #[getter]
    fn runs(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, |reader| Ok(reader.runs()))
    }

    #[getter]
    fn is_closed(&self, py: Python<'_>) -> bool {
        self.reader.is_closed(py)
    }
}

/// Drops the page cache of `paths`; returns the bytes that stayed resident all the same.
#[pyfunction]
pub(crate) fn drop_cache(py: Python<'_>, paths: Vec<PathBuf>) -> PyResult<u64> {
    py.detach(|| {
        paths
            .iter()
            .map(|path| engram_core::file::drop_cache(path))
            .sum::<engram_core::Result<u64>>()
    })
    .or_raise(py)
}
