//! `Reader`: an opened table, and the gathers over one or many of them.
//!
//! The open table sits behind a read-write lock: gathers share it, closing waits for them. The lock
//! is only ever taken with the interpreter released, because a running gather attaches to the
//! interpreter to look for signals.

use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use engram_core::Error;
use engram_core::discover::TableRef;
use engram_core::gather::{self, Control, Request, gather};
use engram_core::reader::{Advice, Io, Located, Options, Reader as CoreReader};
use engram_core::ticket::drain;
use engram_core::warm;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::buffer::{Output, read_ids};
use crate::errors::{OrRaise as _, to_py};
use crate::hash::{Inputs, NgramHash, threads_for};
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
    reader: RwLock<Option<Arc<CoreReader>>>,
    /// Bytes of a row, per plane; kept outside the lock for use with the interpreter held.
    plane_bytes: Vec<usize>,
}

pub(crate) fn closed() -> PyErr {
    PyValueError::new_err("this FileGather is closed; open a new one")
}

thread_local! {
    /// Ids of the running call, kept so that a step allocates nothing.
    static IDS: RefCell<Vec<i64>> = const { RefCell::new(Vec::new()) };
}

impl Reader {
    pub(crate) fn lock(&self) -> RwLockReadGuard<'_, Option<Arc<CoreReader>>> {
        self.reader.read().unwrap_or_else(PoisonError::into_inner)
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
        py.detach(|| self.lock().as_ref().map(body))
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
            reader: RwLock::new(Some(Arc::new(reader))),
            plane_bytes,
        })
    }

    /// The table, as a dictionary.
    fn table<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (table, files) = self.with(py, |reader| {
            let files: Vec<_> = reader
                .files()
                .iter()
                .map(|file| file.path().to_owned())
                .collect();
            Ok((reader.table().clone(), files))
        })?;
        table::describe(py, &table, &files)
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
            let guard = self.lock();
            let reader = guard.as_ref()?;
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
            let guard = self.lock();
            let reader = guard.as_ref()?;
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
            let guard = self.lock();
            let reader = guard.as_ref()?;
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

    /// Closes after running calls and tickets in flight have ended.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let interrupts = Interrupts::new(None)?;
        let outcome = py.detach(|| {
            let taken = self
                .reader
                .write()
                .unwrap_or_else(PoisonError::into_inner)
                .take();
            let Some(reader) = taken else { return Ok(()) };
            reader.close();
            drain(&reader, &|| interrupts.attached(|_| Ok(())))
        });
        interrupts.raise(py, outcome)
    }

    #[getter]
    fn is_closed(&self, py: Python<'_>) -> bool {
        py.detach(|| self.lock().is_none())
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
    // One lock per reader however often it occurs: a second shared lock behind a waiting close
    // would wait for ever.
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
        let guards: Vec<_> = readers.iter().map(|reader| reader.lock()).collect();
        let requests = prepared
            .into_iter()
            .map(|(place, ids, sinks, pad_id)| {
                guards[place].as_ref().map(|reader| Request {
                    reader,
                    ids,
                    sinks,
                    pad_id,
                })
            })
            .collect::<Option<Vec<_>>>()?;
        Some(interrupts.run(|control| gather(&requests, control)))
    });
    interrupts.raise(py, outcome.ok_or_else(closed)?)?;
    Ok(())
}

/// Hashes a step's tokens and gathers the rows of their ids, which never leave this side.
///
/// `planes` is per plane of the table the memory with offset and stride, a place per id.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "a step, and where its rows go")]
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
        let guard = reader.lock();
        let request = Request {
            reader: guard.as_ref()?,
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
pub(crate) struct Interrupts {
    deadline: Option<Instant>,
    raised: Mutex<Option<PyErr>>,
}

impl Interrupts {
    pub(crate) fn new(timeout: Option<f64>) -> PyResult<Self> {
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

    /// When the call's time is up.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    pub(crate) fn run<T>(
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
    pub(crate) fn attached(
        &self,
        body: impl FnOnce(Python<'_>) -> PyResult<()>,
    ) -> engram_core::Result<()> {
        Python::attach(|py| py.check_signals().and_then(|()| body(py))).map_err(|error| {
            *self.raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            Error::Cancelled
        })
    }

    /// The outcome; an exception that a signal handler raised comes before ours.
    pub(crate) fn raise<T>(self, py: Python<'_>, outcome: engram_core::Result<T>) -> PyResult<T> {
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
