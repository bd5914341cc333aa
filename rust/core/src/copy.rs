//! Copies of rows from their addresses to their places.
//!
//! Rows of a large table miss every cache, so a copy is a wait for memory, and what counts is how many
//! of those waits overlap. Hence the widest loads there are, all loads of a row before its stores, no
//! call per row, and a hint for the rows to come.
#![expect(
    unsafe_code,
    reason = "raw copies out of memory that others may change"
)]
#![expect(
    clippy::inline_always,
    reason = "a call costs as much as the few instructions it would run, once per row"
)]

use crate::buffer::PlaneSink;
use crate::map::RowAddress;

/// Rows between the one that is copied and the one the processor is told of. Its own look-ahead ends
/// a few rows on.
pub(crate) const AHEAD: usize = 16;

/// Of each row at most so many bytes are loaded ahead; the processor sees the pattern by then.
#[cfg(target_arch = "x86_64")]
const MOST_AHEAD: usize = 256;

#[cfg(target_arch = "x86_64")]
const CACHE_LINE: usize = 64;

/// Stands for rows of a length that is not known when the code is compiled.
const ANY: usize = 0;

impl RowAddress<'_> {
    /// Tells the processor that the row of `row_bytes` bytes will be copied soon.
    #[inline(always)]
    pub(crate) fn load_soon(self, row_bytes: usize) {
        #[cfg(target_arch = "x86_64")]
        for offset in (0..row_bytes.min(MOST_AHEAD)).step_by(CACHE_LINE) {
            use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
            // SAFETY: a prefetch is a hint that may name any address and never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(self.as_ptr().wrapping_add(offset).cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = row_bytes;
    }
}

/// Copies one row, of `BYTES` bytes unless that is [`ANY`], to `position`.
#[inline(always)]
fn copy_row_of<const BYTES: usize>(row: RowAddress<'_>, sink: &PlaneSink<'_>, position: usize) {
    let bytes = if BYTES == ANY {
        sink.row_bytes()
    } else {
        assert_eq!(sink.row_bytes(), BYTES);
        BYTES
    };
    // SAFETY: `RowAddress` lies in live memory for as many bytes as it was made for, the sink's
    // row length; `PlaneSink::row` is valid for that many writes; the caller's memory cannot
    // overlap a file mapping or zeros that only engram knows, and is checked not to overlap a buffer.
    unsafe { std::ptr::copy_nonoverlapping(row.as_ptr(), sink.row(position), bytes) };
}

/// Copies the first `count` of `rows` into consecutive positions of `sink` from `first` on. Those
/// after them are copied next, and are looked ahead to.
#[inline]
pub(crate) fn copy_rows(rows: &[RowAddress<'_>], count: usize, sink: &PlaneSink<'_>, first: usize) {
    match sink.row_bytes() {
        8 => return copy_rows_of::<8>(rows, count, sink, first),
        10 => return copy_rows_of::<10>(rows, count, sink, first),
        _ => {}
    }
    #[cfg(target_arch = "x86_64")]
    if wide::copy_rows(rows, count, sink, first) {
        return;
    }
    match sink.row_bytes() {
        80 => copy_rows_of::<80>(rows, count, sink, first),
        _ => copy_rows_of::<ANY>(rows, count, sink, first),
    }
}

#[inline(always)]
fn copy_rows_of<const BYTES: usize>(
    rows: &[RowAddress<'_>],
    count: usize,
    sink: &PlaneSink<'_>,
    first: usize,
) {
    for (index, row) in rows[..count].iter().enumerate() {
        if let Some(next) = rows.get(index + AHEAD) {
            next.load_soon(sink.row_bytes());
        }
        copy_row_of::<BYTES>(*row, sink, first + index);
    }
}

/// Copies one row to `position`.
#[inline]
pub(crate) fn copy_row(row: RowAddress<'_>, sink: &PlaneSink<'_>, position: usize) {
    copy_row_of::<ANY>(row, sink, position);
}

/// Registers of 64 bytes.
#[cfg(target_arch = "x86_64")]
mod wide {
    use std::arch::x86_64::{_mm512_loadu_si512, _mm512_setzero_si512, _mm512_storeu_si512};

    use super::AHEAD;
    use crate::buffer::PlaneSink;
    use crate::map::RowAddress;

    const WIDTH: usize = 64;

    /// Copies rows as [`super::copy_rows`] does, if they are of a length that this is for and the
    /// processor has such registers and does not slow down when they are used. (The first
    /// generation that has them does; VBMI2 came with the next.)
    #[inline]
    pub(super) fn copy_rows(
        rows: &[RowAddress<'_>],
        count: usize,
        sink: &PlaneSink<'_>,
        first: usize,
    ) -> bool {
        if sink.row_bytes() < WIDTH
            || !is_x86_feature_detected!("avx512f")
            || !is_x86_feature_detected!("avx512vbmi2")
        {
            return false;
        }
        // SAFETY: the processor has AVX-512F.
        unsafe {
            match sink.row_bytes().div_ceil(WIDTH) {
                1 => copy_rows_of::<1>(rows, count, sink, first),
                2 => copy_rows_of::<2>(rows, count, sink, first),
                3 => copy_rows_of::<3>(rows, count, sink, first),
                4 => copy_rows_of::<4>(rows, count, sink, first),
                5 => copy_rows_of::<5>(rows, count, sink, first),
                6 => copy_rows_of::<6>(rows, count, sink, first),
                7 => copy_rows_of::<7>(rows, count, sink, first),
                8 => copy_rows_of::<8>(rows, count, sink, first),
                _ => return false,
            }
        }
        true
    }

    /// Copies rows that `REGISTERS` registers hold; the last overlaps the one before it where the
    /// length is no multiple of theirs.
    #[target_feature(enable = "avx512f")]
    fn copy_rows_of<const REGISTERS: usize>(
        rows: &[RowAddress<'_>],
        count: usize,
        sink: &PlaneSink<'_>,
        first: usize,
    ) {
        let bytes = sink.row_bytes();
        assert!(bytes >= WIDTH && bytes.div_ceil(WIDTH) == REGISTERS);
        for (index, row) in rows[..count].iter().enumerate() {
            if let Some(next) = rows.get(index + AHEAD) {
                next.load_soon(bytes);
            }
            let to = sink.row(first + index);
            let mut held = [_mm512_setzero_si512(); REGISTERS];
            for (place, register) in held.iter_mut().enumerate() {
                let offset = (place * WIDTH).min(bytes - WIDTH);
                // SAFETY: `RowAddress` lies in live memory for as many bytes as it was made for,
                // the sink's row length, and `offset + WIDTH` is at most that.
                *register = unsafe { _mm512_loadu_si512(row.as_ptr().wrapping_add(offset).cast()) };
            }
            for (place, register) in held.into_iter().enumerate() {
                let offset = (place * WIDTH).min(bytes - WIDTH);
                // SAFETY: `PlaneSink::row` is valid for writes of `bytes` bytes.
                unsafe { _mm512_storeu_si512(to.wrapping_add(offset).cast(), register) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;
    use crate::map::Map;

    #[test]
    fn copies_rows_of_any_length_from_any_offset() {
        let bytes: Vec<u8> = (0..9000_u32).map(|index| (index % 251) as u8).collect();
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&bytes).unwrap();
        let map = Map::new(file.as_file(), bytes.len() as u64).unwrap();
        for row_bytes in 1..=700 {
            let offsets = [0_u64, 1, 4090, 8999 - row_bytes as u64];
            let rows: Vec<_> = offsets
                .iter()
                .map(|&offset| map.row(offset, row_bytes))
                .collect();
            // A byte between two rows, which stays what it is.
            let stride = row_bytes + 1;
            let mut out = vec![7; stride * 4];
            let sink = PlaneSink::new(&mut out, 0, stride, row_bytes, 4).unwrap();
            copy_rows(&rows, rows.len(), &sink, 0);
            for (index, &offset) in offsets.iter().enumerate() {
                let offset = offset as usize;
                assert_eq!(
                    out[index * stride..][..row_bytes],
                    bytes[offset..][..row_bytes]
                );
                assert_eq!(out[index * stride + row_bytes], 7);
            }
        }
    }
}
