//! Completions that kernels give seldom, put to a ring as if they had come.

use std::fs::OpenOptions;
use std::io::Write as _;

use super::*;
use crate::checkpoint::CheckpointFile;
use crate::fetch::MAX_RETRIES;
use crate::fetch::unread::Unread;
use crate::file::{Mapping, OpenFile};
use crate::plan::Read;

const LEN: u32 = 160;
const OFFSET: u64 = 977;

fn stored() -> Vec<u8> {
    (0..4096_u32).map(|at| (at % 251) as u8).collect()
}

/// A ring with one read of [`LEN`] bytes in a slot, not handed to the kernel yet, and what came of it.
struct One {
    ring: Ring,
    slot: u32,
    reads: [Read; 1],
    files: [std::sync::Arc<OpenFile>; 1],
    on_disk: tempfile::NamedTempFile,
    cost: Cost,
    delivered: Vec<Vec<u8>>,
}

impl One {
    /// Nothing where the system has no rings.
    fn new() -> Option<Self> {
        let mut ring = Ring::new().ok()?;
        let mut on_disk = tempfile::NamedTempFile::new().unwrap();
        on_disk.write_all(&stored()).unwrap();
        let checkpoint = CheckpointFile::of(on_disk.path()).unwrap();
        let file = OpenFile::open(&checkpoint, Mapping::Never, true).unwrap();
        ring.prepare(LEN as usize, false).unwrap();
        let slot = ring.free.pop().unwrap();
        ring.slots[slot as usize] = Slot {
            read: 0,
            progress: Progress::new(LEN),
        };
        Some(Self {
            ring,
            slot,
            reads: [Read {
                file: 0,
                offset: OFFSET,
                len: LEN,
                copies: 0..1,
            }],
            files: [file],
            on_disk,
            cost: Cost::default(),
            delivered: Vec::new(),
        })
    }

    /// Puts a result to the ring; whether the read is whole.
    fn completed(&mut self, result: i32) -> Result<bool> {
        let Self {
            ring,
            slot,
            reads,
            files,
            cost,
            delivered,
            ..
        } = self;
        let batch = Batch {
            reads,
            files,
            ends: &[4096],
            direct: false,
            deadline: None,
            interrupt: &|| Ok(()),
            unread: &Unread::new(reads.len()),
        };
        let mut done = |_: usize, bytes: &[u8]| delivered.push(bytes.to_vec());
        ring.completed(*slot, result, &batch, cost, &mut done)
    }

    /// What the kernel says of the read that the ring has asked for.
    fn answer(&mut self) -> i32 {
        assert_eq!(self.ring.in_flight, 1, "the read was asked for again");
        loop {
            self.ring.enter(1).unwrap();
            if let Some((slot, result)) = self.ring.reap() {
                assert_eq!(slot, self.slot);
                return result;
            }
        }
    }

    fn assert_delivered(&self) {
        let start = usize::try_from(OFFSET).unwrap();
        let row = &stored()[start..start + LEN as usize];
        assert_eq!(self.delivered, [row]);
        assert_eq!(self.cost.bytes, u64::from(LEN));
        assert_eq!(self.ring.free.last(), Some(&self.slot), "the slot is free");
        assert_eq!(self.ring.in_flight, 0);
    }
}

/// I27: "again" and a signal have the ring ask once more.
#[test]
fn again_is_asked_again() {
    for errno in [libc::EAGAIN, libc::EINTR] {
        let Some(mut one) = One::new() else { return };
        for asked in 1..=u64::from(MAX_RETRIES) {
            assert!(!one.completed(-errno).unwrap());
            assert_eq!(one.cost.reads, asked);
            assert!(one.delivered.is_empty());
            if asked < u64::from(MAX_RETRIES) {
                one.answer(); // As if it had been "again".
            }
        }
        let result = one.answer();
        assert_eq!(result, 160);
        assert!(one.completed(result).unwrap());
        one.assert_delivered();
    }
}

/// I27: who is told "again" too often reads blocking, what is missing and no more.
#[test]
fn again_too_often_is_read_blocking() {
    for (errno, filled) in [(libc::EAGAIN, 0), (libc::EINTR, 0), (libc::EAGAIN, 100)] {
        let Some(mut one) = One::new() else { return };
        let first = one.ring.slots[one.slot as usize];
        if filled > 0 {
            // The kernel fills all of the slot; it counts as filled as far as the result says.
            one.completed(-errno).unwrap();
            one.answer();
            one.ring.slots[one.slot as usize] = first;
            assert!(!one.completed(filled).unwrap());
            assert_eq!(one.answer(), 160 - filled, "the rest was asked for");
        }
        for _ in 0..MAX_RETRIES {
            assert!(!one.completed(-errno).unwrap());
            one.answer();
        }
        let before = one.cost.reads;
        assert!(one.completed(-errno).unwrap(), "read within the call");
        assert_eq!(one.cost.reads, before + 1);
        one.assert_delivered();
    }
}

/// A blocking read that comes to the end of the file says so, and one that fails names the offset.
#[test]
fn a_blocking_read_that_fails_is_an_error() {
    let Some(mut one) = One::new() else { return };
    for _ in 0..MAX_RETRIES {
        assert!(!one.completed(-libc::EAGAIN).unwrap());
        one.answer();
    }
    let cut = OpenOptions::new().write(true).open(one.on_disk.path());
    cut.unwrap().set_len(OFFSET).unwrap();
    let error = one.completed(-libc::EAGAIN).unwrap_err();
    assert!(
        error.to_string().contains("the file ended early"),
        "{error}"
    );

    let Some(mut one) = One::new() else { return };
    assert!(!one.completed(40).unwrap());
    one.answer();
    let error = one.completed(-libc::EIO).unwrap_err();
    let Error::Io { errno, place, .. } = error else {
        panic!("{error}")
    };
    assert_eq!((errno, place.offset), (libc::EIO, Some(OFFSET + 40)));
    assert!(one.delivered.is_empty());
}
