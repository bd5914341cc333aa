//! The process's threads: how many there may be, the pool that copies, the pool that waits.
//!
//! Both pools are made on first use and belong to one process: after a fork the child, which has
//! none of the threads, makes its own. The parent's are forgotten there rather than dropped, since
//! a lock inside them may have been held at the moment of the fork.

use std::collections::VecDeque;
use std::io;
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

/// The pool that copies rows: one per process, as many threads as [`available`] says. `None` where
/// they cannot be started now: callers then work alone, which takes longer and fails nobody.
pub(crate) fn compute() -> Option<Arc<(u32, ThreadPool)>> {
    static POOL: PerProcess<ThreadPool> = PerProcess::new();
    POOL.get(|| {
        ThreadPoolBuilder::new()
            .num_threads(available())
            .thread_name(|index| format!("engram-copy-{index}"))
            .build()
    })
    .ok()
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
    /// Jobs that no thread has taken yet, each with a number of its own.
    jobs: VecDeque<(u64, Job)>,
    numbers: u64,
    idle: usize,
    /// Threads that are about to come.
    starting: usize,
}

impl BlockingState {
    /// Whether there is a thread for every job in line.
    fn suffices(&self) -> bool {
        self.idle + self.starting >= self.jobs.len()
    }
}

/// An idle blocking thread leaves after this long.
const IDLE: Duration = Duration::from_secs(10);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while the lock was held leaves a queue or a counter, both valid at every step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `job` on a thread that may block. After an error it has not run and never will.
pub(crate) fn spawn_blocking(job: impl FnOnce() + Send + 'static) -> Result<()> {
    static POOL: PerProcess<Blocking> = PerProcess::new();
    let pool = POOL.get(|| Ok(Blocking::default()))?;
    let submitted = pool.1.submit(Box::new(job), || {
        let worker = Arc::clone(&pool);
        std::thread::Builder::new()
            .name("engram-read".to_owned())
            .spawn(move || worker.1.run())
            .map(drop)
    });
    submitted.map_err(|error| Error::Io {
        doing: "cannot start a reading thread".to_owned(),
        errno: error.raw_os_error().unwrap_or(libc::EAGAIN),
        place: Box::default(),
    })
}

impl Blocking {
    /// Puts `job` in line and sees to it that a thread comes for it; `start` makes one that calls
    /// [`Blocking::run`].
    fn submit(&self, job: Job, start: impl Fn() -> io::Result<()>) -> io::Result<()> {
        let mut state = lock(&self.state);
        let number = state.numbers;
        state.numbers += 1;
        state.jobs.push_back((number, job));
        while !state.suffices() {
            state.starting += 1;
            drop(state);
            let started = start();
            state = lock(&self.state);
            let Err(error) = started else { continue };
            state.starting -= 1;
            // Meanwhile a thread may have become idle or taken the job, which is then under way. If
            // not, this job leaves the line, and no other: the rest was promised to its submitters.
            if !state.suffices()
                && let Some(place) = state.jobs.iter().position(|(own, _)| *own == number)
            {
                let refused = state.jobs.remove(place);
                drop(state);
                drop(refused); // What it holds may take locks of its own.
                return Err(error);
            }
            break;
        }
        drop(state);
        self.work.notify_one();
        Ok(())
    }

    fn run(&self) {
        let mut state = lock(&self.state);
        state.starting -= 1;
        loop {
            if let Some((_, job)) = state.jobs.pop_front() {
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

    /// A thread of `pool`, as `submit` would start it.
    fn start(pool: &Arc<Blocking>) {
        let pool = Arc::clone(pool);
        std::thread::spawn(move || pool.run());
    }

    fn refused() -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EAGAIN))
    }

    const SOON: Duration = Duration::from_secs(5);

    /// A job is under way if a busy thread took it while no thread could be started for it.
    #[test]
    fn a_job_that_was_taken_meanwhile_is_not_refused() {
        let pool = Arc::new(Blocking::default());
        let (open, gate) = channel::<()>();
        let busy = Box::new(move || gate.recv().unwrap());
        pool.submit(busy, || {
            start(&pool);
            Ok(())
        })
        .unwrap();
        while lock(&pool.state).starting > 0 {
            std::thread::yield_now();
        }
        let (done, finished) = channel();
        let outcome = pool.submit(Box::new(move || done.send(()).unwrap()), || {
            open.send(()).unwrap();
            finished.recv_timeout(SOON).unwrap(); // The busy thread has run it.
            refused()
        });
        outcome.unwrap();
        assert!(lock(&pool.state).jobs.is_empty());
    }

    /// The job that no thread could be started for is the one that leaves, not the youngest.
    #[test]
    fn a_refused_job_takes_no_other_with_it() {
        let pool = Arc::new(Blocking::default());
        let (say, hear) = channel();
        let job = |name: &'static str| {
            let say = say.clone();
            Box::new(move || say.send(name).unwrap())
        };
        let outcome = pool.submit(job("refused"), || {
            pool.submit(job("promised"), || Ok(())).unwrap();
            refused()
        });
        assert_eq!(
            outcome.unwrap_err().raw_os_error(),
            Some(libc::EAGAIN),
            "nobody was there to run it"
        );
        start(&pool); // The thread that was about to come for the other.
        assert_eq!(hear.recv_timeout(SOON).unwrap(), "promised");
        pool.submit(job("later"), || {
            start(&pool);
            Ok(())
        })
        .unwrap();
        assert_eq!(hear.recv_timeout(SOON).unwrap(), "later");
        assert!(hear.try_recv().is_err(), "the refused job never runs");
    }

    /// A line that has fewer threads than jobs gets them with the next job.
    #[test]
    fn missing_threads_are_made_up_for() {
        let pool = Arc::new(Blocking::default());
        let (open, gate) = channel::<()>();
        let (say, hear) = channel();
        let started = AtomicUsize::new(0);
        // Two wait in line; the first thread takes the first job, whose own thread is refused.
        let first = Box::new(move || {
            let _ = gate.recv();
        });
        let outcome = pool.submit(first, || {
            let say = say.clone();
            pool.submit(Box::new(move || say.send("second").unwrap()), || Ok(()))
                .unwrap();
            start(&pool);
            while lock(&pool.state).jobs.len() > 1 {
                std::thread::yield_now();
            }
            refused()
        });
        outcome.unwrap();
        let say = say.clone();
        pool.submit(Box::new(move || say.send("third").unwrap()), || {
            started.fetch_add(1, Ordering::Relaxed);
            start(&pool);
            Ok(())
        })
        .unwrap();
        let mut heard = [(); 2].map(|()| hear.recv_timeout(SOON).unwrap());
        heard.sort_unstable();
        assert_eq!(heard, ["second", "third"]);
        drop(open);
        assert!((1..=2).contains(&started.load(Ordering::Relaxed)));
    }
}
