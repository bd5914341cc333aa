//! Lost pages, and handlers that come and go.
use std::fs::File;
use std::io::Write as _;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::channel;
use std::sync::{Mutex, PoisonError};

use libc::{c_void, sigaction, siginfo_t};

use super::handlers::on_top;
use super::handlers::{BELOW, DEFAULT, TOP, action};
use super::*;
use crate::buffer::PlaneSink;
use crate::copy::copy_row;
use crate::map::Map;
use crate::system;

/// Tests that lose pages or install handlers, one at a time: both are the process's.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn mapped(len: usize) -> (File, Map) {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&vec![7; len]).unwrap();
    let map = Map::new(&file, len as u64).unwrap();
    (file, map)
}

fn byte(map: &Map, offset: u64) -> u8 {
    let mut out = [9];
    let sink = PlaneSink::new(&mut out, 0, 1, 1, 1).unwrap();
    copy_row(map.row(offset, 1), &sink, 0);
    out[0]
}

/// Pieces the kernel keeps the mapping in.
fn pieces(map: &Map) -> usize {
    let start = |line: &str| usize::from_str_radix(line.split('-').next()?, 16).ok();
    std::fs::read_to_string("/proc/self/maps")
        .unwrap()
        .lines()
        .filter_map(start)
        .filter(|address| (map.address()..map.address() + map.len()).contains(address))
        .count()
}

#[test]
fn the_part_of_a_mapping_beyond_the_end_is_lost_in_one_piece() {
    let _alone = alone();
    let pages = 600;
    let size = page() as u64;
    let (file, map) = mapped(pages * page());
    assert_eq!(map.lost(), None);
    file.set_len(10 * size + 5).unwrap();
    let before = losses();
    assert_eq!(byte(&map, 500 * size), 0);
    assert_eq!(map.lost(), Some(11 * size..600 * size));
    // Nothing there faults again, in whatever order it is touched.
    for page in (11..600).rev() {
        assert_eq!(byte(&map, page * size), 0);
    }
    assert!(losses() > before);
    assert_eq!(pieces(&map), 2, "not page by page");
    assert_eq!(byte(&map, 10 * size + 4), 7);
    assert_eq!(
        byte(&map, 10 * size + 5),
        0,
        "the last page says nothing of its end"
    );
    file.set_len(3 * size).unwrap();
    assert_eq!(byte(&map, 5 * size), 0);
    assert_eq!(map.lost(), Some(3 * size..600 * size));
    assert_eq!(byte(&map, 0), 7);
}

#[test]
fn lost_pages_are_not_called_resident() {
    let _alone = alone();
    let size = page() as u64;
    let (file, map) = mapped(8 * page());
    file.set_len(4 * size).unwrap();
    assert_eq!(byte(&map, 6 * size), 0);
    let mut states = Vec::new();
    if !system::TELLS_RESIDENT_PAGES {
        assert!(map.resident(0..8, &mut states).is_err());
        return;
    }
    map.resident(0..8, &mut states).unwrap();
    assert_eq!(
        states.iter().map(|state| state & 1).collect::<Vec<_>>(),
        [1, 1, 1, 1, 0, 0, 0, 0]
    );
}

#[test]
fn many_threads_may_fault_at_once() {
    let _alone = alone();
    let size = page() as u64;
    for _ in 0..20 {
        let (file, map) = mapped(256 * page());
        let (other, kept) = mapped(256 * page());
        file.set_len(100).unwrap();
        let go = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (map, kept, go) = (&map, &kept, &go);
                scope.spawn(move || {
                    while !go.load(Ordering::Acquire) {
                        std::hint::spin_loop();
                    }
                    for step in 0..256 {
                        let page = (step * 37 + thread * 31) % 256;
                        assert_eq!(byte(map, page * size + 1), if page == 0 { 7 } else { 0 });
                        assert_eq!(byte(kept, page * size), 7);
                    }
                });
            }
            go.store(true, Ordering::Release);
        });
        assert_eq!(map.lost(), Some(size..256 * size));
        assert_eq!(kept.lost(), None);
        drop(other);
    }
}

#[test]
fn slots_are_used_again() {
    let _alone = alone();
    let file = tempfile::tempfile().unwrap();
    file.set_len(page() as u64).unwrap();
    let count = slots().count();
    for _ in 0..1000 {
        drop(Map::new(&file, page() as u64).unwrap());
    }
    // Other tests of this process may hold mappings meanwhile.
    assert!(slots().count() < count + 500);
    let map = Map::new(&file, page() as u64).unwrap();
    assert_eq!(map.lost(), None);
}

static SEEN: AtomicUsize = AtomicUsize::new(0);

extern "C" fn foreign(_signal: c_int) {
    SEEN.fetch_add(1, Ordering::SeqCst);
}

unsafe extern "C" fn foreign_with_info(
    _signal: c_int,
    info: *mut siginfo_t,
    _context: *mut c_void,
) {
    assert!(!info.is_null());
    SEEN.fetch_add(100, Ordering::SeqCst);
}

fn put_on_top(handler: usize, flags: c_int) -> sigaction {
    // SAFETY: all zeros is a `sigaction`.
    let mut new: sigaction = unsafe { std::mem::zeroed() };
    new.sa_sigaction = handler;
    new.sa_flags = flags;
    action(Some(&new)).unwrap()
}

fn send() -> usize {
    SEEN.store(0, Ordering::SeqCst);
    // SAFETY: somebody handles it, as the callers have made sure.
    unsafe { libc::raise(libc::SIGBUS) };
    SEEN.load(Ordering::SeqCst)
}

#[test]
fn handlers_installed_later_are_passed_what_is_not_ours() {
    let _alone = alone();
    let (file, map) = mapped(16 * page());
    let first = put_on_top(foreign as *const () as usize, 0);
    on_top().unwrap();
    assert_eq!(send(), 1);
    put_on_top(
        foreign_with_info as *const () as usize,
        libc::SA_SIGINFO | libc::SA_NODEFER,
    );
    on_top().unwrap();
    assert_eq!(send(), 100);
    // Still ours, with two others below.
    file.set_len(0).unwrap();
    assert_eq!(byte(&map, 8 * page() as u64), 0);
    assert_eq!(map.lost(), Some(0..16 * page() as u64));
    // Coming and going does not use up the levels.
    for _ in 0..1000 {
        let below = put_on_top(foreign as *const () as usize, 0);
        on_top().unwrap();
        assert_eq!(send(), 1);
        put_on_top(below.sa_sigaction, below.sa_flags);
        on_top().unwrap();
        assert_eq!(send(), 100);
    }
    // A handler for one signal only leaves the default behind.
    put_on_top(foreign as *const () as usize, libc::SA_RESETHAND);
    on_top().unwrap();
    assert_eq!(send(), 1);
    let top = TOP.load(Ordering::Relaxed);
    assert!(ptr::eq(
        BELOW[top].load(Ordering::Relaxed),
        ptr::from_ref(&DEFAULT)
    ));
    put_on_top(first.sa_sigaction, first.sa_flags);
    on_top().unwrap();
}

/// Forks and runs `work` in the child; whether it ended well and in time.
fn forked(work: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child calls nothing that needs other threads, which is what is tested, and ends
    // without returning; a child that hangs is ended by its alarm.
    unsafe {
        let child = libc::fork();
        assert!(child >= 0);
        if child == 0 {
            libc::alarm(20);
            libc::_exit(i32::from(!work()));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
    }
}

#[test]
fn a_child_maps_although_a_thread_was_changing_slots_at_the_fork() {
    let _alone = alone();
    let (inside, is_inside) = channel();
    let (go, gone) = channel::<()>();
    let thread = std::thread::spawn(move || {
        changing(|| {
            // Half way through taking a slot.
            let slot = Slot::leak();
            slot.version.fetch_add(1, Ordering::SeqCst);
            slot.start.store(page(), Ordering::SeqCst);
            inside.send(()).unwrap();
            gone.recv().unwrap();
            slot.change(0, 0, -1);
            slot.version.fetch_add(1, Ordering::SeqCst);
        });
    });
    is_inside.recv().unwrap();
    let well = forked(|| {
        let (start, len) = (page() * 4, page());
        let registered = Registered::new(start, len, -1).unwrap();
        let even = slots().all(|slot| slot.version.load(Ordering::SeqCst).is_multiple_of(2));
        let known = registered.0.range() == Some((start, len));
        drop(registered);
        even && known && slots().all(|slot| slot.start.load(Ordering::SeqCst) != page())
    });
    go.send(()).unwrap();
    thread.join().unwrap();
    assert!(well);
}
