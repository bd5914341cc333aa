//! Tables whose parts contradict each other, and choices that cannot be met.

use super::*;

/// Asserts that discovery gives an [`Error::Checkpoint`] with all of `parts` in its message.
fn refused_with(tensors: &[Tensor], parts: &[&str]) {
    let error = only(tensors).unwrap_err();
    let Error::Checkpoint { place, .. } = &error else {
        panic!("{error:?}");
    };
    assert!(place.path.is_some() && place.table.is_some(), "{place:?}");
    let message = error.to_string();
    assert!(message.contains("table \""), "no table in {message:?}");
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
}

pub(super) fn choice_refused_with(checkpoint: &Checkpoint, table: TableRef<'_>, parts: &[&str]) {
    let error = select(checkpoint, table).unwrap_err();
    assert!(matches!(error, Error::Value { .. }), "{error:?}");
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
}

fn named(segment: &str, leaf: &str, dtype: &'static str, shape: &[u64]) -> Tensor {
    tensor(&format!("{QWEN}.{segment}.{leaf}"), dtype, shape)
}

/// F30.
#[test]
fn gaps() {
    let pieces = |numbers: &[u64]| -> Vec<Tensor> {
        numbers
            .iter()
            .map(|&number| shard(number, "BF16", 2, 4))
            .collect()
    };
    refused_with(
        &pieces(&[0, 1, 3]),
        &["shard_3.weight", "piece 2 is missing", "model.safetensors"],
    );
    refused_with(&pieces(&[1, 2]), &["shard_1.weight", "piece 0 is missing"]);
    refused_with(
        &pieces(&[0, 1, 2, 10]),
        &["shard_10.weight", "piece 3 is missing"],
    );
}

/// F30.
#[test]
fn repeats() {
    let tensors = [
        shard(0, "BF16", 2, 4),
        shard(1, "BF16", 2, 4),
        named("shards.1", "weight", "BF16", &[2, 4]),
    ];
    refused_with(
        &tensors,
        &[
            "shard_1.weight",
            "shards.1.weight",
            "both claim to be piece 1",
        ],
    );
}

#[test]
fn piece_numbers_that_are_no_plain_numbers() {
    for segment in [
        "shard_01",
        "shard_-1",
        "shard_+1",
        "shard_1x",
        "shard_",
        "shards.01",
        "shards.x",
        "shard_99999999999999999999",
    ] {
        let tensors = [
            shard(0, "BF16", 2, 4),
            named(segment, "weight", "BF16", &[2, 4]),
        ];
        refused_with(&tensors, &[segment, "no plain decimal number"]);
    }
    refused_with(
        &[tensor(
            "model.ngram_embeddings.embedders.00.weight",
            "BF16",
            &[2, 4],
        )],
        &["embedders.00.weight", "\"00\""],
    );
}

#[test]
fn pieces_that_do_not_fit_together() {
    refused_with(
        &[shard(0, "BF16", 2, 4), shard(1, "F16", 2, 4)],
        &["shard_1.weight", "is F16", "shard_0.weight", "is BF16"],
    );
    refused_with(
        &[shard(0, "BF16", 2, 4), shard(1, "BF16", 2, 5)],
        &["shard_1.weight", "has 5 columns", "has 4"],
    );
    for shape in [&[8_u64][..], &[2, 2, 4], &[]] {
        refused_with(
            &[
                shard(0, "BF16", 2, 4),
                named("shard_1", "weight", "BF16", shape),
            ],
            &["shard_1.weight", &format!("{shape:?}"), "two dimensions"],
        );
    }
    refused_with(
        &[shard(0, "BF16", 2, 0)],
        &["shard_0.weight", "rows without columns"],
    );
}

#[test]
fn two_forms_of_one_table() {
    let whole = tensor(&format!("{QWEN}.weight"), "BF16", &[4, 4]);
    refused_with(
        &[whole, shard(0, "BF16", 2, 4)],
        &["holds the whole table", "shard_0.weight"],
    );
    refused_with(
        &[
            shard(0, "BF16", 2, 4),
            tensor(&format!("{QWEN}.trellis"), "I16", &[2, 3]),
        ],
        &["trellis", "shard_0.weight", "two ways"],
    );
    refused_with(
        &[
            shard(0, "U8", 2, 8),
            named("shard_0", "weight_packed", "U8", &[2, 8]),
        ],
        &["weight_packed", "two ways"],
    );
}

/// F27: no scale, no rows.
#[test]
fn missing_scales() {
    let scale = |number, rows| {
        named(
            &format!("shard_{number}"),
            "weight_scale",
            "F8_E4M3",
            &[rows, 1],
        )
    };
    refused_with(
        &[shard(0, "F8_E4M3", 2, 16)],
        &[
            "shard_0.weight",
            "is F8_E4M3",
            &format!("looked for \"{QWEN}.weight_scale\""),
        ],
    );
    refused_with(&[shard(0, "U8", 2, 8)], &["shard_0.weight_scale\""]);
    refused_with(
        &[shard(0, "U8", 2, 8), scale(0, 2)],
        &[&format!("looked for \"{QWEN}.weight_scale_2\"")],
    );
    refused_with(
        &[
            named("shard_0", "weight_packed", "U8", &[2, 8]),
            scale(0, 2),
        ],
        &[&format!("looked for \"{QWEN}.weight_global_scale\"")],
    );
    refused_with(
        &[shard(0, "U8", 2, 8), shard(1, "U8", 2, 8), scale(0, 2)],
        &["shard_1.weight", "looked for", "shard_1.weight_scale\""],
    );
    refused_with(
        &[
            shard(0, "U8", 2, 8),
            shard(1, "U8", 2, 8),
            scale(0, 2),
            scale(1, 2),
            f32_scalar(&format!("{QWEN}.shard_0.weight_scale_2"), &[1], 0.5),
        ],
        &["shard_1.weight\" has no scale", "shard_1.weight_scale_2\""],
    );
    for (weight, looked_for) in [
        (
            "layers.1.engram.embed.weight",
            "layers.1.engram.embed.scale",
        ),
        (
            "layers.1.engram.embed_tokens.weight",
            "layers.1.engram.embed_tokens.weight_scale_inv",
        ),
    ] {
        for dtype in ["F8_E4M3", "U8"] {
            let looked_for = format!("looked for {looked_for:?}");
            refused_with(&[tensor(weight, dtype, &[2, 64])], &[weight, &looked_for]);
        }
    }
    refused_with(
        &[shard(0, "U32", 2, 20)],
        &["looked for", "shard_0.scales\""],
    );
    refused_with(
        &[
            shard(0, "U32", 2, 20),
            named("shard_0", "scales", "BF16", &[2, 5]),
        ],
        &["looked for", "shard_0.biases\""],
    );
}

/// An FP8 table needs its own scale; block scales beside the pieces are another thing.
#[test]
fn block_scales_do_not_stand_for_the_table_scale() {
    refused_with(
        &[
            shard(0, "F8_E4M3", 2, 16),
            named("shard_0", "weight_scale", "F8_E4M3", &[2, 1]),
        ],
        &[&format!("looked for \"{QWEN}.weight_scale\"")],
    );
}

#[test]
fn scales_that_were_never_set() {
    for (value, shown) in [
        (0.0, "0"),
        (f32::NAN, "NaN"),
        (f32::INFINITY, "inf"),
        (-1.0, "-1"),
    ] {
        refused_with(
            &[
                shard(0, "F8_E4M3", 2, 16),
                f32_scalar(&format!("{QWEN}.weight_scale"), &[1], value),
            ],
            &[
                "weight_scale",
                &format!("is {shown}, which is no usable scale"),
            ],
        );
    }
    refused_with(
        &[
            shard(0, "F8_E4M3", 2, 16),
            tensor(&format!("{QWEN}.weight_scale"), "I32", &[1]),
        ],
        &["weight_scale", "is I32"],
    );
    refused_with(
        &[
            shard(0, "F8_E4M3", 2, 16),
            tensor(&format!("{QWEN}.weight_scale"), "F32", &[2]),
        ],
        &["weight_scale", "two dimensions"],
    );
}

#[test]
fn scales_of_pieces_that_are_not_there() {
    let scale =
        |number: u64| f32_scalar(&format!("{QWEN}.shard_{number}.weight_scale_2"), &[1], 0.5);
    let block = |number, rows| {
        named(
            &format!("shard_{number}"),
            "weight_scale",
            "F8_E4M3",
            &[rows, 1],
        )
    };
    refused_with(
        &[shard(0, "U8", 2, 8), block(0, 2), scale(0), scale(1)],
        &["shard_1.weight_scale_2", "whose rows are missing"],
    );
    refused_with(
        &[shard(0, "U8", 2, 8), block(0, 2), block(1, 2), scale(0)],
        &["shard_1.weight_scale", "whose rows are missing"],
    );
    refused_with(
        &[bf16_scalar(&format!("{QWEN}.weight_scale"), &[1], 0.5)],
        &[
            "rows themselves are missing",
            "weight_scale",
            "shard_0.weight",
        ],
    );
}

#[test]
fn planes_that_disagree() {
    let weight = "layers.1.engram.embed.weight";
    let scale = "layers.1.engram.embed.scale";
    refused_with(
        &[
            tensor(weight, "F8_E4M3", &[5, 64]),
            tensor(scale, "F8_E8M0", &[4, 2]),
        ],
        &[scale, "has 4 rows", weight, "has 5"],
    );
    refused_with(
        &[
            tensor(weight, "F8_E4M3", &[5, 64]),
            tensor(scale, "F8_E8M0", &[5, 3]),
        ],
        &[scale, "has 3 scales a row", "one per 32"],
    );
    refused_with(
        &[
            tensor(weight, "U8", &[5, 128]),
            tensor(scale, "F8_E8M0", &[5, 4]),
        ],
        &[scale, "256 values a row"],
    );
    refused_with(
        &[
            tensor(weight, "U8", &[5, 128]),
            tensor(scale, "F32", &[5, 8]),
        ],
        &[scale, "is F32"],
    );
    refused_with(
        &[
            shard(0, "U8", 2, 8),
            shard(1, "U8", 3, 8),
            named("shard_0", "weight_scale", "F8_E4M3", &[3, 1]),
            named("shard_1", "weight_scale", "F8_E4M3", &[2, 1]),
            f32_scalar(&format!("{QWEN}.weight_scale_2"), &[1], 0.5),
        ],
        &["shard_0.weight_scale", "has 3 rows", "has 2"],
    );
    refused_with(
        &[
            shard(0, "U8", 2, 8),
            tensor(&format!("{QWEN}.weight_scale"), "F8_E4M3", &[2, 1]),
        ],
        &["not cut into the same pieces"],
    );
    refused_with(
        &[
            shard(0, "BF16", 2, 8),
            named("shard_0", "weight_scale", "F8_E4M3", &[2, 1]),
        ],
        &["shard_0.weight_scale", "has no meaning beside"],
    );
}

#[test]
fn mlx_planes_that_disagree() {
    let mlx = |words, scales: (&'static str, u64), biases: (&'static str, u64)| {
        [
            shard(0, "U32", 2, words),
            named("shard_0", "scales", scales.0, &[2, scales.1]),
            named("shard_0", "biases", biases.0, &[2, biases.1]),
        ]
    };
    refused_with(
        &mlx(20, ("BF16", 5), ("F32", 5)),
        &["biases", "is F32 of 5", "BF16 of 5"],
    );
    refused_with(&mlx(20, ("BF16", 5), ("BF16", 4)), &["biases", "BF16 of 4"]);
    refused_with(
        &mlx(20, ("BF16", 3), ("BF16", 3)),
        &["scales", "3 columns for 160", "no group"],
    );
    refused_with(&mlx(20, ("U8", 5), ("U8", 5)), &["scales", "is U8"]);
}

#[test]
fn dtypes_that_no_table_has() {
    for dtype in ["I32", "I64", "F8_E5M2", "BOOL", "I8"] {
        refused_with(
            &[shard(0, dtype, 2, 4)],
            &["shard_0.weight", &format!("is {dtype}")],
        );
    }
    refused_with(
        &[named("shard_0", "trellis", "I32", &[2, 4])],
        &["trellis", "is I32"],
    );
}

/// A part of a table that its own file's index does not name.
#[test]
fn stale_index() {
    let folder = Folder::new();
    folder.tensors(
        "a.safetensors",
        &[shard(0, "BF16", 2, 4), shard(1, "BF16", 2, 4)],
    );
    folder.index(&[(&format!("{QWEN}.shard_0.weight"), "a.safetensors")]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    for result in [
        select(&checkpoint, TableRef::Only).map(drop),
        tables(&checkpoint, true).map(drop),
    ] {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Checkpoint { .. }), "{error:?}");
        let message = error.to_string();
        for part in ["stale index", "shard_1.weight", "a.safetensors"] {
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        }
    }
}

/// Pieces may lie in files beside the index, but only once, and only pieces of tables count there.
#[test]
fn files_beside_the_index() {
    let folder = Folder::new();
    let dense = tensor("model.embed_tokens.weight", "BF16", &[4, 4]);
    folder.indexed(&[("a.safetensors", &[shard(0, "BF16", 2, 4), dense])]);
    folder.tensors(
        "b.safetensors",
        &[
            shard(1, "BF16", 3, 4),
            tensor("other.weight", "U8", &[2, 2]),
        ],
    );
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(select(&checkpoint, TableRef::Only).unwrap().rows(), 5);
    let all = tables(&checkpoint, true).unwrap();
    assert_eq!(all.len(), 2);
    choice_refused_with(
        &checkpoint,
        TableRef::Name("other.weight"),
        &["only in", "b.safetensors"],
    );

    folder.tensors("c.safetensors", &[shard(1, "BF16", 3, 4)]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let message = select(&checkpoint, TableRef::Only).unwrap_err().to_string();
    for part in [
        "shard_1.weight",
        "b.safetensors",
        "c.safetensors",
        "names neither",
    ] {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
}
