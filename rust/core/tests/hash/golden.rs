//! Against published numbers.

use serde_json::Value;

use super::*;

fn golden() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/golden.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn integers(value: &Value) -> Vec<i64> {
    let values = value.as_array().unwrap().iter();
    values.map(|value| value.as_i64().unwrap()).collect()
}

#[test]
fn splitmix64_equals_the_published_numbers() {
    let golden = golden();
    for pair in golden["splitmix64"].as_array().unwrap() {
        assert_eq!(
            Some(splitmix64(pair[0].as_u64().unwrap())),
            pair[1].as_u64()
        );
    }
}

#[test]
fn the_released_qwen_table_has_the_published_constants_and_ids() {
    let golden = &golden()["qwen4exp_real"];
    let hash = Qwen::new(&real_qwen(), Policy::default()).unwrap();
    assert_eq!(
        hash.multipliers()[0],
        integers(&golden["layer_multipliers"])
    );
    assert_eq!(
        Some(hash.heads().padded_rows()),
        golden["padded_rows"].as_u64()
    );
    for sequence in golden["sequences"].as_array().unwrap() {
        let tokens = integers(&sequence["tokens"]);
        let batch = Batch {
            requests: vec![Request {
                before: vec![],
                tokens,
            }],
            padding: 0,
        };
        let expected: Vec<Vec<i64>> = sequence["ids"]
            .as_array()
            .unwrap()
            .iter()
            .map(integers)
            .collect();
        assert_eq!(
            run(&hash, &batch, 1).unwrap(),
            expected,
            "{}",
            sequence["name"]
        );
    }
}
