//! A step against hashing and gathering apart, and what it allocates.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that cannot go on fails its test"
)]

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use engram_core::buffer::PlaneSink;
use engram_core::discover::TableRef;
use engram_core::gather::{Control, Request, Sinks, gather};
use engram_core::hash::{Context, Hash, Ints, OutOfVocab, Policy, Qwen, QwenConfig, Step};
use engram_core::mode::Io;
use engram_core::reader::{Located, Options, Reader};
use engram_core::step::{Ids, StepTable, StepTables, gather_step};

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

/// Allocations are counted over the whole process.
static ALONE: Mutex<()> = Mutex::new(());

const ROW_BYTES: usize = 160;

fn hash(ple_index: usize) -> Qwen {
    let config = QwenConfig {
        vocab_size: 1000,
        ngram_size: 3,
        heads_per_ngram: 8,
        vocab_size_base: 300,
        divisor: 128,
        seed: 1234,
        ple_index,
        eos: 999,
    };
    let policy = Policy {
        out_of_vocab: OutOfVocab::Refuse,
        dead_id: None,
    };
    Qwen::new(&config, policy).unwrap()
}

fn open(folder: &Path, name: &str, rows: u64) -> Reader {
    let path = folder.join(name);
    let bytes = rows * ROW_BYTES as u64;
    let header = format!(
        r#"{{"rows":{{"dtype":"U8","shape":[{rows},{ROW_BYTES}],"data_offsets":[0,{bytes}]}}}}"#
    );
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    let seed = name.len() as u64;
    file.extend(
        (0..bytes).map(|byte| (byte.wrapping_mul(0x9E37_79B9) >> (8 + seed)).to_le_bytes()[0]),
    );
    std::fs::write(&path, file).unwrap();
    let located = Located::find(&path, TableRef::Name("rows")).unwrap();
    let options = Options {
        io: Io::Auto,
        ..Options::default()
    };
    Reader::open(located, options).unwrap()
}

fn sinks(memory: &mut [u8], rows: usize) -> Sinks<'_> {
    let mut sinks = Sinks::new();
    sinks.push(PlaneSink::new(memory, 0, ROW_BYTES, ROW_BYTES, rows).unwrap());
    sinks
}

struct Fixture {
    _folder: tempfile::TempDir,
    hashes: [Qwen; 2],
    readers: [Reader; 2],
    tokens: Vec<i64>,
    starts: Vec<i32>,
    context: Vec<i64>,
}

impl Fixture {
    fn new(tokens: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let hashes = [hash(0), hash(1)];
        let readers = [
            open(
                folder.path(),
                "a.safetensors",
                hashes[0].heads().padded_rows(),
            ),
            open(
                folder.path(),
                "bb.safetensors",
                hashes[1].heads().padded_rows(),
            ),
        ];
        let requests = i32::try_from(tokens).unwrap();
        Self {
            _folder: folder,
            hashes,
            readers,
            tokens: (0..i64::from(requests))
                .map(|token| token * 37 % 1000)
                .collect(),
            starts: (0..=requests).collect(),
            context: (0..2 * i64::from(requests))
                .map(|token| token * 91 % 1000)
                .collect(),
        }
    }

    fn step(&self) -> Step<'_> {
        let context = Context {
            values: Ints::I64(&self.context),
            rows: self.tokens.len(),
            width: 2,
        };
        Step::new(
            Ints::I64(&self.tokens),
            Some(Ints::I32(&self.starts)),
            Some(context),
            2,
        )
        .unwrap()
    }

    fn run(&self, ids: &mut Ids, out: &mut [Vec<u8>; 2]) {
        let rows = self.tokens.len() * 16;
        let mut tables = StepTables::new();
        for ((hash, reader), out) in self.hashes.iter().zip(&self.readers).zip(out) {
            tables.push(StepTable {
                hash,
                reader,
                sinks: sinks(out, rows),
                pad_id: None,
            });
        }
        let report = gather_step(tables, &self.step(), ids, 1, &Control::NONE).unwrap();
        assert_eq!(report.rows, 2 * rows as u64);
    }
}

#[test]
fn a_step_equals_hashing_and_gathering_apart() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut kept = Ids::default();
    for tokens in [40, 3, 0, 17] {
        let fixture = Fixture::new(tokens);
        let rows = tokens * 16;
        let mut out = [vec![1; rows * ROW_BYTES], vec![1; rows * ROW_BYTES]];
        fixture.run(&mut kept, &mut out);
        for ((hash, reader), out) in fixture.hashes.iter().zip(&fixture.readers).zip(&out) {
            let mut ids = vec![0; rows];
            hash.ids(&fixture.step(), &mut ids, 1).unwrap();
            let mut expected = vec![2; rows * ROW_BYTES];
            let request = Request {
                reader,
                ids: &ids,
                sinks: sinks(&mut expected, rows),
                pad_id: None,
            };
            gather(&[request], &Control::NONE).unwrap();
            assert_eq!(out, &expected, "{tokens} tokens");
        }
    }
}

#[test]
fn a_decode_step_allocates_nothing_after_the_first() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let fixture = Fixture::new(32);
    let mut out = [vec![0; 512 * ROW_BYTES], vec![0; 512 * ROW_BYTES]];
    let mut ids = Ids::default();
    // The first makes the memory; the second finds every row resident.
    fixture.run(&mut ids, &mut out);
    fixture.run(&mut ids, &mut out);
    let _profiler = dhat::Profiler::builder().testing().build();
    // The test harness allocates now and then on another thread; a step that did would always.
    let least = (0..5)
        .map(|_| {
            let before = dhat::HeapStats::get().total_blocks;
            for _ in 0..20 {
                fixture.run(&mut ids, &mut out);
            }
            dhat::HeapStats::get().total_blocks - before
        })
        .min();
    assert_eq!(least, Some(0), "allocations in 20 steps");
}
