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

use crate::file::OpenFile;
use crate::map::{RowAddress, Window};
use crate::residency::Residency;
use crate::table::Plane;

/// One piece of a plane.
#[derive(Debug)]
struct Cut {
    first_row: u64,
    rows: u64,
    /// Index into the reader's files.
    file: usize,
    /// Byte offset of the piece in its file.
    offset: u64,
    window: Window,
    residency: Arc<Residency>,
}

/// The pieces of a mapped plane.
#[derive(Debug)]
pub(crate) struct Cuts {
    pieces: Vec<Cut>,
    reciprocal: u64,
    row_bytes: usize,
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
                let window = Window::new(
                    file.map().ok()?,
                    piece.offset,
                    piece.rows * row_bytes as u64,
                )?;
                Some(Cut {
                    first_row: piece.first_row,
                    rows: piece.rows,
                    file: piece.file,
                    offset: piece.offset,
                    window,
                    residency: Arc::clone(file.residency()),
                })
            })
            .collect::<Option<Vec<_>>>()?;
        Some(Self {
            pieces,
            reciprocal: plane.reciprocal(),
            row_bytes,
        })
    }

    /// The piece that row `id` lies in, which must be a row of the table.
    #[inline(always)]
    fn piece(&self, id: u64) -> &Cut {
        let guess = (u128::from(id) * u128::from(self.reciprocal)) >> 64;
        #[expect(
            clippy::cast_possible_truncation,
            reason = "at most the number of pieces"
        )]
        let cut = &self.pieces[(guess as usize).min(self.pieces.len() - 1)];
        if id.wrapping_sub(cut.first_row) < cut.rows {
            cut
        } else {
            self.search(id)
        }
    }

    /// Index of the file that row `id` lies in, which must be a row of the table.
    #[inline(always)]
    pub(crate) fn file_of(&self, id: i64) -> usize {
        self.piece(id.cast_unsigned()).file
    }

    /// Indices of the files of all pieces.
    pub(crate) fn files(&self) -> impl Iterator<Item = usize> {
        self.pieces.iter().map(|cut| cut.file)
    }

    /// Finds row `id`, which must lie in the table.
    #[inline(always)]
    pub(crate) fn find(&self, id: i64) -> Found<'_> {
        let id = id.cast_unsigned();
        let cut = self.piece(id);
        let within = (id - cut.first_row) * self.row_bytes as u64;
        let believed = cut
            .residency
            .contains(cut.offset + within, self.row_bytes as u64);
        #[expect(
            clippy::cast_possible_truncation,
            reason = "below the length of the window, a usize"
        )]
        let address = cut.window.row(within as usize, self.row_bytes);
        Found { address, believed }
    }

    #[cold]
    fn search(&self, id: u64) -> &Cut {
        &self.pieces[self.pieces.partition_point(|cut| cut.first_row <= id) - 1]
    }
}
