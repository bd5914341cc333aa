//! From what has happened in a reader to Python's log, once a call is over.

use std::sync::Arc;

use engram_core::reader::Reader as CoreReader;
use pyo3::prelude::*;

/// The reader, where something has happened in it since the last look; a load of one byte where not.
/// Asked inside its gate, told of outside.
#[inline]
pub(crate) fn of(reader: &Arc<CoreReader>) -> Option<Arc<CoreReader>> {
    reader.take_news().then(|| Arc::clone(reader))
}

/// Hands what has happened to `engram._notices`, where it is counted for `this`.
#[inline]
pub(crate) fn tell(this: &Bound<'_, PyAny>, news: Option<Arc<CoreReader>>) -> PyResult<()> {
    news.map_or(Ok(()), |reader| told(this, &reader))
}

#[cold]
fn told(this: &Bound<'_, PyAny>, reader: &CoreReader) -> PyResult<()> {
    let stats = reader.stats();
    let arguments = (
        this,
        &reader.table().name,
        reader.fallbacks(),
        stats.rows_reread.get(),
        stats.bytes_trimmed.get(),
    );
    let module = this.py().import("engram._notices")?;
    module.call_method1("happened", arguments).map(drop)
}
