//! Rows of n-gram embedding tables, read in place from safetensors checkpoints.
//!
//! A step runs left to right through the modules, and so do the imports:
//!
//! ```text
//! header -> checkpoint -> table -> discover -> plan -> map / residency / fetch -> buffer -> gather
//! ```
//!
//! `gather.rs` meets them in that order; open it first.

#![cfg_attr(
    test,
    allow(
        clippy::cast_possible_truncation,
        reason = "tests make bytes out of small numbers"
    )
)]

#[cfg(feature = "bench")]
pub mod bench;
pub mod buffer;
pub mod cache;
pub mod cgroup;
pub mod checkpoint;
mod copy;
mod crew;
mod cuts;
pub mod discover;
pub mod error;
mod fault;
pub mod fetch;
pub mod file;
pub mod filesystem;
pub mod gather;
pub mod hash;
pub mod header;
pub mod hosted;
pub mod hot;
mod in_flight;
pub mod latency;
pub mod load;
pub mod map;
pub mod maps;
pub mod mode;
pub mod plan;
pub mod primes;
pub mod probe;
mod process;
pub mod reader;
mod reread;
pub mod residency;
mod schedule;
pub mod stats;
pub mod step;
mod system;
pub mod table;
pub mod threads;
pub mod ticket;
mod trim;
pub mod verify;
pub mod views;
pub mod warm;
mod words;

pub use error::{Error, Place, Result};

#[cfg(test)]
mod testing;
