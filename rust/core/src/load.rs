//! Rows of a table into memory that will hold them: straight, in order, in large reads.
//!
//! Rows of a piece follow one another in the file as they do in memory, so a piece is one copy of
//! bytes. Several threads read at once; no byte passes through other memory of this process.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::buffer::PlaneSink;
use crate::crew;
use crate::error::{Error, Result};
use crate::reader::Reader;

/// Bytes of one read: large enough for the device's best rate, small enough to report progress and
/// to stop soon.
const STEP: usize = 8 << 20;

/// Threads that read: more do not help a device's sequential rate.
const THREADS: usize = 4;

/// Consecutive rows of one plane in one file, and where they go.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Part {
    plane: usize,
    file: usize,
    offset: u64,
    /// Positions in the plane's sink.
    positions: Range<usize>,
}

/// Reads the rows `rows` of every plane into `sinks`, one per plane: the row with id
/// `rows.start + i` to position `i`.
///
/// `progress` is called on the calling thread with bytes done and bytes to do; an error from it
/// stops the work. What the sinks then hold is unspecified.
pub fn load(
    reader: &Reader,
    rows: Range<u64>,
    sinks: &[PlaneSink<'_>],
    progress: &mut dyn FnMut(u64, u64) -> Result<()>,
) -> Result<()> {
    let table = reader.table();
    check(reader, &rows, sinks)?;
    let parts = parts(reader, &rows)?;
    let total = (rows.end - rows.start) * table.row_bytes() as u64;
    let files: Vec<OnceLock<File>> = reader.files().iter().map(|_| OnceLock::new()).collect();
    let done = Mutex::new((0_u64, None));
    let lock = || done.lock().unwrap_or_else(PoisonError::into_inner);
    let work = |task: usize| {
        if lock().1.is_some() {
            return;
        }
        let part = &parts[task];
        let sink = &sinks[part.plane];
        let outcome = read(reader, &files[part.file], part, sink);
        let mut done = lock();
        match outcome {
            Ok(()) => done.0 += (part.positions.len() * sink.row_bytes()) as u64,
            Err(error) => done.1 = Some(error),
        }
    };
    progress(0, total)?;
    let helpers = reader.threads().min(THREADS) - 1;
    crew::run(parts.len(), helpers, &work, || {
        let bytes = match &mut *lock() {
            (_, failure @ Some(_)) => return failure.take().map_or(Ok(()), Err),
            (bytes, None) => *bytes,
        };
        progress(bytes, total)
    })?;
    match done.into_inner().unwrap_or_else(PoisonError::into_inner) {
        (_, Some(error)) => Err(error),
        (bytes, None) => {
            for (file, opened) in reader.files().iter().zip(&files) {
                if let Some(handle) = opened.get() {
                    file.require_unchanged(handle)
                        .map_err(|error| error.in_table(&table.name))?;
                }
            }
            progress(bytes, total)
        }
    }
}

fn check(reader: &Reader, rows: &Range<u64>, sinks: &[PlaneSink<'_>]) -> Result<()> {
    let table = reader.table();
    if rows.start > rows.end || rows.end > table.rows() {
        return Err(Error::value(format!(
            "rows {}..{} are not all among the {} rows of table {:?}",
            rows.start,
            rows.end,
            table.rows(),
            table.name
        )));
    }
    let fits = sinks.len() == table.planes.len()
        && sinks.iter().zip(&table.planes).all(|(sink, plane)| {
            sink.rows() as u64 == rows.end - rows.start && sink.row_bytes() == plane.row_bytes()
        });
    if fits {
        return Ok(());
    }
    Err(Error::value(format!(
        "the memory does not have a place for each of {} rows in each of the {} planes of table {:?}",
        rows.end - rows.start,
        table.planes.len(),
        table.name
    )))
}

/// The rows asked for, cut where a plane, a piece or [`STEP`] ends.
fn parts(reader: &Reader, rows: &Range<u64>) -> Result<Vec<Part>> {
    let mut parts = Vec::new();
    for (number, plane) in reader.table().planes.iter().enumerate() {
        let row_bytes = plane.row_bytes();
        let step = (STEP / row_bytes).max(1) as u64;
        for piece in plane.pieces() {
            let end = rows.end.min(piece.first_row + piece.rows);
            let mut row = rows.start.max(piece.first_row);
            while row < end {
                let next = end.min(row + step);
                let position = |row: u64| {
                    usize::try_from(row - rows.start)
                        .map_err(|_| Error::value("more rows than this machine has addresses"))
                };
                parts.push(Part {
                    plane: number,
                    file: piece.file,
                    offset: piece.offset + (row - piece.first_row) * row_bytes as u64,
                    positions: position(row)?..position(next)?,
                });
                row = next;
            }
        }
    }
    Ok(parts)
}

fn read(reader: &Reader, opened: &OnceLock<File>, part: &Part, sink: &PlaneSink<'_>) -> Result<()> {
    let file = &reader.files()[part.file];
    let handle = if let Some(handle) = opened.get() {
        handle
    } else {
        // Its own descriptor: the table's is advised against reading ahead.
        let handle = file.reopen()?;
        opened.get_or_init(|| handle)
    };
    sink.fill(part.positions.clone(), |bytes| {
        let mut filled = 0;
        while filled < bytes.len() {
            let offset = part.offset + filled as u64;
            match handle.read_at(&mut bytes[filled..], offset) {
                Ok(0) => {
                    let doing = "cannot load rows: the file ended early";
                    return Err(Error::os(doing, libc::EIO, file.path()).at_offset(offset));
                }
                Ok(read) => filled += read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(
                        Error::io("cannot load rows", &error, file.path()).at_offset(offset)
                    );
                }
            }
        }
        // While a file is being cut, a read of what is cut off may bring zeros and no error.
        let whole = file
            .is_whole()
            .map_err(|error| Error::io("cannot load rows", &error, file.path()))?;
        if whole || part.offset + bytes.len() as u64 <= file.end() {
            return Ok(());
        }
        let doing = "cannot load rows: the file was cut meanwhile";
        Err(Error::os(doing, libc::EIO, file.path()).at_offset(file.end()))
    })
    .map_err(|error| error.in_table(&reader.table().name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::TableRef;
    use crate::reader::{Located, Options};
    use crate::testing::{Folder, Tensor, tensor};

    const ROWS: u64 = 40_000;

    /// A table of two planes over four pieces in two files: 12 MB, so that pieces are cut.
    fn table() -> (Folder, Vec<Tensor>, Reader) {
        let folder = Folder::new();
        let name = "layers.1.engram.embed";
        let tensors = [
            tensor(&format!("{name}.weight"), "F8_E4M3", &[ROWS, 256]),
            tensor(&format!("{name}.scale"), "F8_E8M0", &[ROWS, 8]),
        ];
        let path = folder.tensors("model.safetensors", &tensors);
        let located = Located::find(&path, TableRef::Only).unwrap();
        let reader = Reader::open(located, Options::default()).unwrap();
        (folder, tensors.to_vec(), reader)
    }

    /// The planes' bytes, and the progress reported.
    type Loaded = (Vec<Vec<u8>>, Vec<(u64, u64)>);

    fn loaded(reader: &Reader, rows: Range<u64>) -> Result<Loaded> {
        let count = usize::try_from(rows.end - rows.start).unwrap();
        let mut memory = [vec![0_u8; count * 256], vec![0_u8; count * 8]];
        let mut reported = Vec::new();
        {
            let sinks: Vec<_> = memory
                .iter_mut()
                .zip([256, 8])
                .map(|(memory, bytes)| PlaneSink::new(memory, 0, bytes, bytes, count).unwrap())
                .collect();
            load(reader, rows, &sinks, &mut |done, total| {
                reported.push((done, total));
                Ok(())
            })?;
        }
        Ok((memory.to_vec(), reported))
    }

    #[test]
    fn any_part_of_a_table_is_loaded_byte_for_byte() {
        let (_folder, tensors, reader) = table();
        for rows in [0..ROWS, 0..0, 7..8, 32_767..32_769, ROWS - 1..ROWS] {
            let (memory, reported) = loaded(&reader, rows.clone()).unwrap();
            for (memory, (tensor, bytes)) in memory.iter().zip(tensors.iter().zip([256, 8])) {
                let range = rows.start as usize * bytes..rows.end as usize * bytes;
                assert!(*memory == tensor.bytes[range], "rows {rows:?}");
            }
            let total = (rows.end - rows.start) * 264;
            assert_eq!(reported.first(), Some(&(0, total)));
            assert_eq!(reported.last(), Some(&(total, total)));
            assert!(reported.is_sorted());
        }
    }

    #[test]
    fn an_error_from_progress_stops_the_work() {
        let (_folder, _tensors, reader) = table();
        let mut memory = vec![0_u8; 264];
        let (one, two) = memory.split_at_mut(256);
        let sinks = [
            PlaneSink::new(one, 0, 256, 256, 1).unwrap(),
            PlaneSink::new(two, 0, 8, 8, 1).unwrap(),
        ];
        let outcome = load(&reader, 0..1, &sinks, &mut |_, _| Err(Error::Cancelled));
        assert!(matches!(outcome, Err(Error::Cancelled)));
        assert!(load(&reader, 0..2, &sinks, &mut |_, _| Ok(())).is_err());
        assert!(load(&reader, ROWS..ROWS + 1, &sinks, &mut |_, _| Ok(())).is_err());
    }

    #[test]
    fn a_file_that_was_written_to_meanwhile_is_refused() {
        let (folder, _tensors, reader) = table();
        loaded(&reader, 0..10).unwrap();
        let path = folder.join("model.safetensors");
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(&[1; 100], 1_000_000).unwrap();
        let error = loaded(&reader, 0..ROWS).unwrap_err();
        assert!(matches!(error, Error::Checkpoint { .. }), "{error:?}");
        assert!(error.to_string().contains("was written to"), "{error}");
    }

    #[test]
    fn a_file_that_became_shorter_is_an_error_with_its_offset() {
        let (folder, _tensors, reader) = table();
        let path = folder.join("model.safetensors");
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(1_000_000).unwrap();
        let error = loaded(&reader, 0..ROWS).unwrap_err();
        assert!(
            error.to_string().contains("the file ended early"),
            "{error}"
        );
        assert!(matches!(
            error,
            Error::Io {
                errno: libc::EIO,
                ..
            }
        ));
    }
}
