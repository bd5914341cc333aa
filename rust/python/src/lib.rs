//! `engram._engram`: translation between Python and `engram-core`, and no policy.
#![expect(
    clippy::needless_pass_by_value,
    reason = "arguments are converted from Python objects, and the converted value is ours to take"
)]

mod array;
#[cfg(feature = "bench")]
mod bench;
mod buffer;
mod diagnosis;
mod errors;
mod gate;
mod gather;
mod hash;
mod hosted;
mod interrupts;
mod many;
mod news;
mod stats;
mod step;
mod table;
mod ticket;
mod verification;
mod views;

use pyo3::prelude::*;

/// Native half of engram.
// Gates and locks count on the interpreter's lock; see `gate.rs`.
#[pymodule(gil_used = true)]
mod _engram {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use pyo3::exceptions::PyImportError;
    use pyo3::prelude::*;

    /// The `builtins` of the interpreter that imported the module; 0 for none.
    static BUILTINS: AtomicUsize = AtomicUsize::new(0);

    /// Refuses a second interpreter of the process: rings, threads and open files are the process's,
    /// and what waits for the lock of one interpreter knows nothing of another's.
    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let own = module.py().import("builtins")?.as_ptr().addr();
        match BUILTINS.compare_exchange(0, own, Ordering::SeqCst, Ordering::SeqCst) {
            Err(other) if other != own => Err(PyImportError::new_err(
                "engram serves one interpreter of a process, and this is another one \
                 (subinterpreters share what belongs to the process); use a thread, or a process",
            )),
            _ => Ok(()),
        }
    }

    #[cfg(feature = "bench")]
    #[pymodule_export]
    use crate::bench::{BenchTrace, bench_copy, bench_forget, bench_uring};
    #[pymodule_export]
    use crate::buffer::HostBuffer;
    #[pymodule_export]
    use crate::diagnosis::{random_reads, ring_refusal, survey};
    #[pymodule_export]
    use crate::errors::CheckpointError;
    #[pymodule_export]
    use crate::gather::{Reader, drop_cache};
    #[pymodule_export]
    use crate::hash::NgramHash;
    #[pymodule_export]
    use crate::hosted::{Hosted, huge_page_bytes, load_rows, memory_bytes};
    #[pymodule_export]
    use crate::interrupts::{after_fork, at_exit};
    #[pymodule_export]
    use crate::many::{gather_many, gather_tokens};
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
