"""Ids in and rows out, between what callers hold and the int64 and bytes the native half takes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from engram._dtypes import torch_dtype
from engram._errors import placed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engram.table import PlaneInfo, TableInfo

INT64 = np.dtype(np.int64)
UINT8 = np.dtype(np.uint8)


def is_torch(value: object) -> bool:
    """Whether `value` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_numpy(value: object) -> bool:
    """Whether `value` is a numpy array; it keeps its static type, which `isinstance` would blur."""
    return isinstance(value, np.ndarray)


def int64_ids(ids: Any, table: TableInfo) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Ids as a one-dimensional C-contiguous int64 array, and their shape.

    Args:
        ids: numpy array, CPU torch tensor, nested sequence of ints or any buffer, of any integer
            dtype and stride. An empty sequence counts as integers.
        table: The table they are for, to be named in errors.

    Raises:
        TypeError: The ids are not integers (booleans are not), or live on a device.
        IndexError: An id is beyond int64, and so beyond any table.
    """
    given = ids
    if is_torch(ids):
        if ids.device.type != "cpu":
            raise placed(
                TypeError(
                    f"ids are on {ids.device}; FileGather takes ids on the host. engram.Stage "
                    "copies tokens from the device once per step and computes ids on the host"
                ),
                table=table.name,
            )
        ids = ids.detach().numpy()
    array: NDArray[Any] = np.asarray(ids)
    if array.dtype != INT64:
        written_out = not is_numpy(ids)
        if written_out and array.size == 0 and array.dtype == np.float64:
            return np.empty(0, np.int64), array.shape  # An empty list has no dtype of its own.
        if array.dtype.kind not in "iu":
            if written_out:
                _refuse_huge(np.asarray(ids, object), table)
            raise placed(TypeError(_no_integers(given, array.dtype)), table=table.name)
        if array.dtype.kind == "u" and array.dtype.itemsize == INT64.itemsize:
            _refuse_huge(array, table)
    return np.ascontiguousarray(array, np.int64).reshape(-1), array.shape


def _no_integers(ids: Any, dtype: np.dtype[Any]) -> str:
    """What is wrong with ids of this dtype, and what to pass instead if that is clear."""
    of_torch, of_numpy = is_torch(ids), is_numpy(ids)
    if dtype.kind == "O" and not of_numpy and not isinstance(ids, list | tuple):
        # numpy makes one object of what is neither a sequence nor an array.
        kind = "None" if ids is None else f"a {type(ids).__name__}"
        hint = "" if ids is None else "; pass a list or an array"
        return f"ids must be integers, not {kind}{hint}"
    hint = ""
    if dtype.kind == "f" and of_torch:
        hint = "; pass ids.long()"
    elif dtype.kind == "f" and of_numpy:
        hint = "; pass ids.astype(numpy.int64)"
    return f"ids must be integers, not {dtype}{hint}"


def _refuse_huge(array: NDArray[Any], table: TableInfo) -> None:
    """Raises IndexError for the first integer that int64 cannot hold, if all are integers.

    numpy makes floats or objects of integers that have no common dtype.
    """
    flat = array.reshape(-1)
    if array.dtype.kind == "O":
        kinds = (int, np.integer)
        if not all(isinstance(value, kinds) and not isinstance(value, bool) for value in flat):
            return
    limits = np.iinfo(np.int64)
    beyond = np.flatnonzero((flat > limits.max) | (flat < limits.min))
    if beyond.size == 0:
        return
    position = int(beyond[0])
    row = int(flat[position])
    raise placed(
        IndexError(
            f'row id {row} at position {position} is outside table "{table.name}" with '
            f"{table.rows} rows (valid ids: 0 to {max(table.rows - 1, 0)})"
        ),
        table=table.name,
        row=row,
        position=position,
    )


def byte_view(out: Any, plane: PlaneInfo, shape: tuple[int, ...], what: str = "out") -> Any:
    """A writable uint8 view of `out`, which must hold rows of `plane` for ids of `shape`.

    Args:
        out: numpy array or CPU torch tensor, either of the plane's dtype and shape
            `[*shape, *plane.row_shape]`, or of uint8 and shape `[*shape, plane.row_bytes]`.
        plane: The plane whose rows it receives.
        shape: Shape of the ids.
        what: How messages call `out`.

    Raises:
        TypeError: Neither an array nor a tensor on the host, or of another dtype; both are named.
        ValueError: Wrong shape, not C-contiguous, or read-only.
    """
    torch_like = is_torch(out)
    if torch_like:
        if out.device.type != "cpu":
            raise placed(
                TypeError(f"{what} is on {out.device}; rows are gathered into host memory")
            )
        expected = {torch_dtype(plane.stored_dtype): plane.row_shape}
        expected[sys.modules["torch"].uint8] = (plane.row_bytes,)
    elif is_numpy(out):
        expected = {plane.dtype: plane.row_shape, UINT8: (plane.row_bytes,)}
    else:
        raise placed(
            TypeError(
                f"{what} is a {type(out).__name__}; pass a numpy array, a CPU torch tensor, "
                "engram.Rows or a HostBuffer"
            )
        )
    row_shape = expected.get(out.dtype)
    if row_shape is None:
        raise placed(
            TypeError(
                f"{what} has dtype {out.dtype}; rows of this table are {plane.dtype} (or bytes: "
                "uint8). engram.dequantize converts gathered rows to values"
            )
        )
    if tuple(out.shape) != (*shape, *row_shape):
        raise placed(
            ValueError(
                f"{what} has shape {tuple(out.shape)}; ids of shape {shape} give rows of shape "
                f"{(*shape, *row_shape)} in {out.dtype}"
            )
        )
    return _bytes_of(out, torch_like=torch_like, what=what)


def _bytes_of(out: Any, *, torch_like: bool, what: str) -> NDArray[np.uint8]:
    if torch_like:
        if not out.is_contiguous():
            raise placed(
                ValueError(f"{what} is not contiguous; pass out.contiguous(), or leave out away")
            )
        torch = sys.modules["torch"]
        flat = out.detach().reshape(-1).view(torch.uint8)
        return cast("NDArray[np.uint8]", flat.numpy())
    if not out.flags.c_contiguous:
        raise placed(
            ValueError(
                f"{what} is not C-contiguous; pass numpy.ascontiguousarray(out), or leave out away"
            )
        )
    if not out.flags.writeable:
        raise placed(ValueError(f"{what} is read-only; pass a writable array"))
    return cast("NDArray[np.uint8]", out.reshape(-1).view(UINT8))


def empty(plane: PlaneInfo, shape: tuple[int, ...], *, torch_like: bool) -> Any:
    """Uninitialised rows of `plane` for ids of `shape`."""
    if torch_like:
        torch = sys.modules["torch"]
        return torch.empty((*shape, *plane.row_shape), dtype=torch_dtype(plane.stored_dtype))
    return np.empty((*shape, *plane.row_shape), plane.dtype)
