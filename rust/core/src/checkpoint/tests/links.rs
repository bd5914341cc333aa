//! Names from an index, symbolic links and hub caches.

use std::fs;
use std::os::unix::fs::symlink;

use super::*;

/// Names from an index cannot reach outside its directory.
#[test]
fn file_names_that_an_index_may_not_use() {
    let (folder, ..) = two_files();
    let absolute = folder.join("model-1.safetensors").display().to_string();
    for (name, problem) in [
        (absolute.as_str(), "is absolute"),
        ("../model-1.safetensors", "leaves the checkpoint directory"),
        (
            "a/../../model-1.safetensors",
            "leaves the checkpoint directory",
        ),
        ("a\\model-1.safetensors", "backslash"),
        ("..\\model-1.safetensors", "backslash"),
        ("model-1.safetensors\0", "NUL"),
        ("config.json", "no .safetensors file"),
        ("", "no .safetensors file"),
        (".safetensors", "no .safetensors file"),
        ("model-1.safetensors/..", "leaves the checkpoint directory"),
    ] {
        folder.index(&[("left", name)]);
        refused_with(folder.path(), &[problem, "model.safetensors.index.json"]);
    }
    let odd = "odd\\name.safetensors";
    folder.tensors(odd, &[tensor("left", "U8", &[1, 1])]);
    folder.index(&[("left", odd)]);
    refused_with(folder.path(), &["backslash"]);
    fs::remove_file(folder.join(odd)).unwrap();
    folder.tensors("below/c.safetensors", &[tensor("c", "U8", &[1, 1])]);
    folder.index(&[("c", "./below/c.safetensors")]);
    assert_eq!(open(folder.path()).read_tensor("c", 1).unwrap().len(), 1);
    folder.index(&[("c", "below")]);
    refused_with(folder.path(), &["no .safetensors file"]);
    fs::create_dir(folder.join("d.safetensors")).unwrap();
    folder.index(&[("c", "d.safetensors")]);
    refused_with(folder.path(), &["it is a directory"]);
}

#[test]
fn links_out_of_the_directory_are_refused_unless_the_caller_names_them() {
    let (folder, left, _) = two_files();
    let outside = Folder::new();
    let target = outside.tensors("elsewhere.safetensors", std::slice::from_ref(&left));
    let link = folder.join("model-1.safetensors");
    fs::remove_file(&link).unwrap();
    symlink(&target, &link).unwrap();
    refused_with(
        folder.path(),
        &["outside the checkpoint directory", "elsewhere.safetensors"],
    );
    let checkpoint = open(&link);
    assert_eq!(checkpoint.read_tensor("left", 24).unwrap(), left.bytes);
    assert_eq!(*checkpoint.files[0].path, link);
    assert_eq!(
        *checkpoint.files[0].resolved,
        fs::canonicalize(&target).unwrap()
    );

    fs::remove_file(folder.join("model.safetensors.index.json")).unwrap();
    refused_with(folder.path(), &["outside the checkpoint directory"]);
    fs::remove_file(&link).unwrap();
    fs::create_dir(folder.join("data")).unwrap();
    fs::rename(folder.join("model-2.safetensors"), folder.join("data/two")).unwrap();
    symlink("data/two", folder.join("model-2.safetensors")).unwrap();
    assert_eq!(names(&open(folder.path())), ["right"]);

    symlink(outside.path(), folder.join("nested")).unwrap();
    folder.index(&[("left", "nested/elsewhere.safetensors")]);
    refused_with(folder.path(), &["outside the checkpoint directory"]);
}

/// A hub cache: every file of a snapshot, index and configuration too, is a link to a blob.
fn hub_cache() -> (Folder, PathBuf, Tensor) {
    let folder = Folder::new();
    let table = tensor("table", "U8", &[4, 2]);
    folder.write("blobs/aa", file(std::slice::from_ref(&table)));
    folder.write(
        "blobs/bb",
        r#"{"weight_map":{"table":"model-1.safetensors"}}"#,
    );
    folder.write("blobs/cc", r#"{"model_type":"x"}"#);
    let snapshot = folder.join("snapshots/0123abc");
    fs::create_dir_all(&snapshot).unwrap();
    for (blob, name) in [
        ("aa", "model-1.safetensors"),
        ("bb", "model.safetensors.index.json"),
        ("cc", "config.json"),
    ] {
        symlink(format!("../../blobs/{blob}"), snapshot.join(name)).unwrap();
    }
    (folder, snapshot, table)
}

/// I34.
#[test]
fn hub_cache_is_followed_to_its_blobs() {
    let (folder, snapshot, table) = hub_cache();
    symlink(&snapshot, folder.join("main")).unwrap();
    for path in [
        snapshot.clone(),
        folder.join("main"),
        snapshot.join("model.safetensors.index.json"),
        snapshot.join("model-1.safetensors"),
    ] {
        let checkpoint = open(&path);
        assert_eq!(checkpoint.read_tensor("table", 8).unwrap(), table.bytes);
        assert_eq!(checkpoint.config.as_ref().unwrap()["model_type"], "x");
        let blob = fs::canonicalize(folder.join("blobs/aa")).unwrap();
        assert_eq!(*checkpoint.files[0].resolved, blob);
        assert!(checkpoint.files[0].path.ends_with("model-1.safetensors"));
    }
    fs::remove_file(snapshot.join("model.safetensors.index.json")).unwrap();
    assert_eq!(names(&open(&snapshot)), ["table"]);
    let (message, _) = missing(folder.path());
    assert!(
        message.contains("pass one of the directories in snapshots"),
        "{message}"
    );
}

#[test]
fn hub_cache_whose_blobs_are_linked_from_another_disk() {
    let (folder, snapshot, table) = hub_cache();
    let disk = Folder::new();
    fs::rename(folder.join("blobs/aa"), disk.join("aa")).unwrap();
    fs::rename(folder.join("blobs/bb"), disk.join("bb")).unwrap();
    fs::rename(folder.join("blobs/cc"), disk.join("cc")).unwrap();
    fs::remove_dir(folder.join("blobs")).unwrap();
    symlink(disk.path(), folder.join("blobs")).unwrap();
    assert_eq!(
        open(&snapshot).read_tensor("table", 8).unwrap(),
        table.bytes
    );
}

/// I34: only the snapshots were copied.
#[test]
fn links_without_their_blobs_name_link_and_target() {
    let (folder, snapshot, _) = hub_cache();
    fs::remove_file(folder.join("blobs/aa")).unwrap();
    for path in [snapshot.clone(), snapshot.join("model-1.safetensors")] {
        let (message, paths) = missing(&path);
        assert_eq!(paths, [snapshot.join("model-1.safetensors")]);
        assert!(message.contains("model-1.safetensors -> "), "{message}");
        assert!(message.contains("blobs/aa"), "{message}");
        assert!(message.contains("mount or copy blobs"), "{message}");
    }
    fs::remove_dir_all(folder.join("blobs")).unwrap();
    let (_, paths) = missing(&snapshot);
    assert_eq!(paths, [snapshot.join("model.safetensors.index.json")]);
    fs::remove_file(snapshot.join("model.safetensors.index.json")).unwrap();
    let (_, paths) = missing(&snapshot);
    assert_eq!(paths, [snapshot.join("model-1.safetensors")]);
    fs::remove_file(snapshot.join("model-1.safetensors")).unwrap();
    fs::write(snapshot.join("model.safetensors"), file(&[])).unwrap();
    let (_, paths) = missing(&snapshot);
    assert_eq!(paths, [snapshot.join("config.json")]);
}
