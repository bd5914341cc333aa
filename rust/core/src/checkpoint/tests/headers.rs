//! Headers of every length, of files of every size, and what they say besides tensors.

use super::*;

/// I31 and K04: a table of the real size is opened by its header alone.
#[test]
fn sparse_file_of_the_real_size() {
    let folder = Folder::new();
    let (rows, begin) = (384_006_168_u64, 98_305_579_008_u64);
    let header = format!(
        r#"{{"layers.1.engram.embed.weight":{{"dtype":"F8_E4M3","shape":[{rows},256],"data_offsets":[0,{begin}]}},
            "layers.1.engram.embed.scale":{{"dtype":"F8_E8M0","shape":[{rows},8],"data_offsets":[{begin},{}]}}}}"#,
        begin + rows * 8
    );
    let path = folder.write("model.safetensors", file_of(&header, b""));
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    let length = 8 + header.len() as u64 + begin + rows * 8;
    if file.set_len(length).is_err() {
        return; // This file system has no sparse files of that size.
    }
    let checkpoint = open(&path);
    let scale = checkpoint.tensor("layers.1.engram.embed.scale").unwrap();
    assert_eq!(scale.offset, 8 + header.len() as u64 + begin);
    assert_eq!(scale.offset + scale.bytes, length);
}

/// F21: headers of every length, so that data begins at every alignment.
#[test]
fn data_after_a_header_of_any_length() {
    let folder = Folder::new();
    for padding in 0..64 {
        let table = tensor("table", "BF16", &[3, 2]);
        let header = crate::testing::header(std::slice::from_ref(&table), None);
        let header = format!("{header}{}", " ".repeat(padding));
        let path = folder.write("a.safetensors", file_of(&header, &table.bytes));
        assert_eq!(open(&path).read_tensor("table", 12).unwrap(), table.bytes);
    }
}

#[test]
fn metadata_of_each_file_is_kept_unless_it_is_long() {
    let folder = Folder::new();
    let header = crate::testing::header(
        &[],
        Some(&json!({"row_dim": "160", "log": "x".repeat(300)})),
    );
    folder.write("a.safetensors", file_of(&header, b""));
    folder.tensors("b.safetensors", &[]);
    let checkpoint = open(folder.path());
    assert_eq!(checkpoint.metadata(0).unwrap().len(), 1);
    assert_eq!(checkpoint.metadata(0).unwrap()["row_dim"], "160");
    assert!(checkpoint.metadata(1).is_none());
    assert!(checkpoint.metadata(2).is_none());
}
