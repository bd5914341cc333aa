//! The way from a row id to an address, for one plane of mapped files, in a few instructions.
//!
//! [`Plane::span`](crate::table::Plane::span) gives file and offset; copying a resident row needs
//! an address and two residency bits, millions of times a second. This is the same arithmetic with
//! the mapping and the bits of each piece at hand.
#![expect(
    clippy::inline_always,
    reason = "a call costs as much as the few instructions it would run, once per row"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::file::OpenFile;
use crate::map::{RowAddress, Window};
use crate::residency::{self, Residency};
use crate::table::Plane;

/// One piece of a plane.
#[derive(Debug)]
struct Cut {
    first_row: u64,
    window: Window,
    /// Index into the reader's files.
    file: usize,
    /// Byte offset of the piece in its file.
    offset: u64,
    residency: Arc<Residency>,
}

const NOT_WHOLE: u64 = u64::MAX;

/// The pieces of a mapped plane.
#[derive(Debug)]
pub(crate) struct Cuts {
    pieces: Vec<Cut>,
    reciprocal: u64,
    row_bytes: usize,
    /// All pages were believed resident when so many beliefs had been given up; or [`NOT_WHOLE`].
    whole: AtomicU64,
}

/// A row's address, and whether its pages are believed resident.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found<'a> {
    pub(crate) address: RowAddress<'a>,
    pub(crate) believed: bool,
}

impl Cuts {
    /// The cuts of `plane`, if every file it has rows in is mapped.
    pub(crate) fn new(plane: &Plane, files: &[Arc<OpenFile>]) -> Option<Self> {
        let row_bytes = plane.row_bytes();
        let pieces = plane
            .pieces()
            .iter()
            .map(|piece| {
                let file = &files[piece.file];
                let window = Window::new(file.map().ok()?, piece.offset, piece.rows, row_bytes)?;
                Some(Cut {
                    first_row: piece.first_row,
                    window,
                    file: piece.file,
                    offset: piece.offset,
                    residency: Arc::clone(file.residency()),
                })
            })
            .collect::<Option<Vec<_>>>()?;
        let cuts = Self {
            pieces,
            reciprocal: plane.reciprocal(),
            row_bytes,
            whole: AtomicU64::new(NOT_WHOLE),
        };
        cuts.look();
        Some(cuts)
    }

    /// Looks whether all rows are believed resident, for [`Cuts::is_whole`].
    #[cold]
    pub(crate) fn look(&self) -> bool {
        // Counted before: what is given up meanwhile makes the answer a thing of the past.
        let given_up = residency::given_up();
        let whole = self.pieces.iter().all(|cut| {
            let bytes = cut.window.rows() * self.row_bytes as u64;
            cut.residency.contains_all(cut.offset, bytes)
        });
        let answer = if whole { given_up } else { NOT_WHOLE };
        self.whole.store(answer, Ordering::Relaxed);
        whole
    }

    /// Whether all rows are known to be believed resident. That this has become so is noticed by
    /// [`Cuts::look`] only, that it is no longer so at once.
    #[inline]
    pub(crate) fn is_whole(&self) -> bool {
        match self.whole.load(Ordering::Relaxed) {
            NOT_WHOLE => false,
            // What was given up meanwhile may have been of another file.
            then => then == residency::given_up() || self.look(),
        }
    }

    /// The piece that row `id` lies in, which must be a row of the table, and the row's address.
    #[inline(always)]
    fn place(&self, id: u64) -> (&Cut, RowAddress<'_>) {
        let guess = (u128::from(id) * u128::from(self.reciprocal)) >> 64;
        #[expect(
            clippy::cast_possible_truncation,
            reason = "at most the number of pieces"
        )]
        let guessed = self.pieces.get(guess as usize);
        let placed = guessed.and_then(|cut| {
            let address = cut.window.row(id.wrapping_sub(cut.first_row))?;
            Some((cut, address))
        });
        placed.unwrap_or_else(|| self.search(id))
    }

    #[cold]
    fn search(&self, id: u64) -> (&Cut, RowAddress<'_>) {
        let cut = &self.pieces[self.pieces.partition_point(|cut| cut.first_row <= id) - 1];
        let address = cut.window.row(id - cut.first_row);
        (cut, address.expect("a row of the table"))
    }

    /// Index of the file that row `id` lies in, which must be a row of the table.
    #[inline(always)]
    pub(crate) fn file_of(&self, id: i64) -> usize {
        self.place(id.cast_unsigned()).0.file
    }

    /// Indices of the files of all pieces.
    pub(crate) fn files(&self) -> impl Iterator<Item = usize> {
        self.pieces.iter().map(|cut| cut.file)
    }

    /// Address of row `id`, which must lie in the table.
    #[inline(always)]
    pub(crate) fn address(&self, id: i64) -> RowAddress<'_> {
        self.place(id.cast_unsigned()).1
    }

    /// Finds row `id`, which must lie in the table.
    #[inline(always)]
    pub(crate) fn find(&self, id: i64) -> Found<'_> {
        let id = id.cast_unsigned();
        let (cut, address) = self.place(id);
        let within = (id - cut.first_row) * self.row_bytes as u64;
        let believed = cut
            .residency
            .contains(cut.offset + within, self.row_bytes as u64);
        Found { address, believed }
    }
}
