//! Checkpoints that are right in unusual ways, and one test per way of being wrong.

use std::fs;

use serde_json::json;

use super::*;
use crate::testing::{Folder, Tensor, file, file_of, tensor};

mod headers;
mod links;

fn names(checkpoint: &Checkpoint) -> Vec<String> {
    checkpoint.tensors().map(|(name, _)| name).collect()
}

fn open(path: &Path) -> Checkpoint {
    Checkpoint::open(path).unwrap_or_else(|error| panic!("{error}"))
}

/// The message of the [`Error::Checkpoint`] that opening gives, with all of `parts` in it.
fn refused_with(path: &Path, parts: &[&str]) {
    let error = Checkpoint::open(path).unwrap_err();
    assert!(matches!(error, Error::Checkpoint { .. }), "{error:?}");
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
}

/// The message and paths of the [`Error::Missing`] that opening gives.
fn missing(path: &Path) -> (String, Vec<PathBuf>) {
    match Checkpoint::open(path) {
        Err(Error::Missing { message, paths }) => (message, paths),
        other => panic!("{other:?}"),
    }
}

fn two_files() -> (Folder, Tensor, Tensor) {
    let folder = Folder::new();
    let (left, right) = (
        tensor("left", "BF16", &[4, 3]),
        tensor("right", "U8", &[7, 1]),
    );
    folder.indexed(&[
        ("model-1.safetensors", std::slice::from_ref(&left)),
        ("model-2.safetensors", std::slice::from_ref(&right)),
    ]);
    (folder, left, right)
}

#[test]
fn directory_index_and_file_lead_to_the_same_bytes() {
    let (folder, left, right) = two_files();
    for path in [
        folder.path().to_owned(),
        folder.join("model.safetensors.index.json"),
    ] {
        let checkpoint = open(&path);
        assert_eq!(checkpoint.path, path);
        assert_eq!(names(&checkpoint), ["left", "right"]);
        assert_eq!(checkpoint.tensor_count(), 2);
        assert_eq!(checkpoint.read_tensor("left", 24).unwrap(), left.bytes);
        assert_eq!(checkpoint.read_tensor("right", 24).unwrap(), right.bytes);
        assert_eq!(checkpoint.files.len(), 2);
        assert_eq!(
            *checkpoint.files[0].path,
            folder.join("model-1.safetensors")
        );
        assert_eq!(
            checkpoint.files[0].identity.len,
            file(std::slice::from_ref(&left)).len() as u64
        );
        let info = checkpoint.tensor("right").unwrap();
        assert_eq!((info.file, info.shape, info.bytes), (1, &[7, 1][..], 7));
        assert_eq!(info.listing, Listing::Named);
        assert!(checkpoint.tensor("middle").is_none());
    }
    let checkpoint = open(&folder.join("model-2.safetensors"));
    assert_eq!(names(&checkpoint), ["right"]);
}

#[test]
fn directory_without_an_index_is_all_its_files() {
    let folder = Folder::new();
    folder.tensors("b.safetensors", &[tensor("b", "U8", &[2, 2])]);
    folder.tensors("a.safetensors", &[tensor("z", "U8", &[2, 2])]);
    folder.tensors(".hidden.safetensors", &[tensor("b", "U8", &[2, 2])]);
    folder.write("._b.safetensors", b"resource fork");
    folder.write("notes.txt", b"");
    folder.tensors("deeper/c.safetensors", &[tensor("b", "U8", &[2, 2])]);
    fs::create_dir(folder.join("d.safetensors")).unwrap();
    let checkpoint = open(folder.path());
    assert_eq!(names(&checkpoint), ["b", "z"]);
    assert_eq!(*checkpoint.files[0].path, folder.join("a.safetensors"));
    assert!(checkpoint.config.is_none());
}

#[test]
fn file_numbers_beyond_the_count_in_their_names_mean_nothing() {
    let folder = Folder::new();
    folder.indexed(&[
        (
            "model-00074-of-00048.safetensors",
            &[tensor("a", "U32", &[2, 2])],
        ),
        (
            "model-00005-of-00048.safetensors",
            &[tensor("b", "F32", &[2, 2])],
        ),
    ]);
    assert_eq!(names(&open(folder.path())), ["a", "b"]);
}

#[test]
fn only_index_of_another_name_is_used_and_several_are_a_question() {
    let (folder, ..) = two_files();
    let usual = folder.join("model.safetensors.index.json");
    let other = folder.join("weights.fp16.safetensors.index.json");
    fs::rename(&usual, &other).unwrap();
    folder.tensors("stray.safetensors", &[tensor("left", "U8", &[1, 1])]);
    assert_eq!(open(folder.path()).shadowed.len(), 1);
    fs::copy(&other, folder.join("second.safetensors.index.json")).unwrap();
    refused_with(
        folder.path(),
        &[
            "second.safetensors.index.json",
            "weights.fp16.safetensors.index.json",
        ],
    );
    fs::copy(&other, &usual).unwrap();
    assert_eq!(open(folder.path()).shadowed.len(), 1);
}

/// F16: the index decides, and the copy is reported.
#[test]
fn second_copy_of_an_indexed_tensor_is_set_aside() {
    let (folder, left, _) = two_files();
    let stray = Tensor {
        bytes: vec![9; 24],
        ..left.clone()
    };
    let path = folder.tensors(
        "model.safetensors",
        &[stray, tensor("extra", "U8", &[1, 1])],
    );
    let checkpoint = open(folder.path());
    assert_eq!(checkpoint.read_tensor("left", 24).unwrap(), left.bytes);
    let shadowed = Shadowed {
        tensor: "left".to_owned(),
        file: path,
    };
    assert_eq!(checkpoint.shadowed, [shadowed]);
    assert_eq!(
        checkpoint.tensor("extra").unwrap().listing,
        Listing::SideFile
    );
}

/// F16: nobody decides.
#[test]
fn tensor_in_two_files_without_an_index() {
    let folder = Folder::new();
    folder.tensors("a.safetensors", &[tensor("x", "U8", &[2, 2])]);
    folder.tensors(
        "b.safetensors",
        &[tensor("w", "U8", &[2, 2]), tensor("x", "U8", &[2, 2])],
    );
    refused_with(
        folder.path(),
        &["tensor \"x\"", "a.safetensors", "b.safetensors"],
    );
}

#[test]
fn copy_in_another_indexed_file_is_set_aside_too() {
    let folder = Folder::new();
    let (one, two) = (tensor_filled("x", 1), tensor_filled("x", 2));
    folder.tensors("a.safetensors", &[one, tensor("a", "U8", &[1, 1])]);
    folder.tensors("b.safetensors", &[two.clone(), tensor("c", "U8", &[1, 1])]);
    folder.index(&[("a", "a.safetensors"), ("x", "b.safetensors")]);
    let checkpoint = open(folder.path());
    assert_eq!(checkpoint.read_tensor("x", 4).unwrap(), two.bytes);
    assert_eq!(checkpoint.shadowed[0].file, folder.join("a.safetensors"));
    assert_eq!(checkpoint.tensor("c").unwrap().listing, Listing::Unlisted);
}

fn tensor_filled(name: &str, byte: u8) -> Tensor {
    Tensor {
        bytes: vec![byte; 4],
        ..tensor(name, "U8", &[4, 1])
    }
}

/// F17.
#[test]
fn every_missing_file_is_listed() {
    let (folder, ..) = two_files();
    fs::remove_file(folder.join("model-2.safetensors")).unwrap();
    let (message, paths) = missing(folder.path());
    assert_eq!(paths, [folder.join("model-2.safetensors")]);
    assert!(message.contains("1 of the 2 files"), "{message}");
    assert!(message.contains("model-2.safetensors"), "{message}");
    assert!(message.contains("download is incomplete"), "{message}");
    fs::remove_file(folder.join("model-1.safetensors")).unwrap();
    let (message, paths) = missing(folder.path());
    assert_eq!(paths.len(), 2);
    assert!(message.contains("2 of the 2 files"), "{message}");
    assert!(message.contains("model-1.safetensors"), "{message}");
}

/// F18.
#[test]
fn index_that_points_to_the_wrong_file() {
    let (folder, ..) = two_files();
    folder.index(&[
        ("left", "model-2.safetensors"),
        ("right", "model-2.safetensors"),
    ]);
    refused_with(
        folder.path(),
        &[
            "tensor \"left\"",
            "model-2.safetensors",
            "does not contain it; it is in",
            "model-1.safetensors",
        ],
    );
    for (name, file) in [
        ("absent", "model-1"),
        ("zebra", "model-2"),
        ("m", "model-1"),
    ] {
        let file = format!("{file}.safetensors");
        folder.index(&[
            ("left", "model-1.safetensors"),
            ("right", "model-2.safetensors"),
            (name, &file),
        ]);
        refused_with(
            folder.path(),
            &[&format!("tensor {name:?}"), &file, "does not contain it"],
        );
    }
}

/// F20.
#[test]
fn large_index_is_read_whole() {
    let (folder, ..) = two_files();
    let padding = " ".repeat(16 << 20);
    let index = format!(
        r#"{{"weight_map":{{"left":"model-1.safetensors",{padding}"right":"model-2.safetensors"}}}}"#
    );
    folder.write("model.safetensors.index.json", index);
    assert_eq!(names(&open(folder.path())), ["left", "right"]);
}

#[test]
fn index_longer_than_the_limit_names_it() {
    let (folder, ..) = two_files();
    let index = fs::OpenOptions::new()
        .write(true)
        .open(folder.join("model.safetensors.index.json"))
        .unwrap();
    index.set_len((512 << 20) + 1).unwrap();
    refused_with(
        folder.path(),
        &["index has 536870913 bytes", "limit is 536870912"],
    );
}

#[test]
fn index_that_is_none() {
    let (folder, ..) = two_files();
    let name = "model.safetensors.index.json";
    for (text, problem) in [
        ("{", "not valid"),
        ("[]", "not valid"),
        ("{}", "no \"weight_map\""),
        (r#"{"weight_map":{}}"#, "names no tensor"),
        (r#"{"weight_map":{"a":1}}"#, "not valid"),
        (r#"{"weight_map":null}"#, "not valid"),
        (
            r#"{"weight_map":{"left":"model-1.safetensors"},"weight_map":{}}"#,
            "duplicate field",
        ),
        (
            r#"{"weight_map":{"left":"model-1.safetensors","left":"model-2.safetensors"}}"#,
            "\"left\" twice, in \"model-1.safetensors\" and in \"model-2.safetensors\"",
        ),
    ] {
        folder.write(name, text);
        refused_with(folder.path(), &[problem, name]);
    }
    folder.write(name, b"{\"weight_map\":{\"\xFF\":\"a\"}}");
    refused_with(folder.path(), &["not UTF-8", name]);
    let config = folder.config(&json!({"model_type": "qwen4_exp"}));
    refused_with(&config, &["this JSON file is no index", "config.json"]);
    let same = r#"{"weight_map":{"left":"model-1.safetensors","\u006ceft":"model-1.safetensors"}}"#;
    folder.write(name, same);
    assert_eq!(
        open(folder.path()).tensor("left").unwrap().listing,
        Listing::Named
    );
}

#[test]
fn configuration_beside_the_file_is_read() {
    let (folder, ..) = two_files();
    folder.write(
        "config.json",
        r#"{"limit": [0.0, Infinity], "low": -Infinity, "bad": NaN, "text": "NaN \" Infinity"}"#,
    );
    for name in ["", "model-1.safetensors", "model.safetensors.index.json"] {
        let config = open(&folder.join(name)).config.unwrap();
        assert_eq!(
            config,
            json!({"limit": [0.0, null], "low": null, "bad": null, "text": "NaN \" Infinity"})
        );
    }
    for (text, problem) in [
        ("{\"a\": nan}", "not valid JSON"),
        ("[]", "not a JSON object"),
    ] {
        folder.write("config.json", text);
        refused_with(folder.path(), &[problem, "config.json"]);
    }
}

#[test]
fn what_is_not_there_is_the_kernels_error() {
    let folder = Folder::new();
    let path = folder.join("absent.safetensors");
    match Checkpoint::open(&path) {
        Err(Error::Io { errno, place, .. }) => {
            assert_eq!(errno, libc::ENOENT);
            assert_eq!(place.path.as_deref(), Some(path.as_path()));
        }
        other => panic!("{other:?}"),
    }
    let error = Checkpoint::open(Path::new("no-such-owner/no-such-model")).unwrap_err();
    assert!(error.to_string().contains("download it first"), "{error}");
}

#[test]
fn directory_without_anything_to_read_guesses_why() {
    let folder = Folder::new();
    assert!(
        missing(folder.path())
            .0
            .contains("sub-directories are not searched")
    );
    folder.write("pytorch_model.bin", b"");
    assert!(missing(folder.path()).0.contains("PyTorch"));
    folder.write("model.gguf", b"GGUF");
    assert!(missing(folder.path()).0.contains("GGUF"));
    refused_with(
        &folder.write("x.gguf", b"GGUF\x03\0\0\0\0\0\0\0"),
        &["GGUF", "engram reads safetensors"],
    );
}

/// Neither of them may be waited for.
#[test]
fn what_is_no_regular_file_is_refused_by_its_kind() {
    let folder = Folder::new();
    let pipe = folder.join("pipe.safetensors");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &pipe,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    refused_with(&pipe, &["a named pipe", "pipe.safetensors"]);
    refused_with(folder.path(), &["a named pipe", "pipe.safetensors"]);
    refused_with(Path::new("/dev/null"), &["a device"]);
    let socket = folder.join("socket.safetensors");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    refused_with(&socket, &["a socket", "socket.safetensors"]);
}

#[test]
fn broken_files_are_named_and_strays_explained() {
    let (folder, ..) = two_files();
    let whole = fs::read(folder.join("model-2.safetensors")).unwrap();
    folder.write("model-2.safetensors", &whole[..whole.len() - 1]);
    refused_with(
        folder.path(),
        &["download is incomplete", "model-2.safetensors"],
    );
    folder.write("model-2.safetensors", &whole);
    folder.write(
        "stray.safetensors",
        b"version https://git-lfs.github.com/spec/v1\n",
    );
    refused_with(
        folder.path(),
        &[
            "Git LFS pointer",
            "stray.safetensors",
            "the index does not name this file",
        ],
    );
    fs::remove_file(folder.join("model.safetensors.index.json")).unwrap();
    let refused = Checkpoint::open(folder.path()).unwrap_err().to_string();
    assert!(refused.contains("Git LFS pointer"), "{refused}");
    assert!(!refused.contains("index"), "there is none: {refused}");
}

/// Many files are read by several threads; the first wrong one in order is reported.
#[test]
fn first_wrong_file_in_order_is_reported() {
    let folder = Folder::new();
    for number in 0..100 {
        let name = format!("{number:03}.safetensors");
        if number % 30 == 29 {
            folder.write(&name, b"");
        } else {
            folder.tensors(&name, &[tensor(&format!("t{number}"), "U8", &[1, 1])]);
        }
    }
    for _ in 0..20 {
        refused_with(folder.path(), &["empty", "029.safetensors"]);
    }
    for number in [29, 59, 89] {
        fs::remove_file(folder.join(&format!("{number:03}.safetensors"))).unwrap();
    }
    let checkpoint = open(folder.path());
    assert_eq!(checkpoint.tensor_count(), 97);
    for (name, info) in checkpoint.tensors() {
        let number: usize = name[1..].parse().unwrap();
        assert!(
            checkpoint.files[info.file]
                .path
                .ends_with(format!("{number:03}.safetensors"))
        );
    }
}

#[test]
fn small_tensors_are_read_only_while_they_are_small_and_unchanged() {
    let folder = Folder::new();
    let path = folder.tensors("a.safetensors", &[tensor("scale", "F32", &[1])]);
    let checkpoint = open(&path);
    let message = checkpoint.read_tensor("scale", 3).unwrap_err().to_string();
    assert!(message.contains("4 bytes where at most 3"), "{message}");
    let message = checkpoint.read_tensor("other", 3).unwrap_err().to_string();
    assert!(message.contains("no tensor \"other\""), "{message}");
    fs::rename(folder.tensors("b", &[tensor("scale", "F32", &[1])]), &path).unwrap();
    let message = checkpoint.read_tensor("scale", 4).unwrap_err().to_string();
    assert!(message.contains("has changed since"), "{message}");
    fs::remove_file(&path).unwrap();
    assert!(matches!(
        checkpoint.read_tensor("scale", 4),
        Err(Error::Io {
            errno: libc::ENOENT,
            ..
        })
    ));
}
