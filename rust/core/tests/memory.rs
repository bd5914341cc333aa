//! What hostile files cost in memory: lengths in a header are believed only as far as bytes are
//! there (F09, F11, F12).

#![expect(
    clippy::unwrap_used,
    reason = "a helper that cannot go on fails its test"
)]

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use engram_core::checkpoint::Checkpoint;

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

/// Allocations are counted over the whole process, also those of a test that only prepares.
static ALONE: Mutex<()> = Mutex::new(());

/// The most that opening a small checkpoint takes, its first read of 4 KiB included.
const LITTLE: usize = 64 << 10;

/// What opening `path` says, and the most bytes it held at once.
fn measured(path: &Path) -> (Result<(), String>, usize) {
    let _profiler = dhat::Profiler::builder().testing().build();
    let outcome = Checkpoint::open(path)
        .map(drop)
        .map_err(|error| error.to_string());
    (outcome, dhat::HeapStats::get().max_bytes)
}

/// A file with these first bytes, as long as `len` says; what is not written is a hole.
fn sparse(folder: &Path, first: &[u8], len: u64) -> PathBuf {
    let path = folder.join("model.safetensors");
    let mut file = File::create(&path).unwrap();
    file.write_all(first).unwrap();
    file.set_len(len.max(first.len() as u64)).unwrap();
    path
}

fn with_header(header: &str) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes
}

#[test]
fn a_header_length_that_lies_allocates_nothing() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    for (length, file) in [
        (0, 1 << 40),
        (1_000_000, 1000),
        (100_000_001, 1 << 40),
        (1 << 62, 1 << 40),
        (1 << 63, 1 << 40),
        (u64::MAX, 1 << 40),
        (u64::MAX - 7, 1 << 40),
    ] {
        let path = sparse(folder.path(), &u64::to_le_bytes(length), file);
        let (outcome, held) = measured(&path);
        outcome.unwrap_err();
        assert!(
            held < LITTLE,
            "{held} bytes for a header length of {length}"
        );
    }
}

#[test]
fn shapes_and_ranges_that_lie_allocate_nothing() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    for (shape, begin, end) in [
        ("[1099511627776]", 0, 1_u64 << 40),
        ("[4294967296,4294967296]", 0, 16),
        ("[18446744073709551615]", 0, u64::MAX),
        ("[2,2]", u64::MAX - 4, u64::MAX),
        ("[16]", 1 << 60, (1 << 60) + 16),
    ] {
        let header =
            format!(r#"{{"t":{{"dtype":"U8","shape":{shape},"data_offsets":[{begin},{end}]}}}}"#);
        let path = sparse(folder.path(), &with_header(&header), 4096);
        let (outcome, held) = measured(&path);
        outcome.unwrap_err();
        assert!(held < LITTLE, "{held} bytes for {header}");
    }
}

#[test]
fn opening_a_table_of_a_terabyte_takes_as_much_as_a_small_one() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let header =
        r#"{"t":{"dtype":"U8","shape":[8589934592,128],"data_offsets":[0,1099511627776]}}"#;
    let bytes = with_header(header);
    let len = bytes.len() as u64 + (1 << 40);
    let path = sparse(folder.path(), &bytes, len);
    let (outcome, held) = measured(&path);
    outcome.unwrap();
    assert!(held < LITTLE, "{held} bytes");
}

#[test]
fn a_large_header_takes_a_multiple_of_its_own_length() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let axes = vec!["1"; 100_000].join(",");
    let names: Vec<String> = (0..5_000)
        .map(|number| format!(r#""{number}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#))
        .collect();
    for header in [
        format!(r#"{{"t":{{"dtype":"U8","shape":[{axes}],"data_offsets":[0,1]}}}}"#),
        format!("{{{}}}", names.join(",")),
        format!(r#"{{"__metadata__":{{"k":"{}"}}}}"#, "x".repeat(300_000)),
        " ".repeat(300_000) + "{}",
    ] {
        let mut bytes = with_header(&header);
        if header.contains("[0,1]") {
            bytes.push(1);
        }
        let path = sparse(folder.path(), &bytes, 0);
        let (_, held) = measured(&path);
        let most = LITTLE + 24 * header.len();
        assert!(held < most, "{held} bytes for a header of {}", header.len());
    }
}

#[test]
fn an_index_takes_a_multiple_of_its_own_length() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let index = folder.path().join("model.safetensors.index.json");
    let many: Vec<String> = (0..10_000)
        .map(|number| format!(r#""layer.{number}.weight":"{number}.safetensors""#))
        .collect();
    for text in [
        format!(r#"{{"weight_map":{{{}}}}}"#, many.join(",")),
        format!(r#"{{"x":{}}}"#, "[".repeat(300_000)),
        format!(r#"{{"weight_map":{{"a":"{}"}}}}"#, "x".repeat(300_000)),
    ] {
        fs::write(&index, &text).unwrap();
        let (outcome, held) = measured(&index);
        outcome.unwrap_err();
        let most = LITTLE + 24 * text.len();
        assert!(held < most, "{held} bytes for an index of {}", text.len());
    }
}
