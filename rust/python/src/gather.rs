//! `Reader`: an opened table, and the gathers over one or many of them.
//!
//! Leases of the open table are taken, and closing is waited for, with the interpreter released: a
//! running gather attaches to the interpreter to look for signals.

use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use engram_core::Error;
use engram_core::discover::TableRef;
use engram_core::gather::{self, Control, Request, gather};
use engram_core::reader::{Advice, Io, Located, Options, Reader as CoreReader};
use engram_core::{verify, warm};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::buffer::{Output, read_ids};
use crate::errors::{OrRaise as _, to_py};
use crate::hash::{Inputs, NgramHash, threads_for};
use crate::open::Open;
use crate::table;

/// `table` as Python passes it: a name, a place in layer order, or None for the only one.
#[derive(FromPyObject)]
pub(crate) enum TableArgument {
    Layer(usize),
    Name(String),
}

impl TableArgument {
    fn as_ref(argument: Option<&Self>) -> TableRef<'_> {
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
    open: Open,
    /// Bytes of a row, per plane; every reopening keeps them.
    plane_bytes: Vec<usize>,
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

fn closed() -> PyErr {
    PyValueError::new_err("this FileGather is closed; open a new one")
}

thread_local! {
    /// Ids of the running call, kept so that a step allocates nothing.
    static IDS: RefCell<Vec<i64>> = const { RefCell::new(Vec::new()) };
}

impl Reader {
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
        py.detach(|| self.open.lease().map(|reader| body(&reader)))
            .ok_or_else(closed)?
            .or_raise(py)
    }
}

#[pymethods]
impl Reader {
    #[new]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        table: Option<TableArgument>,
        io: &str,
        threads: Option<usize>,
        advice: &str,
        max_mapped_bytes: Option<u64>,
    ) -> PyResult<Self> {
        let io = Io::from_name(io).or_raise(py)?;
        let advice = Advice::from_name(advice).or_raise(py)?;
        let options = Options {
            io,
            threads,
            advice,
            max_mapped_bytes,
        };
        let reader = py
            .detach(|| {
                let located = Located::find(&path, TableArgument::as_ref(table.as_ref()))?;
                CoreReader::open(located, options)
            })
            .or_raise(py)?;
        let plane_bytes = reader
            .table()
            .planes
            .iter()
            .map(engram_core::table::Plane::row_bytes)
            .collect();
        Ok(Self {
            open: Open::new(reader),
            plane_bytes,
        })
    }

    /// The table, as a dictionary.
    fn table<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let lease = py.detach(|| self.open.lease()).ok_or_else(closed)?;
        let dict = describe(py, &lease);
        py.detach(|| drop(lease));
        dict
    }

    /// Gathers rows into one buffer of shape `[*ids.shape, row]`, planes of a row side by side.
    #[pyo3(signature = (ids, out, pad_id = None, timeout = None))]
    fn gather(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        pad_id: Option<i64>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let ids = PyBuffer::<i64>::get(ids)?;
        let out = Output::new(out)?;
        let interrupts = Interrupts::new(timeout)?;
        let row_bytes = self.plane_bytes.iter().sum();
        out.require_shape(&ids, row_bytes)?;
        let mut flat = IDS.take();
        flat.clear();
        read_ids(py, &ids, &mut flat)?;
        let mut offset = 0;
        let mut sinks = engram_core::gather::Sinks::new();
        for &bytes in &self.plane_bytes {
            sinks.push(out.sink(py, offset, row_bytes, bytes, flat.len())?);
            offset += bytes;
        }
        let ids = &flat[..];
        let outcome = py.detach(|| {
            let reader = &**self.open.lease()?;
            Some(interrupts.run(|control| {
                gather(
                    &[Request {
                        reader,
                        ids,
                        sinks,
                        pad_id,
                    }],
                    control,
                )
            }))
        });
        IDS.replace(flat);
        interrupts.raise(py, outcome.ok_or_else(closed)?)?;
        Ok(())
    }

    /// What runs, what it fell back from, counters and latencies.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let collected = self.with(py, |reader| Ok(crate::stats::collect(reader)))?;
        collected.into_dict(py)
    }

    /// Starts reading rows that will be wanted soon; returns at once.
    fn prefetch(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut flat = Vec::new();
        read_ids(py, &PyBuffer::<i64>::get(ids)?, &mut flat)?;
        self.with(py, |reader| gather::prefetch(reader, flat))
    }

    /// Reads the table into memory; returns the bytes made resident.
    fn prewarm(
        &self,
        py: Python<'_>,
        max_bytes: Option<u64>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<u64> {
        let interrupts = Interrupts::new(None)?;
        let outcome = py.detach(|| {
            let reader = &**self.open.lease()?;
            Some(warm::prewarm(reader, max_bytes, &mut |done, total| {
                interrupts.attached(|py| match &progress {
                    Some(progress) => progress.call1(py, (done, total)).map(drop),
                    None => Ok(()),
                })
            }))
        });
        interrupts.raise(py, outcome.ok_or_else(closed)?)
    }

    /// Pages of the table, those in memory (None if the kernel does not tell), those believed to
    /// be, and bytes of a page.
    fn residency(&self, py: Python<'_>) -> PyResult<(u64, Option<u64>, u64, u64)> {
        let interrupts = Interrupts::new(None)?;
        let outcome = py.detach(|| {
            let reader = &**self.open.lease()?;
            Some(interrupts.run(|control| warm::residency(reader, control)))
        });
        let resident = interrupts.raise(py, outcome.ok_or_else(closed)?)?;
        Ok((
            resident.pages,
            resident.resident,
            resident.believed,
            resident.page_bytes,
        ))
    }

    /// Closes after running calls have ended.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.open.close());
    }

    /// Serves the table of the same name at `path` from now on; describes it. Calls under way end
    /// with the files they began with.
    fn reopen<'py>(&self, py: Python<'py>, path: PathBuf) -> PyResult<Bound<'py, PyDict>> {
        let lease = py
            .detach(|| self.open.reopen(&path))
            .ok_or_else(closed)?
            .or_raise(py)?;
        let dict = describe(py, &lease);
        py.detach(|| drop(lease));
        dict
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
        let interrupts = Interrupts::new(None)?;
        let outcome = py.detach(|| {
            let reader = self.open.lease()?;
            Some(verify::verify(&reader, rows, seed, &mut |done, total| {
                interrupts.attached(|py| match &progress {
                    Some(progress) => progress.call1(py, (done, total)).map(drop),
                    None => Ok(()),
                })
            }))
        });
        let found = interrupts.raise(py, outcome.ok_or_else(closed)?)?;
        crate::verification::into_dict(py, &found)
    }

    #[getter]
    fn is_closed(&self, py: Python<'_>) -> bool {
        py.detach(|| self.open.lease().is_none())
    }
}

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
    let interrupts = Interrupts::new(timeout)?;
    // One lease per reader however often it occurs: a batch sees one generation of files.
    let mut readers: Vec<&Reader> = Vec::new();
    let mut flats = Vec::with_capacity(requests.len());
    let mut outputs = Vec::with_capacity(requests.len());
    for (reader, ids, planes, _) in &requests {
        let reader = reader.get();
        if planes.len() != reader.plane_bytes.len() {
            return Err(PyValueError::new_err(format!(
                "{} outputs for a table of {} planes",
                planes.len(),
                reader.plane_bytes.len()
            )));
        }
        let place = readers
            .iter()
            .position(|known| std::ptr::eq(*known, reader))
            .unwrap_or_else(|| {
                readers.push(reader);
                readers.len() - 1
            });
        let mut flat = Vec::new();
        read_ids(py, &PyBuffer::<i64>::get(ids)?, &mut flat)?;
        flats.push((place, flat));
        outputs.push(
            planes
                .iter()
                .map(|(out, _, _)| Output::new(out))
                .collect::<PyResult<Vec<_>>>()?,
        );
    }
    let mut prepared = Vec::with_capacity(requests.len());
    for (((reader, _, planes, pad_id), (place, flat)), outs) in
        requests.iter().zip(&flats).zip(&outputs)
    {
        let mut sinks = engram_core::gather::Sinks::new();
        for (((_, offset, stride), out), bytes) in
            planes.iter().zip(outs).zip(&reader.get().plane_bytes)
        {
            sinks.push(out.sink(py, *offset, *stride, *bytes, flat.len())?);
        }
        prepared.push((*place, &flat[..], sinks, *pad_id));
    }
    let outcome = py.detach(|| {
        let leases = readers
            .iter()
            .map(|reader| reader.open.lease())
            .collect::<Option<Vec<_>>>()?;
        let requests: Vec<_> = prepared
            .into_iter()
            .map(|(place, ids, sinks, pad_id)| Request {
                reader: &leases[place],
                ids,
                sinks,
                pad_id,
            })
            .collect();
        Some(interrupts.run(|control| gather(&requests, control)))
    });
    interrupts.raise(py, outcome.ok_or_else(closed)?)?;
    Ok(())
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
    reader: &Reader,
    tokens: &Bound<'_, PyAny>,
    query_start_loc: Option<&Bound<'_, PyAny>>,
    context: Option<&Bound<'_, PyAny>>,
    planes: Vec<(Bound<'_, PyAny>, usize, usize)>,
    pad_id: Option<i64>,
) -> PyResult<()> {
    if planes.len() != reader.plane_bytes.len() {
        return Err(PyValueError::new_err(format!(
            "{} outputs for a table of {} planes",
            planes.len(),
            reader.plane_bytes.len()
        )));
    }
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
    let interrupts = Interrupts::new(None)?;
    let mut ids = IDS.take();
    ids.clear();
    ids.resize(count, 0);
    let outcome = py.detach(|| {
        if let Err(error) = hash.core().ids(&step, &mut ids, threads_for(count)) {
            return Some(Err(error));
        }
        let lease = reader.open.lease()?;
        let request = Request {
            reader: &lease,
            ids: &ids,
            sinks,
            pad_id,
        };
        Some(interrupts.run(|control| gather(&[request], control)))
    });
    IDS.replace(ids);
    interrupts.raise(py, outcome.ok_or_else(closed)?)?;
    Ok(())
}

/// Deadline and signals of one call.
struct Interrupts {
    deadline: Option<Instant>,
    raised: Mutex<Option<PyErr>>,
}

impl Interrupts {
    fn new(timeout: Option<f64>) -> PyResult<Self> {
        let deadline = match timeout {
            None => None,
            Some(seconds) => {
                let duration = Duration::try_from_secs_f64(seconds).map_err(|_| {
                    PyValueError::new_err(format!(
                        "timeout={seconds} is not a number of seconds from 0 on"
                    ))
                })?;
                // A timeout beyond the clock's range is no timeout.
                Instant::now().checked_add(duration)
            }
        };
        Ok(Self {
            deadline,
            raised: Mutex::new(None),
        })
    }

    fn run<T>(
        &self,
        body: impl FnOnce(&Control<'_>) -> engram_core::Result<T>,
    ) -> engram_core::Result<T> {
        let interrupt = || self.attached(|_| Ok(()));
        body(&Control {
            deadline: self.deadline,
            interrupt: &interrupt,
        })
    }

    /// Looks for signals, then runs `body`; an exception from either is kept and stops the work.
    fn attached(&self, body: impl FnOnce(Python<'_>) -> PyResult<()>) -> engram_core::Result<()> {
        Python::attach(|py| py.check_signals().and_then(|()| body(py))).map_err(|error| {
            *self.raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            Error::Cancelled
        })
    }

    /// The outcome; an exception that a signal handler raised comes before ours.
    fn raise<T>(self, py: Python<'_>, outcome: engram_core::Result<T>) -> PyResult<T> {
        outcome.map_err(|error| {
            let raised = self
                .raised
                .into_inner()
                .unwrap_or_else(PoisonError::into_inner);
            raised.unwrap_or_else(|| to_py(py, &error))
        })
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
