//! The header's JSON, read once and in order. Numbers that are no sizes and unknown dtypes are kept
//! as a problem of their tensor, so that the caller can name it without a position in the text.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use safetensors::Dtype;
use serde::Deserialize;
use serde::de::{
    self, DeserializeSeed, Deserializer, IgnoredAny, IntoDeserializer, MapAccess, SeqAccess,
    Visitor,
};

/// The header as written; nothing is checked beyond its form.
pub(super) struct RawHeader<'a> {
    pub(super) tensors: Vec<(Cow<'a, str>, RawTensor)>,
    pub(super) metadata: Option<HashMap<String, String>>,
}

/// One tensor as written. When there is a `problem`, the other fields mean nothing.
pub(super) struct RawTensor {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    pub(super) begin: u64,
    pub(super) end: u64,
    pub(super) problem: Option<String>,
}

pub(super) fn read(text: &str) -> serde_json::Result<RawHeader<'_>> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let header = deserializer.deserialize_map(HeaderVisitor)?;
    deserializer.end()?;
    Ok(header)
}

/// A tensor's name; it borrows from the header unless it is written with escapes.
#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = RawHeader<'de>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader<'de>, A::Error> {
        let mut tensors = Vec::new();
        let mut metadata = None;
        while let Some(Name(name)) = map.next_key()? {
            if name == "__metadata__" {
                if metadata.is_some() {
                    return Err(de::Error::custom("\"__metadata__\" is defined twice"));
                }
                metadata = Some(map.next_value::<Option<Texts>>()?);
            } else {
                let tensor = map.next_value_seed(TensorSeed(&name))?;
                tensors.push((name, tensor));
            }
        }
        Ok(RawHeader {
            tensors,
            metadata: metadata.flatten().map(|texts| texts.0),
        })
    }
}

/// Texts by unique name.
struct Texts(HashMap<String, String>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextsVisitor;
        impl<'de> Visitor<'de> for TextsVisitor {
            type Value = Texts;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object of strings as \"__metadata__\"")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Texts, A::Error> {
                let mut texts = HashMap::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if texts.contains_key(&key) {
                        return Err(de::Error::custom(format!(
                            "\"__metadata__\" defines {key:?} twice"
                        )));
                    }
                    texts.insert(key, value);
                }
                Ok(Texts(texts))
            }
        }
        deserializer.deserialize_map(TextsVisitor)
    }
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Field {
    Dtype,
    Shape,
    DataOffsets,
    #[serde(other)]
    Other,
}

struct TensorSeed<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for TensorSeed<'_> {
    type Value = RawTensor;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<RawTensor, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for TensorSeed<'_> {
    type Value = RawTensor;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "tensor {:?} to be an object with dtype, shape and data_offsets",
            self.0
        )
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawTensor, A::Error> {
        let name = self.0;
        let repeated = |field| de::Error::custom(format!("tensor {name:?} has two {field} fields"));
        let absent = |field| de::Error::custom(format!("tensor {name:?} has no {field}"));
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(field) = map.next_key::<Field>()? {
            let taken = match field {
                Field::Dtype => dtype
                    .replace(map.next_value::<DtypeName>()?)
                    .map(|_| "dtype"),
                Field::Shape => shape.replace(map.next_value::<Sizes>()?).map(|_| "shape"),
                Field::DataOffsets => offsets
                    .replace(map.next_value::<Sizes>()?)
                    .map(|_| "data_offsets"),
                Field::Other => {
                    map.next_value::<IgnoredAny>()?;
                    None
                }
            };
            if let Some(field) = taken {
                return Err(repeated(field));
            }
        }
        let dtype = dtype.ok_or_else(|| absent("dtype"))?;
        let shape = shape.ok_or_else(|| absent("shape"))?;
        let offsets = offsets.ok_or_else(|| absent("data_offsets"))?;

        let mut problem = None;
        let known = dtype.0.unwrap_or_else(|text| {
            problem = Some(format!(
                "unknown dtype {text:?}; its size cannot be known, so the file is refused"
            ));
            Dtype::U8
        });
        if let Some(found) = shape.problem {
            problem.get_or_insert(format!("{found} in its shape is not a size"));
        }
        if let Some(found) = offsets.problem {
            problem.get_or_insert(format!("{found} in its data_offsets is not a byte offset"));
        }
        let (begin, end) = if let [begin, end] = offsets.values[..] {
            (begin, end)
        } else {
            problem.get_or_insert(format!(
                "data_offsets has {} numbers where begin and end were expected",
                offsets.values.len()
            ));
            (0, 0)
        };
        Ok(RawTensor {
            dtype: known,
            shape: shape.values,
            begin,
            end,
            problem,
        })
    }
}

/// A dtype the `safetensors` crate knows, or the text that stands in its place.
struct DtypeName(Result<Dtype, String>);

impl<'de> Deserialize<'de> for DtypeName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameVisitor;
        impl Visitor<'_> for NameVisitor {
            type Value = DtypeName;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("the name of a dtype")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<DtypeName, E> {
                let known = Dtype::deserialize(
                    IntoDeserializer::<de::value::Error>::into_deserializer(text),
                );
                Ok(DtypeName(known.map_err(|_| text.to_owned())))
            }
        }
        deserializer.deserialize_str(NameVisitor)
    }
}

/// A list of sizes, and the first thing in it that is none.
struct Sizes {
    values: Vec<u64>,
    problem: Option<String>,
}

impl<'de> Deserialize<'de> for Sizes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SizesVisitor;
        impl<'de> Visitor<'de> for SizesVisitor {
            type Value = Sizes;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a list of sizes")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Sizes, A::Error> {
                // Every real shape and range fits; a longer list grows.
                let mut values = Vec::with_capacity(2);
                let mut problem = None;
                while let Some(size) = list.next_element::<Size>()? {
                    match size {
                        Size::Natural(value) => values.push(value),
                        Size::Other(text) => {
                            values.push(0);
                            problem.get_or_insert(text);
                        }
                    }
                }
                Ok(Sizes { values, problem })
            }
        }
        deserializer.deserialize_seq(SizesVisitor)
    }
}

enum Size {
    Natural(u64),
    Other(String),
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SizeVisitor;
        impl<'de> Visitor<'de> for SizeVisitor {
            type Value = Size;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a size")
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Size, E> {
                Ok(Size::Natural(value))
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Size, E> {
                Ok(Size::Other(value.to_string()))
            }

            fn visit_f64<E: de::Error>(self, value: f64) -> Result<Size, E> {
                Ok(Size::Other(format!("{value:?}")))
            }

            fn visit_bool<E: de::Error>(self, value: bool) -> Result<Size, E> {
                Ok(Size::Other(value.to_string()))
            }

            fn visit_str<E: de::Error>(self, value: &str) -> Result<Size, E> {
                Ok(Size::Other(format!("{value:?}")))
            }

            fn visit_unit<E: de::Error>(self) -> Result<Size, E> {
                Ok(Size::Other("null".to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Size, A::Error> {
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Size::Other("a list".to_owned()))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Size, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Size::Other("an object".to_owned()))
            }
        }
        deserializer.deserialize_any(SizeVisitor)
    }
}
