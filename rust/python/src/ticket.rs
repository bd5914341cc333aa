//! `Ticket`: a gather that runs while Python does something else.
//!
//! No Python object crosses to the worker: rows arrive in memory of the core's, and are copied to the
//! caller's `out` by whoever waits for them, the interpreter released. The ticket keeps `out` exported
//! until it has ended or is dropped.

use std::sync::{Mutex, MutexGuard, PoisonError};

use engram_core::Error;
use engram_core::buffer::HostBuffer as CoreBuffer;
use engram_core::ticket::{Arrived, Order, Ticket as CoreTicket, Waited};
use pyo3::prelude::*;

use crate::buffer::{HostBuffer, Ids, Output};
use crate::errors::{OrRaise as _, to_py, value_error};
use crate::gather::Reader;
use crate::interrupts::Interrupts;
use crate::news;

/// Where the rows of one plane go: memory, offset, stride, bytes of a row, rows.
type Place = (Output, usize, usize, usize, usize);

/// Where rows go once they are there.
enum Target {
    /// To the caller's memory, held until the ticket ends.
    Given(Vec<Place>),
    /// They stay where they arrive.
    Own,
    /// They are there, in this many bytes of this memory.
    Arrived(CoreBuffer, usize),
    /// A waiter has this buffer over that memory.
    Made(Py<HostBuffer>),
    /// The ticket has ended: the caller's memory was let go.
    Released,
}

/// Rows on their way.
#[pyclass(frozen, weakref, module = "engram._engram")]
pub(crate) struct Ticket {
    ticket: CoreTicket,
    target: Mutex<Target>,
}

/// One request: reader, int64 ids, per plane the memory with offset and stride (None for memory of
/// the ticket's own), and the id of a row of zeros.
type Item<'py> = (
    Bound<'py, Reader>,
    Bound<'py, PyAny>,
    Option<Vec<(Bound<'py, PyAny>, usize, usize)>>,
    Option<i64>,
);

/// Puts a gather of all `requests`, in one round of reads, in line. Either all requests give memory
/// or none does; `deadline` is in seconds from now.
#[pyfunction]
#[pyo3(signature = (requests, deadline = None))]
pub(crate) fn submit(
    py: Python<'_>,
    requests: Vec<Item<'_>>,
    deadline: Option<f64>,
) -> PyResult<Ticket> {
    let deadline = Interrupts::new(py, deadline)?.deadline();
    let mut orders = Vec::with_capacity(requests.len());
    let mut places = Vec::new();
    let given = requests.iter().filter(|item| item.2.is_some()).count();
    if given != 0 && given != requests.len() {
        return Err(value_error(py, "out for some tables and not for others"));
    }
    for (reader, ids, planes, pad_id) in requests {
        let mut flat = Vec::new();
        Ids::new(&ids)?.append_to(py, &mut flat);
        let own = reader.get();
        if let Some(planes) = planes {
            let plane_bytes = own.plane_bytes();
            own.require_planes(py, planes.len())?;
            for ((out, offset, stride), &row_bytes) in planes.iter().zip(plane_bytes) {
                let out = Output::new(out)?;
                // Refused here rather than by the wait.
                out.sink(py, *offset, *stride, row_bytes, flat.len())?;
                places.push((out, *offset, *stride, row_bytes, flat.len()));
            }
        }
        let (order, news) = own.with(py, |reader| {
            Ok((Order::new(reader, flat, pad_id), news::of(reader)))
        })?;
        orders.push(order);
        news::tell(reader.as_any(), news)?;
    }
    let ticket = CoreTicket::submit(orders, deadline, given > 0).or_raise(py)?;
    let target = if given > 0 {
        Target::Given(places)
    } else {
        Target::Own
    };
    Ok(Ticket {
        ticket,
        target: Mutex::new(target),
    })
}

#[pymethods]
impl Ticket {
    /// Waits for the rows. Returns the buffer that holds them, or None if they went to memory that
    /// was given.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Py<HostBuffer>>> {
        let interrupts = Interrupts::new(py, timeout)?;
        let outcome = py.detach(|| {
            let interrupt = || interrupts.attached(|_| Ok(()));
            self.ticket
                .wait(interrupts.deadline(), &interrupt, &mut |arrived| {
                    self.take(arrived)
                })
        });
        match interrupts.raise(py, outcome)? {
            Waited::NotYet => {
                let error = Error::Timeout {
                    message: format!(
                        "the rows are not there after {} s; the ticket goes on, and can be waited for again or cancelled",
                        timeout.unwrap_or_default()
                    ),
                    place: Box::default(),
                };
                Err(to_py(py, &error))
            }
            Waited::Failed(error) => {
                self.release();
                Err(to_py(py, &error))
            }
            Waited::Delivered => self.delivered(py),
        }
    }

    /// Whether the ticket has ended, with rows or without.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        py.detach(|| self.ticket.done()).or_raise(py)
    }

    /// Ends the ticket without rows; false if it has ended already.
    fn cancel(&self, py: Python<'_>) -> bool {
        let cancelled = py.detach(|| self.ticket.cancel());
        if cancelled {
            self.release();
        }
        cancelled
    }
}

impl Ticket {
    fn target(&self) -> MutexGuard<'_, Target> {
        self.target.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets go of the caller's memory.
    fn release(&self) {
        let mut target = self.target();
        if matches!(*target, Target::Given(_)) {
            *target = Target::Released;
        }
    }

    /// The buffer with the rows, unless they went to the caller's memory, which is let go.
    fn delivered(&self, py: Python<'_>) -> PyResult<Option<Py<HostBuffer>>> {
        let mut target = self.target();
        let made = match std::mem::replace(&mut *target, Target::Released) {
            Target::Arrived(memory, bytes) => Py::new(py, HostBuffer::over(memory, bytes))?,
            Target::Made(made) => made,
            _ => return Ok(None),
        };
        *target = Target::Made(made.clone_ref(py));
        Ok(Some(made))
    }

    /// Puts the rows where they go; on the thread that waits, the interpreter released.
    fn take(&self, arrived: Arrived) -> engram_core::Result<()> {
        let mut target = self.target();
        if let Target::Given(places) = &*target {
            let sinks = places
                .iter()
                .map(|(out, offset, stride, row_bytes, rows)| {
                    out.core_sink(*offset, *stride, *row_bytes, *rows)
                })
                .collect::<engram_core::Result<Vec<_>>>()?;
            return arrived.deliver(&sinks);
        }
        let (memory, bytes) = arrived.into_memory();
        *target = Target::Arrived(memory, bytes);
        Ok(())
    }
}
