use std::fs;

use serde_json::json;

use super::*;
use crate::testing::{Folder, tensor};

fn kinds(survey: &Survey) -> Vec<(FlawKind, String)> {
    survey
        .flaws
        .iter()
        .map(|flaw| {
            let name = flaw.path.file_name().unwrap_or_default();
            (flaw.kind, name.to_string_lossy().into_owned())
        })
        .collect()
}

#[test]
fn a_sound_checkpoint_has_no_flaw() {
    let folder = Folder::new();
    let tensors = ["a", "b"].map(|name| tensor(name, "F32", &[4, 2]));
    folder.indexed(&[
        ("1.safetensors", &tensors[..1]),
        ("2.safetensors", &tensors[1..]),
    ]);
    let found = survey(folder.path()).unwrap();
    assert_eq!(kinds(&found), []);
    assert_eq!((found.files, found.tensors), (2, 2));
    let bytes = ["1.safetensors", "2.safetensors"]
        .map(|name| fs::metadata(folder.join(name)).unwrap().len());
    assert_eq!(found.bytes, bytes.iter().sum::<u64>());
    let alone = survey(&folder.join("1.safetensors")).unwrap();
    assert_eq!((alone.files, alone.index), (1, None));
}

#[test]
fn one_flaw_hides_no_other() {
    let folder = Folder::new();
    let names = ["a", "b", "c", "d"];
    let tensors = names.map(|name| tensor(name, "F32", &[4, 2]));
    let files = [
        "1.safetensors",
        "2.safetensors",
        "3.safetensors",
        "4.safetensors",
    ];
    for (file, tensor) in files.iter().zip(&tensors) {
        folder.tensors(file, std::slice::from_ref(tensor));
    }
    let total: usize = tensors.iter().map(|tensor| tensor.bytes.len()).sum();
    let index = json!({
        "metadata": {"total_size": total},
        "weight_map": {
            "a": files[0], "b": files[1], "c": files[2], "d": files[3],
            "e": files[3], "f": "../f.safetensors"
        },
    });
    folder.write("model.safetensors.index.json", index.to_string());
    fs::remove_file(folder.join(files[0])).unwrap();
    let whole = fs::read(folder.join(files[1])).unwrap();
    folder.write(files[1], &whole[..whole.len() - 3]);
    folder.write(files[2], "<html>");
    folder.write("beside.safetensors", &whole[..12]);
    let found = survey(folder.path()).unwrap();
    let name = |name: &str| name.to_owned();
    assert_eq!(
        kinds(&found),
        [
            (FlawKind::Index, name("model.safetensors.index.json")),
            (FlawKind::Missing, name(files[0])),
            (FlawKind::Short, name(files[1])),
            (FlawKind::Malformed, name(files[2])),
            (FlawKind::Index, name(files[3])),
            (FlawKind::Short, name("beside.safetensors")),
        ]
    );
    let short = &found.flaws[2];
    let len = whole.len() as u64;
    assert_eq!((short.expected, short.found), (Some(len), Some(len - 3)));
    assert_eq!(found.flaws[1].expected, None, "two files are not known");
    assert!(found.flaws[4].message.contains("\"e\""));
}

#[test]
fn what_the_index_counts_and_nobody_holds_is_what_is_missing() {
    let folder = Folder::new();
    let (kept, lost) = (tensor("a", "F32", &[4, 2]), tensor("b", "U8", &[7]));
    folder.tensors("1.safetensors", std::slice::from_ref(&kept));
    let index = json!({
        "metadata": {"total_size": kept.bytes.len() + lost.bytes.len()},
        "weight_map": {"a": "1.safetensors", "b": "2.safetensors"},
    });
    folder.write("model.safetensors.index.json", index.to_string());
    let found = survey(folder.path()).unwrap();
    assert_eq!(
        kinds(&found),
        [(FlawKind::Missing, "2.safetensors".to_owned())]
    );
    assert_eq!(found.flaws[0].expected, Some(7));
}

/// What is wrong with the index is said even where no file lies beside it.
#[test]
fn a_broken_index_with_nothing_beside_it_is_what_is_wrong() {
    let folder = Folder::new();
    folder.write("model.safetensors.index.json", "{");
    for path in [
        folder.path().to_owned(),
        folder.join("model.safetensors.index.json"),
    ] {
        let found = survey(&path).unwrap();
        assert_eq!(
            kinds(&found),
            [(FlawKind::Index, "model.safetensors.index.json".to_owned())]
        );
        assert_eq!(found.files, 0);
    }
}

/// Only what an index leaves out is explained by it.
#[test]
fn files_are_called_strays_only_beside_an_index() {
    let folder = Folder::new();
    folder.tensors("1.safetensors", &[tensor("a", "F32", &[4, 2])]);
    folder.write("2.safetensors", "<html>");
    let message = |folder: &Folder| survey(folder.path()).unwrap().flaws[0].message.clone();
    assert!(!message(&folder).contains("index"), "{}", message(&folder));
    let index = json!({"weight_map": {"a": "1.safetensors"}});
    folder.write("model.safetensors.index.json", index.to_string());
    assert!(message(&folder).contains("the index does not name this file"));
}

#[test]
fn nothing_to_look_at_is_an_error() {
    let folder = Folder::new();
    assert!(matches!(survey(folder.path()), Err(Error::Missing { .. })));
    assert!(matches!(
        survey(&folder.join("absent")),
        Err(Error::Io { .. })
    ));
}
