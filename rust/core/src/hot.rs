//! Which rows are in a cache, written to a file, and such rows read back: a server that is started
//! again has its cache as it was.

mod file;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use file::{Identity, Rows, Writer};

use crate::cache::Cache;
use crate::error::{Error, Result};
use crate::gather::{Control, Wanted, restore};
use crate::reader::Reader;

/// Rows that are put in order at a time, at least: a few megabytes.
const SORTED_AT_ONCE: u64 = 1 << 18;

/// Looks at the whole cache, at most about: each finds the rows of a range of ids.
const LOOKS: u64 = 8;

/// Equal parts of the ids that rows are counted by beforehand.
const PARTS: usize = 1 << 12;

/// Rows read back between two reports of progress.
const RESTORED_AT_ONCE: usize = 1 << 15;

/// Called with rows done and rows to do; an error from it stops the work.
pub type Progress<'a> = dyn FnMut(u64, u64) -> Result<()> + 'a;

fn cache_of(reader: &Reader) -> Result<Arc<Cache>> {
    reader.row_cache().current().ok_or_else(|| {
        let name = &reader.table().name;
        Error::value(format!(
            "table {name:?} has no cache of rows: open it with cache_bytes, or call resize first"
        ))
        .in_table(name)
    })
}

/// Writes the ids of the cached rows to `path`, all of them or nothing; returns how many there are.
/// Waits for the end of a change of the budget, and holds others up while rows are listed. `interrupt`
/// is called now and then; an error from it leaves what was at `path` before.
pub fn save(reader: &Reader, path: &Path, interrupt: &dyn Fn() -> Result<()>) -> Result<u64> {
    // In the middle of a change some rows are in the one cache, the others in the other.
    let turn = reader.row_cache().turn(interrupt)?;
    let cache = cache_of(reader)?;
    let width = reader.table().rows().div_ceil(PARTS as u64).max(1);
    let mut counts = vec![0_u64; PARTS];
    cache.for_each(interrupt, &mut |id, _| {
        let part = usize::try_from(id / width).unwrap_or(PARTS);
        counts[part.min(PARTS - 1)] += 1;
    })?;
    let mut writer = Writer::new(path, &Identity::of(reader))?;
    let mut total = 0;
    let mut some: Vec<(u64, u8)> = Vec::new();
    for ids in ranges(&counts, width) {
        some.clear();
        cache.for_each(interrupt, &mut |id, wanted| {
            if ids.contains(&id) {
                some.push((id, wanted));
            }
        })?;
        // A row that was replaced and came back meanwhile may have been seen twice.
        some.sort_unstable();
        some.dedup_by_key(|row| row.0);
        writer.rows(&some)?;
        total += some.len() as u64;
        interrupt()?;
    }
    drop(turn);
    writer.finish()?;
    Ok(total)
}

/// Ranges of ids, ascending and each id in one, with so many rows each that a few looks find them
/// all: `counts` has the rows of every `width` ids.
fn ranges(counts: &[u64], width: u64) -> Vec<Range<u64>> {
    let most = (counts.iter().sum::<u64>() / LOOKS).max(SORTED_AT_ONCE);
    let mut ranges = Vec::new();
    let (mut begin, mut end, mut rows) = (0, 0_u64, 0);
    for &count in counts {
        if rows > 0 && rows + count > most {
            ranges.push(begin..end);
            (begin, rows) = (end, 0);
        }
        rows += count;
        end = end.saturating_add(width);
    }
    ranges.push(begin..u64::MAX);
    ranges
}

/// Reads the rows listed at `path` into the cache, in the order of the files, those wanted most if
/// not all fit. Returns how many of the listed rows are in the cache then.
///
/// # Errors
/// A list of another table, or one that is damaged: nothing is read then. A cache that was given up
/// meanwhile.
pub fn load(
    reader: &Reader,
    path: &Path,
    control: &Control<'_>,
    progress: &mut Progress<'_>,
) -> Result<u64> {
    let capacity = cache_of(reader)?.capacity();
    let mut rows = Rows::open(path)?;
    check(&rows, &Identity::of(reader))?;
    let mut by_count = [0_u64; 256];
    let mut seen = 0_usize;
    while let Some((_, wanted)) = rows.next()? {
        by_count[usize::from(wanted)] += 1;
        seen += 1;
        if seen.is_multiple_of(RESTORED_AT_ONCE) {
            (control.interrupt)()?;
        }
    }
    rows.rewind()?;
    let mut choice = Choice::new(&by_count, capacity);
    let total = choice.total;
    let mut done = 0;
    let mut chunk: Vec<Wanted> = Vec::new();
    progress(0, total)?;
    loop {
        let next = rows.next()?;
        if let Some((id, wanted)) = next
            && choice.takes(wanted)
        {
            chunk.push(Wanted { id, wanted });
        }
        if chunk.len() == RESTORED_AT_ONCE || next.is_none() {
            // Its budget may have been changed since the last.
            restore(reader, &cache_of(reader)?, &chunk, control)?;
            done += chunk.len() as u64;
            chunk.clear();
            progress(done, total)?;
        }
        if next.is_none() {
            break;
        }
    }
    rows.rewind()?;
    let cache = cache_of(reader)?;
    present(&mut rows, &cache, control)
}

/// How many of the rows are in the cache.
fn present(rows: &mut Rows, cache: &Cache, control: &Control<'_>) -> Result<u64> {
    let (mut present, mut seen) = (0, 0_usize);
    while let Some((id, _)) = rows.next()? {
        present += u64::from(cache.contains(id));
        seen += 1;
        if seen.is_multiple_of(RESTORED_AT_ONCE) {
            (control.interrupt)()?;
        }
    }
    Ok(present)
}

/// Refuses a list of another table.
fn check(rows: &Rows, expected: &Identity) -> Result<()> {
    let found = rows.identity();
    if found == expected {
        return Ok(());
    }
    let (what, found, expected) = if found.table != expected.table {
        ("table", found.table.clone(), expected.table.clone())
    } else if found.rows != expected.rows {
        ("rows", found.rows.to_string(), expected.rows.to_string())
    } else if found.encoding != expected.encoding || found.row_bytes != expected.row_bytes {
        (
            "rows of",
            format!("{} {:?} bytes", found.encoding, found.row_bytes),
            format!("{} {:?} bytes", expected.encoding, expected.row_bytes),
        )
    } else {
        (
            "files of",
            format!("{:?} bytes", found.files),
            format!("{:?} bytes", expected.files),
        )
    };
    Err(rows.bad(&format!(
        "lists rows of another table: {what} {found}, where this one has {expected}"
    )))
}

/// Which of the listed rows are read: those wanted most.
struct Choice {
    least: u8,
    /// Rows wanted exactly that often that there is still room for.
    room: u64,
    total: u64,
}

impl Choice {
    fn new(by_count: &[u64; 256], capacity: u64) -> Self {
        let mut total = 0;
        for (wanted, &rows) in (0..=u8::MAX).zip(by_count).rev() {
            if total + rows > capacity {
                return Self {
                    least: wanted,
                    room: capacity - total,
                    total: capacity,
                };
            }
            total += rows;
        }
        Self {
            least: 0,
            room: by_count[0],
            total,
        }
    }

    fn takes(&mut self, wanted: u8) -> bool {
        if wanted == self.least {
            let takes = self.room > 0;
            self.room = self.room.saturating_sub(1);
            return takes;
        }
        wanted > self.least
    }
}

#[cfg(test)]
mod tests;
