//! Integer arrays of Python, borrowed for the length of one call.
//!
//! Only C-contiguous, aligned int32 and int64 buffers come here; the Python layer converts the rest.
//! The interpreter lock is released while they are read and written. Python's buffer protocol keeps
//! the memory in place, but cannot keep another thread from writing to it: a caller who does that
//! during the call gets unspecified ids, as with numpy. Ids written over the call's own inputs are
//! refused here.

#![expect(unsafe_code, reason = "the buffer protocol hands out pointers")]

use std::ops::Range;

use engram_core::hash::Ints;
use pyo3::buffer::{PyBuffer, PyUntypedBuffer};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

/// A readable buffer of int32 or int64.
pub(crate) enum IntBuffer {
    I32(PyBuffer<i32>),
    I64(PyBuffer<i64>),
}

impl IntBuffer {
    /// Borrows `object`, an argument called `name`.
    pub(crate) fn get(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Self> {
        let untyped = PyUntypedBuffer::get(object)
            .map_err(|error| PyTypeError::new_err(format!("{name}: {error}")))?;
        if !untyped.is_c_contiguous() {
            return Err(PyValueError::new_err(format!("{name} is not C-contiguous")));
        }
        let wrong = |_| PyTypeError::new_err(format!("{name} does not hold int32 or int64"));
        if untyped.item_size() == size_of::<i32>() {
            untyped.into_typed().map(Self::I32).map_err(wrong)
        } else {
            untyped.into_typed().map(Self::I64).map_err(wrong)
        }
    }

    /// The lengths of the buffer's axes.
    pub(crate) fn shape(&self) -> &[usize] {
        match self {
            Self::I32(buffer) => buffer.shape(),
            Self::I64(buffer) => buffer.shape(),
        }
    }

    /// The values, in C order.
    pub(crate) fn values(&self) -> Ints<'_> {
        match self {
            Self::I32(buffer) => Ints::I32(read(buffer)),
            Self::I64(buffer) => Ints::I64(read(buffer)),
        }
    }

    fn addresses(&self) -> Range<usize> {
        match self {
            Self::I32(buffer) => addresses(buffer),
            Self::I64(buffer) => addresses(buffer),
        }
    }
}

/// A writable buffer of int64.
pub(crate) struct IdBuffer(PyBuffer<i64>);

impl IdBuffer {
    /// Borrows `object` for writing; it must not share memory with any of `inputs`.
    pub(crate) fn get(object: &Bound<'_, PyAny>, inputs: &[&IntBuffer]) -> PyResult<Self> {
        let buffer = PyBuffer::<i64>::get(object)
            .map_err(|error| PyTypeError::new_err(format!("out must hold int64: {error}")))?;
        if buffer.readonly() || !buffer.is_c_contiguous() {
            return Err(PyValueError::new_err(
                "out must be writable and C-contiguous",
            ));
        }
        let ours = addresses(&buffer);
        for input in inputs {
            let theirs = input.addresses();
            if ours.start < theirs.end && theirs.start < ours.end {
                return Err(PyValueError::new_err(
                    "out shares memory with the tokens, starts or context it is computed from",
                ));
            }
        }
        Ok(Self(buffer))
    }

    /// The ids' memory.
    pub(crate) fn ids(&mut self) -> &mut [i64] {
        // SAFETY: `get` checked that the buffer is writable, of this element type, aligned (both by
        // `PyBuffer::get`) and contiguous, and that no other slice of this call covers it; `&mut
        // self` keeps it to one slice. The exporter holds the memory while the buffer lives.
        self.0
            .as_slice_ptr()
            .map_or(&mut [], |mut ids| unsafe { ids.as_mut() })
    }
}

fn read<T: pyo3::buffer::Element>(buffer: &PyBuffer<T>) -> &[T] {
    // SAFETY: `IntBuffer::get` checked that the buffer is contiguous, `into_typed` its element type
    // and alignment. The exporter holds the memory while the buffer lives, which outlives the slice.
    // A null pointer, which only an empty buffer has, reads as no values.
    buffer
        .as_slice_ptr()
        .map_or(&[], |values| unsafe { values.as_ref() })
}

fn addresses<T: pyo3::buffer::Element>(buffer: &PyBuffer<T>) -> Range<usize> {
    let start = buffer.buf_ptr().addr();
    start..start + buffer.len_bytes()
}
