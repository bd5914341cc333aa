//! What gathers ask of the kernel, and what they make it do.

use super::*;
use crate::{file, system};

/// Pages that went away behind engram's back cost one batch its faults; then beliefs are checked,
/// and rows are read with many reads in flight again, however often pages go away.
#[test]
fn wrong_beliefs_are_noticed_and_corrected() {
    let fixture = Fixture::new(&[160], &[(40_000, 7)], 1);
    let reader = fixture.open(Io::Auto).unwrap();
    // Few enough for the calling thread alone, whose faults are counted.
    let ids: Vec<i64> = (0..1500).map(|index| index * 7919 % 40_000).collect();
    fixture.drop_cache();
    fixture.gather(&reader, &ids, None).unwrap();
    let faulted = || {
        let before = system::major_faults();
        let (out, report) = fixture.gather(&reader, &ids, None).unwrap();
        fixture.assert_equal(&out, &ids, None);
        (system::major_faults() - before, report)
    };
    // The rows were read, not mapped, so the page cache lets go of them.
    fixture.drop_cache();
    let (first, _) = faulted();
    if first < 100 {
        return; // This filesystem keeps what it was told to drop (tmpfs).
    }
    let noticed = reader.stats().major_faults.get();
    assert!(
        noticed > 0,
        "{first} faults of the batch were not looked for"
    );
    assert!(reader.verifies());
    for _ in 0..3 {
        let map = reader.files()[0].map().unwrap();
        map.trim(0..map.len()).unwrap();
        fixture.drop_cache();
        let (later, report) = faulted();
        assert!(report.fetched > 1000, "denied beliefs are read: {report:?}");
        assert!(
            later < first / 10,
            "{later} faults where the first batch had {first}"
        );
    }
    assert_eq!(reader.stats().major_faults.get(), noticed);
}

/// In small batches the faults may be those of other code: they are not counted, and beliefs are
/// checked for a few batches; for longer if one was wrong.
#[test]
fn wrong_beliefs_of_small_batches_are_noticed_too() {
    let fixture = Fixture::new(&[160], &[(40_000, 7)], 1);
    let reader = fixture.open(Io::Auto).unwrap();
    let ids: Vec<i64> = (0..200).map(|index| index * 7919 % 40_000).collect();
    fixture.gather(&reader, &ids, None).unwrap();
    fixture.gather(&reader, &ids, None).unwrap();
    let doubted = |fixture: &Fixture| {
        let map = reader.files()[0].map().unwrap();
        map.trim(0..map.len()).unwrap();
        fixture.drop_cache();
        let before = system::major_faults();
        let (out, report) = fixture.gather(&reader, &ids, None).unwrap();
        fixture.assert_equal(&out, &ids, None);
        (system::major_faults() - before, report.fetched)
    };
    let (faults, _) = doubted(&fixture);
    if faults < 50 {
        return; // This filesystem keeps what it was told to drop (tmpfs).
    }
    assert!(reader.verifies());
    assert_eq!(reader.stats().major_faults.get(), 0);
    for _ in 0..20 {
        let (faults, fetched) = doubted(&fixture);
        assert!(
            fetched > 150 && faults < 10,
            "{fetched} fetched, {faults} faults"
        );
    }
    for _ in 0..70 {
        fixture.gather(&reader, &ids, None).unwrap();
    }
    assert!(!reader.verifies(), "trusted again");
}

/// With `io="mmap"` the kernel is advised once of each range that the plan has, not of each row.
#[test]
fn one_advice_per_planned_range() {
    let page = i64::try_from(rustix::param::page_size()).unwrap();
    let fixture = Fixture::new(&[128], &[(8 * 4096, 0)], 1);
    let reader = fixture.open(Io::Mmap).unwrap();
    let in_a_page = page / 128;
    let advised = |ids: &[i64]| {
        let before = file::advised();
        let (out, _) = fixture.gather(&reader, ids, None).unwrap();
        fixture.assert_equal(&out, ids, None);
        file::advised() - before
    };
    // Rows of one page, of two that follow each other, and of three far apart; all of them twice.
    let ranges: [&[i64]; 5] = [&[0], &[10, 11], &[20], &[30], &[40]];
    let ids: Vec<i64> = ranges
        .iter()
        .flat_map(|pages| pages.iter())
        .flat_map(|number| number * in_a_page..(number + 1) * in_a_page)
        .collect();
    assert_eq!(advised(&[&ids[..], &ids[..]].concat()), 5);
    assert_eq!(advised(&ids[..1]), 1);
    assert_eq!(advised(&[]), 0);
}
