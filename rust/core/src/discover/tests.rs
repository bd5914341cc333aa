//! Every family and storage variant, found and understood.

use std::fs;

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::testing::{Folder, Tensor, bf16_scalar, f32_scalar, file_of, header, tensor, tensor_of};

mod choices;
mod configured;
mod refused;
mod variants;

pub(super) const QWEN: &str = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding";

pub(super) fn shard(number: u64, dtype: &'static str, rows: u64, columns: u64) -> Tensor {
    let name = format!("{QWEN}.shard_{number}.weight");
    tensor(&name, dtype, &[rows, columns])
}

/// A checkpoint of one file with these tensors.
pub(super) fn checkpoint_of(tensors: &[Tensor]) -> (Folder, Checkpoint) {
    let folder = Folder::new();
    folder.tensors("model.safetensors", tensors);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    (folder, checkpoint)
}

/// The only table of a file with these tensors.
pub(super) fn only(tensors: &[Tensor]) -> Result<Table> {
    let (_folder, checkpoint) = checkpoint_of(tensors);
    select(&checkpoint, TableRef::Only)
}

/// Every row of a plane, read through its spans.
fn stored_rows(checkpoint: &Checkpoint, plane: &Plane) -> Vec<Vec<u8>> {
    let files: Vec<Vec<u8>> = checkpoint
        .files
        .iter()
        .map(|file| fs::read(&file.path).unwrap())
        .collect();
    (0..plane.rows())
        .map(|row| {
            let span = plane.span(row);
            let begin = usize::try_from(span.offset).unwrap();
            files[span.file][begin..begin + plane.row_bytes()].to_vec()
        })
        .collect()
}

/// The rows of tensors one after another.
fn written_rows(tensors: &[&Tensor]) -> Vec<Vec<u8>> {
    tensors
        .iter()
        .filter(|tensor| tensor.shape[0] > 0)
        .flat_map(|tensor| {
            let rows = usize::try_from(tensor.shape[0]).unwrap();
            tensor
                .bytes
                .chunks(tensor.bytes.len() / rows)
                .map(<[u8]>::to_vec)
        })
        .collect()
}

fn plane_names(table: &Table) -> Vec<&'static str> {
    table
        .planes
        .iter()
        .map(|plane| plane.name().name())
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// F30: pieces of any size, in any order, over several files, under all spellings.
    #[test]
    fn pieces_are_joined_in_numeric_order(
        sizes in prop::collection::vec(1_u64..6, 1..24),
        empty in 0_usize..3,
        seed in any::<u64>(),
        dots in any::<bool>(),
        dtype in prop::sample::select(vec!["BF16", "F16", "F32"]),
    ) {
        let sizes: Vec<u64> = sizes.into_iter().chain(vec![0; empty]).collect();
        let pieces: Vec<Tensor> = sizes
            .iter()
            .enumerate()
            .map(|(number, &rows)| {
                let segment = if dots { format!("shards.{number}") } else { format!("shard_{number}") };
                let mut piece = tensor(&format!("{QWEN}.{segment}.weight"), dtype, &[rows, 3]);
                for (at, byte) in piece.bytes.iter_mut().enumerate() {
                    *byte = (number * 31 + at * 7).to_le_bytes()[0];
                }
                piece
            })
            .collect();
        let mut shuffled = pieces.clone();
        shuffled.sort_by_key(|piece| {
            piece.name.bytes().fold(seed, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
            })
        });
        let folder = Folder::new();
        let (first, rest) = shuffled.split_at(shuffled.len() / 3);
        let (second, third) = rest.split_at(rest.len() / 2);
        folder.indexed(&[
            ("b.safetensors", &[&[tensor("odd", "U8", &[3])], first].concat()),
            ("a.safetensors", second),
            ("c.safetensors", third),
        ]);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let table = select(&checkpoint, TableRef::Only).unwrap();
        let expected = written_rows(&pieces.iter().collect::<Vec<_>>());
        prop_assert_eq!(&table.name, QWEN);
        prop_assert_eq!(table.rows(), sizes.iter().sum::<u64>());
        prop_assert_eq!(stored_rows(&checkpoint, &table.planes[0]), expected);
    }
}

/// F30: the three spellings give the same rows.
#[test]
fn whole_and_cut_tables_are_the_same() {
    let whole = tensor(&format!("{QWEN}.weight"), "BF16", &[5, 4]);
    let cut = |spelling: &str| {
        let name = |number| format!("{QWEN}.{spelling}{number}.weight");
        [
            tensor_of(&name(0), "BF16", &[3, 4], &whole.bytes[..24]),
            tensor_of(&name(1), "BF16", &[2, 4], &whole.bytes[24..]),
        ]
    };
    let expected = written_rows(&[&whole]);
    for tensors in [
        vec![whole.clone()],
        cut("shard_").to_vec(),
        cut("shards.").to_vec(),
    ] {
        let (_folder, checkpoint) = checkpoint_of(&tensors);
        let table = select(&checkpoint, TableRef::Only).unwrap();
        assert_eq!(table.name, QWEN);
        assert_eq!(table.encoding, Encoding::Plain(Dtype::BF16));
        assert_eq!(table.logical_shape, [4]);
        assert_eq!(stored_rows(&checkpoint, &table.planes[0]), expected);
    }
}

#[test]
fn helpers_of_a_table_are_no_part_of_it() {
    let ple = "model.language_model.layers.1.ple";
    let helpers = [
        tensor(
            &format!("{ple}.ple_embedding.layer_multipliers"),
            "I64",
            &[3],
        ),
        tensor(
            &format!("{ple}.ple_embedding.ngram_heads_vocab_sizes"),
            "I64",
            &[4],
        ),
        tensor(
            &format!("{ple}.ple_embedding.ngram_heads_offsets"),
            "I64",
            &[4],
        ),
        tensor(&format!("{ple}.ple_embedding.hashstats_x"), "F32", &[4, 2]),
        tensor(&format!("{ple}.ple_embedding.token_lookup"), "I64", &[9, 2]),
        tensor(&format!("{QWEN}.head_bias"), "F16", &[4, 2]),
        tensor(&format!("{QWEN}.head_offsets"), "I64", &[4]),
        tensor(&format!("{QWEN}.hashstats_weight"), "F32", &[4, 2]),
        tensor(&format!("{ple}.key_proj.weight"), "BF16", &[8, 4]),
        tensor(&format!("{ple}.conv1d.weight"), "BF16", &[8, 1, 4]),
        tensor(&format!("{ple}.norm_key.weight"), "BF16", &[8]),
        tensor(
            "model.ngram_embeddings.post_projs.0.weight",
            "BF16",
            &[8, 4],
        ),
        tensor(
            "model.ngram_embeddings.word_embeddings.weight",
            "BF16",
            &[8, 4],
        ),
        tensor("layers.1.engram.wkv.weight", "F8_E4M3", &[8, 4]),
        tensor("layers.1.engram.wkv.scale", "F8_E8M0", &[1, 1]),
        tensor("layers.1.engram.q_weight", "BF16", &[4, 4]),
        tensor("layers.1.engram.multi_head_embedding.offsets", "I64", &[4]),
        tensor("model.embed_tokens.weight", "BF16", &[8, 4]),
        tensor("lm_head.weight", "BF16", &[8, 4]),
    ];
    let mut tensors = helpers.to_vec();
    tensors.push(shard(0, "BF16", 4, 4));
    let (_folder, checkpoint) = checkpoint_of(&tensors);
    let found = tables(&checkpoint, false).unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].planes[0].pieces().len(), 1);
    // Everything with two dimensions can be opened by name all the same.
    let all = tables(&checkpoint, true).unwrap();
    let two_dimensional = helpers
        .iter()
        .filter(|tensor| tensor.shape.len() == 2)
        .count();
    assert_eq!(all.len(), 1 + two_dimensional);
    assert!(all[1..].iter().all(|table| table.family == Family::Plain));
}

fn two_layers() -> (Folder, Checkpoint) {
    let weight = |layer: u64| {
        tensor(
            &format!("layers.{layer}.engram.embed.weight"),
            "BF16",
            &[4, 4],
        )
    };
    checkpoint_of(&[
        weight(14),
        weight(2),
        tensor("model.embed_tokens.weight", "F32", &[3, 2]),
    ])
}

#[test]
fn tables_are_in_the_numeric_order_of_their_layers() {
    let (_folder, checkpoint) = two_layers();
    let names: Vec<_> = tables(&checkpoint, false)
        .unwrap()
        .into_iter()
        .map(|table| table.name)
        .collect();
    assert_eq!(names, ["layers.2.engram.embed", "layers.14.engram.embed"]);
    let second = select(&checkpoint, TableRef::Layer(1)).unwrap();
    assert_eq!(second.layer, Some(14));
}

#[test]
fn tables_are_chosen_by_place_by_name_or_by_their_only_tensor() {
    let (_folder, checkpoint) = two_layers();
    for name in ["layers.2.engram.embed", "layers.2.engram.embed.weight"] {
        let table = select(&checkpoint, TableRef::Name(name)).unwrap();
        assert_eq!(
            (table.name.as_str(), table.family),
            ("layers.2.engram.embed", Family::DeepSeek)
        );
    }
    let plain = select(&checkpoint, TableRef::Name("model.embed_tokens.weight")).unwrap();
    assert_eq!(
        (plain.family, plain.rows(), plain.row_bytes()),
        (Family::Plain, 3, 8)
    );
    assert_eq!(plain.logical_shape, [2]);
    assert_eq!(stored_rows(&checkpoint, &plain.planes[0]).len(), 3);
}

#[test]
fn parts_handed_over_without_a_checkpoint_are_joined_the_same_way() {
    struct Views<'a>(&'a [(&'a str, Vec<u8>)]);
    impl Surroundings for Views<'_> {
        fn read(&self, source: &Source<'_>, _max_bytes: u64) -> Result<Vec<u8>> {
            let (_, bytes) = &self.0[source.file];
            Ok(bytes.clone())
        }
    }
    let scale_name = format!("{QWEN}.weight_scale");
    let names = [
        format!("{QWEN}.shard_1.weight"),
        format!("{QWEN}.shard_0.weight"),
    ];
    let views = [
        (names[0].as_str(), vec![]),
        (names[1].as_str(), vec![]),
        (scale_name.as_str(), 0.5_f32.to_le_bytes().to_vec()),
    ];
    let source = |file: usize, dtype, shape| Source {
        name: views[file].0,
        dtype,
        shape,
        file,
        offset: 4096,
    };
    let groups = group([
        source(0, Dtype::F8_E4M3, &[2, 16]),
        source(1, Dtype::F8_E4M3, &[3, 16]),
        source(2, Dtype::F32, &[]),
    ]);
    let table = join(&groups[0], &Views(&views)).unwrap();
    assert_eq!((table.rows(), table.encoding), (5, Encoding::Fp8E4m3));
    assert_eq!(table.planes[0].span(0).file, 1);
    assert_eq!(table.planes[0].span(3).offset, 4096);
    assert_eq!(table.constants[0].value.to_bits(), 0.5_f64.to_bits());
}
