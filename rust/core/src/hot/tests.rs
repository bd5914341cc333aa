//! Lists of rows written and read back, whole and damaged.

use std::collections::BTreeMap;
use std::fs;

use proptest::prelude::*;

use super::*;

fn identity(rows: u64) -> Identity {
    Identity {
        table: "t".to_owned(),
        rows,
        encoding: "u8".to_owned(),
        row_bytes: vec![160, 8],
        files: vec![1, u64::MAX],
    }
}

/// The rows of the file, its checksum checked.
fn read(path: &Path) -> Result<(Identity, Vec<(u64, u8)>)> {
    let mut rows = Rows::open(path)?;
    let mut first = Vec::new();
    while let Some(row) = rows.next()? {
        first.push(row);
    }
    rows.rewind()?;
    let mut second = Vec::new();
    while let Some(row) = rows.next()? {
        second.push(row);
    }
    assert_eq!(first, second);
    Ok((rows.identity().clone(), first))
}

fn is_damaged(path: &Path) -> bool {
    matches!(read(path), Err(Error::Checkpoint { .. }))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn what_is_written_is_read_and_nothing_else(
        rows in prop::collection::btree_map(prop_oneof![0_u64..300, 0..u64::MAX], any::<u8>(), 0..60),
        calls in 1_usize..4,
        cut in any::<prop::sample::Index>(),
        flip in (any::<prop::sample::Index>(), 0_u32..8),
    ) {
        let rows: BTreeMap<u64, u8> = rows;
        let rows: Vec<(u64, u8)> = rows.into_iter().collect();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hot");
        let mut writer = Writer::new(&path, &identity(u64::MAX)).unwrap();
        prop_assert!(!path.exists(), "it appears whole or not at all");
        for part in rows.chunks(rows.len() / calls + 1) {
            writer.rows(part).unwrap();
        }
        writer.finish().unwrap();
        prop_assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let (found, listed) = read(&path).unwrap();
        prop_assert_eq!(found, identity(u64::MAX));
        prop_assert_eq!(listed, rows);

        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..cut.index(whole.len())]).unwrap();
        prop_assert!(is_damaged(&path));
        let mut changed = whole.clone();
        let place = flip.0.index(whole.len());
        changed[place] ^= 1 << flip.1;
        fs::write(&path, &changed).unwrap();
        prop_assert!(is_damaged(&path), "byte {}", place);
    }
}

#[test]
fn a_writer_that_is_given_up_leaves_what_was_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hot");
    fs::write(&path, "before").unwrap();
    let mut writer = Writer::new(&path, &identity(9)).unwrap();
    writer.rows(&[(1, 2)]).unwrap();
    drop(writer);
    assert_eq!(fs::read(&path).unwrap(), b"before");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn rows_wanted_most_are_chosen() {
    let mut by_count = [0; 256];
    by_count[0] = 10;
    by_count[3] = 5;
    by_count[7] = 4;
    for (capacity, total, taken) in [(100, 19, [10, 5, 4]), (9, 9, [0, 5, 4]), (6, 6, [0, 2, 4])] {
        let mut choice = Choice::new(&by_count, capacity);
        assert_eq!(choice.total, total);
        for (wanted, taken) in [0, 3, 7].into_iter().zip(taken) {
            let rows = (0..by_count[usize::from(wanted)]).filter(|_| choice.takes(wanted));
            assert_eq!(
                rows.count(),
                taken,
                "of those wanted {wanted} times, room for {capacity}"
            );
        }
    }
}

#[test]
fn ranges_hold_every_id_once_and_are_few() {
    for (counts, width) in [
        (vec![0; 10], 5),
        (vec![1 << 20; 64], 1 << 20),
        (vec![1; 4096], 1),
        (vec![1 << 40, 0, 0, 3], u64::MAX / 2),
    ] {
        let ranges = ranges(&counts, width);
        assert_eq!(ranges[0].start, 0);
        assert_eq!(ranges.last().unwrap().end, u64::MAX);
        assert!(ranges.is_sorted_by(|left, right| left.end == right.start));
        assert!(ranges.len() as u64 <= 2 * LOOKS, "{ranges:?}");
    }
    assert_eq!(ranges(&[SORTED_AT_ONCE, 1], 10), [0..10, 10..u64::MAX]);
}
