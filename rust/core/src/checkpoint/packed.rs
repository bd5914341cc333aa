//! Sorted tensor records in few bytes: of each name only what differs from the name before, and
//! numbers as long as they need to be. A hundred thousand tensors, whose names alone would be six
//! megabytes, take about three.

use std::collections::HashMap;

use safetensors::Dtype;

use super::Listing;

/// Every this many records the whole name is written, so that a search can start there.
const RESTART: usize = 16;

/// So many kinds are found faster by looking through them than by hashing.
const FEW_KINDS: usize = 8;

/// Where a tensor lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Record {
    /// Dtype and shape: a number that [`Packed::kind`] understands.
    pub(super) kind: usize,
    pub(super) file: usize,
    pub(super) offset: u64,
    pub(super) listing: Listing,
}

/// Records sorted by name. Names may repeat.
#[derive(Debug, Default)]
pub(super) struct Packed {
    /// What each name adds to the beginning it shares with the one before.
    text: String,
    /// Per record: bytes shared, bytes added, kind, file with listing, offset.
    codes: Vec<u8>,
    /// Positions in `text` and `codes` of every `RESTART`-th record.
    restarts: Vec<(usize, usize)>,
    kinds: Vec<(Dtype, Box<[u64]>)>,
    len: usize,
}

impl Packed {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Dtype and shape of this number.
    pub(super) fn kind(&self, number: usize) -> (Dtype, &[u64]) {
        let (dtype, shape) = &self.kinds[number];
        (*dtype, shape)
    }

    /// Reads all records in order.
    pub(super) fn cursor(&self) -> Cursor<'_> {
        self.cursor_at(0)
    }

    /// Every record called `name`.
    pub(super) fn find(&self, name: &str) -> Vec<Record> {
        // Records of this name may begin before the first restart that has it.
        let restart = self
            .restarts
            .partition_point(|&start| self.whole_name(start) < name)
            .saturating_sub(1);
        let mut cursor = self.cursor_at(restart);
        let mut records = Vec::new();
        while let Some((found, record)) = cursor.next() {
            match found.cmp(name) {
                std::cmp::Ordering::Less => {}
                std::cmp::Ordering::Equal => records.push(record),
                std::cmp::Ordering::Greater => break,
            }
        }
        records
    }

    fn cursor_at(&self, restart: usize) -> Cursor<'_> {
        let (text_at, code_at) = self.restarts.get(restart).copied().unwrap_or_default();
        Cursor {
            packed: self,
            name: String::new(),
            text_at,
            code_at,
            left: self.len - restart * RESTART,
        }
    }

    /// The name at a restart, which shares nothing with the one before.
    fn whole_name(&self, (text_at, mut code_at): (usize, usize)) -> &str {
        let _shared = read_index(&self.codes, &mut code_at);
        let length = read_index(&self.codes, &mut code_at);
        &self.text[text_at..text_at + length]
    }
}

/// Reads records one after another. Not an iterator: the name lasts until the next call only.
#[derive(Debug)]
pub(super) struct Cursor<'a> {
    packed: &'a Packed,
    name: String,
    text_at: usize,
    code_at: usize,
    left: usize,
}

impl Cursor<'_> {
    /// The next record and its name.
    pub(super) fn next(&mut self) -> Option<(&str, Record)> {
        self.left = self.left.checked_sub(1)?;
        let Packed { text, codes, .. } = self.packed;
        let shared = read_index(codes, &mut self.code_at);
        let added = read_index(codes, &mut self.code_at);
        let kind = read_index(codes, &mut self.code_at);
        let place = read_index(codes, &mut self.code_at);
        let offset = read(codes, &mut self.code_at);
        self.name.truncate(shared);
        self.name
            .push_str(&text[self.text_at..self.text_at + added]);
        self.text_at += added;
        let record = Record {
            kind,
            file: place / Listing::ALL.len(),
            offset,
            listing: Listing::ALL[place % Listing::ALL.len()],
        };
        Some((&self.name, record))
    }

    /// The name that the last call of [`Cursor::next`] returned.
    pub(super) fn name(&self) -> &str {
        &self.name
    }
}

/// Writes records, which have to come sorted by name.
#[derive(Debug, Default)]
pub(super) struct Packer {
    packed: Packed,
    last: String,
    /// Numbers of the kinds so far, by shape; empty while they are few.
    numbers: HashMap<Box<[u64]>, Vec<(Dtype, usize)>>,
}

impl Packer {
    /// The number of a dtype and shape.
    pub(super) fn kind(&mut self, dtype: Dtype, shape: &[u64]) -> usize {
        let kinds = &mut self.packed.kinds;
        if kinds.len() < FEW_KINDS {
            let same = |(other, known): &(Dtype, Box<[u64]>)| *other == dtype && **known == *shape;
            return kinds.iter().position(same).unwrap_or_else(|| {
                kinds.push((dtype, shape.into()));
                kinds.len() - 1
            });
        }
        if self.numbers.is_empty() {
            for (number, (dtype, shape)) in kinds.iter().enumerate() {
                let alike = self.numbers.entry(shape.clone()).or_default();
                alike.push((*dtype, number));
            }
        }
        let known = self.numbers.get(shape).and_then(|kinds| {
            let same = kinds.iter().find(|(other, _)| *other == dtype);
            same.map(|(_, number)| *number)
        });
        known.unwrap_or_else(|| {
            let number = self.packed.kinds.len();
            self.packed.kinds.push((dtype, shape.into()));
            let kinds = self.numbers.entry(shape.into()).or_default();
            kinds.push((dtype, number));
            number
        })
    }

    /// Adds a record.
    pub(super) fn push(&mut self, name: &str, record: Record) {
        debug_assert!(self.packed.len == 0 || *self.last <= *name);
        let packed = &mut self.packed;
        let shared = if packed.len.is_multiple_of(RESTART) {
            packed
                .restarts
                .push((packed.text.len(), packed.codes.len()));
            0
        } else {
            shared_bytes(&self.last, name)
        };
        let place = record.file * Listing::ALL.len() + record.listing as usize;
        for value in [shared, name.len() - shared, record.kind, place] {
            write(&mut packed.codes, value as u64);
        }
        write(&mut packed.codes, record.offset);
        packed.text.push_str(&name[shared..]);
        packed.len += 1;
        self.last.truncate(shared);
        self.last.push_str(&name[shared..]);
    }

    /// Everything that was added.
    pub(super) fn finish(mut self) -> Packed {
        self.packed.text.shrink_to_fit();
        self.packed.codes.shrink_to_fit();
        self.packed.restarts.shrink_to_fit();
        self.packed
    }
}

/// Length of the longest beginning that both names have, in whole characters.
fn shared_bytes(left: &str, right: &str) -> usize {
    let text = right;
    let (left, right) = (left.as_bytes(), right.as_bytes());
    let most = left.len().min(right.len());
    // Names of one table differ near their end: whole words are compared as long as they are alike.
    let words = left[..most]
        .chunks_exact(8)
        .zip(right[..most].chunks_exact(8));
    let mut shared = 8 * words.take_while(|(left, right)| left == right).count();
    let rest = left[shared..most].iter().zip(&right[shared..most]);
    shared += rest.take_while(|(left, right)| left == right).count();
    while !text.is_char_boundary(shared) {
        shared -= 1;
    }
    shared
}

/// Seven bits a byte, low ones first; the eighth says that more follow.
fn write(codes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        codes.push(0x80 | value.to_le_bytes()[0]);
        value >>= 7;
    }
    codes.push(value.to_le_bytes()[0]);
}

fn read(codes: &[u8], at: &mut usize) -> u64 {
    let mut value = 0;
    for shift in (0..).step_by(7) {
        let byte = codes[*at];
        *at += 1;
        value |= u64::from(byte & 0x7F) << shift;
        if byte < 0x80 {
            break;
        }
    }
    value
}

fn read_index(codes: &[u8], at: &mut usize) -> usize {
    usize::try_from(read(codes, at))
        .unwrap_or_else(|_| unreachable!("it was written from an index"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn records() -> impl Strategy<Value = Vec<(String, Record)>> {
        let name = prop_oneof![
            "[ab.éè☃]{0,12}",
            (0_u32..300).prop_map(|number| format!("model.layers.{number}.weight")),
        ];
        let record = (0_usize..5, 0_usize..300, any::<u64>(), 0_usize..3).prop_map(
            |(kind, file, offset, listing)| Record {
                kind,
                file,
                offset,
                listing: Listing::ALL[listing],
            },
        );
        prop::collection::vec((name, record), 0..200).prop_map(|mut records| {
            records.sort_by(|left, right| left.0.cmp(&right.0));
            records
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn records_come_back_in_order_and_are_found_by_name(
            records in records(),
            absent in "[ab.éè☃]{0,12}",
        ) {
            let mut packer = Packer::default();
            for (name, record) in &records {
                packer.push(name, *record);
            }
            let list = packer.finish();
            prop_assert_eq!(list.len(), records.len());
            let mut cursor = list.cursor();
            for (name, record) in &records {
                prop_assert_eq!(cursor.next(), Some((name.as_str(), *record)));
            }
            prop_assert_eq!(cursor.next(), None);
            for name in records.iter().map(|(name, _)| name).chain([&absent]) {
                let naive: Vec<_> = records
                    .iter()
                    .filter(|(other, _)| other == name)
                    .map(|(_, record)| *record)
                    .collect();
                prop_assert_eq!(list.find(name), naive);
            }
        }
    }

    #[test]
    fn kinds_are_kept_once() {
        let mut packer = Packer::default();
        let shapes: [(Dtype, &[u64]); 4] = [
            (Dtype::U8, &[3, 4]),
            (Dtype::BF16, &[3, 4]),
            (Dtype::U8, &[]),
            (Dtype::U8, &[3, 4]),
        ];
        let numbers = shapes.map(|(dtype, shape)| packer.kind(dtype, shape));
        assert_eq!(numbers, [0, 1, 2, 0]);
        let list = packer.finish();
        assert_eq!(list.kind(1), (Dtype::BF16, &[3, 4][..]));
        assert_eq!(list.kind(2), (Dtype::U8, &[][..]));
    }

    /// Names as in a model with many experts, whose tables are a small part of its tensors.
    #[test]
    fn many_tensors_take_few_bytes() {
        let mut names: Vec<String> = (0..48 * 512)
            .flat_map(|expert| {
                ["down_proj", "gate_proj", "up_proj"].map(|projection| {
                    let (layer, expert) = (expert / 512, expert % 512);
                    format!("model.language_model.layers.{layer}.mlp.experts.{expert}.{projection}.weight")
                })
            })
            .collect();
        names.sort_unstable();
        let mut packer = Packer::default();
        for (number, name) in names.iter().enumerate() {
            let record = Record {
                kind: number % 3,
                file: number / 570,
                offset: 4_000_000 * (number as u64 % 570),
                listing: Listing::Named,
            };
            packer.push(name, record);
        }
        let list = packer.finish();
        let bytes = list.text.len() + list.codes.len() + 16 * list.restarts.len();
        assert!(
            bytes / list.len() < 40,
            "{} bytes per tensor",
            bytes / list.len()
        );
    }
}
