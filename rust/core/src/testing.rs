//! Small safetensors files and checkpoints for tests, written by hand so that they can also lie.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tempfile::TempDir;

/// A tensor to be written.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: Vec<u8>,
}

/// A tensor whose bytes count up from `name`'s length, so that different tensors differ.
pub(crate) fn tensor(name: &str, dtype: &'static str, shape: &[u64]) -> Tensor {
    let elements: u64 = shape.iter().product();
    let bits = match dtype {
        "F4" => 4,
        "U8" | "I8" | "BOOL" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => 8,
        "BF16" | "F16" | "I16" => 16,
        "F32" | "U32" | "I32" => 32,
        "F64" | "I64" => 64,
        other => panic!("size of {other}"),
    };
    let start = name.len();
    let length = usize::try_from(elements * bits / 8).unwrap();
    Tensor {
        name: name.to_owned(),
        dtype,
        shape: shape.to_vec(),
        bytes: (0..=250).cycle().skip(start % 251).take(length).collect(),
    }
}

/// A tensor of the bytes given.
pub(crate) fn tensor_of(name: &str, dtype: &'static str, shape: &[u64], bytes: &[u8]) -> Tensor {
    Tensor {
        name: name.to_owned(),
        dtype,
        shape: shape.to_vec(),
        bytes: bytes.to_vec(),
    }
}

/// A BF16 tensor with one value.
pub(crate) fn bf16_scalar(name: &str, shape: &[u64], value: f32) -> Tensor {
    tensor_of(name, "BF16", shape, &value.to_le_bytes()[2..])
}

/// An F32 tensor with one value.
pub(crate) fn f32_scalar(name: &str, shape: &[u64], value: f32) -> Tensor {
    tensor_of(name, "F32", shape, &value.to_le_bytes())
}

/// The header of tensors that follow one another.
pub(crate) fn header(tensors: &[Tensor], metadata: Option<&Value>) -> String {
    let mut map = Map::new();
    let mut begin = 0;
    for tensor in tensors {
        let end = begin + tensor.bytes.len();
        map.insert(
            tensor.name.clone(),
            json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}),
        );
        begin = end;
    }
    if let Some(metadata) = metadata {
        map.insert("__metadata__".to_owned(), metadata.clone());
    }
    Value::Object(map).to_string()
}

/// A file of this header and data; the header is written as it is, without padding.
pub(crate) fn file_of(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    bytes
}

/// A valid file.
pub(crate) fn file(tensors: &[Tensor]) -> Vec<u8> {
    let data: Vec<u8> = tensors
        .iter()
        .flat_map(|tensor| tensor.bytes.clone())
        .collect();
    file_of(&header(tensors, None), &data)
}

/// A directory that lasts as long as the test.
pub(crate) struct Folder(TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// Writes any file, with the directories above it.
    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }

    /// Writes a safetensors file.
    pub(crate) fn tensors(&self, name: &str, tensors: &[Tensor]) -> PathBuf {
        self.write(name, file(tensors))
    }

    /// Writes `model.safetensors.index.json` with these tensors and files.
    pub(crate) fn index(&self, entries: &[(&str, &str)]) -> PathBuf {
        let map: Map<String, Value> = entries
            .iter()
            .map(|(tensor, file)| ((*tensor).to_owned(), json!(file)))
            .collect();
        let index = json!({"metadata": {"total_size": 0}, "weight_map": map});
        self.write("model.safetensors.index.json", index.to_string())
    }

    /// Writes the files and an index of all their tensors.
    pub(crate) fn indexed(&self, files: &[(&str, &[Tensor])]) -> PathBuf {
        let mut entries = Vec::new();
        for (name, tensors) in files {
            self.tensors(name, tensors);
            entries.extend(tensors.iter().map(|tensor| (tensor.name.as_str(), *name)));
        }
        self.index(&entries)
    }

    /// Writes `config.json`.
    pub(crate) fn config(&self, config: &Value) -> PathBuf {
        self.write("config.json", config.to_string())
    }
}
