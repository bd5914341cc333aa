//! Files cut while they are open: right rows or an error, in every mode, from every thread.

use std::fs::OpenOptions;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::tests::Fixture;
use super::*;

fn set_len(path: &Path, len: u64) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(len).unwrap();
}

fn refused(error: &Error, path: &Path, row: i64) {
    let Error::Io { errno, place, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(*errno, libc::EIO, "{error}");
    assert_eq!(place.path.as_deref(), Some(path), "{error}");
    assert_eq!(place.row, Some(row.cast_unsigned()), "{error}");
    assert!(place.offset.is_some() && place.position.is_some());
}

/// One plane in one file, ends of rows known.
fn end_of(fixture: &Fixture, row: i64) -> u64 {
    let plane = &fixture.table.planes[0];
    plane.span(row.cast_unsigned()).offset + plane.row_bytes() as u64
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn rows_of_a_cut_file_are_right_or_refused(
        row_bytes in prop_oneof![Just(160_usize), 1_usize..700, 3000_usize..9000],
        rows in 1_u64..120,
        junk in 0_usize..5000,
        share in 0.0..1.0,
        cold in any::<bool>(),
    ) {
        for io in Io::ALL {
            let fixture = Fixture::new(&[row_bytes], &[(rows, junk)], 1);
            let Some(reader) = fixture.open(io) else { continue };
            let rows = i64::try_from(rows).unwrap();
            let ids: Vec<i64> = (0..rows).collect();
            let naive: Vec<Vec<u8>> = ids.iter().map(|&id| fixture.naive(0, id, None)).collect();
            if !cold {
                fixture.gather(&reader, &ids, None).unwrap();
            }
            let path = &fixture.paths[0];
            let whole = reader.files()[0].len();
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "a share of it")]
            let cut = (whole as f64 * share) as u64;
            set_len(path, cut);
            for &id in ids.iter().rev() {
                match fixture.gather(&reader, &[id], None) {
                    Ok((out, _)) => {
                        prop_assert!(end_of(&fixture, id) <= cut, "{:?}: row {} of a file cut to {}", io, id, cut);
                        prop_assert_eq!(&out[0], &naive[usize::try_from(id).unwrap()]);
                    }
                    Err(error) => {
                        prop_assert!(end_of(&fixture, id) > cut, "{:?}: {}", io, error);
                        refused(&error, path, id);
                    }
                }
            }
            // Together: an error as soon as one is beyond the end, right rows otherwise.
            prop_assert_eq!(fixture.gather(&reader, &ids, None).is_ok(), cut == whole);
            let left: Vec<i64> = ids.iter().copied().filter(|&id| end_of(&fixture, id) <= cut).collect();
            let (out, _) = fixture.gather(&reader, &left, None).unwrap();
            for (&id, row) in left.iter().zip(out[0].chunks(row_bytes)) {
                prop_assert_eq!(row, &naive[usize::try_from(id).unwrap()][..]);
            }
            // What was cut off does not come back by making the file longer.
            set_len(path, whole);
            if let Some(&last) = ids.iter().find(|&&id| end_of(&fixture, id) > cut) {
                let outcome = fixture.gather(&reader, &[last], None);
                refused(&outcome.unwrap_err(), path, last);
            }
        }
    }
}

/// Files are cut at a random moment while eight threads gather from them.
#[test]
fn threads_gathering_from_a_file_that_is_cut_see_right_rows_or_errors() {
    for (round, io) in [Io::Auto, Io::Mmap, Io::Auto, Io::Pread]
        .into_iter()
        .enumerate()
    {
        let fixture = Fixture::new(&[160, 8], &[(20_000, 4093), (20_000, 1)], 2);
        let reader = fixture.open(io).unwrap();
        let naive: Vec<Vec<Vec<u8>>> = (0..2)
            .map(|plane| {
                (0..40_000)
                    .map(|id| fixture.naive(plane, id, None))
                    .collect()
            })
            .collect();
        let (served, failed) = (AtomicU64::new(0), AtomicU64::new(0));
        let until = Instant::now() + Duration::from_millis(400);
        std::thread::scope(|scope| {
            for thread in 0..8_i64 {
                let (fixture, reader, naive) = (&fixture, &reader, &naive);
                let (served, failed) = (&served, &failed);
                scope.spawn(move || {
                    let mut next = thread * 7919 + 1;
                    while Instant::now() < until {
                        let count = [1, 16, 3000][usize::try_from(next % 3).unwrap()];
                        let ids: Vec<i64> = (0..count)
                            .map(|_| {
                                next = (next * 75 + 74) % 65_537;
                                next % 40_000
                            })
                            .collect();
                        match fixture.gather(reader, &ids, None) {
                            Ok((out, _)) => {
                                for (plane, bytes) in [160, 8].into_iter().enumerate() {
                                    for (&id, row) in ids.iter().zip(out[plane].chunks(bytes)) {
                                        let wanted = &naive[plane][usize::try_from(id).unwrap()];
                                        assert_eq!(row, wanted, "{io:?}, row {id}");
                                    }
                                }
                                served.fetch_add(1, Ordering::Relaxed);
                            }
                            Err(Error::Io {
                                errno: libc::EIO, ..
                            }) => {
                                failed.fetch_add(1, Ordering::Relaxed);
                            }
                            Err(error) => panic!("{error}"),
                        }
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(100));
            for step in (1..20).rev() {
                set_len(&fixture.paths[round % 2], step * 170_000 + 1234);
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        assert!(served.into_inner() > 0 && failed.into_inner() > 0, "{io:?}");
        // What lies before the cut, and in the other file, is served all along.
        let row = if round % 2 == 0 { 0 } else { 20_000 };
        let (out, _) = fixture.gather(&reader, &[row + 5], None).unwrap();
        assert_eq!(out[0], naive[0][usize::try_from(row + 5).unwrap()]);
    }
}
