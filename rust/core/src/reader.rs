//! A table opened for reading: its files, how they are read, and what that falls back to.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use arc_swap::ArcSwap;
use once_cell::race::OnceBox;

use crate::cache::RowCache;
use crate::checkpoint::{Checkpoint, CheckpointFile, Shadowed};
use crate::cuts::Cuts;
use crate::discover::{self, TableRef};
use crate::error::{Error, Result};
use crate::file::{Mapping, OpenFile};
use crate::in_flight::InFlight;
use crate::mode::{self, Io, Mode};
use crate::process::PerProcess;
use crate::stats::Stats;
use crate::table::{Plane, Table};
use crate::threads;
use crate::trim::Trimmer;

/// Advice for the mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Advice {
    /// Random: see `DESIGN.md`, "Advice on the mapping".
    Auto,
    /// `MADV_RANDOM`: a fault reads one page.
    Random,
    /// `MADV_NORMAL`: a fault may read its neighbourhood.
    Normal,
}

impl Advice {
    /// The advice of that name.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "auto" => Ok(Self::Auto),
            "random" => Ok(Self::Random),
            "normal" => Ok(Self::Normal),
            _ => Err(Error::value(format!(
                "advice={name:?} is not one of \"auto\", \"random\", \"normal\""
            ))),
        }
    }
}

/// What to open a table with.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// How to read.
    pub io: Io,
    /// Threads for large copies; `None` for as many as the process may use.
    pub threads: Option<usize>,
    /// Advice for the mapping.
    pub advice: Advice,
    /// Cap on the mapping's resident bytes.
    pub max_mapped_bytes: Option<u64>,
    /// Bytes for a cache of rows; 0 for none.
    pub cache_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            io: Io::Auto,
            threads: None,
            advice: Advice::Auto,
            max_mapped_bytes: None,
            cache_bytes: 0,
        }
    }
}

/// Sweeps in which every belief is checked with the kernel after one was found wrong.
const VERIFIED_SWEEPS: u32 = 64;

/// Sweeps in which they are after one may have been.
const SUSPICIOUS_SWEEPS: u32 = 4;

/// Digests of rows that verifications read, by plane and row.
pub(crate) type Digests = HashMap<(usize, u64), u64>;

/// A table opened for reading. All methods may be called from any thread.
#[derive(Debug)]
pub struct Reader {
    table: Table,
    files: Vec<Arc<OpenFile>>,
    /// Per plane, the short way to mapped rows; empty unless rows may be copied from the mapping.
    cuts: Vec<Cuts>,
    mode: Mode,
    threads: Option<usize>,
    advice: Advice,
    trimmer: Option<Trimmer>,
    stats: Stats,
    /// Sweeps left in which beliefs are verified before they are acted on.
    verify: AtomicU32,
    late_fallbacks: ArcSwap<Vec<String>>,
    /// Whether something has happened that belongs in a log.
    news: AtomicBool,
    prefetches: Entrance,
    tickets: InFlight,
    closing: AtomicBool,
    options: Options,
    shadowed: Vec<Shadowed>,
    /// Compare every gathered row with a second read of it.
    checks_rows: bool,
    digests: PerProcess<Mutex<Digests>>,
    row_cache: RowCache,
    /// Alignment of direct reads of rows that are cached; found out when there is first a budget.
    cached_direct: OnceBox<Option<u64>>,
}

/// A table and the files it has rows in, before they are opened for reading.
#[derive(Debug, Clone)]
pub struct Located {
    /// The table; its pieces index `files`.
    pub table: Table,
    /// The files, as they were when their headers were read.
    pub files: Vec<CheckpointFile>,
    /// The files that are open already, by the same numbers; may be shorter.
    pub handles: Vec<Option<Arc<File>>>,
    /// Second copies of tensors in the checkpoint, which are never read.
    pub shadowed: Vec<Shadowed>,
}

impl Located {
    /// Finds `table` in the checkpoint at `path`.
    pub fn find(path: &Path, table: TableRef<'_>) -> Result<Self> {
        let checkpoint = Checkpoint::open_for_rows(path)?;
        let table = discover::select(&checkpoint, table)?;
        Ok(Self::new(&checkpoint, table))
    }

    /// A table of an opened checkpoint.
    pub fn new(checkpoint: &Checkpoint, mut table: Table) -> Self {
        let used = table.files();
        let files = used
            .iter()
            .map(|&file| checkpoint.files[file].clone())
            .collect();
        let handles = used.iter().map(|&file| checkpoint.handle(file)).collect();
        table.renumber_files(&used);
        Self {
            table,
            files,
            handles,
            shadowed: checkpoint.shadowed.clone(),
        }
    }

    /// Paths of the files, symlinks resolved.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.files
            .iter()
            .map(|file| file.resolved.to_path_buf())
            .collect()
    }
}

impl Reader {
    /// Opens the files of a located table.
    pub fn open(located: Located, options: Options) -> Result<Self> {
        let name = located.table.name.clone();
        Self::open_files(located, options).map_err(|error| error.in_table(&name))
    }

    /// The table of the same name at `path`, opened in the same way; its rows must have the same
    /// planes, encoding and meaning, so that they fit where rows of this one went.
    pub fn reopen(&self, path: &Path) -> Result<Self> {
        let located = Located::find(path, TableRef::Name(&self.table.name))?;
        let layout = |table: &Table| {
            let planes: Vec<_> = table
                .planes
                .iter()
                .map(|plane| (plane.name(), plane.dtype(), plane.row_bytes()))
                .collect();
            (planes, table.encoding, table.logical_shape.clone())
        };
        let (old, new) = (layout(&self.table), layout(&located.table));
        if old != new {
            return Err(Error::value(format!(
                "table {:?} at {} has rows of another layout ({new:?}, not {old:?}); open a new FileGather",
                self.table.name,
                path.display()
            )));
        }
        let options = Options {
            cache_bytes: self.row_cache.budget(),
            ..self.options
        };
        Self::open(located, options)
    }

    fn open_files(located: Located, options: Options) -> Result<Self> {
        let Located {
            table,
            files,
            handles,
            shadowed,
        } = located;
        let mapping = match options.io {
            Io::Auto => Mapping::IfSafe,
            Io::Mmap => Mapping::Required,
            Io::Pread | Io::Uring | Io::Direct => Mapping::Never,
        };
        let random = options.advice != Advice::Normal;
        let count = files.len();
        let files =
            OpenFile::open_all(&files, &handles, mapping, random).map_err(|error| match error {
                Error::Io {
                    doing,
                    errno: errno @ libc::EMFILE,
                    place,
                } => Error::Io {
                    doing: format!("{doing}; this table alone lies in {count} files"),
                    errno,
                    place,
                },
                error => error,
            })?;
        let mode = mode::resolve(options.io, &files)?;
        let cuts = if mode.mapped {
            table
                .planes
                .iter()
                .map(|plane| Cuts::new(plane, &files))
                .collect::<Option<_>>()
        } else {
            None
        };
        let plane_bytes = table.planes.iter().map(Plane::row_bytes).collect();
        let reader = Self {
            cuts: cuts.unwrap_or_default(),
            row_cache: RowCache::new(plane_bytes, table.rows()),
            cached_direct: OnceBox::new(),
            table,
            files,
            mode,
            threads: options.threads.map(|threads| threads.max(1)),
            advice: options.advice,
            trimmer: options.max_mapped_bytes.map(Trimmer::new),
            stats: Stats::default(),
            verify: AtomicU32::new(0),
            late_fallbacks: ArcSwap::default(),
            news: AtomicBool::new(false),
            prefetches: Entrance::default(),
            tickets: InFlight::default(),
            closing: AtomicBool::new(false),
            options,
            shadowed,
            checks_rows: std::env::var_os("ENGRAM_VERIFY").is_some_and(|value| value == "1"),
            digests: PerProcess::new(),
        };
        reader.resize_cache(options.cache_bytes, &|| Ok(()))?;
        Ok(reader)
    }

    /// The cache of rows, which may have no budget.
    #[inline]
    pub fn row_cache(&self) -> &RowCache {
        &self.row_cache
    }

    /// Changes the budget for cached rows: see [`RowCache::resize`]. With one, `auto` reads missing
    /// rows past the page cache where it can.
    pub fn resize_cache(&self, bytes: u64, interrupt: &dyn Fn() -> Result<()>) -> Result<()> {
        if bytes > 0 {
            self.cached_direct();
        }
        self.row_cache.resize(bytes, interrupt)
    }

    /// Alignment of direct reads of rows that are cached; `None` for reads through the page cache.
    pub(crate) fn cached_direct(&self) -> Option<u64> {
        if self.mode.asked != Io::Auto {
            return self.mode.direct;
        }
        *self.cached_direct.get_or_init(|| {
            let mut fallbacks = Vec::new();
            let direct = mode::resolve_direct(&self.files, &mut fallbacks);
            for fallback in fallbacks {
                self.note_fallback(&fallback);
            }
            Box::new(direct)
        })
    }

    /// Alignment of direct reads; `None` for reads through the page cache.
    pub fn direct(&self) -> Option<u64> {
        if self.row_cache.is_active() {
            self.cached_direct()
        } else {
            self.mode.direct
        }
    }

    /// A few words naming what runs.
    pub fn runs(&self) -> String {
        let mode = Mode {
            direct: self.direct(),
            ..self.mode.clone()
        };
        if self.row_cache.is_active() {
            format!("cache+{}", mode.name())
        } else {
            mode.name()
        }
    }

    /// The table.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Its files; the table's pieces index them.
    pub fn files(&self) -> &[Arc<OpenFile>] {
        &self.files
    }

    /// The short way to the mapped rows of a plane, where there is one.
    pub(crate) fn cuts(&self, plane: usize) -> Option<&Cuts> {
        self.cuts.get(plane)
    }

    /// Looks of each plane whether all its rows are believed resident by now.
    pub(crate) fn look_at_belief(&self) {
        for cuts in &self.cuts {
            cuts.look();
        }
    }

    /// What runs.
    pub fn mode(&self) -> &Mode {
        &self.mode
    }

    /// Threads for large copies.
    pub fn threads(&self) -> usize {
        // Asking takes a tenth of a millisecond the first time, which opening need not pay.
        self.threads.unwrap_or_else(threads::available)
    }

    /// Advice for the mapping.
    pub fn advice(&self) -> Advice {
        self.advice
    }

    /// The cap on the mappings' resident bytes, where there is one.
    pub(crate) fn trimmer(&self) -> Option<&Trimmer> {
        self.trimmer.as_ref()
    }

    /// After `rows` rows were copied: gives page tables back if the cap asks for it.
    pub(crate) fn trim(&self, rows: u64) {
        if let Some(trimmer) = &self.trimmer {
            let trimmed = trimmer.copied(rows, &self.files);
            if trimmed > 0 {
                self.stats.bytes_trimmed.add(trimmed);
                self.note_news();
            }
        }
    }

    /// Counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Second copies of tensors in the checkpoint, which are never read.
    pub fn shadowed(&self) -> &[Shadowed] {
        &self.shadowed
    }

    /// Whether every gathered row is compared with a second read of it (`ENGRAM_VERIFY=1`).
    #[inline]
    pub(crate) fn checks_rows(&self) -> bool {
        self.checks_rows
    }

    pub(crate) fn digests(&self) -> &PerProcess<Mutex<Digests>> {
        &self.digests
    }

    /// Stops background work at its next look.
    pub fn close(&self) {
        self.closing.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    pub(crate) fn prefetches(&self) -> &Entrance {
        &self.prefetches
    }

    /// Tickets that have not ended yet.
    pub(crate) fn tickets(&self) -> &InFlight {
        &self.tickets
    }

    /// Fallbacks taken at open and since.
    pub fn fallbacks(&self) -> Vec<String> {
        let late = self.late_fallbacks.load();
        self.mode
            .fallbacks
            .iter()
            .chain(late.iter())
            .cloned()
            .collect()
    }

    pub(crate) fn note_fallback(&self, text: &str) {
        let before = self.late_fallbacks.rcu(|late| {
            let mut late = Vec::clone(late);
            if !late.iter().any(|noted| noted == text) {
                late.push(text.to_owned());
            }
            late
        });
        if !before.iter().any(|noted| noted == text) {
            self.note_news();
        }
    }

    /// Something has happened that belongs in a log.
    pub(crate) fn note_news(&self) {
        self.news.store(true, Ordering::Relaxed);
    }

    /// Whether a fallback was taken, rows were read again, or page tables were given back since this
    /// was last asked. Costs a load of one byte when not.
    #[inline]
    pub fn take_news(&self) -> bool {
        self.news.load(Ordering::Relaxed) && self.news.swap(false, Ordering::Relaxed)
    }

    /// Whether beliefs are to be checked with the kernel in this sweep.
    pub(crate) fn verifies(&self) -> bool {
        self.verify.load(Ordering::Relaxed) > 0
    }

    /// A belief was wrong: check them all for a while.
    pub(crate) fn distrust(&self) {
        self.verify.store(VERIFIED_SWEEPS, Ordering::Relaxed);
    }

    /// A belief may have been wrong: check them all in the next few sweeps.
    pub(crate) fn suspect(&self) {
        self.verify.fetch_max(SUSPICIOUS_SWEEPS, Ordering::Relaxed);
    }

    /// All beliefs of a sweep were right.
    pub(crate) fn trust_more(&self) {
        let _ = self
            .verify
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(1)
            });
    }
}

/// Lets a limited number of things be under way at once.
#[derive(Debug, Default)]
pub(crate) struct Entrance(Arc<AtomicU64>);

/// A place taken in an [`Entrance`], given back when dropped.
#[derive(Debug)]
pub(crate) struct Place(Arc<AtomicU64>);

impl Entrance {
    /// A place, unless `most` are taken.
    pub(crate) fn enter(&self, most: u64) -> Option<Place> {
        let taken = self.0.fetch_add(1, Ordering::Relaxed);
        let place = Place(Arc::clone(&self.0));
        (taken < most).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
