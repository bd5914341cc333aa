//! Values and locks that survive a fork.
//!
//! A forked child has none of its parent's other threads, and every lock that one of them held at
//! that moment stays locked in the child for ever. So what threads share outside of a single call is
//! either an atomic, or replaced as a whole ([`arc_swap`]), or belongs to one process
//! ([`PerProcess`]): a child finds nothing there, and makes its own.

use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwapOption;

/// A value that each process makes for itself on first use.
///
/// A value from before a fork is forgotten rather than dropped: it may have been changing at that
/// moment, and a destructor might wait for threads that are not there.
#[derive(Debug)]
pub(crate) struct PerProcess<T> {
    cell: ArcSwapOption<(u32, T)>,
}

impl<T> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        Self {
            cell: ArcSwapOption::const_empty(),
        }
    }

    /// This process's value, made by `make` if there is none yet. All threads get the same one,
    /// also those that were making one at the same time.
    pub(crate) fn get<E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<Arc<(u32, T)>, E> {
        let process = std::process::id();
        let mut make = Some(make);
        let mut fresh = None;
        loop {
            let found = self.cell.load_full();
            if let Some(value) = found.as_ref().filter(|value| value.0 == process) {
                return Ok(Arc::clone(value));
            }
            if let Some(make) = make.take() {
                fresh = Some(Arc::new((process, make()?)));
            }
            let before = self.cell.compare_and_swap(&found, fresh.clone());
            let before = arc_swap::Guard::into_inner(before);
            for old in [before, found].into_iter().flatten() {
                if old.0 != process {
                    std::mem::forget(old);
                }
            }
        }
    }
}

impl<T: Default> PerProcess<Mutex<T>> {
    /// Calls `work` with what is behind the lock; in a process that has just begun, a default.
    pub(crate) fn lock<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        let Ok(lock) = self.get(|| Ok::<_, std::convert::Infallible>(Mutex::default()));
        let mut value = lock.1.lock().unwrap_or_else(PoisonError::into_inner);
        work(&mut value)
    }
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        let value = self.cell.swap(None);
        if let Some(value) = value.filter(|value| value.0 != std::process::id()) {
            std::mem::forget(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn all_threads_share_the_first_value() {
        for _ in 0..200 {
            let cell = PerProcess::<Mutex<u32>>::new();
            let barrier = Barrier::new(4);
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        barrier.wait();
                        cell.lock(|count| *count += 1);
                    });
                }
            });
            assert_eq!(cell.lock(|count| *count), 4);
        }
    }

    #[test]
    fn a_value_of_another_process_is_left_alone() {
        struct Loud;
        impl Drop for Loud {
            fn drop(&mut self) {
                panic!("this belongs to another process");
            }
        }
        let cell = PerProcess::<Option<Loud>>::new();
        let other = std::process::id().wrapping_add(1);
        cell.cell.store(Some(Arc::new((other, Some(Loud)))));
        let own = cell.get(|| Ok::<_, ()>(None)).unwrap();
        assert_eq!(own.0, std::process::id());
        let again = PerProcess::<Option<Loud>>::new();
        again.cell.store(Some(Arc::new((other, Some(Loud)))));
        drop(again);
    }

    #[test]
    fn what_cannot_be_made_leaves_nothing() {
        let cell = PerProcess::<u8>::new();
        assert_eq!(cell.get(|| Err::<u8, _>("refused")).unwrap_err(), "refused");
        assert_eq!(cell.get(|| Ok::<_, ()>(7)).unwrap().1, 7);
    }
}
