//! Gathers that run while the caller does something else.
//!
//! A ticket's rows arrive in memory of its own, never in the caller's: whoever waits for them copies
//! them out. So a ticket that was cancelled, dropped or given up can be left to its worker, which may
//! be stuck in a device, and nothing is written behind the caller's back.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::buffer::{HostBuffer, PlaneSink};
use crate::error::{Error, Place, Result};
use crate::gather::{Control, Request, Sinks, gather};
use crate::in_flight::Flight;
use crate::reader::Reader;
use crate::schedule::Schedule;
use crate::threads::PerProcess;

/// Planes that share memory start at multiples of this many bytes.
const ALIGNMENT: usize = 64;

/// How long a waiter sleeps between two looks at its interrupt check.
const CHECK_PERIOD: Duration = Duration::from_millis(50);

/// Rows wanted from one table; counted among the reader's tickets from the start.
#[derive(Debug)]
pub struct Order {
    reader: Arc<Reader>,
    ids: Vec<i64>,
    pad_id: Option<i64>,
    _flight: Flight,
}

impl Order {
    /// Rows of `ids` (flattened), with zeros for `pad_id`.
    pub fn new(reader: &Arc<Reader>, ids: Vec<i64>, pad_id: Option<i64>) -> Self {
        Self {
            _flight: reader.tickets().begin(),
            reader: Arc::clone(reader),
            ids,
            pad_id,
        }
    }

    /// Per plane of the table, bytes of all its rows.
    fn plane_bytes(&self) -> impl Iterator<Item = (usize, usize)> {
        let count = self.ids.len();
        self.reader.table().planes.iter().map(move |plane| {
            let row_bytes = plane.row_bytes();
            (row_bytes, row_bytes.saturating_mul(count))
        })
    }
}

/// Rows that have arrived: plane after plane and table after table, in the order of the request, each
/// plane at a multiple of 64 bytes.
#[derive(Debug)]
pub struct Arrived {
    memory: HostBuffer,
    bytes: usize,
    parts: Vec<Part>,
}

/// One plane's rows.
#[derive(Debug, Clone, Copy)]
struct Part {
    offset: usize,
    row_bytes: usize,
    rows: usize,
}

impl Arrived {
    /// Room for the rows of `orders`.
    fn room(orders: &[Order], recycled: bool) -> Result<Self> {
        let mut parts = Vec::new();
        let mut end = 0_usize;
        for order in orders {
            for (row_bytes, bytes) in order.plane_bytes() {
                let offset = end.next_multiple_of(ALIGNMENT);
                end = offset
                    .checked_add(bytes)
                    .ok_or_else(|| Error::value("rows of one ticket exceed the address space"))?;
                parts.push(Part {
                    offset,
                    row_bytes,
                    rows: order.ids.len(),
                });
            }
        }
        let spare = if recycled { Spares::take(end)? } else { None };
        Ok(Self {
            memory: match spare {
                Some(memory) => memory,
                None => HostBuffer::new(end, false)?,
            },
            bytes: end,
            parts,
        })
    }

    /// One sink per plane, per table.
    fn sinks(&mut self, orders: &[Order]) -> Result<Vec<Sinks<'_>>> {
        let mut rest = self.memory.as_mut_slice();
        let mut begin = 0;
        let mut parts = self.parts.iter();
        let mut all = Vec::with_capacity(orders.len());
        for order in orders {
            let mut sinks = Sinks::new();
            for part in parts.by_ref().take(order.reader.table().planes.len()) {
                let bytes = part.row_bytes * part.rows;
                let (own, after) = rest.split_at_mut(part.offset - begin + bytes);
                let own = &mut own[part.offset - begin..];
                sinks.push(PlaneSink::new(
                    own,
                    0,
                    part.row_bytes,
                    part.row_bytes,
                    part.rows,
                )?);
                begin = part.offset + bytes;
                rest = after;
            }
            all.push(sinks);
        }
        Ok(all)
    }

    /// The memory and the bytes of it that hold rows.
    pub fn into_memory(self) -> (HostBuffer, usize) {
        (self.memory, self.bytes)
    }

    /// Copies every plane's rows to its sink, and keeps the memory for another ticket.
    pub fn deliver(mut self, sinks: &[PlaneSink<'_>]) -> Result<()> {
        if sinks.len() != self.parts.len() {
            return Err(Error::value(format!(
                "{} sinks for {} planes",
                sinks.len(),
                self.parts.len()
            )));
        }
        let bytes = self.memory.as_mut_slice();
        for (part, sink) in self.parts.iter().zip(sinks) {
            let rows = bytes[part.offset..].chunks_exact(part.row_bytes.max(1));
            for (position, row) in rows.take(part.rows).enumerate() {
                sink.write(position, row);
            }
        }
        Spares::give(self.memory)
    }
}

/// Memory of tickets that have been delivered, for those to come: fresh pages cost more than the rows
/// of a small ticket.
#[derive(Default)]
struct Spares(Mutex<Vec<HostBuffer>>);

impl Spares {
    /// Buffers kept, and the largest kept.
    const MOST: usize = 8;
    const LARGEST: usize = 8 << 20;

    fn of_process() -> Result<Arc<(u32, Self)>> {
        static SPARES: PerProcess<Spares> = PerProcess::new();
        SPARES.get(|| Ok(Self::default()))
    }

    /// A buffer for `bytes` bytes, at most twice as large as it needs to be.
    fn take(bytes: usize) -> Result<Option<HostBuffer>> {
        let spares = Self::of_process()?;
        let mut kept = spares.1.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = kept.iter().position(|memory| {
            memory.len() >= bytes && memory.len() / 2 <= bytes.next_multiple_of(1 << 16)
        });
        Ok(fits.map(|place| kept.swap_remove(place)))
    }

    fn give(memory: HostBuffer) -> Result<()> {
        let spares = Self::of_process()?;
        let mut kept = spares.1.0.lock().unwrap_or_else(PoisonError::into_inner);
        if memory.len() <= Self::LARGEST {
            if kept.len() == Self::MOST {
                kept.remove(0);
            }
            kept.push(memory);
        }
        Ok(())
    }
}

enum State {
    /// In line.
    Queued(Vec<Order>),
    Running,
    Arrived(Arrived),
    /// A waiter has taken the rows.
    Delivered,
    Failed(Arc<Error>),
}

impl State {
    fn ended(&self) -> bool {
        !matches!(self, Self::Queued(_) | Self::Running)
    }
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    cancelled: AtomicBool,
    deadline: Option<Instant>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Every assignment to the state is whole, whatever panicked after it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the ticket, unless it has ended already.
    fn end(&self, state: State) -> bool {
        let mut current = self.lock();
        if current.ended() {
            return false;
        }
        let before = std::mem::replace(&mut *current, state);
        drop(current);
        self.changed.notify_all();
        drop(before);
        true
    }

    /// On a worker.
    fn run(&self, recycled: bool) {
        let taken = {
            let mut state = self.lock();
            match std::mem::replace(&mut *state, State::Running) {
                State::Queued(orders) => Some(orders),
                other => {
                    *state = other;
                    None
                }
            }
        };
        let Some(orders) = taken else {
            return; // Ended while it was in line.
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| self.gather(&orders, recycled)));
        self.end(match outcome {
            Ok(Ok(arrived)) => State::Arrived(arrived),
            Ok(Err(error)) => State::Failed(Arc::new(error)),
            Err(_) => State::Failed(Arc::new(Error::value(
                "the gather of this ticket panicked; its message is on standard error",
            ))),
        });
        // Only now may the readers be closed: tickets have ended when `drain` returns.
        drop(orders);
    }

    fn gather(&self, orders: &[Order], recycled: bool) -> Result<Arrived> {
        let interrupt = || {
            if self.cancelled.load(Ordering::Relaxed) {
                Err(Error::Cancelled)
            } else {
                Ok(())
            }
        };
        interrupt()?;
        if self
            .deadline
            .is_some_and(|deadline| Instant::now() >= deadline)
        {
            return Err(too_late());
        }
        let mut arrived = Arrived::room(orders, recycled)?;
        let sinks = arrived.sinks(orders)?;
        let requests: Vec<_> = orders
            .iter()
            .zip(sinks)
            .map(|(order, sinks)| Request {
                reader: &order.reader,
                ids: &order.ids,
                sinks,
                pad_id: order.pad_id,
            })
            .collect();
        let control = Control {
            deadline: self.deadline,
            interrupt: &interrupt,
        };
        gather(&requests, &control)?;
        drop(requests);
        Ok(arrived)
    }
}

fn too_late() -> Error {
    Error::Timeout {
        message: "the deadline passed before the ticket's turn came".to_owned(),
        place: Box::<Place>::default(),
    }
}

/// Rows on their way. Dropping a ticket cancels it.
pub struct Ticket {
    shared: Arc<Shared>,
    process: u32,
}

/// What a wait found.
pub enum Waited {
    /// The rows were handed over, now or to an earlier waiter.
    Delivered,
    /// The wait's own time is up; the ticket goes on.
    NotYet,
    /// The ticket's error, the same for every waiter.
    Failed(Arc<Error>),
}

impl Ticket {
    /// Puts a gather of `orders`, in one round of reads, in line: earliest deadline first. At its
    /// deadline a ticket ends with a timeout. With `recycled`, rows arrive in memory that is used
    /// again after [`Arrived::deliver`].
    pub fn submit(orders: Vec<Order>, deadline: Option<Instant>, recycled: bool) -> Result<Self> {
        let shared = Arc::new(Shared {
            state: Mutex::new(State::Queued(orders)),
            changed: Condvar::new(),
            cancelled: AtomicBool::new(false),
            deadline,
        });
        let worker = Arc::clone(&shared);
        Schedule::of_process()?.submit(deadline, move || worker.run(recycled))?;
        Ok(Self {
            shared,
            process: std::process::id(),
        })
    }

    /// Waits until the ticket has ended, at most until `until`. The first waiter to find the rows
    /// passes them to its `take`; other waiters, and a cancel, come after that. `interrupt` is called
    /// now and then; an error from it ends the wait, not the ticket.
    pub fn wait(
        &self,
        until: Option<Instant>,
        interrupt: &dyn Fn() -> Result<()>,
        take: &mut dyn FnMut(Arrived) -> Result<()>,
    ) -> Result<Waited> {
        self.require_own_process()?;
        let shared = &*self.shared;
        let mut state = shared.lock();
        loop {
            match &*state {
                State::Failed(error) => return Ok(Waited::Failed(Arc::clone(error))),
                State::Delivered => return Ok(Waited::Delivered),
                State::Arrived(_) => {
                    let arrived = std::mem::replace(&mut *state, State::Delivered);
                    if let State::Arrived(arrived) = arrived
                        && let Err(error) = take(arrived)
                    {
                        *state = State::Failed(Arc::new(error));
                    }
                    continue;
                }
                State::Queued(_) | State::Running => {}
            }
            let now = Instant::now();
            if let State::Queued(_) = &*state
                && shared.deadline.is_some_and(|deadline| now >= deadline)
            {
                // Its turn may be long in coming, if ever: all workers may hang in a device.
                drop(state);
                shared.end(State::Failed(Arc::new(too_late())));
                state = shared.lock();
                continue;
            }
            if until.is_some_and(|until| now >= until) {
                return Ok(Waited::NotYet);
            }
            let wake = [until, shared.deadline.filter(|&deadline| deadline > now)]
                .into_iter()
                .flatten()
                .map(|instant| instant.duration_since(now))
                .fold(CHECK_PERIOD, Duration::min);
            let (guard, outcome) = shared
                .changed
                .wait_timeout(state, wake)
                .unwrap_or_else(PoisonError::into_inner);
            state = guard;
            if outcome.timed_out() {
                drop(state);
                interrupt()?;
                state = shared.lock();
            }
        }
    }

    /// Whether the ticket has ended, with rows or without.
    pub fn done(&self) -> Result<bool> {
        self.require_own_process()?;
        Ok(self.shared.lock().ended())
    }

    /// Ends the ticket without rows, at once; false if it has ended already.
    pub fn cancel(&self) -> bool {
        if self.require_own_process().is_err() {
            return false;
        }
        self.shared.cancelled.store(true, Ordering::Relaxed);
        self.shared.end(State::Failed(Arc::new(Error::Cancelled)))
    }

    /// A forked child has none of the threads that would end the ticket, and perhaps its lock held.
    fn require_own_process(&self) -> Result<()> {
        let process = std::process::id();
        if process == self.process {
            return Ok(());
        }
        Err(Error::value(format!(
            "this ticket was submitted by process {}, before the fork that made process {process}; submit it again here",
            self.process
        )))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// Waits until no ticket of `reader` is in flight. `interrupt` is called now and then; an error from
/// it ends the wait.
pub fn drain(reader: &Reader, interrupt: &dyn Fn() -> Result<()>) -> Result<()> {
    let mut pause = Duration::from_micros(50);
    while reader.tickets().count() > 0 {
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(10));
        interrupt()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
