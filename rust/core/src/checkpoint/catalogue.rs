//! Every tensor of a checkpoint, compactly: a hundred thousand of them should not cost a server
//! tens of megabytes. Names lie in one text, sorted; equal shapes are kept once.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use safetensors::Dtype;

use super::{CheckpointFile, Listing, TensorInfo};
use crate::error::{Error, Result};
use crate::header::TensorEntry;

/// The tensors of one file, sorted by name.
#[derive(Debug, Default)]
pub(super) struct Pack {
    names: String,
    shapes: Vec<u64>,
    records: Vec<PackRecord>,
}

#[derive(Debug, Clone, Copy)]
struct PackRecord {
    name_end: usize,
    shape_end: usize,
    offset: u64,
    dtype: Dtype,
}

impl Pack {
    pub(super) fn new(mut tensors: Vec<TensorEntry>) -> Self {
        tensors.sort_unstable_by(|left, right| left.name.cmp(&right.name));
        let mut pack = Self {
            names: String::with_capacity(tensors.iter().map(|tensor| tensor.name.len()).sum()),
            shapes: Vec::with_capacity(tensors.iter().map(|tensor| tensor.shape.len()).sum()),
            records: Vec::with_capacity(tensors.len()),
        };
        for tensor in tensors {
            pack.names.push_str(&tensor.name);
            pack.shapes.extend_from_slice(&tensor.shape);
            pack.records.push(PackRecord {
                name_end: pack.names.len(),
                shape_end: pack.shapes.len(),
                offset: tensor.begin,
                dtype: tensor.dtype,
            });
        }
        pack
    }

    fn name(&self, position: usize) -> &str {
        let start = position
            .checked_sub(1)
            .map_or(0, |before| self.records[before].name_end);
        &self.names[start..self.records[position].name_end]
    }

    fn shape(&self, position: usize) -> &[u64] {
        let start = position
            .checked_sub(1)
            .map_or(0, |before| self.records[before].shape_end);
        &self.shapes[start..self.records[position].shape_end]
    }
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

#[derive(Debug, Clone, Copy)]
struct Record {
    offset: u64,
    name_end: u32,
    shape: u32,
    file: u32,
    dtype: Dtype,
    listing: Listing,
}

/// Every tensor of a checkpoint, sorted by name.
#[derive(Debug, Default)]
pub(super) struct Catalogue {
    names: String,
    shapes: Vec<Box<[u64]>>,
    records: Vec<Record>,
}

/// Names of ignored second copies, each with its file.
pub(super) type Copies = Vec<(String, usize)>;

/// A tensor of a pack, before the packs are joined.
#[derive(Debug, Clone, Copy)]
struct Candidate<'a> {
    name: &'a str,
    file: usize,
    at: usize,
}

impl Catalogue {
    /// Joins the contents of all files and holds them against the index, where there is one.
    pub(super) fn merge(
        packs: &[Pack],
        files: &[CheckpointFile],
        listed: Option<&Listed<'_>>,
    ) -> Result<(Self, Copies)> {
        let mut order: Vec<Candidate<'_>> =
            Vec::with_capacity(packs.iter().map(|pack| pack.records.len()).sum());
        for (file, pack) in packs.iter().enumerate() {
            order.extend((0..pack.records.len()).map(|at| Candidate {
                name: pack.name(at),
                file,
                at,
            }));
        }
        // Each file is in order already, and this sort makes use of that. Equal names stay in the
        // order of their files.
        order.sort_by_key(|candidate| candidate.name);

        let mut builder = Builder::new(packs, order.len());
        match listed {
            None => once_each(&mut builder, &order, files)?,
            Some(listed) => as_listed(&mut builder, &order, files, listed)?,
        }
        Ok((builder.catalogue, builder.copies))
    }

    pub(super) fn len(&self) -> usize {
        self.records.len()
    }

    fn name(&self, position: usize) -> &str {
        let start = position
            .checked_sub(1)
            .map_or(0, |before| self.records[before].name_end);
        &self.names[start as usize..self.records[position].name_end as usize]
    }

    pub(super) fn get(&self, position: usize) -> (&str, TensorInfo<'_>) {
        let record = &self.records[position];
        let shape: &[u64] = &self.shapes[record.shape as usize];
        let info = TensorInfo {
            dtype: record.dtype,
            shape,
            file: record.file as usize,
            offset: record.offset,
            bytes: crate::header::tensor_bytes(record.dtype, shape)
                .unwrap_or_else(|problem| unreachable!("accepted by header::parse: {problem}")),
            listing: record.listing,
        };
        (self.name(position), info)
    }

    /// Position of the first tensor called `name`.
    pub(super) fn find(&self, name: &str) -> Option<usize> {
        let mut range = 0..self.len();
        while !range.is_empty() {
            let middle = range.start + range.len() / 2;
            if self.name(middle) < name {
                range.start = middle + 1;
            } else {
                range.end = middle;
            }
        }
        (range.start < self.len() && self.name(range.start) == name).then_some(range.start)
    }
}

/// Without an index, no tensor may be there twice.
fn once_each(
    builder: &mut Builder<'_>,
    order: &[Candidate<'_>],
    files: &[CheckpointFile],
) -> Result<()> {
    if let Some([first, second]) = order.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(Error::checkpoint(
            format!(
                "tensor {:?} is in this file and in {}, and no index says which one counts; \
                 remove the one that does not belong here",
                first.name,
                files[first.file].path.display()
            ),
            &files[second.file].path,
        ));
    }
    order
        .iter()
        .try_for_each(|candidate| builder.push(candidate, Listing::Named))
}

/// With an index, every entry has to be where the index says.
fn as_listed(
    builder: &mut Builder<'_>,
    order: &[Candidate<'_>],
    files: &[CheckpointFile],
    listed: &Listed<'_>,
) -> Result<()> {
    let absent = |(name, file): &(Cow<'_, str>, u32), found: &[Candidate<'_>]| {
        let elsewhere = found.first().map_or(String::new(), |other| {
            format!("; it is in {}", files[other.file].path.display())
        });
        Error::checkpoint(
            format!(
                "the index {} says that tensor {name:?} is in this file, but the file does not \
                 contain it{elsewhere}",
                listed.path.display()
            ),
            &files[*file as usize].path,
        )
    };
    let mut entries = listed.entries.iter().peekable();
    for found in order.chunk_by(|left, right| left.name == right.name) {
        let name = found[0].name;
        if let Some(skipped) = entries.next_if(|(entry, _)| entry.as_ref() < name) {
            return Err(absent(skipped, &[]));
        }
        if let Some(entry) = entries.next_if(|(entry, _)| entry == name) {
            let place = entry.1 as usize;
            let named = found.iter().find(|candidate| candidate.file == place);
            builder.push(named.ok_or_else(|| absent(entry, found))?, Listing::Named)?;
            let others = found.iter().filter(|candidate| candidate.file != place);
            builder
                .copies
                .extend(others.map(|candidate| (name.to_owned(), candidate.file)));
        } else {
            for candidate in found {
                let listing = if candidate.file < listed.files {
                    Listing::Unlisted
                } else {
                    Listing::SideFile
                };
                builder.push(candidate, listing)?;
            }
        }
    }
    match entries.next() {
        Some(entry) => Err(absent(entry, &[])),
        None => Ok(()),
    }
}

struct Builder<'a> {
    packs: &'a [Pack],
    catalogue: Catalogue,
    shape_numbers: HashMap<&'a [u64], u32>,
    copies: Copies,
}

impl<'a> Builder<'a> {
    fn new(packs: &'a [Pack], tensors: usize) -> Self {
        Self {
            packs,
            catalogue: Catalogue {
                names: String::with_capacity(packs.iter().map(|pack| pack.names.len()).sum()),
                shapes: Vec::new(),
                records: Vec::with_capacity(tensors),
            },
            shape_numbers: HashMap::new(),
            copies: Vec::new(),
        }
    }

    fn push(&mut self, candidate: &Candidate<'_>, listing: Listing) -> Result<()> {
        let too_many = |_| Error::value("the checkpoint has more tensors than fit 32-bit numbers");
        let pack = &self.packs[candidate.file];
        let shape = pack.shape(candidate.at);
        let shape = if let Some(&number) = self.shape_numbers.get(shape) {
            number
        } else {
            let number = u32::try_from(self.catalogue.shapes.len()).map_err(too_many)?;
            self.catalogue.shapes.push(shape.into());
            self.shape_numbers.insert(shape, number);
            number
        };
        self.catalogue.names.push_str(candidate.name);
        self.catalogue.records.push(Record {
            offset: pack.records[candidate.at].offset,
            name_end: u32::try_from(self.catalogue.names.len()).map_err(too_many)?,
            shape,
            file: u32::try_from(candidate.file).map_err(too_many)?,
            dtype: pack.records[candidate.at].dtype,
            listing,
        });
        Ok(())
    }
}
