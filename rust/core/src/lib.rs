//! Rows of n-gram embedding tables, read in place from safetensors checkpoints.
//!
//! A step runs left to right through the modules, and so do the imports:
//!
//! ```text
//! header -> checkpoint -> table -> discover -> plan -> map / residency / fetch -> buffer -> gather
//! ```
//!
//! `gather.rs` meets them in that order; open it first.

pub mod error;
pub mod hash;
pub mod primes;
pub mod table;

pub use error::{Error, Place, Result};
