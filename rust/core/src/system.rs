//! The one place that knows which system this is built for.
//!
//! `linux` has the calls that make engram fast: rings, advice on descriptors, questions about
//! pages. `portable` has the same names for systems without them, and for the feature `portable`,
//! which tests that way on Linux: nothing to ask, no ring, and errors that say so. All callers know
//! what to do then, because a kernel may refuse each of these calls too.

#[cfg(all(target_os = "linux", not(feature = "portable")))]
#[path = "system/linux.rs"]
mod here;
#[cfg(not(all(target_os = "linux", not(feature = "portable"))))]
#[path = "system/portable.rs"]
mod here;

pub(crate) use here::*;
