//! The first bytes of a file, and a length the file is said to have. What is accepted must lie
//! inside the file and be accepted by the reference implementation too; what either takes in memory
//! must follow from the bytes that are there, not from numbers written in them.

#![no_main]

use std::path::Path;

use engram_core::header;
use engram_fuzz::{Bytes, Counting, measured};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fuzz_target!(|data: &[u8]| {
    let path = Path::new("fuzzed.safetensors");
    let mut input = Bytes(data);
    // One input in four has a header length of its own; the others have the right one.
    let lies = input.u8() % 4 == 0;
    let first8 = if lies {
        input.array()
    } else {
        (input.0.len() as u64).to_le_bytes()
    };
    let data_len = if lies { input.u64() } else { data_of(input.0) };
    let file_len = (8 + input.0.len() as u64).saturating_add(data_len);
    let text = input.0;
    let (length, held) = measured(|| header::header_length(first8, file_len, path));
    assert!(held < 4096, "{held} bytes to look at a length");
    let Ok(length) = length else {
        return;
    };
    assert!(length <= header::MAX_HEADER_BYTES && length + 8 <= file_len);
    let (parsed, held) = measured(|| header::parse(text, file_len, path));
    assert!(
        held < 65_536 + 64 * text.len(),
        "{held} bytes for a header of {}",
        text.len()
    );
    let Ok(parsed) = parsed else {
        return;
    };
    let mut ranges = Vec::new();
    for tensor in &parsed.tensors {
        assert!(parsed.data_start <= tensor.begin && tensor.begin <= tensor.end);
        assert!(tensor.end <= file_len);
        let bytes = header::tensor_bytes(tensor.dtype, &tensor.shape).expect("it was accepted");
        assert_eq!(bytes, tensor.end - tensor.begin);
        ranges.push((tensor.begin, tensor.end));
    }
    ranges.sort_unstable();
    let covered = ranges.iter().fold(parsed.data_start, |end, range| {
        assert_eq!(range.0, end);
        range.1
    });
    assert_eq!(covered, file_len);
    let data_len = file_len - parsed.data_start;
    if data_len <= 1 << 20 {
        let mut whole = (text.len() as u64).to_le_bytes().to_vec();
        whole.extend_from_slice(text);
        whole.resize(
            whole.len() + usize::try_from(data_len).expect("it is small"),
            0,
        );
        let reference = safetensors::SafeTensors::deserialize(&whole);
        assert!(reference.is_ok(), "the reference refuses: {reference:?}");
    }
});

/// The bytes of data that a header asks for, so that correct headers are not refused for it.
fn data_of(header: &[u8]) -> u64 {
    let Ok(serde_json::Value::Object(map)) = serde_json::from_slice(header) else {
        return 0;
    };
    map.values()
        .filter_map(|tensor| tensor.get("data_offsets")?.get(1)?.as_u64())
        .max()
        .unwrap_or(0)
}
