//! Rows of n-gram embedding tables, read in place from safetensors checkpoints.
//!
//! A step runs left to right through the modules, and so do the imports:
//!
//! ```text
//! header -> checkpoint -> table -> discover -> plan -> map / residency / fetch -> buffer -> gather
//! ```
//!
//! `gather.rs` meets them in that order; open it first.

pub mod buffer;
pub mod error;
pub mod fetch;
pub mod file;
pub mod gather;
pub mod hash;
pub mod map;
pub mod plan;
pub mod reader;
pub mod residency;
pub mod stats;
pub mod table;
pub mod threads;

pub use error::{Error, Place, Result};
