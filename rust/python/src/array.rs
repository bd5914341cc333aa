//! numpy arrays looked at in place, for calls whose buffers are ready.
//!
//! The buffer protocol makes numpy describe an array anew for every export, some microseconds when
//! its code is not in the processor's cache: as long as a decode step copies rows. The fields of an
//! array lie where `PyArrayObject_fields` of numpy's C interface says, in every numpy so far. That is
//! tried on arrays of known contents before it is relied upon; where it does not hold, and for
//! anything but plain arrays, callers take the buffer protocol.
#![expect(
    unsafe_code,
    reason = "fields of numpy's arrays are read where its C interface puts them"
)]

use std::ffi::c_int;
use std::ptr::NonNull;

use engram_core::buffer::PlaneSink;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

const C_CONTIGUOUS: c_int = 0x1;
const WRITEABLE: c_int = 0x400;

/// `PyArrayObject_fields`, as far as `flags`.
#[repr(C)]
struct Fields {
    base: ffi::PyObject,
    data: *mut u8,
    dimension_count: c_int,
    dimensions: *const isize,
    strides: *const isize,
    owner: *mut ffi::PyObject,
    dtype: *mut ffi::PyObject,
    flags: c_int,
}

/// The objects that plain arrays are made of.
struct Numpy {
    array: Py<PyType>,
    int64: Py<PyAny>,
    uint8: Py<PyAny>,
}

/// An array of numpy's own class.
#[derive(Clone, Copy)]
struct Array<'a> {
    fields: &'a Fields,
}

/// Ids, and memory with a place for the row of each, both in plain arrays.
pub(crate) struct Pair<'a> {
    ids: Array<'a>,
    out: Array<'a>,
}

impl<'a> Pair<'a> {
    /// The pair that `ids` and `out` are, if they are arrays of numpy's own class, the ids int64 of
    /// any shape but a single number's, `out` uint8 of shape `[*ids.shape, row_bytes]` and writable,
    /// both C-contiguous.
    #[inline]
    pub(crate) fn new(
        ids: &'a Bound<'_, PyAny>,
        out: &'a Bound<'_, PyAny>,
        row_bytes: usize,
    ) -> PyResult<Option<Self>> {
        let numpy = Numpy::get(ids.py())?;
        let pair = numpy.and_then(|numpy| {
            let (ids, out) = (numpy.array(ids)?, numpy.array(out)?);
            let (row, places) = out.shape().split_last()?;
            let ready = ids.is_of(&numpy.int64)
                && out.is_of(&numpy.uint8)
                && ids.is_contiguous()
                && out.is_contiguous()
                && out.is_writable()
                && *row == row_bytes
                && !places.is_empty()
                && places == ids.shape();
            ready.then_some(Self { ids, out })
        });
        Ok(pair)
    }

    /// How many ids there are.
    pub(crate) fn count(&self) -> usize {
        self.ids.count()
    }

    /// Appends the ids to `into`.
    #[inline]
    pub(crate) fn append_ids(&self, into: &mut Vec<i64>) {
        let count = self.ids.count();
        if count == 0 {
            return;
        }
        into.reserve(count);
        // SAFETY: a C-contiguous array of int64 has `count` of them from `data` on, and `reserve`
        // made room for them. They are copied once, before any check, and only the copy is used.
        // The address need not be aligned, hence the byte-wise copy.
        unsafe {
            let to = into.as_mut_ptr().add(into.len()).cast::<u8>();
            std::ptr::copy_nonoverlapping(self.ids.fields.data, to, count * size_of::<i64>());
            into.set_len(into.len() + count);
        }
    }

    /// A sink for rows of `row_bytes` bytes, from byte `offset` on, every `stride` bytes.
    #[inline]
    pub(crate) fn sink(
        &self,
        offset: usize,
        stride: usize,
        row_bytes: usize,
    ) -> engram_core::Result<PlaneSink<'a>> {
        let (address, length) = (self.out.fields.data, self.out.count());
        // SAFETY: a C-contiguous, writable array of uint8 has `length` bytes from `data` on. The
        // caller's reference on it, which 'a borrows, keeps it alive and keeps numpy from moving
        // its memory (as much as an export would); Rust holds no reference into them.
        unsafe { PlaneSink::from_raw(address, length, offset, stride, row_bytes, self.ids.count()) }
    }
}

impl Numpy {
    /// `None` where arrays are not what this file takes them for.
    fn get(py: Python<'_>) -> PyResult<Option<&Self>> {
        static NUMPY: PyOnceLock<Option<Numpy>> = PyOnceLock::new();
        let numpy = NUMPY.get_or_try_init(py, || Self::proven(py))?;
        Ok(numpy.as_ref())
    }

    #[cold]
    fn proven(py: Python<'_>) -> PyResult<Option<Self>> {
        let module = py.import("numpy")?;
        let dtype = |name: &str| module.call_method1("dtype", (name,));
        let numpy = Self {
            array: module.getattr("ndarray")?.cast_into::<PyType>()?.unbind(),
            int64: dtype("int64")?.unbind(),
            uint8: dtype("uint8")?.unbind(),
        };
        let keywords = PyDict::new(py);
        keywords.set_item("dtype", &numpy.int64)?;
        let whole = module.call_method("ones", ((3, 5),), Some(&keywords))?;
        let turned = whole.getattr("T")?;
        let fixed = whole.call_method1("view", (&numpy.uint8,))?;
        fixed.call_method1("setflags", (false,))?;
        let holds = numpy.holds(&whole, &numpy.int64, &[3, 5], true, true)?
            && numpy.holds(&turned, &numpy.int64, &[5, 3], false, true)?
            && numpy.holds(&fixed, &numpy.uint8, &[3, 40], true, false)?;
        Ok(holds.then_some(numpy))
    }

    /// Whether the fields of `array` are these, and its address the one that it tells.
    fn holds(
        &self,
        array: &Bound<'_, PyAny>,
        dtype: &Py<PyAny>,
        shape: &[usize],
        contiguous: bool,
        writable: bool,
    ) -> PyResult<bool> {
        let interface = array.getattr("__array_interface__")?;
        let address: usize = interface.get_item("data")?.get_item(0)?.extract()?;
        let Some(found) = self.array(array) else {
            return Ok(false);
        };
        Ok(found.fields.data.addr() == address
            && found.is_of(dtype)
            && usize::try_from(found.fields.dimension_count) == Ok(shape.len())
            && found.shape() == shape
            && found.is_contiguous() == contiguous
            && found.is_writable() == writable)
    }

    /// The array that `object` is, if it is one of numpy's own class.
    #[inline]
    fn array<'a>(&self, object: &'a Bound<'_, PyAny>) -> Option<Array<'a>> {
        if object.get_type_ptr() != self.array.as_ptr().cast() {
            return None;
        }
        // SAFETY: an object whose class is `ndarray` itself begins with these fields: numpy's C
        // interface says so, and `proven` saw it. It is alive while the borrowed `object` is. The
        // fields change only with the interpreter held, which is held while the reference is used.
        let fields = unsafe { &*object.as_ptr().cast::<Fields>() };
        Some(Array { fields })
    }
}

impl<'a> Array<'a> {
    fn shape(self) -> &'a [usize] {
        let count = usize::try_from(self.fields.dimension_count).unwrap_or(0);
        match NonNull::new(self.fields.dimensions.cast_mut()) {
            // SAFETY: numpy keeps as many lengths there, none of them negative, so that they read
            // the same as unsigned numbers.
            Some(lengths) if count > 0 => unsafe {
                std::slice::from_raw_parts(lengths.as_ptr().cast::<usize>(), count)
            },
            _ => &[],
        }
    }

    fn is_of(self, dtype: &Py<PyAny>) -> bool {
        self.fields.dtype == dtype.as_ptr()
    }

    fn count(self) -> usize {
        self.shape().iter().product()
    }

    fn is_contiguous(self) -> bool {
        self.fields.flags & C_CONTIGUOUS != 0
    }

    fn is_writable(self) -> bool {
        self.fields.flags & WRITEABLE != 0
    }
}
