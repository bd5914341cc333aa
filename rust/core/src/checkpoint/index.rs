//! The index of a checkpoint: tensor names and the files they are in. Its content is untrusted.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{self, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::reading;
use crate::error::{Error, Result};

/// Longest index read. The largest ones published have about 14 MB.
const MAX_INDEX_BYTES: u64 = 512 << 20;

/// An index, borrowing from its text.
pub(super) struct Index<'a> {
    /// Tensor name and position in `files`, sorted by name, each name once.
    pub(super) entries: Vec<(Cow<'a, str>, u32)>,
    /// File names as written, sorted, each once.
    pub(super) files: Vec<Cow<'a, str>>,
}

/// The text of the index at `path`.
pub(super) fn text(path: &Path) -> Result<String> {
    reading::small_text(path, MAX_INDEX_BYTES, "index")?.ok_or_else(|| {
        let absent = std::io::Error::from_raw_os_error(libc::ENOENT);
        Error::io("cannot open index", &absent, path)
    })
}

/// Parses an index.
pub(super) fn parse<'a>(text: &'a str, path: &Path) -> Result<Index<'a>> {
    let refuse = |message: String| Error::checkpoint(message, path);
    let root: Root<'a> = serde_json::from_str(text)
        .map_err(|error| refuse(format!("the index is not valid: {error}")))?;
    let Some(mut map) = root.weight_map else {
        return Err(refuse(
            "this JSON file is no index: it has no \"weight_map\" from tensor names to files"
                .to_owned(),
        ));
    };
    if map.entries.is_empty() {
        return Err(refuse("the index names no tensor".to_owned()));
    }
    map.entries.sort_by(|left, right| left.0.cmp(&right.0));
    let conflict = map
        .entries
        .windows(2)
        .find(|pair| pair[0].0 == pair[1].0 && pair[0].1 != pair[1].1);
    if let Some([(name, first), (_, second)]) = conflict {
        let file = |number: u32| &map.files[number as usize];
        return Err(refuse(format!(
            "the index names tensor {name:?} twice, in {:?} and in {:?}",
            file(*first),
            file(*second)
        )));
    }
    map.entries.dedup();

    let mut order: Vec<u32> = (0..).zip(&map.files).map(|(number, _)| number).collect();
    order.sort_by_key(|&number| &map.files[number as usize]);
    let mut place = vec![0; order.len()];
    for (new, &old) in (0..).zip(&order) {
        place[old as usize] = new;
    }
    for (_, file) in &mut map.entries {
        *file = place[*file as usize];
    }
    map.files.sort_unstable();
    Ok(Index {
        entries: map.entries,
        files: map.files,
    })
}

struct Root<'a> {
    weight_map: Option<WeightMap<'a>>,
}

impl<'de: 'a, 'a> Deserialize<'de> for Root<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct RootVisitor;
        impl<'de> Visitor<'de> for RootVisitor {
            type Value = Root<'de>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object with a \"weight_map\"")
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<Root<'de>, A::Error> {
                let mut weight_map = None;
                while let Some(Text(key)) = map.next_key()? {
                    if key != "weight_map" {
                        map.next_value::<IgnoredAny>()?;
                    } else if weight_map.replace(map.next_value()?).is_some() {
                        return Err(de::Error::duplicate_field("weight_map"));
                    }
                }
                Ok(Root { weight_map })
            }
        }
        deserializer.deserialize_map(RootVisitor)
    }
}

struct WeightMap<'a> {
    entries: Vec<(Cow<'a, str>, u32)>,
    files: Vec<Cow<'a, str>>,
}

impl<'de: 'a, 'a> Deserialize<'de> for WeightMap<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct MapVisitor;
        impl<'de> Visitor<'de> for MapVisitor {
            type Value = WeightMap<'de>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a \"weight_map\" from tensor names to file names")
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<WeightMap<'de>, A::Error> {
                let mut entries = Vec::new();
                let mut numbers: HashMap<Cow<'de, str>, u32> = HashMap::new();
                while let Some((Text(name), Text(file))) = map.next_entry()? {
                    let number = if let Some(&number) = numbers.get(&file) {
                        number
                    } else {
                        let number = u32::try_from(numbers.len()).map_err(de::Error::custom)?;
                        numbers.insert(file, number);
                        number
                    };
                    entries.push((name, number));
                }
                let mut files: Vec<_> = numbers.into_iter().collect();
                files.sort_unstable_by_key(|&(_, number)| number);
                let files = files.into_iter().map(|(file, _)| file).collect();
                Ok(WeightMap { entries, files })
            }
        }
        deserializer.deserialize_map(MapVisitor)
    }
}

/// A string that borrows from the text unless it holds escapes.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);
