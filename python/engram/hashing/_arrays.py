"""Integers in and ids out, between what callers hold and the int32 and int64 of the native half."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from engram._errors import placed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64] | NDArray[np.int32]

_INT64 = np.dtype(np.int64)
_INT32 = np.dtype(np.int32)


def is_torch(value: object) -> bool:
    """Whether `value` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def integers(value: Any, name: str) -> Integers:
    """`value` as a C-contiguous array of int32 or int64, without a copy where it already is one.

    Args:
        value: numpy array, CPU torch tensor, sequence of ints or any buffer, of any integer dtype
            and stride. An empty list counts as integers; an empty array has the dtype it has.
        name: How messages call it.

    Raises:
        TypeError: Not integers (booleans are not), or on a device.
        ValueError: Ragged, or an integer does not fit 64 bits.
    """
    if _is_native(value):
        return cast("Integers", value)
    given = value
    if is_torch(value):
        if value.device.type != "cpu":
            raise placed(
                TypeError(
                    f"{name}: on {value.device}; NgramHash.ids takes host memory. "
                    f'NgramHash.to_device("{value.device}") computes the same ids there'
                )
            )
        value = value.detach().numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise placed(ValueError(f"{name}: {error}")) from None
    if _is_native(array):
        return cast("Integers", array)
    if array.dtype in (_INT64, _INT32):
        return np.array(array, order="C")
    if isinstance(given, list | tuple) and array.size == 0 and array.dtype == np.float64:
        return np.empty(array.shape, np.int64)
    if array.dtype.kind not in "iu":
        _refuse_huge(array, name)
        raise placed(TypeError(f"{name}: integers are needed, not {array.dtype}"))
    if array.dtype == np.uint64 and array.size > 0 and int(array.max()) > np.iinfo(np.int64).max:
        raise placed(ValueError(f"{name}: {int(array.max())} does not fit a signed 64-bit integer"))
    return array.astype(np.int64, order="C")


def _is_native(value: Any) -> bool:
    """Whether the native half can read `value` in place; cheap, as it is asked on every step."""
    if type(value) is not np.ndarray:
        return False
    dtype = value.dtype
    if dtype is not _INT64 and dtype is not _INT32:
        return False
    flags = value.flags
    return flags.c_contiguous and flags.aligned


def _refuse_huge(array: NDArray[Any], name: str) -> None:
    """Python integers beyond 64 bits make an object array, which is a matter of value."""
    if array.dtype == np.object_:
        values = cast("list[object]", array.reshape(-1).tolist())
        if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
            raise placed(ValueError(f"{name}: an integer does not fit a signed 64-bit integer"))


def ids_out(out: Any, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """The memory of `out`, which must be int64 of this shape, as a numpy array.

    Raises:
        TypeError: Neither a numpy array nor a CPU torch tensor, or of another dtype.
        ValueError: Wrong shape, not C-contiguous, or read-only.
    """
    if isinstance(out, np.ndarray):
        array = cast("NDArray[np.int64]", out)
        if array.dtype != _INT64:
            raise placed(TypeError(f"out: dtype is {array.dtype}; ids are int64"))
    elif is_torch(out):
        torch = sys.modules["torch"]
        if out.device.type != "cpu":
            raise placed(TypeError(f"out: on {out.device}; ids are written to host memory"))
        if out.dtype != torch.int64:
            raise placed(TypeError(f"out: dtype is {out.dtype}; ids are torch.int64"))
        array = cast("NDArray[np.int64]", out.detach().numpy())
    else:
        raise placed(
            TypeError(f"out: a {type(out).__name__}; pass a numpy array or a CPU torch tensor")
        )
    if array.shape != shape:
        raise placed(
            ValueError(f"out: shape is {array.shape}; the ids of these tokens are {shape}")
        )
    flags = array.flags
    if not flags.c_contiguous:
        raise placed(
            ValueError("out: not C-contiguous; pass a contiguous array, or leave out away")
        )
    if not flags.writeable:
        raise placed(ValueError("out: read-only; pass a writable array"))
    return array


def like(tokens: Any, ids: NDArray[np.int64]) -> Any:
    """`ids` as what `tokens` are: a torch tensor on the same memory, or the array itself."""
    return sys.modules["torch"].from_numpy(ids) if is_torch(tokens) else ids
