//! `StepGather`: hash and gather a step for several tables, into memory chosen once.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};

use engram_core::gather::Sinks;
use engram_core::hash::{Context, Ints, Step};
use engram_core::reader::Reader as CoreReader;
use engram_core::step::{Ids, StepTable, StepTables, gather_step};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use smallvec::SmallVec;

use crate::buffer::Output;
use crate::errors::{OrRaise as _, value_error};
use crate::gate::Entered;
use crate::gather::Reader;
use crate::hash::{NgramHash, threads_for};
use crate::interrupts::{Interrupts, forks};
use crate::news;

/// One table: its hash, itself, where the rows of each plane go, and the id of a row of zeros.
struct Lane {
    hash: Py<NgramHash>,
    reader: Py<Reader>,
    planes: Vec<Plane>,
    pad_id: Option<i64>,
}

/// Where the rows of one plane go.
struct Plane {
    out: Output,
    offset: usize,
    stride: usize,
    row_bytes: usize,
}

/// A table as Python gives it; per plane the memory with offset and stride.
type Item<'py> = (
    Py<NgramHash>,
    Py<Reader>,
    Vec<(Bound<'py, PyAny>, usize, usize)>,
    Option<i64>,
);

/// Copies of what the caller passed, in memory that is kept from step to step.
#[derive(Default)]
struct Kept {
    tokens: Integers,
    starts: Integers,
    context: Integers,
    ids: Ids,
}

/// Hashes and gathers steps of several tables; one step at a time.
#[pyclass(frozen, module = "engram._engram")]
pub(crate) struct StepGather {
    lanes: Vec<Lane>,
    context_len: usize,
    max_tokens: usize,
    kept: Mutex<Kept>,
    /// Forks before `kept` was last locked: who has more holds a lock that its parent held.
    forks: AtomicU64,
}

#[pymethods]
impl StepGather {
    #[new]
    fn new(py: Python<'_>, tables: Vec<Item<'_>>, max_tokens: usize) -> PyResult<Self> {
        let mut lanes: Vec<Lane> = Vec::with_capacity(tables.len());
        let mut context_len = None;
        for (hash, reader, planes, pad_id) in tables {
            let plane_bytes = reader.get().plane_bytes();
            reader.get().require_planes(py, planes.len())?;
            if lanes.iter().any(|lane| lane.reader.is(&reader)) {
                return Err(value_error(py, "a table is given twice"));
            }
            let core = hash.get().core();
            if context_len.is_some_and(|known| known != core.context_len()) {
                return Err(value_error(
                    py,
                    "the hashes of one step look equally far back; these do not",
                ));
            }
            context_len = Some(core.context_len());
            let rows = core.heads().count() * max_tokens;
            let planes = planes
                .iter()
                .zip(plane_bytes)
                .map(|((out, offset, stride), &row_bytes)| {
                    let out = Output::new(out)?;
                    out.sink(py, *offset, *stride, row_bytes, rows)?;
                    Ok(Plane {
                        out,
                        offset: *offset,
                        stride: *stride,
                        row_bytes,
                    })
                })
                .collect::<PyResult<_>>()?;
            lanes.push(Lane {
                hash,
                reader,
                planes,
                pad_id,
            });
        }
        Ok(Self {
            lanes,
            context_len: context_len.unwrap_or(0),
            max_tokens,
            kept: Mutex::default(),
            forks: AtomicU64::new(0),
        })
    }

    /// Fills the first places with the rows of the step's tokens, padding left out. Returns how many
    /// tokens that were.
    #[pyo3(signature = (tokens, query_start_loc = None, context = None))]
    fn run(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        query_start_loc: Option<&Bound<'_, PyAny>>,
        context: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let mut own = Kept::default();
        let mut kept = self.kept(py)?;
        let Kept {
            tokens: kept_tokens,
            starts,
            context: kept_context,
            ids,
        } = kept.as_deref_mut().unwrap_or(&mut own);
        kept_tokens.read(py, tokens, "tokens")?;
        if let Some(object) = query_start_loc {
            starts.read(py, object, "query_start_loc")?;
        }
        let mut context_axes = None;
        if let Some(object) = context {
            let axes = kept_context.read(py, object, "context")?;
            let &[rows, width] = axes.as_slice() else {
                return Err(value_error(
                    py,
                    &format!(
                        "context has {} axes, not [requests, context_len]",
                        axes.len()
                    ),
                ));
            };
            context_axes = Some((rows, width));
        }
        let starts = query_start_loc.map(|_| starts.values());
        let context = context_axes.map(|(rows, width)| Context {
            values: kept_context.values(),
            rows,
            width,
        });
        let all = kept_tokens.values();
        let step = Step::new(all, starts, context, self.context_len).or_raise(py)?;
        let owned = step.owned();
        if owned > self.max_tokens {
            return Err(value_error(
                py,
                &format!(
                    "a step of {owned} tokens; at most {} fit (max_tokens)",
                    self.max_tokens
                ),
            ));
        }
        let tokens = match all {
            Ints::I32(values) => Ints::I32(&values[..owned]),
            Ints::I64(values) => Ints::I64(&values[..owned]),
        };
        let step = Step::new(tokens, starts, context, self.context_len).or_raise(py)?;
        let sinks = self
            .lanes
            .iter()
            .map(|lane| lane.sinks(py, owned))
            .collect::<PyResult<SmallVec<[_; 4]>>>()?;
        let interrupts = Interrupts::new(py, None)?;
        let entered = self
            .lanes
            .iter()
            .map(|lane| lane.reader.get().enter(py))
            .collect::<PyResult<SmallVec<[_; 4]>>>()?;
        let outcome = py.detach(|| self.gather(&entered, sinks, &step, ids, &interrupts));
        let news: SmallVec<[_; 4]> = entered.iter().map(|entered| news::of(entered)).collect();
        drop(entered);
        drop(kept);
        let mut told = Ok(());
        for (lane, news) in self.lanes.iter().zip(news) {
            told = told.and(news::tell(lane.reader.bind(py).as_any(), news));
        }
        interrupts.raise(py, outcome)?;
        told.map(|()| owned)
    }
}

impl StepGather {
    /// The memory that is kept from step to step; `None` in a child whose parent was using it at the
    /// fork and so for ever.
    fn kept(&self, py: Python<'_>) -> PyResult<Option<MutexGuard<'_, Kept>>> {
        let forks = forks();
        // Never waited for: the holder may itself wait for the interpreter, which this thread holds.
        let kept = match self.kept.try_lock() {
            Ok(kept) => kept,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) if self.forks.load(Ordering::Relaxed) != forks => {
                return Ok(None);
            }
            Err(TryLockError::WouldBlock) => {
                return Err(value_error(
                    py,
                    "another step is being gathered into this memory",
                ));
            }
        };
        self.forks.store(forks, Ordering::Relaxed);
        Ok(Some(kept))
    }

    fn gather(
        &self,
        entered: &[Entered<'_, CoreReader>],
        sinks: SmallVec<[Sinks<'_>; 4]>,
        step: &Step<'_>,
        ids: &mut Ids,
        interrupts: &Interrupts,
    ) -> engram_core::Result<()> {
        let mut tables = StepTables::new();
        let mut heads = 0;
        for ((lane, reader), sinks) in self.lanes.iter().zip(entered).zip(sinks) {
            let hash = lane.hash.get().core();
            heads += hash.heads().count();
            tables.push(StepTable {
                hash,
                reader,
                sinks,
                pad_id: lane.pad_id,
            });
        }
        let threads = threads_for(heads * step.tokens().len());
        interrupts
            .run(|control| gather_step(tables, step, ids, threads, control))
            .map(drop)
    }
}

impl Lane {
    fn sinks(&self, py: Python<'_>, tokens: usize) -> PyResult<Sinks<'_>> {
        let rows = self.hash.get().core().heads().count() * tokens;
        self.planes
            .iter()
            .map(|plane| {
                plane
                    .out
                    .sink(py, plane.offset, plane.stride, plane.row_bytes, rows)
            })
            .collect()
    }
}

/// A copy of a caller's int32 or int64 values, in memory that is used again.
#[derive(Default)]
struct Integers {
    narrow: Vec<i32>,
    wide: Vec<i64>,
    is_wide: bool,
}

impl Integers {
    /// Copies the buffer of `object`, an argument called `name`; returns its shape.
    fn read(
        &mut self,
        py: Python<'_>,
        object: &Bound<'_, PyAny>,
        name: &str,
    ) -> PyResult<SmallVec<[usize; 2]>> {
        let buffer = PyUntypedBuffer::get(object)
            .map_err(|error| PyTypeError::new_err(format!("{name}: {error}")))?;
        let shape = SmallVec::from_slice(buffer.shape());
        let wrong = |_| PyTypeError::new_err(format!("{name} does not hold int32 or int64"));
        let count = buffer.item_count();
        self.is_wide = buffer.item_size() == size_of::<i64>();
        if self.is_wide {
            self.wide.resize(count, 0);
            let typed = buffer.into_typed::<i64>().map_err(wrong)?;
            typed.copy_to_slice(py, &mut self.wide)?;
        } else {
            self.narrow.resize(count, 0);
            let typed = buffer.into_typed::<i32>().map_err(wrong)?;
            typed.copy_to_slice(py, &mut self.narrow)?;
        }
        Ok(shape)
    }

    fn values(&self) -> Ints<'_> {
        if self.is_wide {
            Ints::I64(&self.wide)
        } else {
            Ints::I32(&self.narrow)
        }
    }
}
