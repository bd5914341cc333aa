//! The cache against a dictionary, and against itself on many threads.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const POLICIES: [Policy; 2] = [Policy::Clock, Policy::Counted];

fn byte(id: u64, plane: usize, column: usize, version: u64) -> u8 {
    (mix(id ^ (version << 40)) >> (8 * (column % 8))) as u8 ^ (column * 31 + plane * 7) as u8
}

fn row(id: u64, plane_bytes: &[usize], version: u64) -> Vec<Vec<u8>> {
    let planes = plane_bytes.iter().enumerate();
    planes
        .map(|(plane, &bytes)| {
            (0..bytes)
                .map(|column| byte(id, plane, column, version))
                .collect()
        })
        .collect()
}

fn insert(cache: &Cache, id: u64, row: &[Vec<u8>]) -> Insertion {
    let planes: Vec<&[u8]> = row.iter().map(Vec::as_slice).collect();
    cache.insert(id, &planes)
}

fn get(cache: &Cache, id: u64, plane_bytes: &[usize]) -> Option<Vec<Vec<u8>>> {
    let mut row: Vec<Vec<u8>> = plane_bytes.iter().map(|&bytes| vec![0xAA; bytes]).collect();
    let mut planes: Vec<&mut [u8]> = row.iter_mut().map(Vec::as_mut_slice).collect();
    let batch = cache.batch();
    cache.get(id, &mut planes, batch).then_some(row)
}

/// What `serve` finds, per id.
fn serve(cache: &Cache, ids: &[i64], plane_bytes: &[usize]) -> Vec<Option<Vec<Vec<u8>>>> {
    let mut out: Vec<Vec<u8>> = plane_bytes
        .iter()
        .map(|&bytes| vec![0xAA; bytes * ids.len()])
        .collect();
    let sinks: Vec<_> = out
        .iter_mut()
        .zip(plane_bytes)
        .map(|(out, &bytes)| PlaneSink::new(out, 0, bytes, bytes, ids.len()).unwrap())
        .collect();
    let mut missed = Vec::new();
    let hits = cache.serve(ids, 0, None, &sinks, cache.batch(), &mut missed);
    drop(sinks);
    assert_eq!(hits + missed.len() as u64, ids.len() as u64);
    assert!(missed.is_sorted());
    (0..ids.len())
        .map(|position| {
            let row = out.iter().zip(plane_bytes);
            let row = row
                .map(|(out, &bytes)| out[position * bytes..][..bytes].to_vec())
                .collect();
            (!missed.contains(&(position as u32))).then_some(row)
        })
        .collect()
}

fn ids_of(cache: &Cache) -> Vec<u64> {
    let mut ids = Vec::new();
    cache.for_each(&mut |id, _| ids.push(id));
    ids
}

#[derive(Debug, Clone)]
enum Step {
    Insert(u64),
    Get(u64),
    Serve(Vec<u64>),
    Resize(usize),
}

fn steps(ids: u64) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..ids).prop_map(Step::Insert),
        3 => (0..ids).prop_map(Step::Get),
        2 => prop::collection::vec(0..ids, 0..200).prop_map(Step::Serve),
        1 => (1_usize..9).prop_map(Step::Resize),
    ];
    prop::collection::vec(step, 0..300)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// D19: what comes out of the cache is what was put in under that id, and nothing is in it that
    /// it does not say.
    #[test]
    fn agrees_with_a_dictionary(
        plane_bytes in prop::collection::vec(prop_oneof![Just(160_usize), Just(8), 1_usize..90], 1..=3),
        policy in prop::sample::select(POLICIES.to_vec()),
        sets in 1_usize..9,
        spread in prop_oneof![Just(1_u64), Just(7919), Just((1 << 31) + 11)],
        steps in steps(150),
    ) {
        let rows = 150 * spread;
        let least = Cache::least_bytes(&plane_bytes, rows);
        let budget = |sets: usize| least * sets as u64;
        let mut cache = Cache::new(budget(sets), &plane_bytes, rows, policy).unwrap();
        let mut model: HashMap<u64, Vec<Vec<u8>>> = HashMap::new();
        for (version, step) in (0..).zip(steps) {
            match step {
                Step::Insert(id) => {
                    let id = id * spread;
                    let row = row(id, &plane_bytes, version);
                    match insert(&cache, id, &row) {
                        Insertion::Kept { evicted } => {
                            if let Some(evicted) = evicted {
                                prop_assert!(model.remove(&evicted).is_some());
                            }
                            prop_assert!(model.insert(id, row).is_none());
                        }
                        Insertion::Present => prop_assert!(model.contains_key(&id)),
                        Insertion::Refused => prop_assert!(false, "nobody else is here"),
                    }
                }
                Step::Get(id) => {
                    let id = id * spread;
                    prop_assert_eq!(cache.contains(id), model.contains_key(&id));
                    prop_assert_eq!(get(&cache, id, &plane_bytes), model.get(&id).cloned());
                }
                Step::Serve(ids) => {
                    let ids: Vec<i64> = ids.iter().map(|id| (id * spread).cast_signed()).collect();
                    let found = serve(&cache, &ids, &plane_bytes);
                    for (id, found) in ids.iter().zip(&found) {
                        prop_assert_eq!(found.as_ref(), model.get(&id.cast_unsigned()));
                    }
                }
                Step::Resize(sets) => {
                    let new = Cache::new(budget(sets), &plane_bytes, rows, policy).unwrap();
                    cache.move_to(&new, &|| Ok(())).unwrap();
                    prop_assert!(cache.is_empty());
                    prop_assert_eq!(insert(&cache, 1, &row(1, &plane_bytes, 0)), Insertion::Refused);
                    let kept: Vec<u64> = ids_of(&new);
                    prop_assert!(kept.iter().all(|id| model.contains_key(id)));
                    model.retain(|id, _| kept.contains(id));
                    prop_assert_eq!(kept.len(), model.len());
                    cache = new;
                }
            }
            prop_assert!(cache.len() <= cache.capacity());
            prop_assert_eq!(cache.len(), model.len() as u64);
        }
        let mut ids = ids_of(&cache);
        ids.sort_unstable();
        let mut expected: Vec<u64> = model.keys().copied().collect();
        expected.sort_unstable();
        prop_assert_eq!(ids, expected);
    }
}

#[test]
fn set_and_tag_together_are_the_id() {
    let rows = 40_u64 << 32;
    let cache = Cache::new(1 << 20, &[160], rows, Policy::Counted).unwrap();
    for id in (0..rows)
        .step_by(987_654_321)
        .chain([0, 1, u64::from(u32::MAX) - 1, 1 << 32])
    {
        let (set, tag) = cache.place(id);
        assert_eq!(cache.id(set, tag), id);
    }
    assert_eq!(cache.place(u64::from(u32::MAX)).1, 0);
    assert_eq!(
        insert(&cache, u64::from(u32::MAX), &row(5, &[160], 0)),
        Insertion::Refused
    );
    assert!(!cache.contains(u64::from(u32::MAX)));
    assert!(get(&cache, u64::from(u32::MAX), &[160]).is_none());
}

#[test]
fn a_budget_is_kept_to_the_byte() {
    for budget in [7_000, 10_000, 1 << 20, 31 << 20, (64 << 20) + 12_345] {
        for planes in [&[160_usize][..], &[80, 10], &[256, 8], &[1]] {
            for policy in POLICIES {
                let cache = Cache::new(budget, planes, u64::from(u32::MAX), policy).unwrap();
                let row = planes.iter().sum::<usize>() as u64;
                let bytes = cache.index_bytes() + cache.capacity() * row;
                assert!(bytes <= budget);
                let (left, set) = (budget - bytes, 13 * row + 64);
                assert!(left < set || (budget > 32 << 20 && left < (2 << 20) + set));
                // Five bytes a row besides the row.
                assert!(bytes - cache.capacity() * row <= 5 * cache.capacity());
            }
        }
    }
    for policy in POLICIES {
        let least = Cache::least_bytes(&[160], 1000);
        assert!(Cache::new(least, &[160], 1000, policy).is_ok());
        assert!(Cache::new(least - 1, &[160], 1000, policy).is_err());
    }
}

/// A long run of rows that are wanted once does not flush those that are wanted often.
#[test]
fn a_scan_leaves_the_hot_rows() {
    let cache = Cache::new(1 << 20, &[160], 1 << 30, Policy::Counted).unwrap();
    let hot: Vec<u64> = (0..cache.capacity() / 2).map(|id| id * 3).collect();
    let want = |id: u64| {
        if get(&cache, id, &[160]).is_none() {
            insert(&cache, id, &row(id, &[160], 0));
        }
    };
    for _ in 0..4 {
        hot.iter().copied().for_each(want);
    }
    (0..3 * cache.capacity())
        .map(|id| (1 << 29) + id)
        .for_each(want);
    let left = hot.iter().filter(|&&id| cache.contains(id)).count();
    assert!(left * 100 > hot.len() * 90, "{left} of {}", hot.len());
}

/// Sixteen threads, one or a few sets, rows going in and out all the time: never half a row.
#[test]
fn threads_never_see_half_a_row() {
    for (planes, sets) in [(&[160_usize][..], 1), (&[80, 10], 3), (&[256, 8, 33], 2)] {
        let least = Cache::least_bytes(planes, 1 << 20);
        let cache = Cache::new(least * sets, planes, 1 << 20, Policy::Counted).unwrap();
        let ids: Vec<u64> = (0..60).collect();
        std::thread::scope(|scope| {
            for thread in 0..16_u64 {
                let (cache, ids) = (&cache, &ids);
                scope.spawn(move || {
                    for turn in 0..100 {
                        let id = ids[(mix(thread << 32 | turn) % 60) as usize];
                        insert(cache, id, &row(id, planes, 0));
                        let wanted: Vec<i64> = (0..50)
                            .map(|n| (mix(turn << 8 | n) % 60).cast_signed())
                            .collect();
                        for (id, found) in wanted.iter().zip(serve(cache, &wanted, planes)) {
                            if let Some(found) = found {
                                assert_eq!(found, row(id.cast_unsigned(), planes, 0));
                            }
                        }
                    }
                });
            }
        });
        assert!(!cache.is_empty());
    }
}

/// What a fork in the middle of an insertion leaves: a lock that nobody gives back.
#[test]
fn a_lock_that_is_never_given_back_holds_nobody_up() {
    let least = Cache::least_bytes(&[8], 100);
    let cache = Cache::new(least, &[8], 100, Policy::Counted).unwrap();
    insert(&cache, 1, &row(1, &[8], 0));
    std::mem::forget(cache.memory.sets()[0].lock());
    assert_eq!(insert(&cache, 2, &row(2, &[8], 0)), Insertion::Refused);
    assert_eq!(get(&cache, 1, &[8]), None);
    assert_eq!(serve(&cache, &[1, 2], &[8]), [None, None]);
    let new = Cache::new(least, &[8], 100, Policy::Counted).unwrap();
    cache.move_to(&new, &|| Ok(())).unwrap();
    assert!(new.is_empty());
}
