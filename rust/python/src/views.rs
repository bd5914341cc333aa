//! Tables out of tensors that a loader has mapped.

use engram_core::Error;
use engram_core::discover;
use engram_core::mode::Io;
use engram_core::reader::{Advice, Options, Reader as CoreReader};
use engram_core::views::{Expectation, View, locate};
use pyo3::prelude::*;

use crate::errors::OrRaise as _;
use crate::gather::{Reader, TableArgument};

/// Name of the table a tensor of this name belongs to; None for other tensors.
#[pyfunction]
pub(crate) fn table_of(name: &str) -> Option<&str> {
    discover::table_of(name)
}

/// Opens the files behind `views`, each a name, a safetensors dtype, a shape and an address.
#[pyfunction]
#[pyo3(signature = (views, num_rows, config, table, io, threads, advice, max_mapped_bytes))]
#[expect(
    clippy::too_many_arguments,
    reason = "they are Reader's, behind the views"
)]
pub(crate) fn bind_views(
    py: Python<'_>,
    views: Vec<(String, String, Vec<u64>, u64)>,
    num_rows: Option<u64>,
    config: Option<&str>,
    table: Option<TableArgument>,
    io: &str,
    threads: Option<usize>,
    advice: &str,
    max_mapped_bytes: Option<u64>,
) -> PyResult<Reader> {
    let options = Options {
        io: Io::from_name(io).or_raise(py)?,
        threads,
        advice: Advice::from_name(advice).or_raise(py)?,
        max_mapped_bytes,
        cache_bytes: 0,
    };
    let opened = py.detach(|| {
        let views = views
            .into_iter()
            .map(|(name, dtype, shape, address)| {
                Ok(View {
                    dtype: discover::dtype_of(&dtype)?,
                    name,
                    shape,
                    address,
                })
            })
            .collect::<engram_core::Result<Vec<_>>>()?;
        let config = config.map(discover::parse_config).transpose()?;
        let expected = match (num_rows, &config) {
            (Some(rows), _) => Expectation::Rows(rows),
            (None, Some(config)) => Expectation::Config(config),
            (None, None) => return Err(Error::value("pass num_rows or a configuration")),
        };
        let located = locate(&views, expected, TableArgument::as_ref(table.as_ref()))?;
        CoreReader::open(located, options)
    });
    Ok(Reader::over(opened.or_raise(py)?))
}
