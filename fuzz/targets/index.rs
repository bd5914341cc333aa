//! The text of an index beside real files, links that lead out and a file next door. Whatever it
//! says, no file outside the directory may become part of the checkpoint, and memory must follow
//! from the length of the text.

#![no_main]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use engram_core::checkpoint::Checkpoint;
use engram_fuzz::{Counting, measured};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const INDEX: &str = "model.safetensors.index.json";

/// Bytes that reading the headers of the files takes, whatever the index says.
const FOR_FILES: usize = 256 << 10;

struct Place {
    _directory: tempfile::TempDir,
    checkpoint: PathBuf,
}

static PLACE: LazyLock<Place> = LazyLock::new(|| {
    let directory = if Path::new("/dev/shm").is_dir() {
        tempfile::tempdir_in("/dev/shm")
    } else {
        tempfile::tempdir()
    }
    .expect("a directory for the files");
    let outside = directory.path().canonicalize().expect("it was just made");
    let checkpoint = outside.join("checkpoint");
    fs::create_dir_all(checkpoint.join("below")).expect("a directory in it");
    for (path, tensor) in [
        ("checkpoint/a.safetensors", "a"),
        ("checkpoint/below/b.safetensors", "b"),
        ("outside.safetensors", "o"),
    ] {
        let header =
            format!(r#"{{"{tensor}":{{"dtype":"U8","shape":[2,1],"data_offsets":[0,2]}}}}"#);
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.bytes());
        file.extend([1, 2]);
        fs::write(outside.join(path), file).expect("a file in it");
    }
    symlink(
        outside.join("outside.safetensors"),
        checkpoint.join("out.safetensors"),
    )
    .expect("a link");
    symlink("..", checkpoint.join("up")).expect("a link");
    symlink("nowhere", checkpoint.join("gone.safetensors")).expect("a link");
    Place {
        _directory: directory,
        checkpoint,
    }
});

fuzz_target!(|text: &[u8]| {
    let directory = &PLACE.checkpoint;
    let index = directory.join(INDEX);
    fs::write(&index, text).expect("the index is written");
    let (opened, held) = measured(|| Checkpoint::open(&index));
    assert!(
        held < FOR_FILES + 128 * text.len(),
        "{held} bytes for an index of {}",
        text.len()
    );
    let Ok(opened) = opened else {
        return;
    };
    for file in &opened.files {
        assert!(
            file.resolved.starts_with(directory),
            "{} was opened",
            file.resolved.display()
        );
        assert!(!file.resolved.ends_with("outside.safetensors"));
    }
    assert!(opened.tensors().all(|(name, _)| name == "a" || name == "b"));
});
