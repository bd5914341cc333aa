//! The tensors of all files in one list, held against the index.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::path::Path;

use super::packed::{Cursor, Packed, Packer, Record};
use super::{CheckpointFile, Listing};
use crate::error::{Error, Result};
use crate::header::TensorEntry;

/// The tensors of one file, which come sorted by name.
pub(super) fn pack(tensors: &[TensorEntry<'_>], file: usize) -> Packed {
    let mut packer = Packer::default();
    for tensor in tensors {
        let record = Record {
            kind: packer.kind(tensor.dtype, &tensor.shape),
            file,
            offset: tensor.begin,
            listing: Listing::Named,
        };
        packer.push(&tensor.name, record);
    }
    packer.finish()
}

/// What an index says, for comparison with what the files contain.
pub(super) struct Listed<'a> {
    /// Tensor name and file, sorted by name.
    pub(super) entries: &'a [(Cow<'a, str>, u32)],
    /// The first this many files are named by the index.
    pub(super) files: usize,
    /// The index itself.
    pub(super) path: &'a Path,
}

/// Names of ignored second copies, each with its file.
pub(super) type Copies = Vec<(String, usize)>;

/// Joins the tensors of all files; `packs[n]` are those of `files[n]`.
pub(super) fn merge(
    packs: &[Packed],
    files: &[CheckpointFile],
    listed: Option<&Listed<'_>>,
) -> Result<(Packed, Copies)> {
    if let Some(packer) = listed.and_then(|listed| as_named(packs, listed)) {
        return Ok((packer.finish(), Copies::new()));
    }
    let mut merged = Merged {
        packer: Packer::default(),
        packs,
        files,
        copies: Vec::new(),
    };
    match listed {
        None => {
            each_name(packs, |name, found| merged.only_one(name, found))?;
        }
        Some(listed) => {
            let mut entries = listed.entries.iter().peekable();
            each_name(packs, |name, found| {
                if let Some((entry, file)) = entries.next_if(|(entry, _)| entry.as_ref() < name) {
                    return Err(merged.absent(entry, *file, &[], listed));
                }
                if let Some((_, file)) = entries.next_if(|(entry, _)| entry == name) {
                    return merged.as_listed(name, *file, found, listed);
                }
                merged.not_listed(name, found, listed);
                Ok(())
            })?;
            if let Some((entry, file)) = entries.next() {
                return Err(merged.absent(entry, *file, &[], listed));
            }
        }
    }
    Ok((merged.packer.finish(), merged.copies))
}

/// The tensors of an index that names every tensor of every file, each once and where it is: the
/// names need not be sorted again then. `None` if there is anything else to say.
fn as_named(packs: &[Packed], listed: &Listed<'_>) -> Option<Packer> {
    if packs.iter().map(Packed::len).sum::<usize>() != listed.entries.len() {
        return None;
    }
    let mut cursors: Vec<Cursor<'_>> = packs.iter().map(Packed::cursor).collect();
    let mut packer = Packer::default();
    for (name, file) in listed.entries {
        let file = *file as usize;
        let (found, record) = cursors.get_mut(file)?.next()?;
        if found != name {
            return None;
        }
        push(&mut packer, packs, name, &record, Listing::Named);
    }
    Some(packer)
}

/// Adds a record of one file to those of all.
fn push(packer: &mut Packer, packs: &[Packed], name: &str, record: &Record, listing: Listing) {
    let (dtype, shape) = packs[record.file].kind(record.kind);
    let record = Record {
        kind: packer.kind(dtype, shape),
        listing,
        ..*record
    };
    packer.push(name, record);
}

/// Calls `visit` with every name in order and all records that have it, in the order of files.
fn each_name(packs: &[Packed], mut visit: impl FnMut(&str, &[Record]) -> Result<()>) -> Result<()> {
    let mut heads: BinaryHeap<Head<'_>> = packs
        .iter()
        .filter_map(|pack| Head::first(pack.cursor()))
        .collect();
    let mut name = String::new();
    let mut found: Vec<Record> = Vec::new();
    while let Some(mut head) = heads.peek_mut() {
        if head.cursor.name() != name {
            if !found.is_empty() {
                visit(&name, &found)?;
                found.clear();
            }
            name.clear();
            name.push_str(head.cursor.name());
        }
        found.push(head.record);
        if !head.advance() {
            std::collections::binary_heap::PeekMut::pop(head);
        }
    }
    if found.is_empty() {
        Ok(())
    } else {
        visit(&name, &found)
    }
}

/// The next record of one file; the smallest name, then the first file, is the greatest.
struct Head<'a> {
    cursor: Cursor<'a>,
    record: Record,
}

impl<'a> Head<'a> {
    fn first(mut cursor: Cursor<'a>) -> Option<Self> {
        let (_, record) = cursor.next()?;
        Some(Self { cursor, record })
    }

    fn advance(&mut self) -> bool {
        match self.cursor.next() {
            Some((_, record)) => {
                self.record = record;
                true
            }
            None => false,
        }
    }

    fn key(&self) -> (&str, usize) {
        (self.cursor.name(), self.record.file)
    }
}

impl Ord for Head<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        other.key().cmp(&self.key())
    }
}

impl PartialOrd for Head<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Head<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Head<'_> {}

struct Merged<'a> {
    packer: Packer,
    packs: &'a [Packed],
    files: &'a [CheckpointFile],
    copies: Copies,
}

impl Merged<'_> {
    /// Without an index, no tensor may be there twice.
    fn only_one(&mut self, name: &str, found: &[Record]) -> Result<()> {
        if let [first, second, ..] = found {
            return Err(Error::checkpoint(
                format!(
                    "tensor {name:?} is in this file and in {}, and no index says which one \
                     counts; remove the one that does not belong here",
                    self.files[first.file].path.display()
                ),
                &self.files[second.file].path,
            ));
        }
        self.push(name, &found[0], Listing::Named);
        Ok(())
    }

    /// The index says that `name` is in `file`; copies elsewhere are set aside.
    fn as_listed(
        &mut self,
        name: &str,
        file: u32,
        found: &[Record],
        listed: &Listed<'_>,
    ) -> Result<()> {
        let Some(here) = found.iter().find(|record| record.file == file as usize) else {
            return Err(self.absent(name, file, found, listed));
        };
        self.push(name, here, Listing::Named);
        let elsewhere = found.iter().filter(|record| record.file != here.file);
        let copies = elsewhere.map(|record| (name.to_owned(), record.file));
        self.copies.extend(copies);
        Ok(())
    }

    /// The index does not name `name`.
    fn not_listed(&mut self, name: &str, found: &[Record], listed: &Listed<'_>) {
        for record in found {
            let listing = if record.file < listed.files {
                Listing::Unlisted
            } else {
                Listing::SideFile
            };
            self.push(name, record, listing);
        }
    }

    fn push(&mut self, name: &str, record: &Record, listing: Listing) {
        push(&mut self.packer, self.packs, name, record, listing);
    }

    /// The error for a tensor that is not where the index says.
    fn absent(&self, name: &str, file: u32, found: &[Record], listed: &Listed<'_>) -> Error {
        let elsewhere = found.first().map_or(String::new(), |record| {
            format!("; it is in {}", self.files[record.file].path.display())
        });
        Error::checkpoint(
            format!(
                "the index {} says that tensor {name:?} is in this file, but the file does not \
                 contain it{elsewhere}",
                listed.path.display()
            ),
            &self.files[file as usize].path,
        )
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use safetensors::Dtype;

    use super::*;

    fn packs_of(tensors: &BTreeMap<(usize, String), u64>, files: usize) -> Vec<Packed> {
        let entries = |file: usize| {
            tensors
                .iter()
                .filter(move |((of, _), _)| *of == file)
                .map(|((_, name), &begin)| TensorEntry {
                    name: Cow::Borrowed(name.as_str()),
                    dtype: Dtype::U8,
                    shape: vec![begin % 3, 2],
                    begin,
                    end: begin + 1,
                })
                .collect::<Vec<_>>()
        };
        (0..files).map(|file| pack(&entries(file), file)).collect()
    }

    fn records(packed: &Packed) -> Vec<(String, Record, Vec<u64>)> {
        let mut cursor = packed.cursor();
        std::iter::from_fn(|| {
            let (name, record) = cursor.next()?;
            let shape = packed.kind(record.kind).1.to_vec();
            Some((name.to_owned(), record, shape))
        })
        .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn an_index_that_names_all_is_merged_as_any_other(
            tensors in prop::collection::btree_map("[ab.]{1,6}", (0_usize..4, 0_u64..1000), 1..40),
            change in 0_usize..4,
            pick in any::<prop::sample::Index>(),
        ) {
            let in_files: BTreeMap<(usize, String), u64> =
                tensors.iter().map(|(name, &(file, begin))| ((file, name.clone()), begin)).collect();
            let mut entries: Vec<(Cow<'_, str>, u32)> = tensors
                .iter()
                .map(|(name, &(file, _))| (Cow::Borrowed(name.as_str()), file as u32))
                .collect();
            let mut in_files = in_files;
            let place = pick.index(entries.len());
            match change {
                0 => {}
                1 => drop(entries.remove(place)),
                2 => entries[place].1 = (entries[place].1 + 1) % 4,
                _ => {
                    let (name, file) = &entries[place];
                    in_files.insert((*file as usize + 1, name.to_string()), 7);
                }
            }
            let packs = packs_of(&in_files, 5);
            let listed = Listed { entries: &entries, files: 4, path: Path::new("index") };
            let short = as_named(&packs, &listed).map(Packer::finish);
            prop_assert_eq!(short.is_some(), change == 0);
            if let Some(short) = short {
                let mut merged = Merged {
                    packer: Packer::default(),
                    packs: &packs,
                    files: &[],
                    copies: Vec::new(),
                };
                each_name(&packs, |name, found| merged.only_one(name, found)).unwrap();
                prop_assert_eq!(records(&short), records(&merged.packer.finish()));
            }
        }
    }
}
