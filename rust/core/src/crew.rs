//! Sharing the tasks of one call among threads, without waiting for threads that never came.
//!
//! A scoped pool waits until every job it handed out has run, also the ones whose thread has not
//! been scheduled yet. On a machine whose cores are busy that wait is a time slice of the
//! scheduler, milliseconds, for a copy of a tenth of one. Here the caller works through the tasks
//! itself and helpers take some off it: when the last task has been taken, only helpers in the
//! middle of one are waited for. (4,096 warm rows with both cores busy: 1.5 ms scoped.)
//!
//! A thread that sleeps takes a good part of such a call to come, so helpers may be called before the
//! tasks are known; who comes early waits a little, and leaves if nothing is to be done.
#![expect(
    unsafe_code,
    reason = "helpers call a closure that borrows from the caller's stack"
)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::threads;

/// Spins before the caller offers its core to a helper that was interrupted in its task.
const SPINS: usize = 1000;

/// Looks for the tasks between two offers of the core.
const SPINS_EARLY: usize = 64;

/// The number of the next task, at least, when no more are to be given out: beyond any number of
/// tasks, and too far from the end for those who still ask to count up to it.
const NO_MORE: usize = usize::MAX / 2;

/// A helper that came early waits this long for the tasks.
const PATIENCE: Duration = Duration::from_micros(200);

/// What caller and helpers share.
struct Shared {
    /// Set once the tasks are known.
    job: OnceLock<Job>,
    next: AtomicUsize,
    /// Threads that may be inside the closure.
    inside: AtomicUsize,
    stop: AtomicBool,
    panicked: AtomicBool,
    /// Where the helpers are.
    process: u32,
}

/// The caller's closure, its lifetime erased.
#[derive(Clone, Copy)]
struct Work(*const (dyn Fn(usize) + Sync + 'static));

// SAFETY: the closure is `Sync`, so several threads may call it; when they may is `Shared::help`'s
// business.
unsafe impl Send for Work {}
// SAFETY: as for `Send`; a `Work` has no interior state.
unsafe impl Sync for Work {}

/// What is to be done, and how often.
#[derive(Clone, Copy)]
struct Job {
    work: Work,
    tasks: usize,
}

impl Shared {
    /// Takes the next of `tasks`, counted as inside until [`Shared::leave`]; `None` when none is left.
    fn enter(&self, tasks: usize) -> Option<usize> {
        // Counted before a task is taken: whoever sees all tasks taken and nobody inside knows
        // that nobody will be. Sequential consistency makes the two counters agree on the order.
        self.inside.fetch_add(1, Ordering::SeqCst);
        if !self.stop.load(Ordering::Relaxed) {
            let task = self.next.fetch_add(1, Ordering::SeqCst);
            if task < tasks {
                return Some(task);
            }
        }
        self.leave();
        None
    }

    /// Lets helpers call `work` with tasks up to `tasks` until the result is dropped.
    fn begin<'a>(
        &'a self,
        work: &'a (dyn Fn(usize) + Sync + 'a),
        tasks: usize,
    ) -> WaitForHelpers<'a> {
        let waiting = WaitForHelpers(self);
        #[expect(
            clippy::transmute_ptr_to_ptr,
            reason = "a cast cannot extend the lifetime of a trait object"
        )]
        // SAFETY: only the lifetime changes; see `Shared::help` for why the closure outlives its
        // use. What is returned borrows it, and waits for the helpers when it is dropped; the
        // functions of `Crew`, who alone come here, keep it on their stack, so it is dropped.
        let erased = Work(unsafe {
            std::mem::transmute::<
                *const (dyn Fn(usize) + Sync + '_),
                *const (dyn Fn(usize) + Sync + 'static),
            >(std::ptr::from_ref(work))
        });
        let _ = self.job.set(Job {
            work: erased,
            tasks,
        });
        waiting
    }

    fn leave(&self) {
        self.inside.fetch_sub(1, Ordering::SeqCst);
    }

    /// Gives out no more tasks.
    fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        // Not added: every helper that panics stops, and sums would come round to tasks again.
        self.next.fetch_max(NO_MORE, Ordering::SeqCst);
    }

    /// Waits a little for the tasks to be known.
    fn job(&self) -> Option<Job> {
        let came = Instant::now();
        loop {
            for _ in 0..SPINS_EARLY {
                if let Some(job) = self.job.get() {
                    return Some(*job);
                }
                if self.stop.load(Ordering::Relaxed) {
                    return None;
                }
                std::hint::spin_loop();
            }
            if came.elapsed() > PATIENCE {
                return None;
            }
            // The caller may be waiting for this very core.
            std::thread::yield_now();
        }
    }

    fn help(&self) {
        let Some(job) = self.job() else { return };
        while let Some(task) = self.enter(job.tasks) {
            // SAFETY: `enter` gave out a task, so the function of `Crew` that began this has not
            // returned and cannot before `leave` below: what `begin` gave it waits until no task can
            // be taken and nobody is inside, and borrows the closure for all that time.
            let outcome = catch_unwind(AssertUnwindSafe(|| unsafe { (*job.work.0)(task) }));
            if outcome.is_err() {
                self.panicked.store(true, Ordering::Relaxed);
                self.stop();
            }
            self.leave();
        }
    }
}

/// Helpers that have been called, for one [`Crew::run`] or [`Crew::beside`].
pub(crate) struct Crew {
    shared: Arc<Shared>,
    helpers: usize,
}

/// Calls up to `helpers` threads of the process's pool; nobody where threads cannot be started.
pub(crate) fn call(helpers: usize) -> Crew {
    let shared = Arc::new(Shared {
        job: OnceLock::new(),
        next: AtomicUsize::new(0),
        inside: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
        panicked: AtomicBool::new(false),
        process: std::process::id(),
    });
    if helpers > 0
        && let Some(pool) = threads::compute()
    {
        for _ in 0..helpers {
            let shared = Arc::clone(&shared);
            pool.1.spawn(move || shared.help());
        }
    }
    Crew { shared, helpers }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.stop();
    }
}

/// Calls `work` with every task from 0 to `tasks - 1`, each once, on the calling thread and on up
/// to `helpers` threads of the process's pool. Between its own tasks the calling thread calls
/// `between`; an error from it stops the work.
pub(crate) fn run(
    tasks: usize,
    helpers: usize,
    work: &(dyn Fn(usize) + Sync),
    between: impl FnMut() -> Result<()>,
) -> Result<()> {
    call(helpers.min(tasks.saturating_sub(1))).run(tasks, work, between)
}

impl Crew {
    /// As [`run`], with the helpers that were called.
    pub(crate) fn run(
        self,
        tasks: usize,
        work: &(dyn Fn(usize) + Sync),
        mut between: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let shared = &*self.shared;
        let waiting = shared.begin(work, tasks);
        let mut outcome = Ok(());
        while let Some(task) = shared.enter(tasks) {
            let done = catch_unwind(AssertUnwindSafe(|| work(task)));
            shared.leave();
            if let Err(panic) = done {
                resume_unwind(panic);
            }
            outcome = between();
            if outcome.is_err() {
                break;
            }
        }
        waiting.end()?;
        outcome
    }

    /// Does `main` on the calling thread while helpers are at `work`, each of which calls it once or
    /// a few times. Helpers that come too late do nothing; `work` must end soon once `main` has.
    pub(crate) fn beside<T>(
        self,
        work: &(dyn Fn() + Sync),
        main: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let helper = |_: usize| work();
        let waiting = self.shared.begin(&helper, self.helpers);
        let outcome = main();
        waiting.end()?;
        outcome
    }
}

/// Keeps functions of [`Crew`] from ending, also by a panic, while a helper may be inside the closure.
struct WaitForHelpers<'a>(&'a Shared);

impl WaitForHelpers<'_> {
    /// Waits; an error in a process that was forked meanwhile.
    fn end(self) -> Result<()> {
        let shared = self.0;
        drop(self);
        if shared.process != std::process::id() {
            return Err(Error::forked());
        }
        assert!(
            !shared.panicked.load(Ordering::Relaxed),
            "a helping thread panicked; see its message"
        );
        Ok(())
    }
}

impl Drop for WaitForHelpers<'_> {
    fn drop(&mut self) {
        self.0.stop();
        let mut spins = 0;
        while self.0.inside.load(Ordering::SeqCst) > 0 {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
            } else if self.0.process != std::process::id() {
                // Forked between two tasks: no helper is here, and none has this copy of the closure.
                return;
            } else {
                std::thread::yield_now();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn every_task_runs_once() {
        for helpers in 0..4 {
            for tasks in [0, 1, 2, 100, 1000] {
                let counts: Vec<AtomicU64> = (0..tasks).map(|_| AtomicU64::new(0)).collect();
                run(
                    tasks,
                    helpers,
                    &|task| {
                        counts[task].fetch_add(1, Ordering::Relaxed);
                    },
                    || Ok(()),
                )
                .unwrap();
                assert!(
                    counts
                        .iter()
                        .all(|count| count.load(Ordering::Relaxed) == 1)
                );
            }
        }
    }

    #[test]
    fn nothing_runs_after_the_return() {
        for _ in 0..2000 {
            let mut done = [0_u8; 64];
            let places: Vec<AtomicU64> = (0..64).map(|_| AtomicU64::new(0)).collect();
            run(
                64,
                3,
                &|task| places[task].store(1, Ordering::Relaxed),
                || Ok(()),
            )
            .unwrap();
            for (done, place) in done.iter_mut().zip(places) {
                *done = u8::try_from(place.into_inner()).unwrap();
            }
            assert!(done.iter().all(|&done| done == 1));
        }
    }

    #[test]
    fn helpers_called_early_wait_for_the_tasks_or_leave() {
        for pause in [0, 20, 1000] {
            for run in [true, false] {
                let crew = call(2);
                std::thread::sleep(Duration::from_micros(pause));
                let count = AtomicU64::new(0);
                let work = |_: usize| {
                    count.fetch_add(1, Ordering::Relaxed);
                };
                if run {
                    crew.run(100, &work, || Ok(())).unwrap();
                    assert_eq!(count.into_inner(), 100);
                }
            }
        }
    }

    #[test]
    fn helpers_work_beside_the_caller_and_are_gone_when_it_returns() {
        for helpers in 0..4 {
            let (count, over) = (AtomicU64::new(0), AtomicBool::new(false));
            let work = || {
                while !over.load(Ordering::Relaxed) {
                    count.fetch_add(1, Ordering::Relaxed);
                    std::thread::yield_now();
                }
            };
            let main = || {
                while helpers > 0 && count.load(Ordering::Relaxed) == 0 {
                    std::thread::yield_now();
                }
                over.store(true, Ordering::Relaxed);
                Ok(7)
            };
            assert_eq!(call(helpers).beside(&work, main).unwrap(), 7);
            let seen = count.load(Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(1));
            assert_eq!(count.load(Ordering::Relaxed), seen);
        }
    }

    #[test]
    fn a_helper_that_panics_is_no_secret() {
        let came = AtomicBool::new(false);
        let work = || {
            came.store(true, Ordering::Relaxed);
            panic!("a helper's");
        };
        let main = || {
            while !came.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            Ok(())
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| call(1).beside(&work, main)));
        assert!(outcome.is_err());
    }

    #[test]
    fn an_error_between_tasks_stops_the_work() {
        let count = AtomicU64::new(0);
        let work = |_: usize| {
            count.fetch_add(1, Ordering::Relaxed);
        };
        let outcome = run(1_000_000, 1, &work, || Err(Error::Cancelled));
        assert!(matches!(outcome, Err(Error::Cancelled)));
        let seen = count.load(Ordering::Relaxed);
        assert!(seen < 1_000_000);
        assert_eq!(
            count.load(Ordering::Relaxed),
            seen,
            "nobody is inside any more"
        );
    }

    #[test]
    fn no_task_is_given_out_again_however_often_the_work_is_stopped() {
        let crew = call(0);
        for _ in 0..9 {
            crew.shared.stop();
            crew.shared.stop.store(false, Ordering::Relaxed);
            assert_eq!(crew.shared.enter(1000), None);
        }
        assert_eq!(crew.shared.inside.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_survives() {
        let work = |task: usize| assert_ne!(task, 50, "as asked");
        let outcome = catch_unwind(AssertUnwindSafe(|| run(100, 2, &work, || Ok(()))));
        assert!(outcome.is_err());
        run(100, 2, &|_| {}, || Ok(())).unwrap();
    }
}
