use std::sync::Arc;

use serde_json::json;

use super::*;
use crate::map::Map;
use crate::reader::{Options, Reader};
use crate::testing::{Folder, Tensor, bf16_scalar, tensor};

const QWEN: &str = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding";

/// A file of tensors, mapped, with a view of each.
struct Mapped {
    views: Vec<View>,
    _map: Arc<Map>,
}

fn mapped(folder: &Folder, name: &str, tensors: &[Tensor]) -> Mapped {
    let path = folder.tensors(name, tensors);
    let bytes = std::fs::read(&path).unwrap();
    let map = Arc::new(Map::new(&File::open(&path).unwrap(), bytes.len() as u64).unwrap());
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let mut address = map.address() as u64 + 8 + header;
    let views = tensors
        .iter()
        .map(|tensor| {
            let view = View {
                name: tensor.name.clone(),
                dtype: dtype(tensor.dtype),
                shape: tensor.shape.clone(),
                address,
            };
            address += tensor.bytes.len() as u64;
            view
        })
        .collect();
    Mapped { views, _map: map }
}

fn dtype(name: &str) -> Dtype {
    serde_json::from_value(json!(name)).unwrap()
}

fn shard(number: u64, rows: u64) -> Tensor {
    tensor(
        &format!("{QWEN}.shard_{number}.weight"),
        "F8_E4M3",
        &[rows, 16],
    )
}

fn scale() -> Tensor {
    bf16_scalar(&format!("{QWEN}.weight_scale"), &[1], 0.5)
}

fn bound(views: &[View], rows: u64) -> Result<Located> {
    locate(views, Expectation::Rows(rows), TableRef::Only)
}

/// Two pieces in two files, and the scale in the second.
fn fp8() -> (Folder, Vec<View>, Vec<Mapped>) {
    let folder = Folder::new();
    let one = mapped(&folder, "a.safetensors", &[shard(1, 5)]);
    let two = mapped(&folder, "b.safetensors", &[scale(), shard(0, 7)]);
    let views = [one.views.clone(), two.views.clone()].concat();
    (folder, views, vec![one, two])
}

#[test]
fn views_in_any_order_give_the_rows_of_their_files() {
    let (_folder, views, _maps) = fp8();
    for views in [views.clone(), views.into_iter().rev().collect()] {
        let located = bound(&views, 12).unwrap();
        assert_eq!(located.table.name, QWEN);
        assert_eq!(
            located.table.constants[0].value.to_bits(),
            0.5_f64.to_bits()
        );
        let shards: Vec<_> = located.table.planes[0].pieces().iter().collect();
        assert_eq!(shards.len(), 2);
        assert!(shards[0].tensor.ends_with("shard_0.weight"));
        assert_eq!(located.files.len(), 2);
        Reader::open(located, Options::default()).unwrap();
    }
}

#[test]
fn names_with_and_without_the_optional_segment_belong_together() {
    let (_folder, mut views, _maps) = fp8();
    views[0].name = views[0].name.replace("language_model.", "");
    let located = bound(&views, 12).unwrap();
    assert_eq!(located.table.name, QWEN.replace("language_model.", ""));
    let by_name = locate(&views, Expectation::Rows(12), TableRef::Name(QWEN)).unwrap();
    assert_eq!(by_name.table.rows(), 12);
}

/// F27, F28: nothing is bound until the scale is there.
#[test]
fn a_missing_scale_is_named() {
    let (_folder, mut views, _maps) = fp8();
    views.retain(|view| !view.name.ends_with("weight_scale"));
    let error = bound(&views, 12).unwrap_err().to_string();
    assert!(
        error.contains(&format!("looked for \"{QWEN}.weight_scale\"")),
        "{error}"
    );
}

#[test]
fn the_pieces_must_make_up_the_table() {
    let (_folder, mut views, _maps) = fp8();
    views.retain(|view| !view.name.contains("shard_1"));
    let error = bound(&views, 12).unwrap_err().to_string();
    assert!(error.contains("num_rows says 12 rows"), "{error}");
    assert!(
        error.contains("shard_0.weight\" have 7: a piece has not been added"),
        "{error}"
    );
}

/// I32: copies are refused, and what they are is said.
#[test]
fn memory_that_is_no_file_is_refused_by_name() {
    let (_folder, mut views, _maps) = fp8();
    let copy = [0_u8; 5 * 16];
    views[0].address = copy.as_ptr() as u64;
    let error = bound(&views, 12).unwrap_err();
    assert!(matches!(error, Error::Value { .. }));
    let text = error.to_string();
    assert!(
        text.contains(&format!("tensor \"{QWEN}.shard_1.weight\" is backed by")),
        "{text}"
    );
    assert!(text.contains("engram.FileGather(path)"), "{text}");
}

#[test]
fn a_file_replaced_behind_its_mapping_is_noticed() {
    let (folder, views, _maps) = fp8();
    let other = folder.tensors("c.safetensors", &[shard(1, 6)]);
    std::fs::rename(other, folder.join("a.safetensors")).unwrap();
    let error = bound(&views, 12).unwrap_err().to_string();
    assert!(error.contains("a file that has been deleted"), "{error}");
}

#[test]
fn configurations_say_how_many_rows_there_are() {
    let (_folder, views, _maps) = fp8();
    let config = json!({"text_config": {
        "ngram_size": 2, "heads_per_ngram": 2, "ngram_vocab_size_base": 4,
        "make_ngram_vocab_size_divisible_by": 1, "ple_layer_ids": [2],
    }});
    // The first two primes from 4 on are 5 and 7.
    let located = locate(&views, Expectation::Config(&config), TableRef::Layer(0));
    assert_eq!(located.unwrap().table.rows(), 12);
    let silent = json!({"text_config": {"ple_layer_ids": [2]}});
    let error = locate(&views, Expectation::Config(&silent), TableRef::Only).unwrap_err();
    assert!(error.to_string().contains("pass num_rows"), "{error}");
}

#[test]
fn several_tables_are_told_apart() {
    let folder = Folder::new();
    let name = |layer: u32| format!("layers.{layer}.engram.embed");
    let tensors: Vec<Tensor> = [1, 14]
        .iter()
        .flat_map(|&layer| {
            [
                tensor(&format!("{}.weight", name(layer)), "F8_E4M3", &[6, 32]),
                tensor(&format!("{}.scale", name(layer)), "F8_E8M0", &[6, 1]),
            ]
        })
        .collect();
    let mapped = mapped(&folder, "a.safetensors", &tensors);
    let error = bound(&mapped.views, 6).unwrap_err().to_string();
    assert!(error.contains("2 tables"), "{error}");
    let second = locate(&mapped.views, Expectation::Rows(6), TableRef::Layer(1)).unwrap();
    assert_eq!(second.table.name, name(14));
    assert_eq!(second.table.planes.len(), 2);
    assert!(
        bound(&[], 6)
            .unwrap_err()
            .to_string()
            .contains("no tensor was added")
    );
}
