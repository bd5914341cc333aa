//! How a row of several planes lies in its slot.

use smallvec::SmallVec;

/// The unit that rows are copied in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Word {
    /// Four bytes.
    Four,
    /// Eight bytes, where every plane is a multiple of it.
    Eight,
}

/// One plane of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PlanePlace {
    /// Bytes from the beginning of the slot.
    pub(super) offset: usize,
    /// Bytes of a row.
    pub(super) bytes: usize,
}

/// The planes of a slot, each at a multiple of the word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shape {
    planes: SmallVec<[PlanePlace; 3]>,
    stride: usize,
    word: Word,
}

impl Shape {
    /// The shape of rows whose planes have these many bytes.
    pub(super) fn new(plane_bytes: &[usize]) -> Self {
        let (word, size) = if plane_bytes.iter().all(|bytes| bytes % 8 == 0) {
            (Word::Eight, 8)
        } else {
            (Word::Four, 4)
        };
        let mut planes = SmallVec::new();
        let mut end = 0;
        for &bytes in plane_bytes {
            planes.push(PlanePlace { offset: end, bytes });
            end += bytes.next_multiple_of(size);
        }
        Self {
            planes,
            stride: end.max(size),
            word,
        }
    }

    pub(super) fn planes(&self) -> &[PlanePlace] {
        &self.planes
    }

    /// Bytes from one slot to the next.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    pub(super) fn word(&self) -> Word {
        self.word
    }

    /// Bytes of a row over all planes.
    pub(super) fn row_bytes(&self) -> usize {
        self.planes.iter().map(|plane| plane.bytes).sum()
    }
}
