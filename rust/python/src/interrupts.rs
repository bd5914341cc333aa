//! What may end a call early: its deadline, a signal, the end of the interpreter.
//!
//! A call lets go of the interpreter while rows move and comes back to it now and then, to look for
//! signals. Threads of Python that are not waited for may do so while the interpreter goes away, and
//! asking one that has gone ends the process: so nobody comes back once it has begun to go, and it
//! waits for those on their way.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use engram_core::Error;
use engram_core::gather::Control;
use pyo3::prelude::*;

use crate::errors::{to_py, value_error};

/// Forks between this process and the one that loaded the module.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// How often the process that loaded the module forked to make this one.
pub(crate) fn forks() -> u64 {
    FORKS.load(Ordering::Relaxed)
}

/// Whether the interpreter has begun to go away.
static LEAVING: AtomicBool = AtomicBool::new(false);

/// Threads on their way to the interpreter, or holding it.
static ATTACHING: AtomicUsize = AtomicUsize::new(0);

/// How long the end of the interpreter waits for those on their way, who may be in a callback.
const PATIENCE: Duration = Duration::from_secs(1);

/// Runs `body` with the interpreter; `None` where that is going away.
fn attach<T>(body: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    ATTACHING.fetch_add(1, Ordering::SeqCst);
    let outcome = (!LEAVING.load(Ordering::SeqCst)).then(|| Python::attach(body));
    ATTACHING.fetch_sub(1, Ordering::SeqCst);
    outcome
}

/// Called when the interpreter begins to go away.
#[pyfunction]
pub(crate) fn at_exit(py: Python<'_>) {
    LEAVING.store(true, Ordering::SeqCst);
    let until = Instant::now() + PATIENCE;
    while ATTACHING.load(Ordering::SeqCst) > 0 && Instant::now() < until {
        py.detach(|| std::thread::sleep(Duration::from_millis(1)));
    }
}

/// Notes that this process is a forked child: calls that were running, and threads on their way to
/// the interpreter, are the parent's.
#[pyfunction]
pub(crate) fn after_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    ATTACHING.store(0, Ordering::SeqCst);
}

/// Deadline and signals of one call.
pub(crate) struct Interrupts {
    deadline: Option<Instant>,
    raised: Mutex<Option<PyErr>>,
    /// Forks when the call began.
    forks: u64,
}

impl Interrupts {
    pub(crate) fn new(py: Python<'_>, timeout: Option<f64>) -> PyResult<Self> {
        if let Some(seconds) = timeout.filter(|seconds| seconds.is_nan() || *seconds < 0.0) {
            let text = format!("timeout={seconds} is not a number of seconds from 0 on");
            return Err(value_error(py, &text));
        }
        // A timeout beyond the clock's range is no timeout.
        let deadline = timeout
            .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
            .and_then(|duration| Instant::now().checked_add(duration));
        Ok(Self {
            deadline,
            raised: Mutex::new(None),
            forks: forks(),
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
        let outcome = attach(|py| py.check_signals().and_then(|()| body(py)));
        outcome.unwrap_or(Ok(())).map_err(|error| {
            *self.raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            Error::Cancelled
        })?;
        // A handler or callback may have forked: the call's threads and reads are the parent's.
        if forks() == self.forks {
            Ok(())
        } else {
            Err(Error::forked())
        }
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
