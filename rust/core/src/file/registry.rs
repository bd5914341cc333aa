//! Files that are open for reading rows: to be shared, and for `drop_cache` to unmap their pages.
//!
//! Replaced as a whole, so that nobody waits for a lock that a fork has orphaned, or for a file whose
//! filesystem hangs.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use arc_swap::ArcSwapOption;

use super::{OpenFile, Wanted};
use crate::checkpoint::{CheckpointFile, Identity};

/// Open files by device and inode.
type Files = HashMap<(u64, u64), Vec<Weak<OpenFile>>>;

static OPEN: ArcSwapOption<Files> = ArcSwapOption::const_empty();

/// The files that were open at one moment.
pub(super) struct Snapshot(Option<Arc<Files>>);

fn key(identity: &Identity) -> (u64, u64) {
    (identity.device, identity.inode)
}

/// The files that are open now.
pub(super) fn now() -> Snapshot {
    Snapshot(OPEN.load_full())
}

impl Snapshot {
    /// Every way in which a file is open.
    pub(super) fn same(&self, identity: Identity) -> impl Iterator<Item = Arc<OpenFile>> {
        let files = self.0.as_ref();
        let alike = files.and_then(|files| files.get(&key(&identity)));
        alike
            .into_iter()
            .flatten()
            .filter_map(Weak::upgrade)
            .filter(move |file| file.identity == identity)
    }

    /// A file that is open in the wanted way and sound.
    pub(super) fn find(&self, file: &CheckpointFile, wanted: Wanted) -> Option<Arc<OpenFile>> {
        self.same(file.identity).find(|open| {
            open.path == file.resolved
                && open.wanted == wanted
                && open.is_whole().unwrap_or(false)
                && open.map().ok().and_then(|map| map.lost()).is_none()
        })
    }
}

/// Lets others share `opened` for as long as they are open; those that no longer are, are forgotten.
pub(super) fn add(opened: &[Arc<OpenFile>]) {
    if opened.is_empty() {
        return;
    }
    OPEN.rcu(|files| {
        let mut kept = Files::new();
        for (key, alike) in files.iter().flat_map(|files| files.iter()) {
            let alike: Vec<_> = alike
                .iter()
                .filter(|file| file.strong_count() > 0)
                .cloned()
                .collect();
            if !alike.is_empty() {
                kept.insert(*key, alike);
            }
        }
        for file in opened {
            let alike = kept.entry(key(&file.identity)).or_default();
            alike.push(Arc::downgrade(file));
        }
        Some(Arc::new(kept))
    });
}
