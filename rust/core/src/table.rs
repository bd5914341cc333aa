//! A table: planes made of pieces, and the arithmetic from a row id to byte spans. No I/O.
//!
//! A logical row may be stored in several regions of a checkpoint (FP8 values here, their block
//! scales a hundred gigabytes further on): each region is a [`Plane`]. A plane may be cut over many
//! tensors and files: each cut is a [`Piece`]. Locating a row is one multiplication for the usual
//! equal cuts, and never more than a binary search.

use safetensors::Dtype;

use crate::error::{Error, Result};

/// Model family whose naming rule found the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// Qwen4-Exp / Qwen3.8-Flash-Next per-layer n-gram embeddings.
    Qwen,
    /// DeepSeek-V4.1 Engram.
    DeepSeek,
    /// LongCat-Flash n-gram embeddings.
    LongCat,
    /// Gemma-3n / Gemma-4 per-layer embeddings (not hashed: id = token id).
    Gemma,
    /// Any other two-dimensional tensor, opened by its full name.
    Plain,
}

impl Family {
    /// The name used in the Python API and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Qwen => "qwen",
            Self::DeepSeek => "deepseek",
            Self::LongCat => "longcat",
            Self::Gemma => "gemma",
            Self::Plain => "plain",
        }
    }
}

/// Role of a plane inside a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PlaneName {
    /// The (possibly quantised) values.
    Weight,
    /// Per-block scales.
    Scale,
    /// Per-block biases.
    Bias,
}

impl PlaneName {
    /// The attribute name on `engram.Rows`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weight => "weight",
            Self::Scale => "scale",
            Self::Bias => "bias",
        }
    }
}

/// A run of consecutive rows of one plane inside one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Tensor name in the checkpoint.
    pub tensor: String,
    /// Index into the checkpoint's list of files.
    pub file: usize,
    /// Absolute byte offset of the piece's first row in that file.
    pub offset: u64,
    /// Id of the piece's first row.
    pub first_row: u64,
    /// Rows in the piece.
    pub rows: u64,
}

/// Where one row of one plane lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Index of the piece inside its plane.
    pub piece: usize,
    /// Index into the checkpoint's list of files.
    pub file: usize,
    /// Absolute byte offset in that file.
    pub offset: u64,
}

/// One stored region of every row.
#[derive(Debug, Clone)]
pub struct Plane {
    name: PlaneName,
    dtype: Dtype,
    columns: u64,
    row_bytes: usize,
    pieces: Vec<Piece>,
    rows: u64,
    /// `pieces / rows` as a 64-bit fixed-point fraction: a first guess at a row's piece.
    reciprocal: u64,
}

/// The largest row any table may have. Real rows are 90 to 21,504 bytes; a tensor with wider rows
/// is not an embedding table, and a bound keeps slot arithmetic far from overflow.
pub const MAX_ROW_BYTES: u64 = 64 << 20;

impl Plane {
    /// Builds a plane from pieces in row order. Empty pieces are dropped; the rest must follow one
    /// another without gap or overlap, starting at row 0.
    ///
    /// `columns` counts elements of `dtype` per row.
    pub fn new(name: PlaneName, dtype: Dtype, columns: u64, pieces: Vec<Piece>) -> Result<Self> {
        let bits = u64::try_from(dtype.bitsize()).unwrap_or(u64::MAX);
        let row_bytes = columns
            .checked_mul(bits)
            .filter(|bits| bits % 8 == 0 && bits / 8 <= MAX_ROW_BYTES)
            .and_then(|bits| usize::try_from(bits / 8).ok())
            .ok_or_else(|| {
                Error::value(format!(
                    "{} plane: {columns} columns of {dtype:?} do not make whole rows of at most {MAX_ROW_BYTES} bytes",
                    name.name()
                ))
            })?;
        let pieces: Vec<Piece> = pieces.into_iter().filter(|piece| piece.rows > 0).collect();
        let mut rows = 0_u64;
        for piece in &pieces {
            if piece.first_row != rows {
                return Err(Error::value(format!(
                    "{} plane: tensor {:?} starts at row {} where row {rows} was expected",
                    name.name(),
                    piece.tensor,
                    piece.first_row
                )));
            }
            rows = rows.checked_add(piece.rows).ok_or_else(|| {
                Error::value(format!(
                    "{} plane: row count overflows 64 bits",
                    name.name()
                ))
            })?;
        }
        let reciprocal = if rows == 0 {
            0
        } else {
            let fraction = (u128::from(pieces.len() as u64) << 64) / u128::from(rows);
            u64::try_from(fraction).unwrap_or(u64::MAX)
        };
        Ok(Self {
            name,
            dtype,
            columns,
            row_bytes,
            pieces,
            rows,
            reciprocal,
        })
    }

    /// The plane's role.
    pub fn name(&self) -> PlaneName {
        self.name
    }

    /// Element type as stored.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Elements per row.
    pub fn columns(&self) -> u64 {
        self.columns
    }

    /// Bytes per row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Non-empty pieces in row order.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Rows in the plane.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// `pieces / rows` as a 64-bit fixed-point fraction.
    pub(crate) fn reciprocal(&self) -> u64 {
        self.reciprocal
    }

    /// Index of the piece that holds `row`, which must be below [`Plane::rows`].
    #[inline]
    pub fn piece_of(&self, row: u64) -> usize {
        debug_assert!(row < self.rows, "row {row} of {}", self.rows);
        let last = self.pieces.len() - 1;
        let guess = (u128::from(row) * u128::from(self.reciprocal)) >> 64;
        // Below 2^64 * pieces / rows * rows >> 64, so the guess fits; `min` covers rounding.
        let guess = usize::try_from(guess).unwrap_or(last).min(last);
        let piece = &self.pieces[guess];
        if row.wrapping_sub(piece.first_row) < piece.rows {
            return guess;
        }
        self.search(row)
    }

    #[cold]
    fn search(&self, row: u64) -> usize {
        self.pieces.partition_point(|piece| piece.first_row <= row) - 1
    }

    /// Where `row` lies; `row` must be below [`Plane::rows`].
    #[inline]
    pub fn span(&self, row: u64) -> Span {
        let index = self.piece_of(row);
        let piece = &self.pieces[index];
        Span {
            piece: index,
            file: piece.file,
            offset: piece.offset + (row - piece.first_row) * self.row_bytes as u64,
        }
    }
}

/// How stored bytes stand for values; [`Encoding::name`] is `FileGather.encoding`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// Rows are plain elements of the plane's dtype.
    Plain(Dtype),
    /// FP8 E4M3 values; one scale for the whole table where the family stores one.
    Fp8E4m3,
    /// FP8 E4M3 values with one E8M0 scale per 32 columns.
    Fp8E4m3E8m0Block32,
    /// Packed E2M1 pairs with one E4M3 scale per 16 columns and one table-wide scale.
    Nvfp4,
    /// Packed E2M1 pairs with one E8M0 scale per 32 columns.
    Mxfp4,
    /// 4-bit affine integers in 32-bit words with a scale and a bias per group of this many columns.
    MlxAffine4(u32),
    /// EXL3 trellis words: opaque to engram, served as stored.
    Exl3Trellis,
}

impl Encoding {
    /// Name in the Python API.
    pub fn name(self) -> String {
        match self {
            Self::Plain(dtype) => dtype_name(dtype).to_owned(),
            Self::Fp8E4m3 => "fp8_e4m3".to_owned(),
            Self::Fp8E4m3E8m0Block32 => "fp8_e4m3_e8m0_32".to_owned(),
            Self::Nvfp4 => "nvfp4".to_owned(),
            Self::Mxfp4 => "mxfp4".to_owned(),
            Self::MlxAffine4(group) => format!("mlx_affine4_{group}"),
            Self::Exl3Trellis => "exl3_trellis".to_owned(),
        }
    }
}

/// Short lower-case name of a dtype, as used in `encoding` and in messages.
pub fn dtype_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::BOOL => "bool",
        Dtype::F4 => "fp4_e2m1",
        Dtype::F6_E2M3 => "fp6_e2m3",
        Dtype::F6_E3M2 => "fp6_e3m2",
        Dtype::U8 => "u8",
        Dtype::I8 => "i8",
        Dtype::F8_E5M2 => "fp8_e5m2",
        Dtype::F8_E4M3 => "fp8_e4m3",
        Dtype::F8_E8M0 => "fp8_e8m0",
        Dtype::F8_E4M3FNUZ => "fp8_e4m3fnuz",
        Dtype::F8_E5M2FNUZ => "fp8_e5m2fnuz",
        Dtype::I16 => "i16",
        Dtype::U16 => "u16",
        Dtype::F16 => "f16",
        Dtype::BF16 => "bf16",
        Dtype::I32 => "i32",
        Dtype::U32 => "u32",
        Dtype::F32 => "f32",
        Dtype::C64 => "c64",
        Dtype::F64 => "f64",
        Dtype::I64 => "i64",
        Dtype::U64 => "u64",
        _ => "unknown",
    }
}

/// A table-wide number stored beside the rows, such as Qwen's `weight_scale`.
#[derive(Debug, Clone, PartialEq)]
pub struct Constant {
    /// Short name, e.g. `weight_scale`.
    pub name: String,
    /// Tensor it was read from.
    pub tensor: String,
    /// Its value (exact: BF16 and F32 both fit).
    pub value: f64,
}

/// One id space: every row of one n-gram, per-layer or plain table.
#[derive(Debug, Clone)]
pub struct Table {
    /// Common prefix of the table's tensors, or the tensor's full name for a plain table.
    pub name: String,
    /// Naming rule that found it.
    pub family: Family,
    /// Zero-based decoder layer of the tensor name, where there is one.
    pub layer: Option<u32>,
    /// How stored bytes stand for values.
    pub encoding: Encoding,
    /// Weight first, then scale, then bias.
    pub planes: Vec<Plane>,
    /// Values per row after dequantisation, e.g. `[160]`.
    pub logical_shape: Vec<u64>,
    /// Table-wide numbers.
    pub constants: Vec<Constant>,
}

impl Table {
    /// Rows in the table.
    pub fn rows(&self) -> u64 {
        self.planes.first().map_or(0, Plane::rows)
    }

    /// Bytes of one row over all planes.
    pub fn row_bytes(&self) -> usize {
        self.planes.iter().map(Plane::row_bytes).sum()
    }

    /// Bytes of the whole table over all planes.
    pub fn total_bytes(&self) -> u64 {
        self.rows() * self.row_bytes() as u64
    }

    /// Replaces every piece's file index by its place in `used`, which lists all of them ascending.
    pub fn renumber_files(&mut self, used: &[usize]) {
        for piece in self.planes.iter_mut().flat_map(|plane| &mut plane.pieces) {
            piece.file = used.partition_point(|&file| file < piece.file);
        }
    }

    /// Indices of the files that hold any part of the table, ascending, without repeats.
    pub fn files(&self) -> Vec<usize> {
        let mut files: Vec<usize> = self
            .planes
            .iter()
            .flat_map(|plane| plane.pieces().iter().map(|piece| piece.file))
            .collect();
        files.sort_unstable();
        files.dedup();
        files
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn plane(sizes: &[u64]) -> Plane {
        let mut first_row = 0;
        let pieces = sizes
            .iter()
            .enumerate()
            .map(|(index, &rows)| {
                let piece = Piece {
                    tensor: format!("shard_{index}"),
                    file: index % 3,
                    offset: 17 + 1000 * index as u64,
                    first_row,
                    rows,
                };
                first_row += rows;
                piece
            })
            .collect();
        Plane::new(PlaneName::Weight, Dtype::U8, 5, pieces).unwrap()
    }

    proptest! {
        #[test]
        fn every_row_is_found_in_the_piece_that_covers_it(
            sizes in prop::collection::vec(0_u64..40, 1..30),
        ) {
            let plane = plane(&sizes);
            for row in 0..plane.rows() {
                let naive = plane.pieces().iter().position(|piece| {
                    piece.first_row <= row && row < piece.first_row + piece.rows
                }).unwrap();
                let span = plane.span(row);
                let piece = &plane.pieces()[naive];
                prop_assert_eq!(span.piece, naive);
                prop_assert_eq!(span.file, piece.file);
                prop_assert_eq!(span.offset, piece.offset + (row - piece.first_row) * 5);
            }
        }
    }

    #[test]
    fn real_geometry_is_found_without_searching() {
        let plane = plane(&[2_500_012; 128]);
        assert_eq!(plane.rows(), 320_001_536);
        for row in [0, 2_500_011, 2_500_012, 160_000_768, 320_001_535] {
            assert_eq!(plane.piece_of(row) as u64, row / 2_500_012);
        }
    }

    #[test]
    fn gaps_between_pieces_are_refused() {
        let pieces = vec![Piece {
            tensor: "shard_0".into(),
            file: 0,
            offset: 0,
            first_row: 1,
            rows: 2,
        }];
        let error = Plane::new(PlaneName::Weight, Dtype::U8, 4, pieces).unwrap_err();
        assert!(error.to_string().contains("\"shard_0\" starts at row 1"));
    }
}
