//! Choices of a table that cannot be met.

use super::refused::choice_refused_with;
use super::*;

#[test]
fn unlisted_tensor_in_two_indexed_files_is_not_guessed() {
    let folder = Folder::new();
    let twice = tensor("rotary.table", "F32", &[2, 2]);
    folder.tensors(
        "a.safetensors",
        &[tensor("a", "U8", &[2, 2]), twice.clone()],
    );
    folder.tensors("b.safetensors", &[tensor("b", "U8", &[2, 2]), twice]);
    folder.index(&[("a", "a.safetensors"), ("b", "b.safetensors")]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(tables(&checkpoint, true).unwrap().len(), 2);
    choice_refused_with(
        &checkpoint,
        TableRef::Name("rotary.table"),
        &["a.safetensors", "b.safetensors", "names neither"],
    );
}

#[test]
fn choices_that_cannot_be_met_list_those_that_can() {
    let (_folder, checkpoint) = two_layers();
    let both = [
        "0: \"layers.2.engram.embed\"",
        "1: \"layers.14.engram.embed\"",
    ];
    choice_refused_with(&checkpoint, TableRef::Only, &both);
    choice_refused_with(&checkpoint, TableRef::Layer(2), &both);
    choice_refused_with(&checkpoint, TableRef::Name("layers.3.engram.embed"), &both);
}

#[test]
fn checkpoint_without_a_table_names_what_can_be_opened() {
    let (_folder, checkpoint) = checkpoint_of(&[
        tensor("model.a.weight", "F32", &[2, 2]),
        tensor("model.embed_tokens.weight", "F32", &[2, 2]),
        tensor("model.norm.weight", "F32", &[2]),
        tensor("model.conv.weight", "F32", &[2, 2, 2]),
        tensor("model.half.weight", "F4", &[2, 3]),
        tensor("model.none.weight", "F32", &[2, 0]),
    ]);
    for table in [TableRef::Only, TableRef::Layer(0)] {
        choice_refused_with(
            &checkpoint,
            table,
            &[
                "no n-gram or per-layer embedding table",
                "\"model.embed_tokens.weight\", \"model.a.weight\"",
            ],
        );
    }
    assert_eq!(tables(&checkpoint, false).unwrap().len(), 0);
    assert_eq!(tables(&checkpoint, true).unwrap().len(), 2);
    for (name, problem) in [
        ("model.norm.weight", "has shape [2]"),
        ("model.conv.weight", "has shape [2, 2, 2]"),
        ("model.half.weight", "whole rows"),
        ("model.none.weight", "rows are empty"),
        ("model.b.weight", "no tensor \"model.b.weight\""),
    ] {
        choice_refused_with(&checkpoint, TableRef::Name(name), &[problem]);
    }
    let (_folder, checkpoint) = checkpoint_of(&[tensor("bias", "F32", &[2])]);
    choice_refused_with(
        &checkpoint,
        TableRef::Only,
        &["no two-dimensional tensor either"],
    );
}
