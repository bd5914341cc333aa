//! Tables of which every page is believed resident, and pads among their rows.

use super::*;
use crate::warm::prewarm;

/// Ten megabytes in three pieces that begin anywhere.
fn warmed() -> (Fixture, Reader) {
    let fixture = Fixture::new(&[160], &[(25_000, 4099), (30_000, 1), (5_000, 777)], 2);
    let reader = fixture.open(Io::Auto).unwrap();
    fixture.drop_cache();
    (fixture, reader)
}

fn is_whole(reader: &Reader) -> bool {
    reader.cuts(0).unwrap().is_whole()
}

#[test]
fn a_prewarmed_table_is_believed_whole_until_a_belief_is_given_up() {
    let (fixture, reader) = warmed();
    assert!(!is_whole(&reader));
    let bytes = fixture.table.total_bytes();
    assert_eq!(prewarm(&reader, None, &mut |_, _| Ok(())).unwrap(), bytes);
    assert!(is_whole(&reader));
    let other = fixture.open_with(Io::Auto, 0).unwrap();
    assert!(is_whole(&other), "files that are open already are shared");
    // A belief of another file that is given up changes nothing.
    let beside = warmed();
    beside.1.files()[0].residency().set(0..1);
    beside.1.files()[0].residency().clear(0..1);
    assert!(is_whole(&reader));
    let ids: Vec<i64> = (0..9_000_i64)
        .map(|index| {
            if index % 7 == 3 {
                -5
            } else {
                index * 7919 % 60_000
            }
        })
        .collect();
    let pads = ids.iter().filter(|&&id| id == -5).count() as u64;
    let rows = ids.len() as u64 - pads;
    let counted = || reader.stats().rows_resident.get();
    for count in [1, 2, 17, 128, 129, 1000, ids.len()] {
        let (out, report) = fixture.gather(&reader, &ids[..count], Some(-5)).unwrap();
        fixture.assert_equal(&out, &ids[..count], Some(-5));
        assert_eq!(report.fetched, 0);
    }
    let before = counted();
    fixture.gather(&reader, &ids, Some(-5)).unwrap();
    assert_eq!(counted() - before, rows, "pads are no rows");

    reader.files()[0].residency().clear(3..4);
    assert!(!is_whole(&reader));
    reader.look_at_belief();
    assert!(!is_whole(&reader));
    let all: Vec<i64> = (0..60_000).collect();
    let (out, _) = fixture.gather(&reader, &all, None).unwrap();
    fixture.assert_equal(&out, &all, None);
    reader.look_at_belief();
    assert!(is_whole(&reader), "the page was looked for");
}

#[test]
fn prewarming_ends_at_its_maximum_and_at_the_end_of_a_cut_file() {
    let (fixture, reader) = warmed();
    for bytes in [1, 159, 4096, 2 << 20, 5_000_001] {
        assert_eq!(
            prewarm(&reader, Some(bytes), &mut |_, _| Ok(())).unwrap(),
            bytes
        );
        assert!(!is_whole(&reader));
    }
    let file = fs::File::options()
        .write(true)
        .open(&fixture.paths[0])
        .unwrap();
    file.set_len(3_000_000).unwrap();
    let error = prewarm(&reader, None, &mut |_, _| Ok(())).unwrap_err();
    let Error::Io { errno, place, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(*errno, libc::EIO);
    assert_eq!(place.path.as_deref(), Some(fixture.paths[0].as_path()));
    assert_eq!(place.offset, Some(3_000_000));
}

#[test]
fn pads_are_zeros_in_rows_of_any_length() {
    for row_bytes in [1, 8, 160, 8191, 8192, 8193, 20_000] {
        let fixture = Fixture::new(&[row_bytes], &[(300, 5)], 1);
        let reader = fixture.open(Io::Auto).unwrap();
        prewarm(&reader, None, &mut |_, _| Ok(())).unwrap();
        let ids: Vec<i64> = (0..700_i64)
            .map(|index| if index % 5 == 1 { -1 } else { index * 31 % 300 })
            .collect();
        let (out, report) = fixture.gather(&reader, &ids, Some(-1)).unwrap();
        fixture.assert_equal(&out, &ids, Some(-1));
        assert_eq!((report.padded, report.fetched), (140, 0));
    }
}
