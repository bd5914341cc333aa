//! Work that waits its turn: earliest deadline first, a few jobs at once.
//!
//! Jobs run on the process's blocking threads. A running job is never interrupted for a more urgent
//! one, so several run at once: a decode step then need not wait until a long prefill has ended.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::error::Result;
use crate::threads;

/// Jobs of a process that run at once.
pub(crate) const AT_ONCE: usize = 4;

type Job = Box<dyn FnOnce() + Send>;

/// A job in line.
struct Waiting {
    deadline: Option<Instant>,
    /// Place in order of arrival.
    arrival: u64,
    job: Job,
}

impl Ord for Waiting {
    /// The more urgent one is greater: earlier deadline, any deadline before none, then arrival.
    fn cmp(&self, other: &Self) -> Ordering {
        let deadlines = match (self.deadline, other.deadline) {
            (Some(mine), Some(theirs)) => theirs.cmp(&mine),
            (mine, theirs) => mine.is_some().cmp(&theirs.is_some()),
        };
        deadlines.then_with(|| other.arrival.cmp(&self.arrival))
    }
}

impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Waiting {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Waiting {}

#[derive(Default)]
struct Line {
    waiting: BinaryHeap<Waiting>,
    arrivals: u64,
    workers: usize,
}

/// Gives a worker a thread; an error means that it never runs.
type Start = fn(Job) -> Result<()>;

/// Jobs in line, and how many run at once.
pub(crate) struct Schedule {
    line: Mutex<Line>,
    at_once: usize,
    start: Start,
}

impl Schedule {
    fn new(at_once: usize) -> Self {
        Self {
            line: Mutex::default(),
            at_once,
            start: |worker| threads::spawn_blocking(worker),
        }
    }

    /// This process's schedule.
    pub(crate) fn of_process() -> Result<Arc<Self>> {
        static SCHEDULE: threads::PerProcess<Arc<Schedule>> = threads::PerProcess::new();
        let held = SCHEDULE.get(|| Ok(Arc::new(Self::new(AT_ONCE))))?;
        Ok(Arc::clone(&held.1))
    }

    fn lock(&self) -> MutexGuard<'_, Line> {
        // Jobs run outside the lock, so whoever panicked left the line whole.
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts `job` in line. After an error it is not in line and never runs.
    pub(crate) fn submit(
        self: &Arc<Self>,
        deadline: Option<Instant>,
        job: impl FnOnce() + Send + 'static,
    ) -> Result<()> {
        let mut line = self.lock();
        if line.workers < self.at_once {
            let schedule = Arc::clone(self);
            // Under the lock: whoever finds as many workers as there may be relies on all of them.
            match (self.start)(Box::new(move || schedule.work())) {
                Ok(()) => line.workers += 1,
                Err(error) if line.workers == 0 => return Err(error),
                Err(_) => {} // A worker that runs will come to it.
            }
        }
        let arrival = line.arrivals;
        line.arrivals += 1;
        line.waiting.push(Waiting {
            deadline,
            arrival,
            job: Box::new(job),
        });
        Ok(())
    }

    fn work(&self) {
        loop {
            let mut line = self.lock();
            let Some(next) = line.waiting.pop() else {
                line.workers -= 1;
                return;
            };
            drop(line);
            // A panic has said its message by now; those in line are not to suffer for it.
            drop(catch_unwind(AssertUnwindSafe(next.job)));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::Ordering::Relaxed;
    use std::sync::atomic::{AtomicBool, AtomicUsize};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;
    use crate::error::Error;

    #[test]
    fn earliest_deadline_first_then_in_order_of_arrival() {
        let schedule = Arc::new(Schedule::new(1));
        let (open, gate) = channel::<()>();
        let (say, hear) = channel();
        // The only worker waits at the gate, so that everything else is in line together.
        let (started, running) = channel();
        schedule
            .submit(None, move || {
                started.send(()).unwrap();
                gate.recv().unwrap();
            })
            .unwrap();
        running.recv_timeout(Duration::from_secs(5)).unwrap();
        let now = Instant::now();
        let jobs = [
            ("none, first", None),
            ("late", Some(900)),
            ("soon", Some(100)),
            ("none, second", None),
            ("soon, second", Some(100)),
            ("soonest", Some(50)),
        ];
        for (name, after) in jobs {
            let say = say.clone();
            let deadline = after.map(|seconds| now + Duration::from_secs(seconds));
            schedule
                .submit(deadline, move || say.send(name).unwrap())
                .unwrap();
        }
        open.send(()).unwrap();
        let order: Vec<_> = (0..jobs.len())
            .map(|_| hear.recv_timeout(Duration::from_secs(5)).unwrap())
            .collect();
        let expected = [
            "soonest",
            "soon",
            "soon, second",
            "late",
            "none, first",
            "none, second",
        ];
        assert_eq!(order, expected);
    }

    #[test]
    fn a_job_that_panics_does_not_take_its_worker_with_it() {
        let schedule = Arc::new(Schedule::new(1));
        let (open, gate) = channel::<()>();
        schedule.submit(None, move || gate.recv().unwrap()).unwrap();
        schedule.submit(None, || panic!("as asked")).unwrap();
        let (say, hear) = channel();
        for index in 0..10 {
            let say = say.clone();
            schedule
                .submit(None, move || say.send(index).unwrap())
                .unwrap();
        }
        open.send(()).unwrap();
        for index in 0..10 {
            assert_eq!(hear.recv_timeout(Duration::from_secs(5)).unwrap(), index);
        }
    }

    /// Every job that was accepted runs, and every other is refused, also if no thread can be
    /// started for two that come at the same time; and later ones are served.
    #[test]
    fn a_job_without_a_thread_is_refused_and_later_ones_are_served() {
        static REFUSING: AtomicBool = AtomicBool::new(true);
        let start: Start = |worker| {
            if REFUSING.load(Relaxed) {
                std::thread::sleep(Duration::from_millis(20));
                return Err(Error::Cancelled);
            }
            threads::spawn_blocking(worker)
        };
        let schedule = Arc::new(Schedule {
            start,
            ..Schedule::new(2)
        });
        let ran = Arc::new(AtomicUsize::new(0));
        let submit = || {
            let ran = Arc::clone(&ran);
            schedule.submit(None, move || {
                ran.fetch_add(1, Relaxed);
            })
        };
        let together = Barrier::new(3);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    together.wait();
                    assert!(matches!(submit(), Err(Error::Cancelled)));
                });
            }
        });
        assert_eq!(schedule.lock().workers, 0);
        REFUSING.store(false, Relaxed);
        for _ in 0..20 {
            submit().unwrap();
        }
        let deadline = Instant::now() + Duration::from_secs(5);
        while ran.load(Relaxed) < 20 && Instant::now() < deadline {
            std::thread::yield_now();
        }
        assert_eq!(
            ran.load(Relaxed),
            20,
            "all that were accepted, and no other"
        );
    }
}
