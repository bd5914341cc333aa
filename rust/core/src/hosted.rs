//! A table, or one rank's part of it, held in a [`HostBuffer`]: plane after plane, row after row.

use std::sync::Arc;
use std::time::Instant;

use crate::buffer::{HostBuffer, PlaneSink};
use crate::copy;
use crate::crew;
use crate::error::{Error, Place, Result};
use crate::fault;
use crate::gather::check_ids;
use crate::map::RowAddress;
use crate::threads;

/// Rows whose addresses are found before they are copied.
const BLOCK: usize = 512;

/// Rows per task when a batch is shared among threads.
const CHUNK: usize = 2048;

/// Where the rows of one plane lie in the buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostedPlane {
    /// Byte offset of the first row.
    pub offset: usize,
    /// Bytes of a row; rows follow one another without gaps.
    pub row_bytes: usize,
}

/// Which rows of which table the buffer holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostedRows {
    /// The table's name.
    pub table: String,
    /// Rows of the whole table: ids run from 0 to one less.
    pub rows: u64,
    /// Id of the first row held.
    pub first_row: u64,
    /// Rows held.
    pub held: u64,
}

/// A table in memory. All methods may be called from any thread.
#[derive(Debug)]
pub struct Hosted {
    memory: Arc<HostBuffer>,
    held: HostedRows,
    planes: Vec<HostedPlane>,
    threads: usize,
}

impl Hosted {
    /// The table whose rows lie in `memory`, or will when it is first gathered from.
    pub fn new(
        memory: Arc<HostBuffer>,
        held: HostedRows,
        planes: Vec<HostedPlane>,
        threads: Option<usize>,
    ) -> Result<Self> {
        for plane in &planes {
            let end = usize::try_from(held.held)
                .ok()
                .and_then(|rows| rows.checked_mul(plane.row_bytes))
                .and_then(|bytes| bytes.checked_add(plane.offset));
            if end.is_none_or(|end| end > memory.len()) {
                return Err(Error::value(format!(
                    "{} rows of {} bytes from byte {} on do not fit a buffer of {} bytes",
                    held.held,
                    plane.row_bytes,
                    plane.offset,
                    memory.len()
                )));
            }
        }
        if held
            .first_row
            .checked_add(held.held)
            .is_none_or(|end| end > held.rows)
        {
            return Err(Error::value(format!(
                "rows {}..+{} are not all among the {} rows of table {:?}",
                held.first_row, held.held, held.rows, held.table
            )));
        }
        Ok(Self {
            memory,
            held,
            planes,
            threads: threads.unwrap_or_else(threads::available).max(1),
        })
    }

    /// Bytes of a row of each plane.
    pub fn row_bytes(&self) -> impl Iterator<Item = usize> {
        self.planes.iter().map(|plane| plane.row_bytes)
    }

    /// Copies the rows of `ids` to `sinks`, one per plane, each with a place per id. `pad_id`, and
    /// ids of the table that this part of it does not hold, give rows of zeros.
    ///
    /// # Errors
    /// An id outside the table; sinks that do not fit, or lie in the table's own memory; shared
    /// memory that somebody has cut, for batches with rows that are gone.
    pub fn gather(&self, ids: &[i64], pad_id: Option<i64>, sinks: &[PlaneSink<'_>]) -> Result<()> {
        check_ids(&self.held.table, self.held.rows, ids, pad_id)?;
        self.check_sinks(ids.len(), sinks)?;
        if !self.memory.is_shared() {
            return self.copy_all(ids, pad_id, sinks);
        }
        // Where others took the place of the handler for good, nothing is lost but its help.
        drop(fault::still_on_top(Instant::now()));
        self.copy_all(ids, pad_id, sinks)?;
        self.prove(ids, pad_id)
    }

    fn copy_all(&self, ids: &[i64], pad_id: Option<i64>, sinks: &[PlaneSink<'_>]) -> Result<()> {
        if ids.len() <= CHUNK || self.threads == 1 {
            self.copy(ids, pad_id, sinks, 0);
            return Ok(());
        }
        let work = |task: usize| {
            let start = task * CHUNK;
            let end = (start + CHUNK).min(ids.len());
            self.copy(&ids[start..end], pad_id, sinks, start);
        };
        crew::run(
            ids.len().div_ceil(CHUNK),
            self.threads - 1,
            &work,
            || Ok(()),
        )
    }

    /// After a copy: refuses it if any of the rows was gone.
    fn prove(&self, ids: &[i64], pad_id: Option<i64>) -> Result<()> {
        let Some(lost) = self.memory.lost() else {
            return Ok(());
        };
        for (position, &id) in ids.iter().enumerate() {
            for plane in &self.planes {
                let Some(offset) = self.offset(plane, id, pad_id) else {
                    continue;
                };
                let (start, end) = (offset as u64, (offset + plane.row_bytes) as u64);
                if start < lost.end && lost.start < end {
                    return Err(Error::Io {
                        doing: format!(
                            "bytes {}..{} of the shared memory that holds the table are gone: \
                             somebody cut its file; load the table again",
                            lost.start, lost.end
                        ),
                        errno: libc::EIO,
                        place: Box::new(Place {
                            path: None,
                            table: Some(self.held.table.clone()),
                            row: Some(id.cast_unsigned()),
                            position: Some(position as u64),
                            offset: Some(start),
                        }),
                    });
                }
            }
        }
        Ok(())
    }

    fn check_sinks(&self, count: usize, sinks: &[PlaneSink<'_>]) -> Result<()> {
        let fits = sinks.len() == self.planes.len()
            && sinks
                .iter()
                .zip(&self.planes)
                .all(|(sink, plane)| sink.rows() == count && sink.row_bytes() == plane.row_bytes);
        if !fits {
            return Err(Error::value(format!(
                "out does not have a place for each of {count} rows in each of the {} planes of \
                 table {:?}",
                self.planes.len(),
                self.held.table
            )));
        }
        let start = self.memory.address() as usize;
        let end = start + self.memory.len();
        let overlaps = sinks.iter().any(|sink| {
            let addresses = sink.addresses();
            addresses.start < end && start < addresses.end
        });
        if overlaps {
            return Err(Error::value(format!(
                "out lies in the memory that holds table {:?}; pass other memory",
                self.held.table
            )));
        }
        Ok(())
    }

    /// Copies the rows of `ids` to the positions from `first` on.
    fn copy(&self, ids: &[i64], pad_id: Option<i64>, sinks: &[PlaneSink<'_>], first: usize) {
        let mut addresses = [RowAddress::UNUSED; BLOCK];
        for (plane, sink) in self.planes.iter().zip(sinks) {
            let mut position = first;
            for block in ids.chunks(BLOCK) {
                let mut all = true;
                for (address, &id) in addresses.iter_mut().zip(block) {
                    match self.row(plane, id, pad_id) {
                        Some(found) => *address = found,
                        None => all = false,
                    }
                }
                if all {
                    copy::copy_rows(&addresses[..block.len()], block.len(), sink, position);
                } else {
                    for (offset, &id) in block.iter().enumerate() {
                        match self.row(plane, id, pad_id) {
                            Some(found) => copy::copy_row(found, sink, position + offset),
                            None => sink.zero(position + offset),
                        }
                    }
                }
                position += block.len();
            }
        }
    }

    /// The row of `id`; `None` where it is all zeros.
    #[inline]
    fn row(&self, plane: &HostedPlane, id: i64, pad_id: Option<i64>) -> Option<RowAddress<'_>> {
        let offset = self.offset(plane, id, pad_id)?;
        Some(RowAddress::in_buffer(&self.memory, offset, plane.row_bytes))
    }

    /// Where the row of `id` lies; `None` where it is all zeros.
    #[inline]
    fn offset(&self, plane: &HostedPlane, id: i64, pad_id: Option<i64>) -> Option<usize> {
        // An id below the first row held wraps to a huge index.
        let index = id.cast_unsigned().wrapping_sub(self.held.first_row);
        if index >= self.held.held || pad_id == Some(id) {
            return None;
        }
        #[expect(
            clippy::cast_possible_truncation,
            reason = "below the rows held, which fit the buffer"
        )]
        let offset = plane.offset + index as usize * plane.row_bytes;
        Some(offset)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::os::unix::fs::FileExt as _;

    use proptest::prelude::*;

    use super::*;

    /// A byte of the table that differs from row to row, plane to plane and column to column.
    fn byte(plane: usize, row: u64, column: usize) -> u8 {
        (row * 31 + plane as u64 * 7 + column as u64 * 3) as u8
    }

    /// A part of a table in a file that is mapped shared.
    fn hosted(held: &HostedRows, row_bytes: &[usize], threads: usize) -> Hosted {
        let file = tempfile::tempfile().unwrap();
        let mut planes = Vec::new();
        let mut bytes = vec![0xEE; 3];
        for (number, &row_bytes) in row_bytes.iter().enumerate() {
            planes.push(HostedPlane {
                offset: bytes.len(),
                row_bytes,
            });
            for row in held.first_row..held.first_row + held.held {
                bytes.extend((0..row_bytes).map(|column| byte(number, row, column)));
            }
            bytes.push(0xEE);
        }
        file.write_all_at(&bytes, 0).unwrap();
        let memory = HostBuffer::shared(file.as_fd(), bytes.len()).unwrap();
        Hosted::new(Arc::new(memory), held.clone(), planes, Some(threads)).unwrap()
    }

    fn part(rows: u64, first_row: u64, held: u64) -> HostedRows {
        HostedRows {
            table: "t".into(),
            rows,
            first_row,
            held,
        }
    }

    fn gathered(hosted: &Hosted, ids: &[i64], pad_id: Option<i64>) -> Result<Vec<Vec<u8>>> {
        let row_bytes: Vec<usize> = hosted.row_bytes().collect();
        let mut out: Vec<Vec<u8>> = row_bytes
            .iter()
            .map(|bytes| vec![0xAA; bytes * ids.len()])
            .collect();
        let sinks: Vec<_> = out
            .iter_mut()
            .zip(&row_bytes)
            .map(|(out, &bytes)| PlaneSink::new(out, 0, bytes, bytes, ids.len()).unwrap())
            .collect();
        hosted.gather(ids, pad_id, &sinks)?;
        Ok(out)
    }

    fn expected(held: &HostedRows, row_bytes: &[usize], ids: &[i64]) -> Vec<Vec<u8>> {
        let here = held.first_row..held.first_row + held.held;
        row_bytes
            .iter()
            .enumerate()
            .map(|(number, &row_bytes)| {
                ids.iter()
                    .flat_map(|&id| {
                        let row = id.cast_unsigned();
                        let owned = here.contains(&row);
                        (0..row_bytes).map(
                            move |column| {
                                if owned { byte(number, row, column) } else { 0 }
                            },
                        )
                    })
                    .collect()
            })
            .collect()
    }

    proptest! {
        #[test]
        fn rows_held_are_copied_and_all_others_are_zeros(
            ids in prop::collection::vec(-1_i64..50, 0..5000),
            first_row in 0_u64..20,
            held in 0_u64..30,
            row_bytes in prop::collection::vec(prop::sample::select(vec![1, 8, 10, 80, 160]), 1..3),
            threads in 1_usize..3,
        ) {
            let part = part(50, first_row, held);
            let hosted = hosted(&part, &row_bytes, threads);
            let found = gathered(&hosted, &ids, Some(-1)).unwrap();
            prop_assert_eq!(found, expected(&part, &row_bytes, &ids));
        }
    }

    #[test]
    fn shared_memory_that_is_cut_is_an_error_of_the_rows_that_are_gone() {
        const ROWS: u64 = 20_000;
        let file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..ROWS)
            .flat_map(|row| (0..160).map(move |column| byte(0, row, column)))
            .collect();
        file.write_all_at(&bytes, 0).unwrap();
        let memory = HostBuffer::shared(file.as_fd(), bytes.len()).unwrap();
        let plane = HostedPlane {
            offset: 0,
            row_bytes: 160,
        };
        let held = part(ROWS, 0, ROWS);
        let hosted = Hosted::new(Arc::new(memory), held.clone(), vec![plane], Some(2)).unwrap();
        let all: Vec<i64> = (0..ROWS.cast_signed()).collect();
        assert_eq!(
            gathered(&hosted, &all, None).unwrap(),
            expected(&held, &[160], &all)
        );
        // The end lies inside a page, the rest of which reads as zeros without a fault.
        file.set_len(10_000 * 160 + 7).unwrap();
        for ids in [&all[..], &[3, 10_000], &[19_999]] {
            let error = gathered(&hosted, ids, None).unwrap_err();
            let Error::Io { errno, place, .. } = &error else {
                panic!("{error:?}");
            };
            assert_eq!(*errno, libc::EIO);
            let first = ids.iter().position(|&id| id >= 10_000).unwrap();
            assert_eq!(place.row, Some(ids[first].cast_unsigned()));
            assert_eq!(place.position, Some(first as u64));
        }
        let left = &all[..10_000];
        assert_eq!(
            gathered(&hosted, left, None).unwrap(),
            expected(&held, &[160], left)
        );
        // Zero pages in place of the lost ones can be written to, as what they replace.
        hosted.memory.prefault(0..hosted.memory.len()).unwrap();
    }

    #[test]
    fn ids_outside_the_table_are_refused_by_position() {
        let hosted = hosted(&part(50, 10, 5), &[8], 1);
        for (ids, bad) in [(vec![0, 50], 50), (vec![3, -1], -1)] {
            let text = gathered(&hosted, &ids, None).unwrap_err().to_string();
            assert!(
                text.contains(&format!("row id {bad} at position 1")),
                "{text}"
            );
        }
    }

    #[test]
    fn a_pad_id_inside_the_table_is_zeros_too() {
        let hosted = hosted(&part(50, 0, 50), &[4], 1);
        assert_eq!(gathered(&hosted, &[7], Some(7)).unwrap(), [[0; 4]]);
    }

    #[test]
    fn parts_that_do_not_fit_are_refused() {
        let memory = Arc::new(HostBuffer::new(100, false).unwrap());
        let plane = |offset, row_bytes| vec![HostedPlane { offset, row_bytes }];
        let make = |held, planes| Hosted::new(Arc::clone(&memory), held, planes, None);
        assert!(make(part(10, 0, 10), plane(0, 10)).is_ok());
        assert!(make(part(10, 0, 10), plane(1, 10)).is_err());
        assert!(make(part(10, 0, 10), plane(0, usize::MAX)).is_err());
        assert!(make(part(10, 5, 6), plane(0, 1)).is_err());
        assert!(make(part(10, u64::MAX, 2), plane(0, 1)).is_err());
    }
}
