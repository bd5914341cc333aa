//! `engram._engram`: translation between Python and `engram-core`, and no policy.
#![expect(
    clippy::needless_pass_by_value,
    reason = "arguments are converted from Python objects, and the converted value is ours to take"
)]

#[cfg(feature = "bench")]
mod bench;
mod buffer;
mod errors;
mod gate;
mod gather;
mod hash;
mod hosted;
mod interrupts;
mod stats;
mod step;
mod table;
mod ticket;
mod verification;
mod views;

use pyo3::prelude::*;

/// Native half of engram.
#[pymodule]
mod _engram {
    #[cfg(feature = "bench")]
    #[pymodule_export]
    use crate::bench::{BenchTrace, bench_copy, bench_uring};
    #[pymodule_export]
    use crate::buffer::HostBuffer;
    #[pymodule_export]
    use crate::errors::CheckpointError;
    #[pymodule_export]
    use crate::gate::after_fork;
    #[pymodule_export]
    use crate::gather::{Reader, drop_cache, gather_many, gather_tokens};
    #[pymodule_export]
    use crate::hash::NgramHash;
    #[pymodule_export]
    use crate::hosted::{Hosted, huge_page_bytes, load_rows, memory_bytes};
    #[pymodule_export]
    use crate::interrupts::at_exit;
    #[pymodule_export]
    use crate::step::StepGather;
    #[pymodule_export]
    use crate::table::{configured_tables, tables};
    #[pymodule_export]
    use crate::ticket::{Ticket, submit};
    #[pymodule_export]
    use crate::views::{bind_views, table_of};

    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "the Python name")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
