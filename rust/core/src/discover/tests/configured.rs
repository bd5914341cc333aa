//! What `config.json` says and the files do not.

use serde_json::{Value, json};

use super::*;

fn qwen_config() -> Value {
    json!({
        "model_type": "qwen4_exp",
        "text_config": {
            "vocab_size": 97,
            "ngram_size": 3,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 50,
            "make_ngram_vocab_size_divisible_by": 16,
            "ple_embed_dim": 64,
            "split_ngram_parts": 7,
            "ple_layer_ids": [2],
        }
    })
}

/// 240 rows of 16 values in pieces of 35.
fn qwen_pieces() -> Vec<Tensor> {
    (0..7)
        .map(|number| shard(number, "BF16", if number < 6 { 35 } else { 30 }, 16))
        .collect()
}

fn only_with(config: &Value, tensors: &[Tensor]) -> Result<Table> {
    let folder = Folder::new();
    folder.config(config);
    folder.tensors("model.safetensors", tensors);
    select(&Checkpoint::open(folder.path())?, TableRef::Only)
}

fn refused_with(config: &Value, tensors: &[Tensor], parts: &[&str]) {
    let error = only_with(config, tensors).unwrap_err();
    assert!(matches!(error, Error::Checkpoint { .. }), "{error:?}");
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
}

#[test]
fn qwen_rows_follow_from_the_configuration() {
    let table = only_with(&qwen_config(), &qwen_pieces()).unwrap();
    assert_eq!(table.rows(), 240);
    refused_with(
        &qwen_config(),
        &qwen_pieces()[..6],
        &["implies 240 rows", "have 210", "a piece is missing", QWEN],
    );
    let mut longer = qwen_pieces();
    longer[6] = shard(6, "BF16", 31, 16);
    refused_with(
        &qwen_config(),
        &longer,
        &["implies 240 rows", "have 241", "another checkpoint"],
    );
    let wider: Vec<Tensor> = (0..7)
        .map(|number| shard(number, "BF16", if number < 6 { 35 } else { 30 }, 17))
        .collect();
    refused_with(&qwen_config(), &wider, &["rows of 17 values", "implies 16"]);
}

/// The released model: 16 primes from 20,000,003 to 20,000,171, padded to a multiple of 128.
#[test]
fn qwen_rows_of_the_released_model() {
    let config = json!({
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20_000_000,
        "make_ngram_vocab_size_divisible_by": 128,
        "ple_layer_ids": [2],
    });
    let config = expected::Config(&config);
    assert_eq!(expected::qwen_rows(&config, 1), Some(320_001_536));
    assert_eq!(expected::qwen_rows(&config, 2), None);
}

/// Primes of the second layer go on after those of the first, whatever the order of the list.
#[test]
fn qwen_rows_of_a_second_layer() {
    let mut config = qwen_config();
    config["text_config"]["ple_layer_ids"] = json!([9, 2, 2]);
    let config = expected::Config(&config);
    assert_eq!(expected::qwen_rows(&config, 1), Some(240)); // 53 + 59 + 61 + 67
    assert_eq!(expected::qwen_rows(&config, 8), Some(320)); // 71 + 73 + 79 + 83 = 306
}

/// Fewer pieces than the configuration cuts are fine, more are not.
#[test]
fn qwen_pieces_may_be_fewer_but_not_more_than_configured() {
    let mut config = qwen_config();
    config["split_ngram_parts"] = json!(12);
    config["text_config"]["split_ngram_parts"] = json!(512);
    assert!(only_with(&config, &qwen_pieces()).is_ok());
    let mut trailing = qwen_pieces();
    trailing.push(shard(7, "BF16", 0, 16));
    assert!(only_with(&config, &trailing).is_ok());
    config["text_config"]["split_ngram_parts"] = json!(6);
    refused_with(
        &config,
        &qwen_pieces(),
        &["shard_6.weight", "piece 6 of 6", "split_ngram_parts"],
    );
    for parts in [json!(0), json!("many"), json!(7)] {
        config["text_config"]["split_ngram_parts"] = parts;
        assert!(only_with(&config, &qwen_pieces()).is_ok());
    }
}

#[test]
fn fields_that_are_absent_or_absurd_are_not_checked() {
    for field in [
        "ngram_size",
        "heads_per_ngram",
        "ngram_vocab_size_base",
        "ple_layer_ids",
        "make_ngram_vocab_size_divisible_by",
    ] {
        let mut config = qwen_config();
        config["text_config"].as_object_mut().unwrap().remove(field);
        assert!(only_with(&config, &qwen_pieces()[..6]).is_ok(), "{field}");
        for absurd in [
            json!(0),
            json!(-1),
            json!("3"),
            json!(null),
            json!(u64::MAX),
            json!([u64::MAX]),
        ] {
            let mut config = qwen_config();
            config["text_config"][field] = absurd.clone();
            if let Err(error) = only_with(&config, &qwen_pieces()) {
                let message = error.to_string();
                assert!(message.contains("implies"), "{field}: {absurd}: {message}");
            }
        }
    }
}

/// Quantised rows are held against the configuration by the values they stand for.
#[test]
fn widths_are_compared_after_dequantisation() {
    let mut tensors = Vec::new();
    for number in 0..7 {
        let rows = if number < 6 { 35 } else { 30 };
        tensors.push(shard(number, "U8", rows, 8));
        let scale = format!("{QWEN}.shard_{number}.weight_scale");
        tensors.push(tensor(&scale, "F8_E4M3", &[rows, 1]));
    }
    tensors.push(f32_scalar(&format!("{QWEN}.weight_scale_2"), &[1], 0.5));
    let table = only_with(&qwen_config(), &tensors).unwrap();
    assert_eq!(table.logical_shape, [16]);
    let trellis = tensor(&format!("{QWEN}.trellis"), "I16", &[240, 7]);
    assert_eq!(
        only_with(&qwen_config(), &[trellis]).unwrap().logical_shape,
        [16]
    );
}

#[test]
fn deepseek_rows_are_listed_by_layer() {
    let config = json!({
        "text_config": {
            "engram_layer_ids": [1, 14],
            "engram_num_embeddings": [5, 6],
            "engram_head_dim": 64,
        }
    });
    let table = |layer: u64, rows, columns| {
        let name = format!("layers.{layer}.engram.embed");
        [
            tensor(&format!("{name}.weight"), "F8_E4M3", &[rows, columns]),
            tensor(&format!("{name}.scale"), "F8_E8M0", &[rows, columns / 32]),
        ]
    };
    assert!(only_with(&config, &table(1, 5, 64)).is_ok());
    assert!(only_with(&config, &table(14, 6, 64)).is_ok());
    assert!(only_with(&config, &table(3, 9, 64)).is_ok());
    refused_with(&config, &table(14, 5, 64), &["implies 6 rows", "have 5"]);
    refused_with(
        &config,
        &table(1, 5, 32),
        &["rows of 32 values", "implies 64"],
    );
}

#[test]
fn longcat_embedders_follow_from_the_configuration() {
    let embedders = |sizes: &[u64]| -> Vec<Tensor> {
        sizes
            .iter()
            .enumerate()
            .map(|(number, &rows)| {
                let name = format!("model.ngram_embeddings.embedders.{number}.weight");
                tensor(&name, "BF16", &[rows, 4])
            })
            .collect()
    };
    let new = json!({"vocab_size": 31, "ngram_vocab_size_ratio": 2, "emb_neighbor_num": 3, "emb_split_num": 2});
    let old = json!({"vocab_size": 31, "oe_vocab_size_ratio": 2, "oe_neighbor_num": 3, "oe_split_num": 2});
    let next = json!({
        "vocab_size": 40, "text_vocab_size": 25, "ngram_vocab_size_ratio": 2.5,
        "emb_neighbor_num": 3, "emb_split_num": 2
    });
    for config in [&new, &old, &next] {
        let table = only_with(config, &embedders(&[63, 65, 67, 69])).unwrap();
        assert_eq!(table.rows(), 264);
        refused_with(
            config,
            &embedders(&[63, 65, 67]),
            &["implies 4 embedders", "there are 3"],
        );
        refused_with(
            config,
            &embedders(&[63, 65, 66, 69]),
            &["embedders.2.weight", "has 66 rows", "implies 67"],
        );
    }
}

#[test]
fn gemma_rows_follow_from_the_configuration() {
    let config =
        json!({"text_config": {"vocab_size_per_layer_input": 6, "hidden_size_per_layer_input": 4}});
    let table = |rows| {
        [tensor(
            "model.embed_tokens_per_layer.weight",
            "BF16",
            &[rows, 8],
        )]
    };
    assert!(only_with(&config, &table(6)).is_ok());
    refused_with(&config, &table(5), &["implies 6 rows", "have 5"]);
}

#[test]
fn mlx_bits_are_taken_from_the_setting_that_fits() {
    let module = format!("{QWEN}.shards.0");
    let part = |leaf, dtype, columns| tensor(&format!("{module}.{leaf}"), dtype, &[3, columns]);
    let tensors = [
        part("weight", "U32", 32),
        part("scales", "BF16", 4),
        part("biases", "BF16", 4),
    ];
    let with = |settings: Value| only_with(&json!({"quantization": settings}), &tensors);
    assert_eq!(
        with(json!({"bits": 4, "group_size": 64}))
            .unwrap()
            .logical_shape,
        [256]
    );
    // Settings that cannot be this table's own.
    assert!(with(json!({"bits": 8, "group_size": 64})).is_ok());
    assert!(
        with(json!({"bits": 8, "group_size": 32, &module: {"bits": 4, "group_size": 64}})).is_ok()
    );
    let error = with(json!({"bits": 8, "group_size": 32}))
        .unwrap_err()
        .to_string();
    assert!(error.contains("8-bit values"), "{error}");
    let error = with(json!({"bits": 4, "group_size": 64, &module: {"bits": 8, "group_size": 32}}));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("8-bit values"), "{error}");
}

/// F32: the configuration describes a model with tables, and no file holds one.
#[test]
fn promised_table_that_no_file_has() {
    let dense = tensor("model.embed_tokens.weight", "BF16", &[4, 4]);
    for (config, field) in [
        (qwen_config(), "ple_layer_ids is [2]"),
        (
            json!({"engram_layer_ids": [1, 14]}),
            "engram_layer_ids is [1,14]",
        ),
        (json!({"emb_split_num": 4}), "emb_split_num is 4"),
        (
            json!({"text_config": {"hidden_size_per_layer_input": 256}}),
            "hidden_size_per_layer_input is 256",
        ),
    ] {
        refused_with(
            &config,
            std::slice::from_ref(&dense),
            &[field, "a file is missing"],
        );
    }
    let none = json!({"ple_layer_ids": [], "hidden_size_per_layer_input": 0});
    let error = only_with(&none, &[dense]).unwrap_err();
    assert!(matches!(error, Error::Value { .. }), "{error:?}");
}
