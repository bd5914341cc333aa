//! Every mode against seek-and-read.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use proptest::prelude::*;
use safetensors::Dtype;

use super::*;
use crate::cache::Cache;
use crate::checkpoint::CheckpointFile;
use crate::reader::{Advice, Located, Options};
use crate::table::{Encoding, Family, Piece, PlaneName, Table};

mod kernel;
mod shared;
mod whole;

/// A table on disk: planes of the given row lengths, cut into pieces over several files.
pub(super) struct Fixture {
    _directory: tempfile::TempDir,
    pub(super) paths: Vec<PathBuf>,
    pub(super) table: Table,
}

impl Fixture {
    /// `pieces` gives, per piece, its rows and the junk bytes before it in its file.
    pub(super) fn new(row_bytes: &[usize], pieces: &[(u64, usize)], files: usize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> = (0..files)
            .map(|file| directory.path().join(file.to_string()))
            .collect();
        let mut contents = vec![Vec::new(); files];
        let mut planes = Vec::new();
        for (plane, &length) in row_bytes.iter().enumerate() {
            let mut first_row = 0;
            let mut placed = Vec::new();
            for (index, &(rows, junk)) in pieces.iter().enumerate() {
                let file = (index + plane) % files;
                contents[file].extend(std::iter::repeat_n(0xEE, junk));
                let offset = contents[file].len() as u64;
                for row in first_row..first_row + rows {
                    contents[file].extend((0..length).map(|byte| value(plane, row, byte)));
                }
                placed.push(Piece {
                    tensor: format!("{plane}.{index}"),
                    file,
                    offset,
                    first_row,
                    rows,
                });
                first_row += rows;
            }
            let name = [PlaneName::Weight, PlaneName::Scale, PlaneName::Bias][plane];
            planes.push(Plane::new(name, Dtype::U8, length as u64, placed).unwrap());
        }
        for (path, content) in paths.iter().zip(&contents) {
            fs::write(path, content).unwrap();
        }
        let table = Table {
            name: "table".to_owned(),
            family: Family::Plain,
            layer: None,
            encoding: Encoding::Plain(Dtype::U8),
            planes,
            logical_shape: vec![row_bytes[0] as u64],
            constants: Vec::new(),
        };
        Self {
            _directory: directory,
            paths,
            table,
        }
    }

    pub(super) fn open(&self, io: Io) -> Option<Reader> {
        self.open_with(io, 0)
    }

    /// The same with a budget for cached rows.
    pub(super) fn open_with(&self, io: Io, cache_bytes: u64) -> Option<Reader> {
        let files = self
            .paths
            .iter()
            .map(|path| CheckpointFile::of(path).unwrap())
            .collect();
        let options = Options {
            io,
            threads: Some(2),
            advice: Advice::Auto,
            cache_bytes,
            ..Options::default()
        };
        match Reader::open(
            Located {
                table: self.table.clone(),
                files,
                handles: Vec::new(),
                shadowed: Vec::new(),
            },
            options,
        ) {
            Ok(reader) => Some(reader),
            // A machine without io_uring says so; the other modes are tested all the same.
            Err(Error::Io {
                errno: libc::EPERM | libc::ENOSYS | libc::ENOMEM,
                ..
            }) if io == Io::Uring => None,
            Err(error) => panic!("{error}"),
        }
    }

    fn drop_cache(&self) {
        for path in &self.paths {
            let file = fs::File::open(path).unwrap();
            file.sync_all().unwrap();
            let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
        }
    }

    /// The oracle: seek, read.
    pub(super) fn naive(&self, plane: usize, id: i64, pad_id: Option<i64>) -> Vec<u8> {
        let plane = &self.table.planes[plane];
        let mut row = vec![0; plane.row_bytes()];
        if Some(id) != pad_id {
            let id = id.cast_unsigned();
            let piece = plane
                .pieces()
                .iter()
                .find(|piece| (piece.first_row..piece.first_row + piece.rows).contains(&id))
                .unwrap();
            let file = fs::File::open(&self.paths[piece.file]).unwrap();
            file.read_exact_at(
                &mut row,
                piece.offset + (id - piece.first_row) * plane.row_bytes() as u64,
            )
            .unwrap();
        }
        row
    }

    pub(super) fn gather(
        &self,
        reader: &Reader,
        ids: &[i64],
        pad_id: Option<i64>,
    ) -> Result<(Vec<Vec<u8>>, Report)> {
        let mut out: Vec<Vec<u8>> = self
            .table
            .planes
            .iter()
            .map(|plane| vec![0xAA; plane.row_bytes() * ids.len()])
            .collect();
        let sinks = out
            .iter_mut()
            .zip(&self.table.planes)
            .map(|(out, plane)| {
                PlaneSink::new(out, 0, plane.row_bytes(), plane.row_bytes(), ids.len()).unwrap()
            })
            .collect();
        let report = gather(
            &[Request {
                reader,
                ids,
                sinks,
                pad_id,
            }],
            &Control::NONE,
        )?;
        Ok((out, report))
    }

    pub(super) fn assert_equal(&self, out: &[Vec<u8>], ids: &[i64], pad_id: Option<i64>) {
        for (plane, out) in out.iter().enumerate() {
            let length = self.table.planes[plane].row_bytes();
            for (position, &id) in ids.iter().enumerate() {
                assert_eq!(
                    out[position * length..][..length],
                    self.naive(plane, id, pad_id),
                    "plane {plane}, position {position}, id {id}"
                );
            }
        }
    }
}

fn value(plane: usize, row: u64, byte: usize) -> u8 {
    let mixed =
        (row + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (byte as u64 * 31 + plane as u64 * 7);
    (mixed >> 24) as u8
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn rows_equal_seek_and_read_in_every_mode(
        row_bytes in prop::collection::vec(prop_oneof![Just(160_usize), Just(8), 1_usize..700], 1..=3),
        pieces in prop::collection::vec((0_u64..60, 0_usize..5000), 1..6),
        files in 1_usize..4,
        picks in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 0..200),
        pad in any::<bool>(),
        cold in any::<bool>(),
    ) {
        prop_assume!(pieces.iter().map(|piece| piece.0).sum::<u64>() > 0);
        let fixture = Fixture::new(&row_bytes, &pieces, files);
        let rows = usize::try_from(fixture.table.rows()).unwrap();
        let pad_id = pad.then_some(-1);
        let ids: Vec<i64> = picks.iter().map(|(pick, padded)| {
            if *padded && pad { -1 } else { i64::try_from(pick.index(rows)).unwrap() }
        }).collect();
        // No cache; one set, which gives rows up all the time; room for every row.
        let budgets = [0, Cache::least_bytes(&row_bytes, 1), 1 << 20];
        for (io, budget) in Io::ALL.into_iter().flat_map(|io| budgets.map(|budget| (io, budget))) {
            let Some(reader) = fixture.open_with(io, budget) else { continue };
            if cold { fixture.drop_cache(); }
            for _ in 0..2 {
                let (out, report) = fixture.gather(&reader, &ids, pad_id).unwrap();
                fixture.assert_equal(&out, &ids, pad_id);
                prop_assert_eq!(report.rows, ids.len() as u64);
                prop_assert_eq!(report.padded, ids.iter().filter(|&&id| id == -1).count() as u64);
            }
        }
    }
}

#[test]
fn very_long_batches_are_served_whole() {
    let fixture = Fixture::new(&[8], &[(1000, 21)], 1);
    let ids: Vec<i64> = (0_i64..(1 << 19) + 5)
        .map(|position| position * 7 % 1000)
        .collect();
    for io in Io::ALL {
        let Some(reader) = fixture.open(io) else {
            continue;
        };
        let (out, report) = fixture.gather(&reader, &ids, None).unwrap();
        fixture.assert_equal(&out, &ids, None);
        assert_eq!(report.rows, ids.len() as u64);
    }
}

fn many() -> (Fixture, Vec<i64>) {
    let fixture = Fixture::new(&[160, 8], &[(3000, 1), (5000, 4093), (2000, 77)], 2);
    let ids = (0..9000_i64).map(|index| index * 7919 % 10_000).collect();
    (fixture, ids)
}

#[test]
fn large_batches_are_shared_among_threads_and_exact() {
    let (fixture, ids) = many();
    for io in Io::ALL {
        let Some(reader) = fixture.open(io) else {
            continue;
        };
        fixture.drop_cache();
        for _ in 0..3 {
            let (out, _) = fixture.gather(&reader, &ids, None).unwrap();
            fixture.assert_equal(&out, &ids, None);
        }
    }
}

/// I38: with the default mode a second identical gather reads nothing.
#[test]
fn a_second_identical_gather_reads_nothing() {
    let (fixture, ids) = many();
    let reader = fixture.open(Io::Auto).unwrap();
    fixture.gather(&reader, &ids, None).unwrap();
    let (_, report) = fixture.gather(&reader, &ids, None).unwrap();
    assert_eq!((report.fetched, report.reads, report.bytes_read), (0, 0, 0));
}

/// D14: each distinct row is read once, rows come back in request order.
#[test]
fn duplicates_are_read_once() {
    let (fixture, _) = many();
    let reader = fixture.open(Io::Direct).unwrap();
    let ids: Vec<i64> = (0..1000).map(|index| (index * 37 % 100) * 90).collect();
    let (out, report) = fixture.gather(&reader, &ids, None).unwrap();
    fixture.assert_equal(&out, &ids, None);
    assert_eq!((report.fetched, report.unique_fetched), (2000, 200));
}

#[test]
fn ids_outside_the_table_are_named_and_nothing_is_read() {
    let (fixture, _) = many();
    let reader = fixture.open(Io::Auto).unwrap();
    for (ids, bad, at) in [
        (vec![0, 10_000], 10_000_i128, 1),
        (vec![-1], -1, 0),
        (vec![3, 4, i64::MIN], i128::from(i64::MIN), 2),
    ] {
        let error = fixture.gather(&reader, &ids, None).unwrap_err();
        let Error::Id {
            id, position, rows, ..
        } = error
        else {
            panic!("{error}")
        };
        assert_eq!((id, position, rows), (bad, at, 10_000));
    }
    // A pad id excuses itself and no other.
    let error = fixture.gather(&reader, &[-1, -2], Some(-1)).unwrap_err();
    assert!(matches!(
        error,
        Error::Id {
            id: -2,
            position: 1,
            ..
        }
    ));
    assert_eq!(reader.stats().reads.get(), 0);
    let (out, _) = fixture.gather(&reader, &[5], None).unwrap();
    fixture.assert_equal(&out, &[5], None);
}

#[test]
fn several_tables_are_read_in_one_round() {
    let (first, ids) = many();
    let second = Fixture::new(&[256], &[(500, 13)], 1);
    let others: Vec<i64> = (0..300).map(|index| index * 3 % 500).collect();
    let (one, two) = (
        first.open(Io::Auto).unwrap(),
        second.open(Io::Auto).unwrap(),
    );
    let mut out = [
        vec![0; 160 * ids.len()],
        vec![0; 8 * ids.len()],
        vec![0; 256 * others.len()],
    ];
    let [weight, scale, other] = &mut out;
    let sink = |memory, bytes, rows| PlaneSink::new(memory, 0, bytes, bytes, rows).unwrap();
    let requests = [
        Request {
            reader: &one,
            ids: &ids,
            sinks: [sink(weight, 160, ids.len()), sink(scale, 8, ids.len())]
                .into_iter()
                .collect(),
            pad_id: None,
        },
        Request {
            reader: &two,
            ids: &others,
            sinks: [sink(other, 256, others.len())].into_iter().collect(),
            pad_id: None,
        },
    ];
    gather(&requests, &Control::NONE).unwrap();
    drop(requests);
    first.assert_equal(&out[..2], &ids, None);
    second.assert_equal(&out[2..], &others, None);
}

#[test]
fn an_interrupt_stops_the_gather_and_the_next_one_works() {
    let (fixture, ids) = many();
    let reader = fixture.open(Io::Pread).unwrap();
    let interrupt = || Err(Error::Cancelled);
    let control = Control {
        deadline: None,
        interrupt: &interrupt,
    };
    let mut out = [vec![0; 160 * ids.len()], vec![0; 8 * ids.len()]];
    let [weight, scale] = &mut out;
    let sinks = [
        PlaneSink::new(weight, 0, 160, 160, ids.len()).unwrap(),
        PlaneSink::new(scale, 0, 8, 8, ids.len()).unwrap(),
    ];
    // Whether the check comes round before a small fixture is read is up to the clock.
    drop(gather(
        &[Request {
            reader: &reader,
            ids: &ids,
            sinks: sinks.into_iter().collect(),
            pad_id: None,
        }],
        &control,
    ));
    let (out, _) = fixture.gather(&reader, &ids, None).unwrap();
    fixture.assert_equal(&out, &ids, None);
}

#[test]
fn a_passed_deadline_is_a_timeout() {
    let (fixture, ids) = many();
    let reader = fixture
        .open(Io::Uring)
        .or_else(|| fixture.open(Io::Pread))
        .unwrap();
    fixture.drop_cache();
    let mut out = [vec![0; 160 * ids.len()], vec![0; 8 * ids.len()]];
    let [weight, scale] = &mut out;
    let sinks = [
        PlaneSink::new(weight, 0, 160, 160, ids.len()).unwrap(),
        PlaneSink::new(scale, 0, 8, 8, ids.len()).unwrap(),
    ];
    let control = Control {
        deadline: Some(Instant::now()),
        ..Control::NONE
    };
    let request = Request {
        reader: &reader,
        ids: &ids,
        sinks: sinks.into_iter().collect(),
        pad_id: None,
    };
    let error = gather(&[request], &control).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    assert_eq!(reader.stats().errors.get(), 1);
    let (out, _) = fixture.gather(&reader, &ids, None).unwrap();
    fixture.assert_equal(&out, &ids, None);
}

#[test]
fn a_truncated_file_is_an_error_that_names_the_row() {
    let (fixture, _) = many();
    for io in [Io::Pread, Io::Uring, Io::Direct] {
        let Some(reader) = fixture.open(io) else {
            continue;
        };
        let path = &fixture.paths[0];
        let whole = fs::read(path).unwrap();
        fs::OpenOptions::new()
            .write(true)
            .open(path)
            .unwrap()
            .set_len(4096)
            .unwrap();
        let error = fixture.gather(&reader, &[0, 2999], None).unwrap_err();
        let Error::Io { errno, place, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(
            (*errno, place.row, place.position),
            (libc::EIO, Some(2999), Some(1)),
            "{io:?}: {error}"
        );
        assert!(place.path.as_ref().is_some_and(|named| named == path) && place.offset.is_some());
        fixture.assert_equal(&fixture.gather(&reader, &[0], None).unwrap().0, &[0], None);
        fs::write(path, whole).unwrap();
        let reader = fixture.open(io).unwrap();
        let (out, _) = fixture.gather(&reader, &[0, 2999], None).unwrap();
        fixture.assert_equal(&out, &[0, 2999], None);
    }
}

/// A ring is handed from one reader to the next: slots left by buffered reads of odd lengths must
/// not be given to direct reads.
#[test]
fn modes_can_follow_one_another_on_the_same_ring() {
    let fixture = Fixture::new(&[540], &[(4000, 3)], 1);
    let neighbours: Vec<i64> = (0..8).collect();
    let strangers: Vec<i64> = (0..40).map(|index| index * 97).collect();
    let Some(buffered) = fixture.open(Io::Uring) else {
        return;
    };
    let direct = fixture.open(Io::Direct).unwrap();
    for (reader, ids) in [
        (&buffered, &neighbours),
        (&direct, &strangers),
        (&buffered, &strangers),
        (&direct, &neighbours),
    ] {
        let (out, _) = fixture.gather(reader, ids, None).unwrap();
        fixture.assert_equal(&out, ids, None);
    }
}
