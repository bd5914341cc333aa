//! Files that are open for reading rows: to be shared, and for `drop_cache` to unmap their pages.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use super::{OpenFile, Wanted};
use crate::checkpoint::{CheckpointFile, Identity};

/// Below this many keys nobody looks for those of closed files.
const FEW: usize = 64;

#[derive(Default)]
struct Open {
    /// By device and inode.
    files: HashMap<(u64, u64), Vec<Weak<OpenFile>>>,
    /// Keys at which those of closed files are removed.
    sweep_at: usize,
}

static OPEN: LazyLock<Mutex<Open>> = LazyLock::new(Mutex::default);

fn open() -> MutexGuard<'static, Open> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn key(identity: &Identity) -> (u64, u64) {
    (identity.device, identity.inode)
}

/// A file that is open in the wanted way and sound.
pub(super) fn find(checkpoint_file: &CheckpointFile, wanted: Wanted) -> Option<Arc<OpenFile>> {
    let open = open();
    let alike = open.files.get(&key(&checkpoint_file.identity))?;
    alike.iter().filter_map(Weak::upgrade).find(|file| {
        file.identity == checkpoint_file.identity
            && file.path == checkpoint_file.resolved
            && file.wanted == wanted
            && file.is_whole().unwrap_or(false)
            && file.map().ok().and_then(|map| map.lost()).is_none()
    })
}

/// Every way in which a file is open.
pub(super) fn same(identity: &Identity) -> Vec<Arc<OpenFile>> {
    let open = open();
    let alike = open.files.get(&key(identity)).into_iter().flatten();
    alike
        .filter_map(Weak::upgrade)
        .filter(|file| file.identity == *identity)
        .collect()
}

/// Lets others share a file for as long as it is open.
pub(super) fn add(file: &Arc<OpenFile>) {
    let mut open = open();
    let alike = open.files.entry(key(&file.identity)).or_default();
    alike.retain(|file| file.strong_count() > 0);
    alike.push(Arc::downgrade(file));
    if open.files.len() >= open.sweep_at.max(FEW) {
        open.files.retain(|_, alike| {
            alike.retain(|file| file.strong_count() > 0);
            !alike.is_empty()
        });
        open.sweep_at = 2 * open.files.len();
    }
}
