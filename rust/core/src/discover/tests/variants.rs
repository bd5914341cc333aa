//! The storage variants of each family.

use super::*;

#[test]
fn qwen_in_floating_point_under_any_prefix() {
    for prefix in [
        "model.language_model.",
        "model.",
        "language_model.model.",
        "",
    ] {
        for (dtype, encoding) in [("BF16", "bf16"), ("F16", "f16"), ("F32", "f32")] {
            let name = format!("{prefix}layers.12.ple.ple_embedding.ngram_embedding");
            let weight = |number| format!("{name}.shard_{number}.weight");
            let table = only(&[
                tensor(&weight(0), dtype, &[4, 6]),
                tensor(&weight(1), dtype, &[3, 6]),
                // An ignored remainder: the values are scaled already.
                bf16_scalar(&format!("{name}.weight_scale"), &[1], 0.25),
            ])
            .unwrap();
            assert_eq!(
                (table.name.as_str(), table.family),
                (name.as_str(), Family::Qwen)
            );
            assert_eq!(table.layer, Some(12));
            assert_eq!(table.encoding.name(), encoding);
            assert_eq!(table.logical_shape, [6]);
            assert_eq!(table.rows(), 7);
            assert!(table.constants.is_empty());
        }
    }
}

/// F28: the scale may be anywhere and written in any way.
#[test]
fn qwen_fp8_with_its_scale() {
    let name = format!("{QWEN}.weight_scale");
    let half = 0x3555_u16; // 0.333251953125
    for (scale, value) in [
        (
            bf16_scalar(&name, &[1], 0.000_199_317_93),
            0.000_199_317_932_128_906_25,
        ),
        (bf16_scalar(&name, &[], 0.5), 0.5),
        (f32_scalar(&name, &[1], 0.1), f64::from(0.1_f32)),
        (f32_scalar(&name, &[], 3.0e-39), f64::from(3.0e-39_f32)),
        (
            tensor_of(&name, "F16", &[1], &half.to_le_bytes()),
            0.333_251_953_125,
        ),
        (
            tensor_of(&name, "F16", &[1], &1_u16.to_le_bytes()),
            2.0_f64.powi(-24),
        ),
        (tensor_of(&name, "F64", &[], &0.1_f64.to_le_bytes()), 0.1),
    ] {
        for scale_first in [true, false] {
            let folder = Folder::new();
            let shards = [shard(0, "F8_E4M3", 4, 16), shard(1, "F8_E4M3", 3, 16)];
            let (weights, scales) = if scale_first { ("b", "a") } else { ("a", "b") };
            folder.indexed(&[
                (&format!("{weights}.safetensors"), &shards),
                (
                    &format!("{scales}.safetensors"),
                    std::slice::from_ref(&scale),
                ),
            ]);
            let checkpoint = Checkpoint::open(folder.path()).unwrap();
            let table = select(&checkpoint, TableRef::Only).unwrap();
            assert_eq!(table.encoding, Encoding::Fp8E4m3);
            assert_eq!(table.planes.len(), 1);
            assert_eq!(table.row_bytes(), 16);
            let constant = &table.constants[0];
            assert_eq!(
                (constant.name.as_str(), &constant.tensor),
                ("weight_scale", &name)
            );
            assert_eq!(constant.value.to_bits(), value.to_bits(), "{constant:?}");
        }
    }
}

#[test]
fn qwen_fp8_with_equal_scales_beside_the_pieces() {
    let scale = |number: u64, value| {
        bf16_scalar(&format!("{QWEN}.shard_{number}.weight_scale"), &[1], value)
    };
    let shards = [shard(0, "F8_E4M3", 4, 16), shard(1, "F8_E4M3", 3, 16)];
    let table = only(&[&shards[..], &[scale(0, 0.5), scale(1, 0.5)]].concat()).unwrap();
    assert_eq!(table.constants[0].value.to_bits(), 0.5_f64.to_bits());
    let error = only(&[&shards[..], &[scale(0, 0.5), scale(1, 0.25)]].concat()).unwrap_err();
    assert!(error.to_string().contains("is 0.25, but"), "{error}");
}

/// The three spellings of NVFP4.
#[test]
fn qwen_nvfp4() {
    let packed = |leaf: &str| {
        let piece =
            |number, rows| tensor(&format!("{QWEN}.shard_{number}.{leaf}"), "U8", &[rows, 16]);
        let scale = |number: u64, rows| {
            let name = format!("{QWEN}.shard_{number}.weight_scale");
            tensor(&name, "F8_E4M3", &[rows, 2])
        };
        vec![piece(0, 5), piece(1, 3), scale(0, 5), scale(1, 3)]
    };
    let per_shard = |number: u64| {
        f32_scalar(
            &format!("{QWEN}.shard_{number}.weight_scale_2"),
            &[1],
            0.125,
        )
    };
    let of_table = |leaf: &str, shape: &[u64]| f32_scalar(&format!("{QWEN}.{leaf}"), shape, 0.125);
    for (leaf, global, constant) in [
        (
            "weight",
            vec![of_table("weight_scale_2", &[1])],
            "weight_scale_2",
        ),
        (
            "weight",
            vec![of_table("weight_scale_2", &[])],
            "weight_scale_2",
        ),
        ("weight", vec![per_shard(0), per_shard(1)], "weight_scale_2"),
        (
            "weight_packed",
            vec![of_table("weight_global_scale", &[1])],
            "weight_global_scale",
        ),
    ] {
        let mut tensors = [packed(leaf), global].concat();
        // The table's FP8 scale may have survived a conversion; it is another thing.
        tensors.push(bf16_scalar(&format!("{QWEN}.weight_scale"), &[1], 7.0));
        let (_folder, checkpoint) = checkpoint_of(&tensors);
        let table = select(&checkpoint, TableRef::Only).unwrap();
        assert_eq!(table.encoding, Encoding::Nvfp4);
        assert_eq!(table.logical_shape, [32]);
        assert_eq!(table.rows(), 8);
        assert_eq!(table.row_bytes(), 18);
        assert_eq!(plane_names(&table), ["weight", "scale"]);
        assert_eq!(table.planes[1].dtype(), Dtype::F8_E4M3);
        assert_eq!(table.constants.len(), 1);
        assert_eq!(table.constants[0].name, constant);
        assert_eq!(table.constants[0].value.to_bits(), 0.125_f64.to_bits());
        let scales = written_rows(&[&tensors[2], &tensors[3]]);
        assert_eq!(stored_rows(&checkpoint, &table.planes[1]), scales);
    }
}

/// Empty pieces at the end may be written for one plane and left out for the other.
#[test]
fn empty_pieces_of_one_plane_only() {
    let weight = |number, rows| shard(number, "U8", rows, 8);
    let scale = |number: u64, rows| {
        let name = format!("{QWEN}.shard_{number}.weight_scale");
        tensor(&name, "F8_E4M3", &[rows, 1])
    };
    let global = f32_scalar(&format!("{QWEN}.weight_scale_2"), &[], 2.0);
    for extra in [weight(1, 0), scale(1, 0)] {
        let table = only(&[weight(0, 3), scale(0, 3), global.clone(), extra]).unwrap();
        assert_eq!(table.rows(), 3);
    }
}

#[test]
fn unsharded_nvfp4() {
    let table = only(&[
        tensor(&format!("{QWEN}.weight"), "U8", &[4, 8]),
        tensor(&format!("{QWEN}.weight_scale"), "F8_E4M3", &[4, 1]),
        f32_scalar(&format!("{QWEN}.weight_scale_2"), &[], 2.0),
    ])
    .unwrap();
    assert_eq!((table.encoding, table.rows()), (Encoding::Nvfp4, 4));
}

#[test]
fn deepseek_fp8_with_block_scales() {
    let scale_inv = |dtype| {
        tensor(
            "model.layers.1.engram.embed_tokens.weight_scale_inv",
            dtype,
            &[5, 2],
        )
    };
    let runtime = tensor(
        "model.layers.1.engram.embed_tokens.weight",
        "F8_E4M3",
        &[5, 64],
    );
    for (name, tensors) in [
        (
            "layers.1.engram.embed",
            [
                tensor("layers.1.engram.embed.weight", "F8_E4M3", &[5, 64]),
                tensor("layers.1.engram.embed.scale", "F8_E8M0", &[5, 2]),
            ],
        ),
        (
            "model.layers.1.engram.embed_tokens",
            [runtime.clone(), scale_inv("F8_E8M0")],
        ),
        (
            "model.layers.1.engram.embed_tokens",
            [runtime.clone(), scale_inv("U8")],
        ),
    ] {
        let (_folder, checkpoint) = checkpoint_of(&tensors);
        let table = select(&checkpoint, TableRef::Only).unwrap();
        assert_eq!(
            (table.name.as_str(), table.family),
            (name, Family::DeepSeek)
        );
        assert_eq!(table.encoding, Encoding::Fp8E4m3E8m0Block32);
        assert_eq!(table.logical_shape, [64]);
        assert_eq!(table.row_bytes(), 66);
        assert_eq!(table.planes[1].dtype(), Dtype::F8_E8M0);
        for (plane, tensor) in table.planes.iter().zip(&tensors) {
            assert_eq!(stored_rows(&checkpoint, plane), written_rows(&[tensor]));
        }
    }
}

#[test]
fn deepseek_mxfp4_under_the_same_names() {
    let table = only(&[
        tensor("layers.14.engram.embed.weight", "U8", &[5, 128]),
        tensor("layers.14.engram.embed.scale", "F8_E8M0", &[5, 8]),
    ])
    .unwrap();
    assert_eq!(table.encoding, Encoding::Mxfp4);
    assert_eq!(table.logical_shape, [256]);
    assert_eq!(table.layer, Some(14));
}

#[test]
fn engram_demo() {
    let table = only(&[tensor(
        "model.layers.15.engram.multi_head_embedding.embedding.weight",
        "F32",
        &[9, 8],
    )])
    .unwrap();
    assert_eq!(
        table.name,
        "model.layers.15.engram.multi_head_embedding.embedding"
    );
    assert_eq!((table.family, table.layer), (Family::DeepSeek, Some(15)));
    assert_eq!(table.encoding, Encoding::Plain(Dtype::F32));
}

#[test]
fn longcat_embedders_are_one_table() {
    let embedders: Vec<Tensor> = (0..12)
        .map(|number: u64| {
            let name = format!("model.ngram_embeddings.embedders.{number}.weight");
            tensor(&name, "BF16", &[10 + 2 * number + 1, 4])
        })
        .collect();
    let (_folder, checkpoint) = checkpoint_of(&embedders);
    let table = select(&checkpoint, TableRef::Only).unwrap();
    assert_eq!(table.name, "model.ngram_embeddings.embedders");
    assert_eq!((table.family, table.layer), (Family::LongCat, None));
    assert_eq!(table.rows(), 12 * 11 + 2 * 66);
    let expected = written_rows(&embedders.iter().collect::<Vec<_>>());
    assert_eq!(stored_rows(&checkpoint, &table.planes[0]), expected);
}

#[test]
fn gemma_per_layer_embeddings() {
    for prefix in ["model.language_model.", "model.", ""] {
        let name = format!("{prefix}embed_tokens_per_layer");
        let table = only(&[
            tensor(&format!("{name}.weight"), "BF16", &[6, 8]),
            tensor("model.embed_tokens.weight", "BF16", &[6, 4]),
        ])
        .unwrap();
        assert_eq!((&table.name, table.family), (&name, Family::Gemma));
        assert_eq!((table.rows(), table.row_bytes()), (6, 16));
    }
}

#[test]
fn mlx_in_four_bits() {
    let qwen = "language_model.model.layers.1.ple.ple_embedding.ngram_embedding";
    let qwen_piece = |number: u64, rows: u64| {
        let part = |leaf, dtype, columns| {
            tensor(
                &format!("{qwen}.shards.{number}.{leaf}"),
                dtype,
                &[rows, columns],
            )
        };
        [
            part("weight", "U32", 20),
            part("scales", "BF16", 5),
            part("biases", "BF16", 5),
        ]
    };
    let survivor = bf16_scalar(&format!("{qwen}.weight_scale"), &[1], 0.5);
    let deepseek = |leaf, dtype, columns| {
        tensor(
            &format!("model.layers.1.engram.embed.{leaf}"),
            dtype,
            &[3, columns],
        )
    };
    for (tensors, encoding, values, row_bytes) in [
        (
            [&qwen_piece(0, 3)[..], &qwen_piece(1, 2), &[survivor]].concat(),
            Encoding::MlxAffine4(32),
            160,
            100,
        ),
        (
            vec![
                deepseek("weight", "U32", 32),
                deepseek("scales", "F32", 4),
                deepseek("biases", "F32", 4),
            ],
            Encoding::MlxAffine4(64),
            256,
            160,
        ),
    ] {
        let table = only(&tensors).unwrap();
        assert_eq!(table.encoding, encoding);
        assert_eq!(table.logical_shape, [values]);
        assert_eq!(table.row_bytes(), row_bytes);
        assert_eq!(plane_names(&table), ["weight", "scale", "bias"]);
        assert!(table.constants.is_empty());
    }
}

/// A side file that the index leaves out, with a note about what a row holds.
#[test]
fn exl3_trellis_in_a_side_file() {
    let folder = Folder::new();
    folder.indexed(&[(
        "model.safetensors",
        &[tensor("lm_head.weight", "F16", &[4, 4])],
    )]);
    let trellis = [
        tensor(&format!("{QWEN}.trellis"), "I16", &[6, 61]),
        tensor(&format!("{QWEN}.head_bias"), "F16", &[4]),
    ];
    let note = |rows: &str| json!({"format": "exl3_ngram_trellis", "row_dim": "160", "rows": rows});
    let data: Vec<u8> = trellis
        .iter()
        .flat_map(|tensor| tensor.bytes.clone())
        .collect();
    let name = "ngram_embedding.safetensors";
    folder.write(name, file_of(&header(&trellis, Some(&note("6"))), &data));
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let table = select(&checkpoint, TableRef::Only).unwrap();
    assert_eq!(table.name, QWEN);
    assert_eq!(table.encoding, Encoding::Exl3Trellis);
    assert_eq!(table.logical_shape, [160]);
    assert_eq!(table.row_bytes(), 122);
    assert_eq!(*checkpoint.files[table.files()[0]].path, folder.join(name));

    folder.write(name, file_of(&header(&trellis, Some(&note("7"))), &data));
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let error = select(&checkpoint, TableRef::Only).unwrap_err().to_string();
    assert!(
        error.contains("has 6 rows, but the metadata of its file says 7"),
        "{error}"
    );
}

#[test]
fn exl3_trellis_in_pieces_without_a_note() {
    let piece = |number: u64| tensor(&format!("{QWEN}.shard_{number}.trellis"), "I16", &[2, 51]);
    let table = only(&[piece(1), piece(0), piece(2)]).unwrap();
    assert_eq!((table.rows(), table.row_bytes()), (6, 102));
    assert_eq!(table.logical_shape, [51]);
}
