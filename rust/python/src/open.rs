//! The open table behind a `Reader`: lent to calls, exchanged by a reopen, ended by a close.
//!
//! A call takes a lease and keeps the files it began with. A reopen exchanges what later calls get
//! and waits for nobody; whoever ends last with the old files closes them. Only a close waits.

use std::ops::Deref;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};

use engram_core::Result;
use engram_core::reader::Reader;

/// How many generations of files are in use.
#[derive(Debug, Default)]
struct InUse {
    count: Mutex<usize>,
    changed: Condvar,
}

/// The files of one opening.
#[derive(Debug)]
struct Generation {
    /// `None` only while it is dropped.
    reader: Option<Arc<Reader>>,
    in_use: Arc<InUse>,
}

impl Generation {
    fn new(reader: Reader, in_use: &Arc<InUse>) -> Arc<Self> {
        *in_use.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Arc::new(Self {
            reader: Some(Arc::new(reader)),
            in_use: Arc::clone(in_use),
        })
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        // The files are closed before anybody who waits for that is told.
        drop(self.reader.take());
        *self
            .in_use
            .count
            .lock()
            .unwrap_or_else(PoisonError::into_inner) -= 1;
        self.in_use.changed.notify_all();
    }
}

/// The files a call works with, until it ends.
#[derive(Debug)]
pub(crate) struct Lease(Arc<Generation>);

impl Deref for Lease {
    type Target = Arc<Reader>;

    fn deref(&self) -> &Arc<Reader> {
        self.0
            .reader
            .as_ref()
            .unwrap_or_else(|| unreachable!("a leased generation is not being dropped"))
    }
}

/// An open table, until it is closed.
#[derive(Debug)]
pub(crate) struct Open {
    current: RwLock<Option<Arc<Generation>>>,
    in_use: Arc<InUse>,
    /// Held by the one reopen that is under way.
    reopening: Mutex<()>,
}

impl Open {
    pub(crate) fn new(reader: Reader) -> Self {
        let in_use = Arc::default();
        Self {
            current: RwLock::new(Some(Generation::new(reader, &in_use))),
            in_use,
            reopening: Mutex::new(()),
        }
    }

    /// The files as they are now; `None` once closed.
    pub(crate) fn lease(&self) -> Option<Lease> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        current.clone().map(Lease)
    }

    /// Lets later calls work with the files at `path`; `None` if closed, also meanwhile.
    pub(crate) fn reopen(&self, path: &Path) -> Option<Result<Lease>> {
        let _alone = self
            .reopening
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let reader = match self.lease()?.reopen(path) {
            Ok(reader) => reader,
            Err(error) => return Some(Err(error)),
        };
        let new = Generation::new(reader, &self.in_use);
        let old = {
            let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
            let old = current.take()?;
            *current = Some(Arc::clone(&new));
            Lease(old)
        };
        old.close();
        Some(Ok(Lease(new)))
    }

    /// Ends after running calls have ended.
    pub(crate) fn close(&self) {
        let taken = self
            .current
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(generation) = taken {
            Lease(generation).close();
        }
        let count = self
            .in_use
            .count
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        drop(
            self.in_use
                .changed
                .wait_while(count, |count| *count > 0)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }
}
