//! A gate around something that many calls use at once and that one call closes.
//!
//! Closing turns later calls away, then waits until the calls inside have left. Three things a
//! read-write lock would get wrong are right here: a call that closes from its own inside (in a
//! progress callback, or in a signal handler that runs while rows move) does not wait for itself;
//! a call that enters several gates cannot deadlock with those closing them; and a forked child does
//! not wait for calls that only its parent had running.

use std::cell::RefCell;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::Duration;

use pyo3::prelude::*;

use crate::interrupts::forks;

/// How long closing waits between two looks for signals.
const SIGNAL_PERIOD: Duration = Duration::from_millis(50);

thread_local! {
    /// Gates this thread is inside of, by address, once per entry.
    static INSIDE: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

struct State<T> {
    value: Option<Arc<T>>,
    inside: usize,
    forks: u64,
    /// Threads that close it and wait.
    closing: Vec<Thread>,
}

/// Lets calls in until it is closed.
pub(crate) struct Gate<T> {
    // Locked with the interpreter held, and so not at the moment of a fork.
    state: Mutex<State<T>>,
}

/// A call inside the gate.
pub(crate) struct Entered<'g, T> {
    gate: &'g Gate<T>,
    value: Arc<T>,
    forks: u64,
}

impl<T: Send + Sync> Gate<T> {
    pub(crate) fn new(value: Arc<T>) -> Self {
        Self {
            state: Mutex::new(State {
                value: Some(value),
                inside: 0,
                forks: forks(),
                closing: Vec::new(),
            }),
        }
    }

    /// Enters; `None` when it is closed.
    pub(crate) fn enter(&self, _py: Python<'_>) -> Option<Entered<'_, T>> {
        let mut state = self.lock();
        let value = Arc::clone(state.value.as_ref()?);
        state.inside += 1;
        let forks = state.forks;
        drop(state);
        INSIDE.with_borrow_mut(|inside| inside.push(self.address()));
        Some(Entered {
            gate: self,
            value,
            forks,
        })
    }

    /// Lets later calls in to `value`; those inside stay with what they entered. `last` is called
    /// with what they had. `None` when it is closed.
    pub(crate) fn exchange(
        &self,
        py: Python<'_>,
        value: Arc<T>,
        last: impl FnOnce(&T),
    ) -> Option<()> {
        let old = self
            .lock()
            .value
            .as_mut()
            .map(|old| std::mem::replace(old, value))?;
        last(&old);
        // The last holder closes the files, which may take the kernel a while.
        py.detach(|| drop(old));
        Some(())
    }

    pub(crate) fn is_closed(&self, _py: Python<'_>) -> bool {
        self.lock().value.is_none()
    }

    /// Turns later calls away and waits for those inside, other than the caller's own. `first` runs
    /// before the wait, in the call that closes.
    ///
    /// # Errors
    /// What a signal handler raised while waiting; the gate is closed all the same.
    pub(crate) fn close(&self, py: Python<'_>, first: impl FnOnce(&T)) -> PyResult<()> {
        let value = self.lock().value.take();
        if let Some(value) = &value {
            first(value);
        }
        let own = INSIDE.with_borrow(|inside| {
            let entries = inside.iter().filter(|&&gate| gate == self.address());
            entries.count()
        });
        loop {
            let mut state = self.lock();
            if state.inside <= own {
                break;
            }
            let this = thread::current();
            if !state.closing.iter().any(|thread| thread.id() == this.id()) {
                state.closing.push(this);
            }
            drop(state);
            // Whoever leaves wakes it up; a wake-up for another reason is one look too many.
            py.detach(|| thread::park_timeout(SIGNAL_PERIOD));
            py.check_signals()?;
        }
        // The last holder closes the files, which may take the kernel a while.
        py.detach(|| drop(value));
        Ok(())
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let forks = forks();
        if state.forks != forks {
            state.forks = forks;
            state.inside = 0;
            state.closing.clear();
        }
        state
    }
}

impl<T> Deref for Entered<'_, T> {
    type Target = Arc<T>;

    fn deref(&self) -> &Arc<T> {
        &self.value
    }
}

impl<T> Drop for Entered<'_, T> {
    fn drop(&mut self) {
        let address = std::ptr::from_ref(self.gate).addr();
        INSIDE.with_borrow_mut(|inside| {
            if let Some(place) = inside.iter().rposition(|&gate| gate == address) {
                inside.swap_remove(place);
            }
        });
        let mut state = self
            .gate
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // An entry from before a fork is not counted in the child.
        if state.forks == self.forks {
            state.inside = state.inside.saturating_sub(1);
            for thread in &state.closing {
                thread.unpark();
            }
        }
    }
}
