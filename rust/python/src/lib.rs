//! `engram._engram`: translation between Python and `engram-core`, and no policy.

mod errors;
mod hash;
mod ints;

use pyo3::prelude::*;

/// Native half of engram.
#[pymodule]
mod _engram {
    #[pymodule_export]
    use crate::errors::CheckpointError;
    #[pymodule_export]
    use crate::hash::NgramHash;

    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "the Python name")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
