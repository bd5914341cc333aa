//! Memory across the border: `HostBuffer` out, ids and output arrays in.
//!
//! An array that Python passes as `out` stays exported (its buffer held) while rows move, so it can
//! neither be freed nor resized. Two calls that write to the same memory at the same time are the
//! caller's error: they may mix rows, and can do no other harm.
#![expect(
    unsafe_code,
    reason = "exporting and importing raw memory through the buffer protocol"
)]

use std::ffi::{c_int, c_void};
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use engram_core::buffer::{HostBuffer as CoreBuffer, NodePolicy, PlaneSink};
use pyo3::buffer::{PyBuffer, PyUntypedBuffer};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::errors::{OrRaise as _, value_error};

/// Page-aligned host memory at a fixed address.
#[pyclass(subclass, frozen, weakref, module = "engram._engram")]
pub(crate) struct HostBuffer {
    pub(crate) memory: Arc<CoreBuffer>,
    nbytes: usize,
}

impl HostBuffer {
    /// A buffer over memory that is there already, of which `nbytes` bytes count.
    pub(crate) fn over(memory: CoreBuffer, nbytes: usize) -> Self {
        Self {
            memory: Arc::new(memory),
            nbytes,
        }
    }

    fn word(&self, py: Python<'_>, offset: usize) -> PyResult<&AtomicU32> {
        self.memory
            .word(offset)
            .ok_or_else(|| value_error(py, "a word is four bytes at a multiple of four"))
    }
}

#[pymethods]
impl HostBuffer {
    #[new]
    #[pyo3(signature = (nbytes, huge_pages = false, *, fd = None))]
    fn new(py: Python<'_>, nbytes: usize, huge_pages: bool, fd: Option<RawFd>) -> PyResult<Self> {
        if fd.is_some_and(|fd| fd < 0) {
            return Err(value_error(py, "fd is not a file descriptor"));
        }
        let memory = py
            .detach(|| match fd {
                None => CoreBuffer::new(nbytes, huge_pages),
                Some(fd) => {
                    // SAFETY: the descriptor is not negative, and used for this one call: a number
                    // that is no open file's makes the kernel refuse.
                    let file = unsafe { BorrowedFd::borrow_raw(fd) };
                    CoreBuffer::shared(file, nbytes)
                }
            })
            .or_raise(py)?;
        Ok(Self {
            memory: Arc::new(memory),
            nbytes,
        })
    }

    /// Bytes the memory really has: whole huge pages where those were asked for.
    #[getter]
    fn capacity(&self) -> usize {
        self.memory.len()
    }

    /// Makes the kernel give memory for a part of the buffer now.
    fn prefault(&self, py: Python<'_>, offset: usize, nbytes: usize) -> PyResult<()> {
        py.detach(|| self.memory.prefault(offset..offset.saturating_add(nbytes)))?;
        Ok(())
    }

    /// Makes huge pages of a part of the buffer, where the kernel finds room.
    fn collapse(&self, py: Python<'_>, offset: usize, nbytes: usize) -> PyResult<()> {
        py.detach(|| self.memory.collapse(offset..offset.saturating_add(nbytes)))?;
        Ok(())
    }

    /// Says which memory nodes pages come from that are touched from now on.
    fn place(&self, nodes: Vec<u32>, interleave: bool) -> PyResult<()> {
        let policy = if interleave {
            NodePolicy::Interleave
        } else {
            NodePolicy::Prefer
        };
        Ok(self.memory.place(&nodes, policy)?)
    }

    /// The word at `offset`, as it is now.
    fn load_word(&self, py: Python<'_>, offset: usize) -> PyResult<u32> {
        Ok(self.word(py, offset)?.load(Ordering::SeqCst))
    }

    /// Sets the word at `offset`. Whoever sees the new value sees all that was written before.
    fn store_word(&self, py: Python<'_>, offset: usize, value: u32) -> PyResult<()> {
        self.word(py, offset)?.store(value, Ordering::SeqCst);
        Ok(())
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.nbytes
    }

    #[getter]
    fn address(&self) -> usize {
        self.memory.address() as usize
    }

    #[getter]
    fn huge_pages(&self) -> bool {
        self.memory.huge_pages()
    }

    fn __len__(&self) -> usize {
        self.nbytes
    }

    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let buffer = slf.get();
        let length = ffi::Py_ssize_t::try_from(buffer.nbytes)?;
        let address = buffer.memory.address().cast::<c_void>();
        // SAFETY: `view` is the interpreter's to fill; the memory is `length` bytes at a fixed
        // address, and the view takes a reference on `slf`, which owns it.
        let result =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), address, length, 0, flags) };
        if result == 0 {
            Ok(())
        } else {
            Err(PyErr::fetch(slf.py()))
        }
    }

    // Nothing to release: a view holds its reference on the buffer, and the interpreter drops it.
    #[expect(clippy::unused_self, reason = "the signature of the protocol")]
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {}
}

/// Row ids that a Python object exports: int64, C-contiguous, at any address.
pub(crate) struct Ids(PyUntypedBuffer);

impl Ids {
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(object)?;
        // Not `PyBuffer<i64>`, which refuses ids at addresses that are no multiple of 8; numpy
        // calls the type of those "=q".
        let int64 = matches!(buffer.format().to_bytes(), b"l" | b"q" | b"=q")
            && buffer.item_size() == size_of::<i64>();
        if !int64 {
            return Err(PyTypeError::new_err("ids must be int64"));
        }
        if !buffer.is_c_contiguous() {
            return Err(PyValueError::new_err("ids must be C-contiguous"));
        }
        Ok(Self(buffer))
    }

    fn shape(&self) -> &[usize] {
        self.0.shape()
    }

    /// Appends the ids to `into`.
    pub(crate) fn append_to(&self, _attached: Python<'_>, into: &mut Vec<i64>) {
        let count = self.0.len_bytes() / size_of::<i64>();
        if count == 0 {
            return;
        }
        into.reserve(count);
        // SAFETY: the export keeps `count` ids readable at this address while `self` is borrowed,
        // and `reserve` made room for them. The ids are copied once, before any check, and only the
        // copy is used, so a thread that changes them meanwhile can spoil values, not bounds. The
        // address need not be aligned, hence the byte-wise copy.
        unsafe {
            let to = into.as_mut_ptr().add(into.len()).cast::<u8>();
            std::ptr::copy_nonoverlapping(self.0.buf_ptr().cast(), to, count * size_of::<i64>());
            into.set_len(into.len() + count);
        }
    }
}

/// int64 memory that a Python object exports for ids to be written to.
pub(crate) struct IdOutput(PyBuffer<i64>);

impl IdOutput {
    /// Borrows `object`; it must be writable and C-contiguous.
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyBuffer::<i64>::get(object)
            .map_err(|error| PyTypeError::new_err(format!("out must hold int64: {error}")))?;
        if buffer.readonly() || !buffer.is_c_contiguous() {
            return Err(PyValueError::new_err(
                "out must be writable and C-contiguous",
            ));
        }
        Ok(Self(buffer))
    }

    /// The places of the ids, in C order.
    pub(crate) fn ids(&mut self) -> &mut [i64] {
        // SAFETY: `new` checked that the memory is writable, contiguous, and made of aligned int64;
        // the export keeps it alive while `self` is borrowed, and `&mut self` keeps this the only
        // slice of it here. An empty buffer may have no address, hence the empty slice.
        self.0
            .as_slice_ptr()
            .map_or(&mut [], |mut ids| unsafe { ids.as_mut() })
    }
}

/// Memory that a Python object exports for writing.
pub(crate) struct Output(PyUntypedBuffer);

impl Output {
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(object).map_err(|_| {
            PyTypeError::new_err(format!(
                "out of type {} does not give access to its memory; pass a numpy array, a CPU torch tensor or a HostBuffer",
                object.get_type()
            ))
        })?;
        if buffer.readonly() {
            return Err(PyValueError::new_err(
                "out is read-only; pass a writable array",
            ));
        }
        if !buffer.is_c_contiguous() {
            return Err(PyValueError::new_err(
                "out is not C-contiguous; pass numpy.ascontiguousarray(out), or leave out away",
            ));
        }
        Ok(Self(buffer))
    }

    /// Refuses a shape other than `[*ids.shape, row]` with `row` elements making `row_bytes` bytes.
    pub(crate) fn require_shape(&self, ids: &Ids, row_bytes: usize) -> PyResult<()> {
        let shape = self.0.shape();
        let fits = shape.split_last().is_some_and(|(last, leading)| {
            leading == ids.shape() && last * self.0.item_size() == row_bytes
        });
        if fits {
            return Ok(());
        }
        let mut expected: Vec<String> = ids.shape().iter().map(ToString::to_string).collect();
        expected.push((row_bytes / self.0.item_size().max(1)).to_string());
        Err(PyValueError::new_err(format!(
            "out has shape {shape:?} of {}-byte elements; ids of shape {:?} need [{}] ({row_bytes} bytes per row)",
            self.0.item_size(),
            ids.shape(),
            expected.join(", ")
        )))
    }

    /// A sink for `rows` rows of `row_bytes` bytes, from byte `offset` on, every `stride` bytes.
    pub(crate) fn sink(
        &self,
        py: Python<'_>,
        offset: usize,
        stride: usize,
        row_bytes: usize,
        rows: usize,
    ) -> PyResult<PlaneSink<'_>> {
        self.core_sink(offset, stride, row_bytes, rows).or_raise(py)
    }

    /// As [`Output::sink`], without the interpreter.
    pub(crate) fn core_sink(
        &self,
        offset: usize,
        stride: usize,
        row_bytes: usize,
        rows: usize,
    ) -> engram_core::Result<PlaneSink<'_>> {
        let (address, length) = (self.0.buf_ptr().cast::<u8>(), self.0.len_bytes());
        // SAFETY: the export keeps `length` writable bytes at `address` alive as long as `self`,
        // which the sink borrows; Rust holds no reference into them.
        unsafe { PlaneSink::from_raw(address, length, offset, stride, row_bytes, rows) }
    }
}
