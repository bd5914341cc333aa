use std::fs;
use std::path::PathBuf;
use std::sync::mpsc::channel;

use super::*;
use crate::discover::TableRef;
use crate::mode::Io;
use crate::reader::{Located, Options};
use crate::testing::{Folder, tensor};

const PATIENCE: Duration = Duration::from_secs(20);
const ROWS: u64 = 300;
const ROW_BYTES: usize = 6;

fn open(folder: &Folder, io: Io) -> (Arc<Reader>, PathBuf) {
    let path = folder.tensors("a.safetensors", &[tensor("rows", "U8", &[ROWS, 6])]);
    let located = Located::find(&path, TableRef::Name("rows")).unwrap();
    let options = Options {
        io,
        ..Options::default()
    };
    (Arc::new(Reader::open(located, options).unwrap()), path)
}

fn order(reader: &Arc<Reader>, ids: &[i64]) -> Order {
    Order::new(reader, ids.to_vec(), None)
}

/// As `tensor` fills it.
fn expected(ids: &[i64]) -> Vec<u8> {
    ids.iter()
        .flat_map(|&id| {
            let first = usize::try_from(id).unwrap() * ROW_BYTES + "rows".len();
            (first..first + ROW_BYTES).map(|byte| u8::try_from(byte % 251).unwrap())
        })
        .collect()
}

fn patience() -> Instant {
    Instant::now() + PATIENCE
}

fn rows_of(ticket: &Ticket) -> Vec<u8> {
    let mut rows = Vec::new();
    let waited = ticket
        .wait(Some(patience()), &|| Ok(()), &mut |arrived| {
            let (mut memory, bytes) = arrived.into_memory();
            rows = memory.as_mut_slice()[..bytes].to_vec();
            Ok(())
        })
        .unwrap();
    assert!(matches!(waited, Waited::Delivered));
    rows
}

fn error_of(ticket: &Ticket) -> Arc<Error> {
    match ticket.wait(Some(patience()), &|| Ok(()), &mut |_| {
        panic!("rows of a failed ticket")
    }) {
        Ok(Waited::Failed(error)) => error,
        _ => panic!("the ticket did not fail"),
    }
}

/// Occupies every worker of the process's schedule until dropped.
struct Jam {
    _gates: Vec<std::sync::mpsc::Sender<()>>,
}

impl Jam {
    fn new() -> Self {
        let schedule = Schedule::of_process().unwrap();
        Self {
            _gates: (0..crate::schedule::AT_ONCE)
                .map(|_| {
                    let (open, gate) = channel::<()>();
                    let (started, running) = channel();
                    let soonest = Some(Instant::now());
                    schedule
                        .submit(soonest, move || {
                            started.send(()).unwrap();
                            let _ = gate.recv();
                        })
                        .unwrap();
                    running.recv_timeout(PATIENCE).unwrap();
                    open
                })
                .collect(),
        }
    }
}

/// Tests that need the schedule to themselves.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn rows_of_several_tables_arrive_in_order_with_aligned_planes() {
    let _alone = alone();
    let folder = Folder::new();
    for io in [Io::Auto, Io::Pread, Io::Direct] {
        let (reader, _) = open(&folder, io);
        let first: Vec<i64> = (0..37).map(|id| id * 7 % 300).collect();
        let second = [299, 0, 0, 5];
        let orders = vec![order(&reader, &first), order(&reader, &second)];
        let ticket = Ticket::submit(orders, None, false).unwrap();
        let rows = rows_of(&ticket);
        assert_eq!(rows[..first.len() * ROW_BYTES], expected(&first));
        let begin = (first.len() * ROW_BYTES).next_multiple_of(ALIGNMENT);
        assert_eq!(rows[begin..], expected(&second));
        assert!(ticket.done().unwrap());
        assert!(!ticket.cancel(), "it has ended");
    }
}

#[test]
fn delivery_goes_through_the_callers_stride_and_the_memory_is_used_again() {
    let _alone = alone();
    let folder = Folder::new();
    let (reader, _) = open(&folder, Io::Auto);
    for ids in [[3, 2, 1], [9, 9, 8], [0, 299, 150]] {
        let ticket = Ticket::submit(vec![order(&reader, &ids)], None, true).unwrap();
        let mut out = [7_u8; 30];
        let sink = PlaneSink::new(&mut out, 1, 10, ROW_BYTES, 3).unwrap();
        let sinks = [sink];
        let mut delivered = 0;
        for _ in 0..2 {
            ticket
                .wait(Some(patience()), &|| Ok(()), &mut |arrived| {
                    delivered += 1;
                    arrived.deliver(&sinks)
                })
                .unwrap();
        }
        assert_eq!(delivered, 1, "rows are handed over once");
        for (position, row) in expected(&ids).chunks(ROW_BYTES).enumerate() {
            assert_eq!(&out[1 + position * 10..][..ROW_BYTES], row);
            assert_eq!(out[position * 10], 7);
        }
    }
}

#[test]
fn an_error_belongs_to_its_ticket() {
    let _alone = alone();
    let folder = Folder::new();
    let (reader, _) = open(&folder, Io::Auto);
    let bad = Ticket::submit(vec![order(&reader, &[1, 300])], None, false).unwrap();
    let good = Ticket::submit(vec![order(&reader, &[1, 2])], None, false).unwrap();
    assert_eq!(rows_of(&good), expected(&[1, 2]));
    for _ in 0..2 {
        assert!(matches!(
            *error_of(&bad),
            Error::Id {
                id: 300,
                position: 1,
                ..
            }
        ));
    }
}

#[test]
fn a_file_that_shrank_fails_the_ticket_and_not_the_worker() {
    let _alone = alone();
    let folder = Folder::new();
    let (reader, path) = open(&folder, Io::Pread);
    fs::OpenOptions::new()
        .write(true)
        .open(path)
        .unwrap()
        .set_len(200)
        .unwrap();
    let bad = Ticket::submit(vec![order(&reader, &[299])], None, false).unwrap();
    assert!(matches!(*error_of(&bad), Error::Io { .. }));
    let good = Ticket::submit(vec![order(&reader, &[0])], None, false).unwrap();
    assert_eq!(rows_of(&good), expected(&[0]));
}

#[test]
fn cancelling_ends_a_ticket_in_line_at_once_and_drops_its_hold_on_the_reader() {
    let _alone = alone();
    let folder = Folder::new();
    let (reader, _) = open(&folder, Io::Auto);
    let jam = Jam::new();
    let ticket = Ticket::submit(vec![order(&reader, &[1])], None, false).unwrap();
    assert!(!ticket.done().unwrap());
    assert_eq!(reader.tickets().count(), 1);
    assert!(ticket.cancel());
    assert!(!ticket.cancel());
    assert!(matches!(*error_of(&ticket), Error::Cancelled));
    assert_eq!(reader.tickets().count(), 0);
    drop(jam);
}

#[test]
fn a_dropped_ticket_is_cancelled() {
    let _alone = alone();
    let folder = Folder::new();
    let (reader, _) = open(&folder, Io::Auto);
    let jam = Jam::new();
    let ticket = Ticket::submit(vec![order(&reader, &[1])], None, false).unwrap();
    assert_eq!(reader.tickets().count(), 1);
    drop(ticket);
    assert_eq!(reader.tickets().count(), 0);
    drop(jam);
    drain(&reader, &|| Ok(())).unwrap();
}

#[test]
fn a_wait_gives_up_without_ending_the_ticket() {
    let _alone = alone();
    let folder = Folder::new();
    let (reader, _) = open(&folder, Io::Auto);
    let jam = Jam::new();
    let ticket = Ticket::submit(vec![order(&reader, &[7])], None, false).unwrap();
    let soon = Some(Instant::now() + Duration::from_millis(5));
    let waited = ticket.wait(soon, &|| Ok(()), &mut |_| panic!("no rows yet"));
    assert!(matches!(waited, Ok(Waited::NotYet)));
    let interrupted = ticket.wait(Some(patience()), &|| Err(Error::Cancelled), &mut |_| Ok(()));
    assert!(matches!(interrupted, Err(Error::Cancelled)));
    drop(jam);
    assert_eq!(rows_of(&ticket), expected(&[7]));
}

#[test]
fn a_deadline_ends_a_ticket_whose_turn_never_comes() {
    let _alone = alone();
    let folder = Folder::new();
    let (reader, _) = open(&folder, Io::Auto);
    let jam = Jam::new();
    let deadline = Some(Instant::now() + Duration::from_millis(5));
    let ticket = Ticket::submit(vec![order(&reader, &[7])], deadline, false).unwrap();
    assert!(matches!(*error_of(&ticket), Error::Timeout { .. }));
    drop(jam);
    let passed = Some(Instant::now());
    let late = Ticket::submit(vec![order(&reader, &[7])], passed, false).unwrap();
    assert!(matches!(*error_of(&late), Error::Timeout { .. }));
}

#[test]
fn draining_waits_for_tickets_in_flight_and_can_be_interrupted() {
    let _alone = alone();
    let folder = Folder::new();
    let (reader, _) = open(&folder, Io::Auto);
    let jam = Jam::new();
    let ticket = Ticket::submit(vec![order(&reader, &[7])], None, false).unwrap();
    assert!(drain(&reader, &|| Err(Error::Cancelled)).is_err());
    drop(jam);
    drain(&reader, &|| Ok(())).unwrap();
    assert!(!ticket.cancel(), "it has ended");
    assert_eq!(rows_of(&ticket), expected(&[7]));
}
