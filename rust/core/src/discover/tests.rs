use serde_json::json;

use super::*;
use crate::testing::{Folder, Tensor, bf16_scalar, tensor};

const QWEN: &str = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding";

fn shard(number: u64, dtype: &'static str, rows: u64, columns: u64) -> Tensor {
    tensor(
        &format!("{QWEN}.shard_{number}.weight"),
        dtype,
        &[rows, columns],
    )
}

#[test]
fn fp8_table_with_its_scale_in_another_file() {
    let folder = Folder::new();
    folder.indexed(&[
        (
            "a.safetensors",
            &[shard(1, "F8_E4M3", 5, 16), shard(0, "F8_E4M3", 7, 16)],
        ),
        (
            "b.safetensors",
            &[bf16_scalar(&format!("{QWEN}.weight_scale"), &[1], 0.5)],
        ),
    ]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let table = select(&checkpoint, TableRef::Only).unwrap();
    assert_eq!(table.name, QWEN);
    assert_eq!(table.layer, Some(1));
    assert_eq!(table.rows(), 12);
    assert_eq!(table.encoding, Encoding::Fp8E4m3);
    assert_eq!(table.constants[0].value.to_bits(), 0.5_f64.to_bits());
    folder.config(&json!({}));
}
