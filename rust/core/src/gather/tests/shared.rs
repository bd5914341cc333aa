//! Reads of one batch done by the calling thread and by helpers.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::*;

/// Rows that are far enough apart for a read each.
const EVERY: i64 = 12;
const READS: i64 = 2500;

fn apart() -> (Fixture, Vec<i64>) {
    let fixture = Fixture::new(&[1024], &[(READS.unsigned_abs() * 12, 777)], 1);
    let ids = (0..READS).map(|index| index * 7919 % READS * EVERY);
    (fixture, ids.collect())
}

/// Reads a part of the file, so that just this is in the page cache.
fn keep(fixture: &Fixture, share: std::ops::Range<u64>) {
    fixture.drop_cache();
    let file = fs::File::open(&fixture.paths[0]).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
    let len = file.metadata().unwrap().len();
    let mut bytes = vec![0; usize::try_from((share.end - share.start) * len / 4).unwrap()];
    file.read_exact_at(&mut bytes, share.start * len / 4)
        .unwrap();
}

/// Wherever the pages lie that are in memory: rows are right, and each read counts once.
#[test]
fn helpers_and_the_caller_do_each_read_once() {
    let (fixture, ids) = apart();
    let came = scatter::CAME.load(Ordering::Relaxed);
    for io in [Io::Auto, Io::Uring, Io::Pread] {
        for share in [0..0, 0..4, 0..2, 2..4, 3..4, 0..3] {
            keep(&fixture, share.clone());
            // Opened anew: it knows of no page.
            let Some(reader) = fixture.open(io) else {
                continue;
            };
            let (out, report) = fixture.gather(&reader, &ids, None).unwrap();
            fixture.assert_equal(&out, &ids, None);
            let reads = READS.unsigned_abs();
            assert_eq!((report.fetched, report.reads), (reads, reads), "{share:?}");
            assert_eq!(report.bytes_read, reads * 1024);
            assert_eq!(reader.stats().reads.get(), reads);
            assert_eq!(reader.stats().bytes_read.get(), reads * 1024);
            if io == Io::Auto {
                let (out, report) = fixture.gather(&reader, &ids, None).unwrap();
                fixture.assert_equal(&out, &ids, None);
                assert_eq!(report.reads, 0, "what helpers read is known to be resident");
            }
        }
    }
    let rings = fixture.open(Io::Uring).is_some();
    assert!(!rings || scatter::CAME.load(Ordering::Relaxed) > came);
}

#[test]
fn what_helpers_read_is_kept_in_a_cache() {
    let (fixture, ids) = apart();
    keep(&fixture, 0..3);
    let Some(reader) = fixture.open_with(Io::Uring, 16 << 20) else {
        return;
    };
    for _ in 0..2 {
        let (out, _) = fixture.gather(&reader, &ids, None).unwrap();
        fixture.assert_equal(&out, &ids, None);
    }
    assert_eq!(reader.stats().rows_fetched.get(), READS.unsigned_abs());
}

/// With a deadline nobody helps, who might be kept by a device that hangs.
#[test]
fn a_batch_with_a_deadline_is_right_or_late() {
    let (fixture, ids) = apart();
    let reader = fixture.open(Io::Uring).or(fixture.open(Io::Auto)).unwrap();
    for share in [0..0, 0..2, 0..4] {
        // From no time at all to one in which everything can be done.
        for turn in 0..12 {
            keep(&fixture, share.clone());
            let mut out = vec![0; ids.len() * 1024];
            let sink = PlaneSink::new(&mut out, 0, 1024, 1024, ids.len()).unwrap();
            let request = Request {
                reader: &reader,
                ids: &ids,
                sinks: [sink].into_iter().collect(),
                pad_id: None,
            };
            let time = Duration::from_micros(if turn == 0 { 0 } else { 500 << turn });
            let control = Control {
                deadline: Some(Instant::now() + time),
                ..Control::NONE
            };
            let outcome = gather(&[request], &control);
            match outcome {
                Ok(_) => {
                    fixture.assert_equal(&[out], &ids, None);
                    assert!(turn > 0);
                    break;
                }
                Err(error) => assert!(matches!(error, Error::Timeout { .. }), "{error}"),
            }
        }
        let (out, _) = fixture.gather(&reader, &ids, None).unwrap();
        fixture.assert_equal(&out, &ids, None);
    }
}

#[test]
fn a_file_that_was_cut_is_named_whoever_finds_it() {
    for share in [0..0, 0..4] {
        let (fixture, ids) = apart();
        let reader = fixture.open(Io::Auto).unwrap();
        keep(&fixture, share);
        let file = fs::File::options()
            .write(true)
            .open(&fixture.paths[0])
            .unwrap();
        let len = file.metadata().unwrap().len();
        file.set_len(len / 2).unwrap();
        let mut error = fixture.gather(&reader, &ids, None).unwrap_err();
        let place = error.place_mut().expect("an error of a place");
        assert_eq!(place.path.as_deref(), Some(&*fixture.paths[0]));
        let row = place.row.expect("the row is named");
        assert!((row + 1) * 1024 + 777 > len / 2, "row {row} was there");
        let before: Vec<i64> = ids.iter().copied().filter(|&id| id < 12_000).collect();
        let (out, _) = fixture.gather(&reader, &before, None).unwrap();
        fixture.assert_equal(&out, &before, None);
    }
}
