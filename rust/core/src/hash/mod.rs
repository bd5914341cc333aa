//! Row ids from token ids.
