//! The header of a safetensors file: bytes in, tensors out. Pure: it never sees the file.
//!
//! Whether a header is valid is the `safetensors` crate's verdict. Two things are added: words that
//! name the tensor and the numbers that disagree, and refusals of what the crate lets pass (a
//! tensor defined twice, where it keeps the last definition). A file with one unreadable tensor is
//! refused as a whole, as the crate does, even when that tensor is not part of a table.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use crate::error::{Error, Result};

mod json;

/// Longest header accepted, the same as the reference implementation's limit.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Bytes before the header: its length, little-endian.
pub const LENGTH_BYTES: u64 = 8;

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry<'a> {
    /// Name in the header, borrowed from it unless it is written with escapes.
    pub name: Cow<'a, str>,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// Absolute byte offset of the first element in the file.
    pub begin: u64,
    /// Absolute byte offset just past the last element.
    pub end: u64,
}

/// A file's header, checked against the file's length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header<'a> {
    /// Every tensor, in the order of their names.
    pub tensors: Vec<TensorEntry<'a>>,
    /// The free-form `__metadata__` entry.
    pub metadata: Option<HashMap<String, String>>,
    /// Absolute byte offset of the data section.
    pub data_start: u64,
}

/// The header's length, from the first eight bytes of a file of `file_len` bytes.
///
/// Nothing may be allocated or read on the strength of those bytes before this has accepted them.
pub fn header_length(first8: [u8; 8], file_len: u64, path: &Path) -> Result<u64> {
    let length = u64::from_le_bytes(first8);
    let room = file_len.saturating_sub(LENGTH_BYTES);
    if (1..=room.min(MAX_HEADER_BYTES)).contains(&length) {
        return Ok(length);
    }
    let message = if length == 0 {
        "not a safetensors file: its header length is 0 (an unfinished download whose space was \
         reserved in advance reads like this)"
            .to_owned()
    } else if let Some(what) = recognise(first8) {
        format!("not a safetensors file but {what}")
    } else if length > MAX_HEADER_BYTES {
        format!(
            "header length {length} exceeds the limit of {MAX_HEADER_BYTES} bytes (the file has \
             {file_len} bytes); this is not a safetensors file, or its first bytes are damaged"
        )
    } else {
        format!(
            "header length {length} runs past the end of the file, which has {file_len} bytes: \
             an incomplete download, or not a safetensors file"
        )
    };
    Err(Error::checkpoint(message, path))
}

/// The error for a file too short to hold even a header length.
pub fn too_short(file_len: u64, path: &Path) -> Error {
    let message = if file_len == 0 {
        "the file is empty: the download has not started or failed".to_owned()
    } else {
        format!(
            "the file has only {file_len} bytes, less than a safetensors header: an incomplete download"
        )
    };
    Error::checkpoint(message, path)
}

/// What the first bytes of a file that is not safetensors say it is.
fn recognise(first8: [u8; 8]) -> Option<&'static str> {
    const KNOWN: [(&[u8], &str); 14] = [
        (
            b"version ",
            "a Git LFS pointer: fetch the real file with `git lfs pull`",
        ),
        (
            b"<!doctyp",
            "an HTML page, most likely a login or error page that was saved as the file",
        ),
        (
            b"<html",
            "an HTML page, most likely a login or error page that was saved as the file",
        ),
        (
            b"<?xml",
            "an XML document, most likely a storage server's error reply",
        ),
        (
            b"{",
            "JSON text; an index is read under a name that ends in .json",
        ),
        (b"[", "JSON text"),
        (
            b"gguf",
            "a GGUF file: engram reads safetensors, so pass the original checkpoint",
        ),
        (
            b"pk\x03\x04",
            "a zip archive, such as torch.save writes: convert it to safetensors",
        ),
        (b"\x80\x02", "a Python pickle: convert it to safetensors"),
        (b"\x80\x04", "a Python pickle: convert it to safetensors"),
        (b"\x93numpy", "a NumPy array file"),
        (b"\x89hdf", "an HDF5 file"),
        (b"\x1f\x8b", "gzip data: decompress it first"),
        (b"\x28\xb5\x2f\xfd", "zstd data: decompress it first"),
    ];
    let lower = first8.to_ascii_lowercase();
    let text = lower.trim_ascii_start();
    KNOWN
        .iter()
        .find(|(magic, _)| text.starts_with(magic))
        .map(|&(_, what)| what)
}

/// Parses the header of a file of `file_len` bytes and checks every range against it.
pub fn parse<'a>(header: &'a [u8], file_len: u64, path: &Path) -> Result<Header<'a>> {
    let refuse = |message: String| Error::checkpoint(message, path);
    let nul_bytes = header.iter().rev().take_while(|&&byte| byte == 0).count();
    if nul_bytes > 0 {
        return Err(refuse(format!(
            "the header is padded with {nul_bytes} NUL byte{}; only spaces may pad it, so the \
             file has to be written again",
            if nul_bytes == 1 { "" } else { "s" }
        )));
    }
    let text = std::str::from_utf8(header).map_err(|error| {
        refuse(format!(
            "the header is not UTF-8 text from byte {} on",
            error.valid_up_to()
        ))
    })?;
    let raw =
        json::read(text).map_err(|error| refuse(format!("the header is invalid: {error}")))?;

    let mut tensors = Vec::with_capacity(raw.tensors.len());
    for (name, tensor) in raw.tensors {
        if let Some(problem) = tensor.problem {
            return Err(refuse(format!("tensor {name:?}: {problem}")));
        }
        tensors.push(TensorEntry {
            name,
            dtype: tensor.dtype,
            shape: tensor.shape,
            begin: tensor.begin,
            end: tensor.end,
        });
    }
    // Writers sort names within a dtype, and this sort makes use of what is sorted already.
    tensors.sort_by(|left, right| left.name.cmp(&right.name));
    if let Some(pair) = tensors.windows(2).find(|pair| pair[0].name == pair[1].name) {
        let name = &pair[0].name;
        return Err(refuse(format!(
            "tensor {name:?} is defined twice in the header"
        )));
    }
    // The order of keys says nothing about the order of data.
    let mut by_data: Vec<&TensorEntry<'_>> = tensors.iter().collect();
    by_data.sort_by_key(|tensor| (tensor.begin, tensor.end));
    if let Err(verdict) = reference_verdict(&by_data) {
        let reason = explain(&by_data).unwrap_or_else(|| verdict.to_string());
        return Err(refuse(reason));
    }

    let header_len = u64::try_from(header.len()).unwrap_or(u64::MAX);
    let data_start = header_len.saturating_add(LENGTH_BYTES);
    let data_len = by_data.last().map_or(0, |tensor| tensor.end);
    let expected = data_start.saturating_add(data_len);
    if expected > file_len {
        return Err(refuse(format!(
            "the file is shorter than its header says: expected {expected} bytes, found \
             {file_len}; the download is incomplete"
        )));
    }
    let uncovered = file_len - expected;
    if uncovered > 0 {
        return Err(refuse(format!(
            "the file is longer than its header says: {uncovered} byte{} after the last tensor \
             belong to none",
            if uncovered == 1 { "" } else { "s" }
        )));
    }
    for tensor in &mut tensors {
        tensor.begin += data_start;
        tensor.end += data_start;
    }
    Ok(Header {
        tensors,
        metadata: raw.metadata,
        data_start,
    })
}

/// Asks the `safetensors` crate. Names are left out: they only serve its messages, and ours say more.
fn reference_verdict(tensors: &[&TensorEntry<'_>]) -> std::result::Result<(), Verdict> {
    let infos = tensors
        .iter()
        .map(|tensor| {
            let shape = tensor.shape.iter().map(|&size| usize::try_from(size));
            let info = TensorInfo {
                dtype: tensor.dtype,
                shape: shape.collect::<std::result::Result<_, _>>().ok()?,
                data_offsets: (
                    usize::try_from(tensor.begin).ok()?,
                    usize::try_from(tensor.end).ok()?,
                ),
            };
            Some((String::new(), info))
        })
        .collect::<Option<Vec<_>>>()
        .ok_or(Verdict::TooLargeForThisMachine)?;
    Metadata::new(None, infos)
        .map(drop)
        .map_err(Verdict::Refused)
}

enum Verdict {
    TooLargeForThisMachine,
    Refused(safetensors::SafeTensorError),
}

impl fmt::Display for Verdict {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLargeForThisMachine => {
                formatter.write_str("a size in the header is larger than this machine can address")
            }
            Self::Refused(error) => write!(formatter, "the header is invalid: {error}"),
        }
    }
}

/// Bytes that `shape` elements of `dtype` take.
///
/// # Errors
/// The reason in words, when that is not a whole number of bytes below 2^64.
pub fn tensor_bytes(dtype: Dtype, shape: &[u64]) -> std::result::Result<u64, String> {
    // As the reference implementation does it: in order, so that a zero after an overflow does not help.
    let bits = shape
        .iter()
        .try_fold(1_u64, |product, &size| product.checked_mul(size))
        .and_then(|elements| elements.checked_mul(u64::try_from(dtype.bitsize()).ok()?))
        .ok_or_else(|| format!("the size of shape {shape:?} of {dtype} overflows 64 bits"))?;
    if bits % 8 == 0 {
        Ok(bits / 8)
    } else {
        Err(format!(
            "shape {shape:?} of {dtype} is {bits} bits, not a whole number of bytes"
        ))
    }
}

/// Why the tensors, sorted by their ranges, are refused. Each tensor is held against itself first:
/// a wrong range usually makes its neighbours look wrong too.
fn explain(tensors: &[&TensorEntry<'_>]) -> Option<String> {
    for tensor in tensors {
        let TensorEntry {
            name,
            dtype,
            shape,
            begin,
            end,
        } = tensor;
        if end < begin {
            return Some(format!(
                "tensor {name:?}: data_offsets [{begin}, {end}] are reversed"
            ));
        }
        match tensor_bytes(*dtype, shape) {
            Err(problem) => return Some(format!("tensor {name:?}: {problem}")),
            Ok(bytes) if bytes != end - begin => {
                return Some(format!(
                    "tensor {name:?}: shape {shape:?} of {dtype} takes {bytes} bytes, but \
                     data_offsets [{begin}, {end}] cover {} bytes",
                    end - begin
                ));
            }
            Ok(_) => {}
        }
    }
    let mut previous: Option<&TensorEntry<'_>> = None;
    for tensor in tensors {
        let covered = previous.map_or(0, |before| before.end);
        if tensor.begin > covered {
            return Some(format!(
                "a hole of {} bytes before tensor {:?}: data up to {covered} is accounted for, \
                 its data_offsets are [{}, {}]",
                tensor.begin - covered,
                tensor.name,
                tensor.begin,
                tensor.end
            ));
        }
        if let Some(before) = previous
            && tensor.begin < before.end
        {
            return Some(format!(
                "tensor {:?} with data_offsets [{}, {}] overlaps tensor {:?}, which ends at {}",
                tensor.name, tensor.begin, tensor.end, before.name, before.end
            ));
        }
        previous = Some(tensor);
    }
    None
}

#[cfg(test)]
mod tests;
