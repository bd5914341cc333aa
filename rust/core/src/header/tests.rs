//! One test per lie a file can tell, then the `safetensors` crate as the oracle for all of them.

use proptest::prelude::*;
use safetensors::SafeTensors;
use serde_json::json;

use super::*;
use crate::testing::{file, file_of, tensor};

const PATH: &str = "folder/model.safetensors";

/// Takes a whole file apart the way a reader does.
fn parse_file(bytes: &[u8]) -> Result<Header<'_>> {
    let path = Path::new(PATH);
    let file_len = bytes.len() as u64;
    let Some(first8) = bytes.first_chunk() else {
        return Err(too_short(file_len, path));
    };
    let length = usize::try_from(header_length(*first8, file_len, path)?).unwrap();
    parse(&bytes[8..8 + length], file_len, path)
}

/// The message of the error that `bytes` gives; it always names the file.
fn refusal(bytes: &[u8]) -> String {
    let message = match parse_file(bytes) {
        Err(error @ Error::Checkpoint { .. }) => error.to_string(),
        other => panic!("accepted or another error: {other:?}"),
    };
    assert!(message.ends_with(PATH), "{message}");
    message
}

/// Asserts that the refusal of `bytes` contains all of `parts`.
fn refused_with(bytes: &[u8], parts: &[&str]) {
    let message = refusal(bytes);
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
}

/// A file with this header and enough data.
fn with_header(header: &str, data: usize) -> Vec<u8> {
    file_of(header, &vec![7; data])
}

fn one(dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#"{{"table":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
}

#[test]
fn offsets_are_absolute_and_entries_are_sorted_by_name() {
    let tensors = [tensor("b", "U8", &[3, 1]), tensor("a", "BF16", &[2, 2])];
    let bytes = file(&tensors);
    let header = parse_file(&bytes).unwrap();
    assert_eq!(header.tensors[0].name, "a");
    assert_eq!(header.tensors[1].name, "b");
    for (entry, written) in header.tensors.iter().rev().zip(&tensors) {
        let range = usize::try_from(entry.begin).unwrap()..usize::try_from(entry.end).unwrap();
        assert_eq!(&bytes[range], &written.bytes[..]);
        assert_eq!(entry.shape, written.shape);
    }
    assert_eq!(header.tensors[0].end, bytes.len() as u64);
    assert_eq!(header.metadata, None);
}

#[test]
fn metadata_is_kept() {
    let header = r#"{"__metadata__":{"format":"pt","rows":"12"}}"#;
    let bytes = with_header(header, 0);
    let texts = parse_file(&bytes).unwrap().metadata.unwrap();
    assert_eq!(texts["rows"], "12");
    let bytes = with_header(r#"{"__metadata__":null}"#, 0);
    assert_eq!(parse_file(&bytes).unwrap().metadata, None);
    assert!(
        parse_file(&with_header("{}", 0))
            .unwrap()
            .tensors
            .is_empty()
    );
}

/// F04.
#[test]
fn file_longer_than_its_header_says() {
    let mut bytes = file(&[tensor("a", "U8", &[4, 4])]);
    bytes.extend([1, 2]);
    refused_with(&bytes, &["longer", "2 bytes after the last tensor"]);
    bytes.pop();
    refused_with(&bytes, &["longer", "1 byte after the last tensor"]);
}

#[test]
fn file_shorter_than_its_header_says() {
    let bytes = file(&[tensor("a", "U8", &[4, 4])]);
    let (expected, found) = (bytes.len(), bytes.len() - 5);
    refused_with(
        &bytes[..found],
        &[
            &format!("expected {expected} bytes, found {found}"),
            "download is incomplete",
        ],
    );
    let far = 1_u64 << 60;
    let header = one("U8", &format!("[{far}]"), &format!("[0,{far}]"));
    let bytes = with_header(&header, 3);
    let expected = far + 8 + header.len() as u64;
    refused_with(
        &bytes,
        &[&format!("expected {expected} bytes, found {}", bytes.len())],
    );
}

/// F06.
#[test]
fn hole_between_tensors() {
    let header = json!({
        "a": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]},
        "b": {"dtype": "U8", "shape": [8], "data_offsets": [24, 32]},
    });
    refused_with(
        &with_header(&header.to_string(), 32),
        &["hole of 8 bytes", "before tensor \"b\""],
    );
    let header = one("U8", "[8]", "[5,13]");
    refused_with(
        &with_header(&header, 13),
        &["hole of 5 bytes", "before tensor \"table\""],
    );
}

#[test]
fn tensors_that_overlap() {
    let header = json!({
        "a": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]},
        "b": {"dtype": "U8", "shape": [8], "data_offsets": [12, 20]},
    });
    refused_with(
        &with_header(&header.to_string(), 20),
        &["\"b\"", "[12, 20]", "overlaps tensor \"a\"", "ends at 16"],
    );
}

/// F07.
#[test]
fn offsets_that_are_reversed_negative_or_no_integers() {
    refused_with(
        &with_header(&one("U8", "[16]", "[16,0]"), 16),
        &["\"table\"", "[16, 0]", "reversed"],
    );
    for (offsets, found) in [
        ("[-16,0]", "-16"),
        ("[0.0,16.0]", "0.0"),
        ("[0,1e3]", "1000.0"),
        ("[0,18446744073709551616]", "1.8446744073709552e19"),
        (r#"[0,"16"]"#, r#""16""#),
        ("[0,null]", "null"),
        ("[0,true]", "true"),
        ("[0,[16]]", "a list"),
        (r#"[0,{"x":1}]"#, "an object"),
    ] {
        let bytes = with_header(&one("U8", "[16]", offsets), 16);
        refused_with(
            &bytes,
            &["\"table\"", &format!("{found} in its data_offsets")],
        );
    }
    for (offsets, count) in [("[]", 0), ("[16]", 1), ("[0,8,16]", 3)] {
        let bytes = with_header(&one("U8", "[16]", offsets), 16);
        refused_with(
            &bytes,
            &["\"table\"", &format!("data_offsets has {count} numbers")],
        );
    }
    refused_with(
        &with_header(&one("U8", "[-1]", "[0,16]"), 16),
        &["\"table\"", "-1 in its shape"],
    );
}

/// F08.
#[test]
fn shape_that_disagrees_with_the_range() {
    let bytes = with_header(&one("U8", "[1000]", "[0,16]"), 16);
    refused_with(
        &bytes,
        &["\"table\"", "takes 1000 bytes", "[0, 16] cover 16 bytes"],
    );
    let bytes = with_header(&one("BF16", "[2,4]", "[0,8]"), 8);
    refused_with(&bytes, &["[2, 4] of BF16 takes 16 bytes", "cover 8 bytes"]);
    let bytes = with_header(&one("F4", "[3]", "[0,2]"), 2);
    refused_with(&bytes, &["\"table\"", "12 bits"]);
}

/// F09.
#[test]
fn shape_whose_size_overflows() {
    for shape in [
        "[4294967296,4294967296]",
        "[4294967296,4294967296,0]",
        "[18446744073709551615]",
    ] {
        let bytes = with_header(&one("F32", shape, "[0,16]"), 16);
        refused_with(&bytes, &["\"table\"", "overflows"]);
    }
}

/// F10: one tensor of unknown size makes every range around it unverifiable, so the file is
/// refused, as the reference implementation does.
#[test]
fn unknown_dtype_of_any_tensor() {
    refused_with(
        &with_header(&one("F9_XYZ", "[16]", "[0,16]"), 16),
        &["\"table\"", "\"F9_XYZ\""],
    );
    let header = json!({
        "table": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]},
        "other": {"dtype": "F9_XYZ", "shape": [16], "data_offsets": [16, 32]},
    });
    refused_with(
        &with_header(&header.to_string(), 32),
        &["\"other\"", "\"F9_XYZ\""],
    );
}

/// F11.
#[test]
fn header_length_that_cannot_be() {
    let mut bytes = file(&[tensor("a", "U8", &[4, 4])]);
    let mut patched = |length: u64| {
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        refusal(&bytes)
    };
    assert!(patched(0).contains("header length is 0"));
    let message = patched(1_000_000);
    assert!(message.contains("1000000 runs past the end"), "{message}");
    for huge in [1 << 63, u64::MAX, u64::MAX - 7] {
        let message = patched(huge);
        assert!(
            message.contains(&format!("{huge} exceeds the limit of 100000000")),
            "{message}"
        );
    }
}

/// F12: judged by the first eight bytes and the file's length, before anything is read.
#[test]
fn header_longer_than_the_limit() {
    let path = Path::new(PATH);
    let length = MAX_HEADER_BYTES + 1;
    for file_len in [length, length + 8, 1 << 40] {
        let error = header_length(length.to_le_bytes(), file_len, path)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("100000001 exceeds the limit of 100000000 bytes"),
            "{error}"
        );
    }
    let accepted = header_length(MAX_HEADER_BYTES.to_le_bytes(), MAX_HEADER_BYTES + 8, path);
    assert_eq!(accepted.unwrap(), MAX_HEADER_BYTES);
}

#[test]
fn file_too_short_for_a_header() {
    refused_with(b"", &["empty"]);
    refused_with(&[1, 0, 0], &["only 3 bytes", "incomplete"]);
    refused_with(&8_u64.to_le_bytes(), &["runs past the end", "8 bytes"]);
}

/// F13.
#[test]
fn only_spaces_pad_a_header() {
    let header = one("U8", "[16]", "[0,16]");
    assert!(parse_file(&with_header(&format!("{header}   "), 16)).is_ok());
    refused_with(
        &with_header(&format!("{header}\0\0\0"), 16),
        &["3 NUL bytes", "only spaces"],
    );
    refused_with(&with_header(&format!("{header}\0"), 16), &["1 NUL byte;"]);
    refused_with(
        &with_header(&format!("{header}xyz"), 16),
        &["trailing characters"],
    );
}

/// F14.
#[test]
fn order_of_keys_says_nothing_about_the_order_of_data() {
    let header = r#"{"b":{"dtype":"U8","shape":[1,4],"data_offsets":[2,6]},
                     "a":{"dtype":"U8","data_offsets":[0,2],"shape":[1,2]},
                     "__metadata__":{"format":"pt"}}"#;
    let bytes = file_of(header, &[1, 2, 3, 4, 5, 6]);
    let parsed = parse_file(&bytes).unwrap();
    let start = parsed.data_start;
    let ranges: Vec<_> = parsed
        .tensors
        .iter()
        .map(|entry| (&*entry.name, entry.begin - start, entry.end - start))
        .collect();
    assert_eq!(ranges, [("a", 0, 2), ("b", 2, 6)]);
    assert_eq!(start, 8 + header.len() as u64);
}

/// F15: the reference implementation keeps the last definition.
#[test]
fn tensor_defined_twice() {
    let header = r#"{"a":{"dtype":"U8","shape":[16],"data_offsets":[0,16]},
                     "\u0061":{"dtype":"U8","shape":[32],"data_offsets":[0,32]}}"#;
    let bytes = with_header(header, 32);
    assert!(SafeTensors::read_metadata(&bytes).is_ok());
    refused_with(&bytes, &["tensor \"a\" is defined twice"]);
}

#[test]
fn fields_and_metadata_defined_twice() {
    for (header, problem) in [
        (
            r#"{"__metadata__":{"a":"b"},"__metadata__":{}}"#,
            "\"__metadata__\" is defined twice",
        ),
        (
            r#"{"__metadata__":{"a":"b","a":"c"}}"#,
            "defines \"a\" twice",
        ),
        (
            r#"{"t":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#,
            "tensor \"t\" has two dtype fields",
        ),
    ] {
        refused_with(&with_header(header, 0), &[problem]);
    }
}

#[test]
fn header_that_is_no_header() {
    for (header, problem) in [
        ("[1]", "an object of tensors"),
        ("{", "EOF"),
        (r#"{"t":3}"#, "tensor \"t\" to be an object"),
        (
            r#"{"t":{"shape":[0],"data_offsets":[0,0]}}"#,
            "tensor \"t\" has no dtype",
        ),
        (
            r#"{"t":{"dtype":"U8","data_offsets":[0,0]}}"#,
            "tensor \"t\" has no shape",
        ),
        (
            r#"{"t":{"dtype":"U8","shape":[0]}}"#,
            "tensor \"t\" has no data_offsets",
        ),
        (r#"{"__metadata__":{"a":3}}"#, "invalid type"),
    ] {
        refused_with(&with_header(header, 0), &[problem]);
    }
    let mut bytes = with_header("{} ", 0);
    bytes[10] = 0xFF;
    refused_with(&bytes, &["not UTF-8", "byte 2"]);
}

#[test]
fn deep_nesting_is_refused_without_overflowing_the_stack() {
    let nested = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    refused_with(
        &with_header(&one("U8", &nested, "[0,0]"), 0),
        &["a list in its shape"],
    );
    let nested = format!(r#"{{"t":{{"x":{nested}}}}}"#);
    refused_with(&with_header(&nested, 0), &["\"t\" has no dtype"]);
}

#[test]
fn files_of_other_kinds_are_recognised() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n";
    refused_with(pointer.as_bytes(), &["Git LFS pointer", "git lfs pull"]);
    for (text, what) in [
        ("<!DOCTYPE html><html></html>", "HTML page"),
        ("<!doctype html>", "HTML page"),
        ("\n <html lang=en>", "HTML page"),
        ("<HTML><body>", "HTML page"),
        ("<?xml version=\"1.0\"?><Error>", "XML"),
        (r#"{"metadata":{},"weight_map":{}}"#, "JSON"),
        ("{\n  \"error\": \"not found\"}", "JSON"),
        ("GGUF\u{3}\0\0\0\0\0\0\0", "GGUF"),
        ("PK\u{3}\u{4}\0\0\u{8}\u{8}\0\0", "zip"),
    ] {
        refused_with(text.as_bytes(), &["not a safetensors file but", what]);
    }
    refused_with(b"\x80\x02}q\x00(X\x05\x00\x00\x00", &["pickle"]);
    refused_with(b"\x93NUMPY\x01\x00v\x00", &["NumPy"]);
}

#[test]
fn empty_tensors_take_no_space_anywhere() {
    let header = json!({
        "b": {"dtype": "F32", "shape": [0, 8], "data_offsets": [4, 4]},
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "c": {"dtype": "F32", "shape": [], "data_offsets": [4, 8]},
    });
    let bytes = with_header(&header.to_string(), 8);
    let header = parse_file(&bytes).unwrap();
    let names: Vec<_> = header.tensors.iter().map(|entry| &*entry.name).collect();
    assert_eq!(names, ["a", "b", "c"]);
}

fn same_as_reference(ours: &Header<'_>, bytes: &[u8]) -> std::result::Result<(), TestCaseError> {
    let (length, metadata) = SafeTensors::read_metadata(bytes)
        .map_err(|error| TestCaseError::fail(format!("the reference refuses it: {error}")))?;
    prop_assert_eq!(ours.data_start, 8 + length as u64);
    let texts = metadata.metadata().as_ref();
    prop_assert_eq!(
        ours.metadata.clone(),
        texts.map(|texts| texts.clone().into_iter().collect::<HashMap<_, _>>())
    );
    let theirs = metadata.tensors();
    prop_assert_eq!(ours.tensors.len(), theirs.len());
    for entry in &ours.tensors {
        let info = theirs[&*entry.name];
        let shape: Vec<u64> = info.shape.iter().map(|&size| size as u64).collect();
        prop_assert_eq!(&entry.shape, &shape);
        prop_assert_eq!(entry.dtype, info.dtype);
        prop_assert_eq!(entry.begin - ours.data_start, info.data_offsets.0 as u64);
        prop_assert_eq!(entry.end - ours.data_start, info.data_offsets.1 as u64);
    }
    Ok(())
}

/// Mostly right headers: consecutive ranges, some of them shifted or stretched.
fn headers() -> impl Strategy<Value = String> {
    let tensor = (
        prop::sample::select(vec!["U8", "BF16", "F32", "F8_E4M3", "F4", "F8_E8M0", "I64"]),
        prop::collection::vec(0_u64..4, 0..4),
        prop::sample::select(vec![0_i64, 0, 0, 0, 0, 0, 0, 0, 1, -1]),
        prop::sample::select(vec![0_i64, 0, 0, 0, 0, 0, 0, 0, 1, -1]),
    );
    (prop::collection::vec(tensor, 0..5), any::<bool>()).prop_map(|(tensors, reversed)| {
        let mut begin = 0_i64;
        let mut entries = Vec::new();
        for (number, (dtype, shape, shift, stretch)) in tensors.into_iter().enumerate() {
            let bits = match dtype {
                "F4" => 4,
                "BF16" => 16,
                "F32" => 32,
                "I64" => 64,
                _ => 8,
            };
            let bytes = i64::try_from(shape.iter().product::<u64>() * bits / 8).unwrap();
            let (from, to) = (begin + shift, begin + bytes + stretch);
            begin += bytes;
            entries.push(format!(
                r#""t{number}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{from},{to}]}}"#
            ));
        }
        if reversed {
            entries.reverse();
        }
        format!("{{{}}}", entries.join(","))
    })
}

proptest! {
    #[test]
    fn the_verdict_is_the_reference_implementations(header in headers(), data in 0_usize..200) {
        let ends: Vec<usize> = header
            .match_indices("data_offsets")
            .filter_map(|(at, _)| header[at..].split([',', ']']).nth(1)?.parse().ok())
            .collect();
        let right = ends.into_iter().max().unwrap_or(0);
        for length in [right, data] {
            let bytes = with_header(&header, length);
            match parse_file(&bytes) {
                Ok(ours) => same_as_reference(&ours, &bytes)?,
                Err(_) => prop_assert!(SafeTensors::read_metadata(&bytes).is_err(), "{header}"),
            }
        }
    }

    #[test]
    fn what_is_accepted_after_damage_is_what_the_reference_reads(
        header in headers(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = with_header(&header, 64);
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        bytes.truncate(cut.index(bytes.len()) + 1);
        if let Ok(ours) = parse_file(&bytes) {
            same_as_reference(&ours, &bytes)?;
        }
    }
}
