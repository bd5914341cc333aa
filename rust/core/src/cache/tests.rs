//! The cache against a dictionary, and against itself on many threads.

use std::collections::HashMap;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::buffer::HUGE_PAGE;

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
    cache
        .for_each(&|| Ok(()), &mut |id, _| ids.push(id))
        .unwrap();
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

/// A cache of so many sets.
fn empty(sets: u64, planes: &[usize]) -> Cache {
    let least = Cache::least_bytes(planes, 1000);
    Cache::new(least * sets, planes, 1000, Policy::Counted).unwrap()
}

fn full(sets: u64, planes: &[usize]) -> Cache {
    let cache = empty(sets, planes);
    let row: Vec<Vec<u8>> = planes.iter().map(|&bytes| vec![7; bytes]).collect();
    for id in 0..40 * sets {
        insert(&cache, id, &row);
    }
    cache
}

/// Whoever still has it, a gather or a list being read, finds nothing and puts nothing in.
#[test]
fn a_cache_that_was_given_up_is_empty_and_stays_so() {
    let cache = full(20, &[160]);
    let before = cache.len();
    assert!(before > 100);
    let outcome = cache.retire(&|| Err(Error::Cancelled));
    assert!(matches!(outcome, Err(Error::Cancelled)));
    assert!(cache.is_empty() && cache.is_retired());
    let again = row(1, &[160], 0);
    assert_eq!(insert(&cache, 1, &again), Insertion::Refused);
    let planes: Vec<&[u8]> = again.iter().map(Vec::as_slice).collect();
    assert_eq!(cache.restore(1, &planes, 7), Insertion::Refused);
    assert!(cache.is_empty());
}

#[test]
fn a_cache_takes_no_other_rows_while_rows_are_moved_to_it() {
    let (old, new) = (full(40, &[160]), empty(40, &[160]));
    let other = row(5000, &[160], 0);
    let planes: Vec<&[u8]> = other.iter().map(Vec::as_slice).collect();
    let tried = std::cell::Cell::new(false);
    let ids = ids_of(&old);
    old.move_to(&new, &|| {
        tried.set(true);
        assert_eq!(new.insert(5000, &planes), Insertion::Refused);
        assert_eq!(new.restore(5000, &planes, 7), Insertion::Refused);
        Ok(())
    })
    .unwrap();
    assert!(tried.get());
    assert_eq!(ids_of(&new).len(), ids.len());
    assert!(matches!(insert(&new, 5000, &other), Insertion::Kept { .. }));
}

/// A fork while rows were moved: in the child nobody moves them on.
#[test]
fn a_cache_that_another_process_was_filling_takes_rows() {
    let cache = empty(4, &[8]);
    cache.begin_filling();
    assert_eq!(insert(&cache, 1, &row(1, &[8], 0)), Insertion::Refused);
    cache.filling.begun_by_another_process();
    let kept = Insertion::Kept { evicted: None };
    assert_eq!(insert(&cache, 1, &row(1, &[8], 0)), kept);
    assert_eq!(cache.restore(2, &[&[0; 8]], 3), kept);
}

/// The index as well as the rows: of rows this short it is two fifths of the memory.
#[test]
fn two_caches_take_no_more_than_one_while_rows_are_moved() {
    let small = rustix::param::page_size();
    for (budget, page) in [(4_u64 << 20, small), (40 << 20, HUGE_PAGE)] {
        let made = || Cache::new(budget, &[8], 1 << 24, Policy::Counted).unwrap();
        let (old, new) = (made(), made());
        for id in 0..old.capacity() / 3 {
            old.insert(id, &[&id.to_le_bytes()]);
        }
        let before = old.memory.resident_pages();
        assert!((before * small) as u64 > budget * 9 / 10);
        let (most, moved) = (std::cell::Cell::new(0), old.len());
        old.move_to(&new, &|| {
            let pages = old.memory.resident_pages() + new.memory.resident_pages();
            most.set(most.get().max(pages));
            Ok(())
        })
        .unwrap();
        assert_eq!(new.len(), moved);
        assert_eq!(old.memory.resident_pages(), 0);
        // Half a megabyte, and where index and rows of either have got to a page that is not done.
        let beside = ((1 << 19) + 5 * page) / small;
        assert!(most.get() <= before + beside, "{} of {before}", most.get());
    }
}

/// A copy that began before a row came, and ends after it went and its memory was given back.
#[test]
fn memory_that_was_given_back_is_not_what_it_was_before() {
    let (old, new) = (empty(1, &[8]), empty(1, &[8]));
    let line = &old.memory.sets()[0];
    assert_eq!(line.begin(), None, "there is nothing to copy yet");
    insert(&old, 1, &row(1, &[8], 0));
    let state = line.begin().unwrap();
    assert!(line.unchanged(state));
    old.move_to(&new, &|| Ok(())).unwrap();
    assert_eq!((line.unchanged(0), line.unchanged(state)), (true, false));
    assert_eq!(get(&old, 1, &[8]), None);
    // Whoever still has it does not make its memory count again.
    assert_eq!(insert(&old, 1, &row(1, &[8], 0)), Insertion::Refused);
    assert!(line.unchanged(0));
    assert_eq!(get(&new, 1, &[8]), Some(row(1, &[8], 0)));
}

/// After an interrupt what was moved stays, the rest is given up, and the new cache is in use.
#[test]
fn a_move_that_is_interrupted_leaves_both_caches_usable() {
    let planes = [350_000];
    let (old, new) = (full(4, &planes), empty(4, &planes));
    let outcome = old.move_to(&new, &|| Err(Error::Cancelled));
    assert!(matches!(outcome, Err(Error::Cancelled)));
    assert!(old.is_empty());
    assert!(!new.is_empty() && new.len() <= WAYS as u64);
    insert(&new, 5000, &[vec![1; 350_000]]);
    assert!(new.contains(5000));
}

#[test]
fn memory_is_given_back_by_bytes_whatever_a_row_weighs() {
    let moved = std::cell::Cell::new(0);
    let count = || {
        moved.set(moved.get() + 1);
        Ok(())
    };
    // A set has 4.5 MB.
    full(6, &[350_000])
        .move_to(&empty(6, &[350_000]), &count)
        .unwrap();
    assert_eq!(moved.replace(0), 6);
    full(6, &[8]).move_to(&empty(6, &[8]), &count).unwrap();
    assert_eq!(moved.get(), 1);
}

#[test]
#[should_panic(expected = "a row of other planes")]
fn rows_of_other_planes_are_refused_before_anything_is_locked() {
    let cache = full(2, &[16, 8]);
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        cache.insert(1001, &[&[0; 16], &[0; 9]])
    }));
    assert!(!cache.contains(1001));
    assert!(matches!(
        insert(&cache, 1001, &row(1001, &[16, 8], 0)),
        Insertion::Kept { .. }
    ));
    std::panic::resume_unwind(outcome.unwrap_err());
}

mod budgets {
    use super::*;

    fn cached(bytes: u64) -> RowCache {
        let cache = RowCache::new(vec![160], 1000);
        cache.resize(bytes, &|| Ok(())).unwrap();
        cache
    }

    #[test]
    fn giving_the_cache_up_empties_it_for_those_who_still_have_it() {
        let cache = cached(1 << 20);
        let held = cache.current().unwrap();
        for id in 0..500 {
            insert(&held, id, &row(id, &[160], 0));
        }
        cache.resize(0, &|| Ok(())).unwrap();
        assert!(cache.current().is_none() && !cache.is_active());
        assert!(held.is_empty());
        assert_eq!(insert(&held, 1, &row(1, &[160], 0)), Insertion::Refused);
        cache.resize(1 << 20, &|| Ok(())).unwrap();
        let new = cache.current().unwrap();
        assert!(matches!(
            insert(&new, 1, &row(1, &[160], 0)),
            Insertion::Kept { .. }
        ));
    }

    /// A signal handler that runs in the middle.
    #[test]
    fn a_change_inside_a_change_is_refused_rather_than_waited_for() {
        let cache = cached(1 << 20);
        let tried = std::cell::Cell::new(0);
        cache
            .resize(2 << 20, &|| {
                tried.set(tried.get() + 1);
                let error = cache.resize(3 << 20, &|| Ok(())).unwrap_err();
                assert!(error.to_string().contains("signal handler"), "{error}");
                Ok(())
            })
            .unwrap();
        assert!(tried.get() > 0);
        assert_eq!(cache.budget(), 2 << 20);
        cache.resize(3 << 20, &|| Ok(())).unwrap();
        assert_eq!(cache.budget(), 3 << 20);
    }

    #[test]
    fn a_change_on_another_thread_waits_for_its_turn() {
        let cache = cached(1 << 20);
        let cache = &cache;
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let outcome = cache.resize(2 << 20, &|| {
                if !ended.swap(true, Ordering::Relaxed) {
                    scope.spawn(move || cache.resize(3 << 20, &|| Ok(())).unwrap());
                    std::thread::sleep(Duration::from_millis(20));
                    assert_eq!(cache.budget(), 2 << 20);
                }
                Ok(())
            });
            outcome.unwrap();
        });
        assert_eq!(cache.budget(), 3 << 20);
    }
}
