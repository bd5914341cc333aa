//! The process's threads: how many there may be, the pool that copies, the pool that waits.
//!
//! Both pools are made on first use and belong to one process: after a fork the child, which has
//! none of the threads, makes its own. The parent's are forgotten there rather than dropped, since
//! a lock inside them may have been held at the moment of the fork.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::cgroup;
use crate::error::{Error, Result};
pub(crate) use crate::process::PerProcess;
use crate::system;

/// Threads this process may use at once: the smaller of its CPU affinity and its cgroup quotas,
/// its own and those of every parent group, v1 and v2. At least 1.
pub fn available() -> usize {
    /// 0 until it was found out. Two threads may both find out; a lock could be held at a fork.
    static AVAILABLE: AtomicUsize = AtomicUsize::new(0);
    let known = AVAILABLE.load(Ordering::Relaxed);
    if known > 0 {
        return known;
    }
    let available = system::processors().min(cgroup::cpus()).max(1);
    AVAILABLE.store(available, Ordering::Relaxed);
    available
}

/// The pool that copies rows: one per process, as many threads as [`available`] says.
pub(crate) fn compute() -> Result<Arc<(u32, ThreadPool)>> {
    static POOL: PerProcess<ThreadPool> = PerProcess::new();
    POOL.get(|| {
        ThreadPoolBuilder::new()
            .num_threads(available())
            .thread_name(|index| format!("engram-copy-{index}"))
            .build()
            .map_err(|error| Error::value(format!("cannot start copy threads: {error}")))
    })
}

type Job = Box<dyn FnOnce() + Send>;

/// Threads that may block in the kernel. One is added whenever a job finds none idle, so a thread
/// that a hung device holds does not hold up the jobs of others.
#[derive(Default)]
struct Blocking {
    state: Mutex<BlockingState>,
    work: Condvar,
}

#[derive(Default)]
struct BlockingState {
    jobs: VecDeque<Job>,
    idle: usize,
}

/// An idle blocking thread leaves after this long.
const IDLE: Duration = Duration::from_secs(10);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while the lock was held leaves a queue or a counter, both valid at every step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `job` on a thread that may block.
pub(crate) fn spawn_blocking(job: impl FnOnce() + Send + 'static) -> Result<()> {
    static POOL: PerProcess<Blocking> = PerProcess::new();
    let pool = POOL.get(|| Ok(Blocking::default()))?;
    let mut state = lock(&pool.1.state);
    state.jobs.push_back(Box::new(job));
    if state.idle >= state.jobs.len() {
        drop(state);
        pool.1.work.notify_one();
        return Ok(());
    }
    drop(state);
    let worker = Arc::clone(&pool);
    let spawned = std::thread::Builder::new()
        .name("engram-read".to_owned())
        .spawn(move || worker.1.run());
    match spawned {
        Ok(_) => Ok(()),
        Err(error) => {
            // Another thread may still take the job; only with nobody to take it is this an error.
            let mut state = lock(&pool.1.state);
            if state.idle > 0 {
                drop(state);
                pool.1.work.notify_one();
                return Ok(());
            }
            state.jobs.pop_back();
            Err(Error::Io {
                doing: "cannot start a reading thread".to_owned(),
                errno: error.raw_os_error().unwrap_or(libc::EAGAIN),
                place: Box::default(),
            })
        }
    }
}

impl Blocking {
    fn run(&self) {
        let mut state = lock(&self.state);
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                state = lock(&self.state);
                continue;
            }
            state.idle += 1;
            let (guard, timeout) = self
                .work
                .wait_timeout_while(state, IDLE, |state| state.jobs.is_empty())
                .unwrap_or_else(PoisonError::into_inner);
            state = guard;
            state.idle -= 1;
            if timeout.timed_out() && state.jobs.is_empty() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_blocked_job_does_not_hold_up_the_next() {
        let (release, wait) = channel::<()>();
        spawn_blocking(move || {
            let _ = wait.recv();
        })
        .unwrap();
        let (done, finished) = channel();
        for index in 0..10 {
            let done = done.clone();
            spawn_blocking(move || done.send(index).unwrap()).unwrap();
        }
        let mut seen: Vec<i32> = (0..10)
            .map(|_| finished.recv_timeout(Duration::from_secs(5)).unwrap())
            .collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..10).collect::<Vec<_>>());
        drop(release);
    }
}
