//! Rows of a round as they arrive.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::part::{Part, Slice, Use};
use crate::buffer::PlaneSink;

/// Takes rows as they arrive, to their places and to the cache.
pub(in crate::gather) struct Arrivals<'a> {
    part: &'a Part<'a>,
    slice: &'a Slice,
    /// Where the round puts the planes of each row.
    scratch: &'a [PlaneSink<'a>],
    progress: Mutex<Progress>,
    /// Row parts of rows wanted several times that are read, the first place of each aside.
    repeats_read: AtomicU64,
}

struct Progress {
    /// Per row a bit for each plane that is there.
    planes: Vec<u8>,
    row: Vec<u8>,
}

/// One plane of the rows that arrive.
#[derive(Clone, Copy)]
pub(in crate::gather) struct Keeper<'a> {
    arrivals: &'a Arrivals<'a>,
    plane: u8,
}

impl Keeper<'_> {
    /// Whether rows come in the order of the file, and many of them.
    pub(in crate::gather) fn in_order(&self) -> bool {
        matches!(self.arrivals.part.wanted_for, Use::Restore)
    }

    /// Whether rows go to a caller, rather than to the cache alone.
    pub(in crate::gather) fn serves(&self) -> bool {
        matches!(self.arrivals.part.wanted_for, Use::Serve(_))
    }

    /// This plane of the row at `position` is going to be read; for how many places.
    pub(in crate::gather) fn reads(&self, position: u32) -> u64 {
        let places = self.arrivals.slice.groups[position as usize].len() as u64;
        if places > 1 {
            let repeats = &self.arrivals.repeats_read;
            repeats.fetch_add(places - 1, Ordering::Relaxed);
        }
        places
    }

    /// This plane of the row at `position` has been read.
    pub(in crate::gather) fn arrived(&self, position: u32, bytes: &[u8]) {
        self.arrivals.arrived(self.plane, position as usize, bytes);
    }
}

impl<'a> Arrivals<'a> {
    pub(super) fn new(part: &'a Part<'a>, slice: &'a Slice, scratch: &'a [PlaneSink<'a>]) -> Self {
        Self {
            progress: Mutex::new(Progress {
                planes: vec![0; slice.ids.len()],
                row: Vec::new(),
            }),
            repeats_read: AtomicU64::new(0),
            part,
            slice,
            scratch,
        }
    }

    /// What is told of the rows of one plane.
    pub(in crate::gather) fn of_plane(&self, plane: usize) -> Keeper<'_> {
        Keeper {
            arrivals: self,
            plane: u8::try_from(plane).unwrap_or(u8::MAX),
        }
    }

    /// All planes of a row.
    fn whole(&self) -> u8 {
        let bits = (1_u32 << self.scratch.len()) - 1;
        u8::try_from(bits).unwrap_or(u8::MAX)
    }

    fn arrived(&self, plane: u8, position: usize, bytes: &[u8]) {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        let before = progress.planes[position];
        let now = before | (1 << plane);
        progress.planes[position] = now;
        if now == before || now != self.whole() {
            return;
        }
        if self.scratch.len() == 1 {
            self.keep(position, bytes);
        } else {
            self.collect(position, &mut progress.row);
            self.keep(position, &progress.row);
        }
    }

    /// Puts the planes of a row one after another.
    fn collect(&self, position: usize, row: &mut Vec<u8>) {
        row.clear();
        for sink in self.scratch {
            sink.look(position, |bytes| row.extend_from_slice(bytes));
        }
    }

    /// Takes the rows that were not read but copied, which are right by now.
    pub(super) fn finish(&self) {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        let progress = &mut *progress;
        for (position, planes) in progress.planes.iter_mut().enumerate() {
            if *planes != self.whole() {
                *planes = self.whole();
                self.collect(position, &mut progress.row);
                self.keep(position, &progress.row);
            }
        }
        // What was not read for its other places was copied for them.
        let groups = self.slice.groups.iter();
        let repeats: usize = groups.map(|group| group.len() - 1).sum();
        let read = self.repeats_read.load(Ordering::Relaxed);
        let copied = (repeats * self.scratch.len()) as u64;
        self.part.count_resident(copied.saturating_sub(read));
    }

    /// A row is whole.
    fn keep(&self, position: usize, row: &[u8]) {
        let id = self.slice.ids[position].cast_unsigned();
        let group = &self.slice.groups[position];
        self.part.scatter(group, row);
        let (cache, planes) = (&self.part.cache, self.part.planes(row));
        let insertion = match self.part.wanted_for {
            Use::Serve(_) | Use::Fill => cache.insert(id, &planes),
            Use::Restore => {
                let wanted = self.part.missing[group.start].position;
                cache.restore(id, &planes, u8::try_from(wanted).unwrap_or(u8::MAX))
            }
        };
        self.part.row_cache().note(insertion);
        self.slice
            .mine
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .arrived(position, &|| Arc::from(row));
    }
}
