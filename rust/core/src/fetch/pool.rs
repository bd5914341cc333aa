//! Reads by threads: the portable way, and the fallback where rings are refused.
//!
//! Each thread takes the next read, performs it into a slot, and sends the slot over; the caller
//! copies it out and returns the slot. Threads hold the work by reference count, so a caller that
//! gives up leaves at once, and a thread stuck in a hung device keeps nothing but its own slot.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::{Batch, Cost, Fetch, INTERRUPT_PERIOD, Next, Progress, read_error};
use crate::buffer::HostBuffer;
use crate::error::{Error, Result};
use crate::file::OpenFile;
use crate::plan::Read;
use crate::threads;

/// Most reads in flight: each occupies a thread, so fewer than a ring's.
pub const DEPTH: usize = 32;

/// Something that reads at an offset, possibly short: the files, or a fake in tests.
pub(crate) trait ReadAt: Send + Sync {
    fn read_at(&self, file: usize, buffer: &mut [u8], offset: u64) -> std::io::Result<usize>;
}

struct Files {
    files: Vec<Arc<OpenFile>>,
    direct: bool,
}

impl ReadAt for Files {
    fn read_at(&self, file: usize, buffer: &mut [u8], offset: u64) -> std::io::Result<usize> {
        self.files[file].read_at(buffer, offset, self.direct)
    }
}

/// Why a read was not completed: bytes that had arrived, and errno or the file's early end.
type Failure = (u32, Option<i32>);

/// One read on its way back to the caller.
struct Delivery {
    index: usize,
    slot: HostBuffer,
    result: std::result::Result<(), Failure>,
    reads: u64,
}

/// What the threads share of one batch.
struct Work {
    source: Box<dyn ReadAt>,
    reads: Vec<(Read, u32)>,
    next: AtomicUsize,
    stop: AtomicBool,
    slots: Mutex<Vec<HostBuffer>>,
    slot_bytes: usize,
}

impl Work {
    fn run(&self, deliveries: &Sender<Delivery>) {
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= self.reads.len() || self.stop.load(Ordering::Relaxed) {
                return;
            }
            let (read, expected) = &self.reads[index];
            let recycled = self
                .slots
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .pop();
            let Some(mut slot) = recycled.or_else(|| HostBuffer::new(self.slot_bytes, false).ok())
            else {
                return; // No memory for a slot: the caller notices that nobody delivers.
            };
            let (result, reads) = self.complete(read, *expected, slot.as_mut_slice());
            if deliveries
                .send(Delivery {
                    index,
                    slot,
                    result,
                    reads,
                })
                .is_err()
            {
                return;
            }
        }
    }

    fn complete(
        &self,
        read: &Read,
        expected: u32,
        slot: &mut [u8],
    ) -> (std::result::Result<(), Failure>, u64) {
        let mut progress = Progress::new(expected);
        let mut reads = 0;
        loop {
            reads += 1;
            let filled = progress.filled;
            let rest = &mut slot[filled as usize..read.len as usize];
            let outcome =
                self.source
                    .read_at(read.file as usize, rest, read.offset + u64::from(filled));
            let result = match &outcome {
                Ok(bytes) => i32::try_from(*bytes).unwrap_or(i32::MAX),
                Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
            };
            match progress.advance(result) {
                Next::Complete => return (Ok(()), reads),
                Next::Continue(_) | Next::Retry => {}
                // The read was blocking already, so "again" for the fourth time is an answer.
                Next::Block => return (Err((progress.filled, Some(-result))), reads),
                Next::Fail(errno) => return (Err((progress.filled, Some(errno))), reads),
                Next::Ended => return (Err((progress.filled, None)), reads),
            }
        }
    }
}

/// The thread-pool engine.
#[derive(Debug, Default)]
pub struct Pool;

impl Fetch for Pool {
    fn fetch(
        &mut self,
        batch: &Batch<'_>,
        done: &mut dyn FnMut(usize, &[u8]),
        idle: &mut dyn FnMut() -> bool,
        cost: &mut Cost,
    ) -> Result<()> {
        Narrow(DEPTH).fetch(batch, done, idle, cost)
    }
}

/// The same with at most this many threads.
#[derive(Debug)]
pub struct Narrow(pub usize);

impl Fetch for Narrow {
    fn fetch(
        &mut self,
        batch: &Batch<'_>,
        done: &mut dyn FnMut(usize, &[u8]),
        idle: &mut dyn FnMut() -> bool,
        cost: &mut Cost,
    ) -> Result<()> {
        let source = Files {
            files: batch.files.to_vec(),
            direct: batch.direct,
        };
        fetch_with(self.0, Box::new(source), batch, done, idle, cost)
    }
}

#[cfg(test)]
pub(crate) fn fetch_from(
    source: Box<dyn ReadAt>,
    batch: &Batch<'_>,
    done: &mut dyn FnMut(usize, &[u8]),
    idle: &mut dyn FnMut() -> bool,
    cost: &mut Cost,
) -> Result<()> {
    fetch_with(DEPTH, source, batch, done, idle, cost)
}

fn fetch_with(
    most: usize,
    source: Box<dyn ReadAt>,
    batch: &Batch<'_>,
    done: &mut dyn FnMut(usize, &[u8]),
    idle: &mut dyn FnMut() -> bool,
    cost: &mut Cost,
) -> Result<()> {
    let reads: Vec<_> = batch
        .reads
        .iter()
        .map(|read| (read.clone(), batch.expected(read)))
        .collect();
    let slot_bytes = reads
        .iter()
        .map(|(read, _)| read.len as usize)
        .max()
        .unwrap_or(0);
    let work = Arc::new(Work {
        source,
        reads,
        next: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
        slots: Mutex::new(Vec::new()),
        slot_bytes,
    });
    let (sender, deliveries) = channel();
    let threads = batch.reads.len().min(most.clamp(1, DEPTH));
    let mut started = 0;
    for _ in 0..threads {
        let (work, sender) = (Arc::clone(&work), sender.clone());
        match threads::spawn_blocking(move || work.run(&sender)) {
            Ok(()) => started += 1,
            Err(error) if started == 0 => return Err(error),
            Err(_) => break, // Fewer threads read as well.
        }
    }
    drop(sender);
    cost.depth = cost.depth.max(started);
    let outcome = collect(&work, &deliveries, batch, done, idle, cost);
    work.stop.store(true, Ordering::Relaxed);
    outcome
}

fn collect(
    work: &Work,
    deliveries: &Receiver<Delivery>,
    batch: &Batch<'_>,
    done: &mut dyn FnMut(usize, &[u8]),
    idle: &mut dyn FnMut() -> bool,
    cost: &mut Cost,
) -> Result<()> {
    let mut left = batch.reads.len();
    let mut busy = true;
    let mut checked = Instant::now();
    while left > 0 {
        batch.check(&mut checked, left)?;
        let delivery = if busy {
            match deliveries.try_recv() {
                Ok(delivery) => Some(delivery),
                Err(TryRecvError::Empty) => {
                    busy = idle();
                    continue;
                }
                Err(TryRecvError::Disconnected) => None,
            }
        } else {
            match deliveries.recv_timeout(INTERRUPT_PERIOD) {
                Ok(delivery) => Some(delivery),
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => None,
            }
        };
        let Some(delivery) = delivery else {
            return Err(Error::Io {
                doing: format!(
                    "cannot allocate {} bytes to read rows into",
                    work.slot_bytes
                ),
                errno: libc::ENOMEM,
                place: Box::default(),
            });
        };
        let read = &batch.reads[delivery.index];
        cost.reads += delivery.reads;
        match delivery.result {
            Ok(()) => {
                let mut slot = delivery.slot;
                let bytes = batch.expected(read);
                cost.bytes += u64::from(bytes);
                done(delivery.index, &slot.as_mut_slice()[..bytes as usize]);
                work.slots
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(slot);
                left -= 1;
            }
            Err((filled, errno)) => {
                return Err(read_error(
                    &batch.files[read.file as usize],
                    read,
                    filled,
                    errno,
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::io;
    use std::io::Write as _;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::checkpoint::CheckpointFile;
    use crate::fetch::unread::Unread;
    use crate::file::Mapping;

    /// Serves the bytes `offset % 251`, misbehaving as told.
    struct Fake {
        most: usize,
        again: Mutex<HashMap<u64, u8>>,
        fail_at: Option<u64>,
        stall: Duration,
    }

    impl ReadAt for Fake {
        fn read_at(&self, _file: usize, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
            std::thread::sleep(self.stall);
            if self.fail_at == Some(offset) {
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            if let Some(left) = self
                .again
                .lock()
                .unwrap()
                .get_mut(&offset)
                .filter(|left| **left > 0)
            {
                *left -= 1;
                let errno = [libc::EAGAIN, libc::EINTR][usize::from(*left % 2)];
                return Err(io::Error::from_raw_os_error(errno));
            }
            let bytes = buffer.len().min(self.most);
            for (byte, position) in buffer[..bytes].iter_mut().zip(offset..) {
                *byte = (position % 251) as u8;
            }
            Ok(bytes)
        }
    }

    fn well_behaved() -> Fake {
        Fake {
            most: usize::MAX,
            again: Mutex::default(),
            fail_at: None,
            stall: Duration::ZERO,
        }
    }

    fn run(fake: Fake, deadline: Option<Instant>) -> Result<Vec<(u64, Vec<u8>)>> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&vec![0; 100_000]).unwrap();
        let open = OpenFile::open(
            &CheckpointFile::of(file.path()).unwrap(),
            Mapping::Never,
            true,
        )
        .unwrap();
        let reads: Vec<_> = (0..100_u32)
            .map(|index| Read {
                file: 0,
                offset: u64::from(index) * 977,
                len: 160,
                copies: index..index + 1,
            })
            .collect();
        let files = [open];
        let batch = Batch {
            reads: &reads,
            files: &files,
            ends: &[100_000],
            direct: false,
            deadline,
            interrupt: &|| Ok(()),
            unread: &Unread::new(reads.len()),
        };
        let mut rows = Vec::new();
        fetch_from(
            Box::new(fake),
            &batch,
            &mut |index, bytes| {
                rows.push((reads[index].offset, bytes.to_vec()));
            },
            &mut || false,
            &mut Cost::default(),
        )?;
        rows.sort();
        Ok(rows)
    }

    fn assert_right(rows: &[(u64, Vec<u8>)]) {
        assert_eq!(rows.len(), 100);
        for (offset, bytes) in rows {
            assert_eq!(bytes.len(), 160);
            assert!(
                bytes
                    .iter()
                    .zip(*offset..)
                    .all(|(&byte, position)| u64::from(byte) == position % 251)
            );
        }
    }

    /// I25: the remainder of a short read is asked for until the row is whole.
    #[test]
    fn short_reads_are_completed() {
        for most in [1, 7, 159] {
            assert_right(
                &run(
                    Fake {
                        most,
                        ..well_behaved()
                    },
                    None,
                )
                .unwrap(),
            );
        }
    }

    /// I27: a transient "again" or a signal is not a failure.
    #[test]
    fn again_is_retried() {
        let again = Mutex::new(HashMap::from([(977, 2), (0, 3)]));
        assert_right(
            &run(
                Fake {
                    again,
                    ..well_behaved()
                },
                None,
            )
            .unwrap(),
        );
    }

    /// I26: one failed read fails the batch with its offset, and the next batch is served.
    #[test]
    fn a_failed_read_names_its_offset() {
        let error = run(
            Fake {
                fail_at: Some(977 * 50),
                ..well_behaved()
            },
            None,
        )
        .unwrap_err();
        let Error::Io { errno, place, .. } = error else {
            panic!("{error}")
        };
        assert_eq!((errno, place.offset), (libc::EIO, Some(977 * 50)));
        assert_right(&run(well_behaved(), None).unwrap());
    }

    #[test]
    fn a_file_that_ends_early_is_an_error() {
        let error = run(
            Fake {
                most: 0,
                ..well_behaved()
            },
            None,
        )
        .unwrap_err();
        assert!(error.to_string().contains("the file ended early"));
    }

    #[test]
    fn a_hung_device_does_not_hold_the_caller() {
        let started = Instant::now();
        let fake = Fake {
            stall: Duration::from_secs(3),
            ..well_behaved()
        };
        let error = run(fake, Some(started + Duration::from_millis(100))).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        assert!(started.elapsed() < Duration::from_secs(2));
    }
}
