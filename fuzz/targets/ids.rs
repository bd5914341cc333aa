//! Ids and tokens as a server that has gone wrong might send them: hashing gives ids of the table or
//! an error, and gathering gives the rows of a naive reading or an error that names the id.

#![no_main]

use std::fs;
use std::sync::LazyLock;

use engram_core::Error;
use engram_core::buffer::PlaneSink;
use engram_core::discover::TableRef;
use engram_core::gather::{Control, Request, Sinks, gather};
use engram_core::hash::{
    Context, DeepSeek, DeepSeekConfig, EosRule, Hash, Ints, LongCat, LongCatConfig, OutOfVocab,
    Policy, Qwen, QwenConfig, Step,
};
use engram_core::mode::Io;
use engram_core::reader::{Located, Options, Reader};
use engram_fuzz::Bytes;
use libfuzzer_sys::fuzz_target;

const ROWS: usize = 200;
const ROW_BYTES: usize = 37;

fn byte(row: usize, column: usize) -> u8 {
    (row * 31 + column * 7).to_le_bytes()[0]
}

struct Subjects {
    _directory: tempfile::TempDir,
    readers: Vec<Reader>,
    hashes: Vec<Box<dyn Hash>>,
}

static SUBJECTS: LazyLock<Subjects> = LazyLock::new(|| {
    let directory = tempfile::tempdir().expect("a directory for the table");
    let path = directory.path().join("model.safetensors");
    let bytes = ROWS * ROW_BYTES;
    let header = format!(
        r#"{{"rows":{{"dtype":"U8","shape":[{ROWS},{ROW_BYTES}],"data_offsets":[0,{bytes}]}}}}"#
    );
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    file.extend((0..ROWS).flat_map(|row| (0..ROW_BYTES).map(move |column| byte(row, column))));
    fs::write(&path, file).expect("the table is written");
    let readers = [Io::Auto, Io::Mmap, Io::Pread]
        .into_iter()
        .map(|io| {
            let located = Located::find(&path, TableRef::Name("rows")).expect("it is there");
            Reader::open(
                located,
                Options {
                    io,
                    ..Options::default()
                },
            )
            .expect("it opens")
        })
        .collect();
    let hashes = [OutOfVocab::Refuse, OutOfVocab::Wrap]
        .into_iter()
        .flat_map(|out_of_vocab| {
            let policy = Policy {
                out_of_vocab,
                dead_id: Some(-1),
            };
            hashes(policy)
        })
        .collect();
    Subjects {
        _directory: directory,
        readers,
        hashes,
    }
});

fn hashes(policy: Policy) -> [Box<dyn Hash>; 3] {
    let qwen = QwenConfig {
        vocab_size: 100,
        ngram_size: 3,
        heads_per_ngram: 2,
        vocab_size_base: 300,
        divisor: 128,
        seed: 1234,
        ple_index: 1,
        eos: 9,
    };
    let deepseek = DeepSeekConfig {
        layer_ids: vec![1, 3],
        layer: 3,
        max_ngram: 3,
        heads_per_order: 2,
        vocab_sizes: vec![300, 20_000],
        pad_token: 2,
        seed: 0,
        token_map: (0..100).map(|token| token % 60).collect(),
        image_token: Some(50),
        demo: false,
    };
    let longcat = LongCatConfig {
        vocab_size: 100,
        valid_tokens: 110,
        base_size: 1500,
        ngram: 3,
        splits: 2,
        eos: 2,
        eos_rule: EosRule::HuggingFace,
        ignored: vec![7],
    };
    [
        Box::new(Qwen::new(&qwen, policy).expect("a configuration")),
        Box::new(DeepSeek::new(deepseek, policy).expect("a configuration")),
        Box::new(LongCat::new(&longcat, policy).expect("a configuration")),
    ]
}

fuzz_target!(|data: &[u8]| {
    let mut input = Bytes(data);
    if input.u8() % 2 == 0 {
        gathered(&mut input)
    } else {
        hashed(&mut input)
    }
});

fn gathered(input: &mut Bytes<'_>) {
    let reader = &SUBJECTS.readers[usize::from(input.u8()) % SUBJECTS.readers.len()];
    let pad_id = (input.u8() % 2 == 0).then(|| input.integer());
    let mut ids = Vec::new();
    while !input.is_empty() && ids.len() < 500 {
        ids.push(input.integer());
    }
    let mut memory = vec![0xAA; ids.len() * ROW_BYTES];
    let mut sinks = Sinks::new();
    sinks.push(
        PlaneSink::new(&mut memory, 0, ROW_BYTES, ROW_BYTES, ids.len()).expect("it has the size"),
    );
    let request = Request {
        reader,
        ids: &ids,
        sinks,
        pad_id,
    };
    let outcome = gather(&[request], &Control::NONE);
    let outside = ids
        .iter()
        .position(|&id| Some(id) != pad_id && !usize::try_from(id).is_ok_and(|row| row < ROWS));
    match (outcome, outside) {
        (Ok(_), None) => {
            for (&id, row) in ids.iter().zip(memory.chunks(ROW_BYTES)) {
                let zeros = Some(id) == pad_id;
                let stored = |column| byte(usize::try_from(id).unwrap_or(0), column);
                let right = |(column, &found)| found == if zeros { 0 } else { stored(column) };
                assert!(row.iter().enumerate().all(right), "row of id {id}");
            }
        }
        (Err(error), Some(position)) => {
            let named = format!("row id {} at position {position}", ids[position]);
            assert!(error.to_string().contains(&named), "{error}");
            assert!(matches!(error, Error::Id { .. }), "{error:?}");
            assert!(
                memory.iter().all(|&byte| byte == 0xAA),
                "no row moves for a refused batch"
            );
        }
        (outcome, outside) => panic!("{outcome:?}, and the first id outside is at {outside:?}"),
    }
}

fn hashed(input: &mut Bytes<'_>) {
    let hash = &SUBJECTS.hashes[usize::from(input.u8()) % SUBJECTS.hashes.len()];
    let width = hash.context_len();
    let requests = usize::from(input.u8() % 5);
    let with_starts = requests > 0;
    let with_context = input.u8() % 2 == 0;
    let starts: Vec<i64> = (0..=requests).map(|_| input.integer()).collect();
    let rows = if with_starts { requests } else { 1 };
    let context: Vec<i64> = (0..rows * width).map(|_| input.integer()).collect();
    let mut tokens = Vec::new();
    while !input.is_empty() && tokens.len() < 300 {
        tokens.push(input.integer());
    }
    let narrow: Vec<i32> = tokens
        .iter()
        .map(|&token| i32::try_from(token).unwrap_or(-1))
        .collect();
    let all = if data_is_narrow(&tokens) {
        Ints::I32(&narrow)
    } else {
        Ints::I64(&tokens)
    };
    let context = with_context.then_some(Context {
        values: Ints::I64(&context),
        rows,
        width,
    });
    let starts = with_starts.then_some(Ints::I64(&starts));
    let Ok(step) = Step::new(all, starts, context, width) else {
        return;
    };
    assert!(step.owned() <= tokens.len());
    let heads = hash.heads().count();
    let mut ids = vec![i64::MIN; heads * tokens.len()];
    if hash.ids(&step, &mut ids, 1).is_ok() {
        let rows = hash.heads().padded_rows().cast_signed();
        for (place, &id) in ids.iter().enumerate() {
            assert!(
                id == -1 || (0..rows).contains(&id),
                "id {id} of token {}",
                place / heads
            );
        }
    }
}

fn data_is_narrow(tokens: &[i64]) -> bool {
    tokens.iter().all(|&token| i32::try_from(token).is_ok())
}
