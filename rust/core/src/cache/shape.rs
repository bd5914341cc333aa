//! How a row of several planes lies in its slot: plane after plane, without gaps.

use smallvec::SmallVec;

/// One plane of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PlanePlace {
    /// Bytes from the beginning of the slot.
    pub(super) offset: usize,
    /// Bytes of a row.
    pub(super) bytes: usize,
}

/// The planes of a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shape {
    planes: SmallVec<[PlanePlace; 3]>,
    row_bytes: usize,
}

impl Shape {
    /// The shape of rows whose planes have these many bytes.
    pub(super) fn new(plane_bytes: &[usize]) -> Self {
        let mut planes = SmallVec::new();
        let mut end = 0;
        for &bytes in plane_bytes {
            planes.push(PlanePlace { offset: end, bytes });
            end += bytes;
        }
        Self {
            planes,
            row_bytes: end,
        }
    }

    pub(super) fn planes(&self) -> &[PlanePlace] {
        &self.planes
    }

    /// Bytes of a row over all planes, and from one slot to the next.
    pub(super) fn row_bytes(&self) -> usize {
        self.row_bytes
    }
}
