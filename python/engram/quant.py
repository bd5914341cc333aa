"""Stored rows to values: FP8, block-scaled FP8, NVFP4, MXFP4, MLX 4-bit and plain floats.

Almost every encoding stands for few distinct values: one byte holds one FP8 value or two FP4
values, and one more byte holds their scale. So a table of every outcome is made once, in the wanted
dtype (at most 65,536 entries), and dequantising is one look-up per stored byte. The look-up is the
same in NumPy and in torch on any device, where it needs integer kernels alone: FP8 arithmetic is
missing from many of them. All devices therefore agree to the bit.

The tables follow the arithmetic of the serving engines, which is float32 with one final rounding:

| encoding | value |
|---|---|
| `fp8_e4m3` | `e4m3 * bf16(weight_scale)`: the scale is rounded to bfloat16 first |
| `fp8_e4m3_e8m0_32` | `e4m3 * 2**(e8m0 - 127)`, one scale per 32 columns |
| `nvfp4` | `(e2m1 * e4m3) * weight_scale_2`, one scale per 16 columns |
| `mxfp4` | `e2m1 * 2**(e8m0 - 127)`, one scale per 32 columns |
| `mlx_affine4_N` | `q * scale + bias`, one scale and bias per N columns |
| `f32`, `f16`, `bf16` | as stored |

Two 4-bit values share a byte, the earlier column in the low half. A NaN comes out as the positive
quiet NaN of the result's dtype.

The engines disagree on one scale byte that no released table is known to hold: E8M0 byte 0 is
`2**-127` in SGLang (and in the OCP specification) and 0.0 in vLLM's kernel; `like` chooses. Byte
255, NaN in the specification, multiplies by infinity in both, and here.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

import ml_dtypes
import numpy as np

from engram._errors import completes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Dequantizer", "EncodedTable", "dequantize"]

Like = Literal["sglang", "vllm"]

_FLOATS: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
_PLAIN = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BYTES = frozenset({"uint8", "int8"})


class EncodedTable(Protocol):
    """What dequantising needs to know of a table; `engram.FileGather` is one."""

    @property
    def encoding(self) -> str:
        """The name of the encoding, e.g. `"fp8_e4m3"`."""
        ...

    @property
    def logical_shape(self) -> Sequence[int]:
        """Values per row, e.g. `(160,)`."""
        ...

    @property
    def constants(self) -> Mapping[str, float]:
        """Table-wide numbers, e.g. `{"weight_scale": 0.000199}`."""
        ...


class _Layout(NamedTuple):
    """How an encoding stores a row."""

    weight_dtypes: frozenset[str]
    columns_per_byte: int
    scale_dtypes: frozenset[str] = frozenset()
    block: int = 0
    """Columns that share a scale; 0 where there is no scale plane."""


_FP8 = frozenset({"float8_e4m3fn"})
_FP4_PAIRS = frozenset({"float4_e2m1fn_x2"})
_E8M0 = frozenset({"float8_e8m0fnu"})
_LAYOUTS = {
    "fp8_e4m3": _Layout(_FP8, 1),
    "fp8_e4m3_e8m0_32": _Layout(_FP8, 1, _E8M0, 32),
    "nvfp4": _Layout(_FP4_PAIRS, 2, _FP8, 16),
    "mxfp4": _Layout(_FP4_PAIRS, 2, _E8M0, 32),
}
_MLX = re.compile(r"mlx_affine4_([1-9][0-9]*)")


@completes
def dequantize(rows: Any, table: EncodedTable, dtype: Any = None, *, like: Like = "sglang") -> Any:
    """Values of stored rows, equal to the bit on every device.

    Capturable in a CUDA graph after one call for the same table, dtype and device; a
    [`Dequantizer`][engram.quant.Dequantizer] makes that call explicit.

    Args:
        rows: Rows as gathered: a NumPy array or torch tensor of the stored dtype or of bytes, shape
            `[*, stored columns]`; for an encoding with scales, an object or mapping with planes
            `weight`, `scale` and (MLX) `bias`, or bytes with the planes of each row one after
            another, `[*, row_bytes]`.
        table: Anything with `encoding`, `logical_shape` and `constants`.
        dtype: A torch or NumPy dtype, or its name: bfloat16, float16 or float32. None is the stored
            dtype for plain floats, the scales' dtype for MLX (as MLX does; two-byte scales given as
            bytes count as bfloat16), and bfloat16, which models serve in, for the rest.
        like: Whose value E8M0 byte 0 has: `"sglang"` is `2**-127`, `"vllm"` is 0.

    Returns:
        An array or tensor, as `rows` is, of shape `[*, *logical_shape]`. Plain floats of the wanted
        dtype share memory with `rows` where possible.

    Raises:
        ValueError: The encoding has no values that engram knows, a scale or bias is missing or
            cannot be one, or a plane's shape does not fit the table.
        TypeError: A plane or `dtype` has a type that the encoding does not allow.
    """
    key = (
        table.encoding,
        tuple(table.logical_shape),
        tuple(sorted(_numbers(table).items())),
        None if dtype is None else _dtype_name(dtype),
        like,
    )
    dequantizer = _dequantizers.get(key)
    if dequantizer is None:
        dequantizer = _dequantizers.setdefault(key, Dequantizer(table, dtype, like=like))
    return dequantizer(rows)


_dequantizers: dict[Any, Dequantizer] = {}
"""Kept for the life of the process: a captured graph reads a dequantizer's tables by address."""


class Dequantizer:
    """`dequantize` for one table and dtype, with its look-up tables.

    Making one checks the table's scales, so a missing scale is found before serving. The object
    must live as long as any CUDA graph that captured a call.

    Args:
        table: As for `dequantize`.
        dtype: As for `dequantize`.
        like: As for `dequantize`.

    Raises:
        ValueError: As `dequantize`.
        TypeError: As `dequantize`.
    """

    @completes
    def __init__(self, table: EncodedTable, dtype: Any = None, *, like: Like = "sglang") -> None:
        if like not in ("sglang", "vllm"):
            raise ValueError(f"like must be 'sglang' or 'vllm', got {like!r}")
        if dtype is not None and _dtype_name(dtype) not in _FLOATS:
            raise TypeError(f"dtype must be {', '.join(_FLOATS)} or None, got {dtype!r}")
        self.encoding = table.encoding
        self._shape = tuple(table.logical_shape)
        self._columns = math.prod(self._shape)
        self._dtype = None if dtype is None else _dtype_name(dtype)
        self._device_tables: dict[Any, Any] = {}
        self._layout = _LAYOUTS.get(self.encoding)
        mlx = _MLX.fullmatch(self.encoding)
        self._group = int(mlx[1]) if mlx else 0
        block = self._group or (self._layout.block if self._layout else 0)
        if self._layout is None and not mlx and self.encoding not in _PLAIN:
            raise ValueError(
                f"encoding {self.encoding!r} has no known values; dequantize knows "
                f"{', '.join([*_LAYOUTS, 'mlx_affine4_N', *_PLAIN])}"
            )
        if block and (self._columns % block or not self._columns):
            raise ValueError(
                f"encoding {self.encoding!r} scales blocks of {block} columns, which do not divide "
                f"rows of {self._columns} values"
            )
        if self._group and self._columns % 8:
            raise ValueError(
                f"encoding {self.encoding!r} stores 8 values in a word, which do not divide rows "
                f"of {self._columns} values"
            )
        if self._layout is not None:
            self._table = _outcomes(
                self.encoding, _constant(table), self._dtype or "bfloat16", like
            )

    @completes
    def __call__(self, rows: Any) -> Any:
        """Values of `rows`; see `dequantize`."""
        if self.encoding in _PLAIN:
            return self._plain(rows)
        if self._layout is None:
            return self._mlx(rows)
        layout = self._layout
        width = self._columns // layout.columns_per_byte
        if not layout.block:
            weight = self._plane(rows, "weight", layout.weight_dtypes, width)
            return self._look_up(weight, tuple(weight.shape[:-1]))
        blocks = self._columns // layout.block
        if _is_array(rows):
            rows = self._split(rows, {"weight": width, "scale": blocks})
        weight = self._plane(rows, "weight", layout.weight_dtypes, width)
        scale = self._plane(rows, "scale", layout.scale_dtypes, blocks)
        _check_alike(weight, scale, "scale")
        lead = tuple(weight.shape[:-1])
        weight = weight.reshape(*lead, blocks, width // blocks)
        scale = scale.reshape(*lead, blocks, 1)
        if _is_tensor(weight):
            return self._look_up((scale.to(sys.modules["torch"].int32) << 8) | weight, lead)
        return self._look_up((scale.astype(np.uint16) << 8) | weight, lead)

    def _look_up(self, index: Any, lead: tuple[int, ...]) -> Any:
        """The table's entries at `index`, as `[*lead, *logical_shape]` of the wanted dtype."""
        dtype = self._dtype or "bfloat16"
        if not _is_tensor(index):
            values = np.take(self._table, index.reshape(-1)).view(_FLOATS[dtype])
            return values.reshape(*lead, *self._shape)
        torch = sys.modules["torch"]
        table = self._device_table(index.device)
        values = torch.index_select(table, 0, index.reshape(-1).to(torch.int32))
        return values.view(getattr(torch, dtype)).reshape(*lead, *self._shape)

    def _device_table(self, device: Any) -> Any:
        table = self._device_tables.get(device)
        if table is None:
            torch = sys.modules["torch"]
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"the look-up table of encoding {self.encoding!r} is not on {device} yet and "
                    "cannot be copied there during CUDA graph capture; dequantize once before "
                    "capturing"
                )
            signed = self._table.view(self._table.dtype.name.removeprefix("u"))
            table = torch.from_numpy(signed.copy()).to(device)
            table = self._device_tables.setdefault(device, table)
        return table

    def _plain(self, rows: Any) -> Any:
        stored = _PLAIN[self.encoding]
        width = self._columns * np.dtype(_FLOATS[stored]).itemsize
        values = _reinterpret(self._plane(rows, "weight", frozenset({stored}), width), stored)
        values = values.reshape(*values.shape[:-1], *self._shape)
        return values if self._dtype in (None, stored) else _cast(values, self._dtype)

    def _mlx(self, rows: Any) -> Any:
        groups = self._columns // self._group
        packed = self._columns // 2
        if _is_array(rows):
            item = 4 if rows.shape[-1:] == (packed + groups * 8,) else 2
            numbers = groups * item
            rows = self._split(rows, {"weight": packed, "scale": numbers, "bias": numbers})
        weight = self._plane(rows, "weight", frozenset({"uint32", "int32"}), packed)
        scale = self._mlx_numbers(rows, "scale", groups)
        bias = self._mlx_numbers(rows, "bias", groups)
        _check_alike(weight, scale, "scale")
        _check_alike(weight, bias, "bias")
        stored = _dtype_name(scale.dtype)
        if _dtype_name(bias.dtype) != stored:
            raise TypeError(
                f"plane 'scale' is {stored} and plane 'bias' {_dtype_name(bias.dtype)}; encoding "
                f"{self.encoding!r} stores both alike"
            )
        lead = tuple(weight.shape[:-1])
        if _is_tensor(weight):
            codes = sys.modules["torch"].stack((weight & 15, weight >> 4), dim=-1)
        else:
            codes = np.stack((weight & 15, weight >> 4), axis=-1)
        codes = _cast(codes.reshape(*lead, groups, self._group), "float32")
        with np.errstate(all="ignore"):
            # Two steps, so that neither NumPy nor a device fuses them into one rounding.
            values = codes * _cast(scale, "float32")[..., None]
            values = values + _cast(bias, "float32")[..., None]
        return _cast(values, self._dtype or stored).reshape(*lead, *self._shape)

    def _mlx_numbers(self, rows: Any, name: str, groups: int) -> Any:
        """The scale or bias plane as floats, `[*, groups]`."""
        plane = _find_plane(rows, name, self.encoding)
        stored = _dtype_name(plane.dtype)
        if stored in _BYTES:
            stored = "float32" if plane.shape[-1:] == (groups * 4,) else "bfloat16"
        width = groups * (4 if stored == "float32" else 2)
        return _reinterpret(self._plane(rows, name, frozenset(_FLOATS), width), stored)

    def _plane(self, rows: Any, name: str, allowed: frozenset[str], width: int) -> Any:
        """Plane `name` of `rows` as bytes, `[*, width]`, its dtype and shape checked."""
        plane = _find_plane(rows, name, self.encoding)
        stored = _dtype_name(plane.dtype)
        if stored not in allowed and stored not in _BYTES:
            raise TypeError(
                f"plane {name!r} is {stored}; encoding {self.encoding!r} stores "
                f"{' or '.join(sorted(allowed))}, or give its bytes as uint8"
            )
        if plane.ndim == 0 or plane.shape[-1] * plane.dtype.itemsize != width:
            raise ValueError(
                f"plane {name!r} has shape {tuple(plane.shape)} of {stored}; encoding "
                f"{self.encoding!r} with rows of {self._columns} values stores {width} bytes a row"
            )
        return _reinterpret(plane, "uint8")

    def _split(self, rows: Any, widths: dict[str, int]) -> dict[str, Any]:
        """Rows that hold their planes one after another, as planes."""
        total = sum(widths.values())
        if _dtype_name(rows.dtype) not in _BYTES or rows.ndim == 0 or rows.shape[-1] != total:
            needed = " and ".join(repr(name) for name in widths if name != "weight")
            parts = " + ".join(str(width) for width in widths.values())
            raise ValueError(
                f"rows of encoding {self.encoding!r} need plane {needed} beside 'weight'; give an "
                f"object or mapping with these planes, or whole rows as {parts} = {total} uint8 "
                f"each, not {_dtype_name(rows.dtype)} of shape {tuple(rows.shape)}"
            )
        planes: dict[str, Any] = {}
        start = 0
        for name, width in widths.items():
            planes[name] = rows[..., start : start + width]
            start += width
        return planes


def _numbers(table: EncodedTable) -> dict[str, float]:
    """The table's constants as plain numbers, without those that hold none."""
    return {name: float(value) for name, value in table.constants.items() if value is not None}  # pyright: ignore[reportUnnecessaryComparison]


def _constant(table: EncodedTable) -> float:
    """The table-wide scale, checked; 1.0 for encodings without one."""
    names = {
        "fp8_e4m3": ("weight_scale",),
        "nvfp4": ("weight_scale_2", "weight_global_scale"),
    }.get(table.encoding)
    if names is None:
        return 1.0
    numbers = _numbers(table)
    present = {name: numbers[name] for name in names if name in numbers}
    if not present:
        raise ValueError(
            f"encoding {table.encoding!r} needs the table-wide scale {' or '.join(names)}; the "
            f"table's constants hold {', '.join(sorted(numbers)) or 'nothing'}, and values without "
            "it would be wrong by orders of magnitude"
        )
    if len(set(present.values())) > 1:
        raise ValueError(f"the table-wide scale is given twice, differently: {present}")
    name, given = next(iter(present.items()))
    with np.errstate(over="ignore"):
        scale = np.float32(given)
        if table.encoding == "fp8_e4m3":
            scale = np.float32(ml_dtypes.bfloat16(scale))
    if not (np.isfinite(scale) and scale > 0):
        raise ValueError(
            f"{name} is {given!r}, which cannot scale a table: it must be finite and above 0 in "
            "its stored precision; a scale that was never loaded looks like this"
        )
    return float(scale)


@functools.cache
def _e4m3() -> NDArray[np.float32]:
    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _e8m0(like: Like) -> NDArray[np.float32]:
    scales = np.ldexp(np.float32(1), np.arange(256) - 127).astype(np.float32)
    scales[255] = np.inf
    if like == "vllm":
        scales[0] = 0.0
    return scales


def _e2m1_pairs() -> NDArray[np.float32]:
    """The two values of every byte, `[256, 2]`, low half first."""
    codes = np.array([*_E2M1_MAGNITUDES, *(-value for value in _E2M1_MAGNITUDES)], np.float32)
    index = np.arange(256)
    return np.stack((codes[index & 15], codes[index >> 4]), axis=-1)


def _outcomes(encoding: str, constant: float, dtype: str, like: Like) -> NDArray[Any]:
    """Every outcome, as unsigned integers that each hold the values of one stored byte.

    Entry `scale << 8 | byte`; just `byte` where there is no scale plane.
    """
    with np.errstate(all="ignore"):
        if encoding == "fp8_e4m3":
            values = _e4m3()[:, None] * np.float32(constant)
        elif encoding == "fp8_e4m3_e8m0_32":
            values = (_e8m0(like)[:, None] * _e4m3()).reshape(-1, 1)
        elif encoding == "mxfp4":
            values = (_e8m0(like)[:, None, None] * _e2m1_pairs()).reshape(-1, 2)
        else:
            values = (_e4m3()[:, None, None] * _e2m1_pairs()).reshape(-1, 2) * np.float32(constant)
    rounded = np.ascontiguousarray(_cast(values, dtype))
    return rounded.view(f"uint{8 * rounded.itemsize * rounded.shape[1]}").reshape(-1)


def _find_plane(rows: Any, name: str, encoding: str) -> Any:
    """Plane `name` of `rows`, which may be the weight plane alone."""
    if _is_array(rows):
        return rows
    if isinstance(rows, Mapping):
        plane = cast("Mapping[str, Any]", rows).get(name)
    else:
        plane = getattr(rows, name, None)
    if plane is None:
        raise ValueError(f"rows of encoding {encoding!r} have no plane {name!r}, which it needs")
    if not _is_array(plane):
        raise TypeError(
            f"plane {name!r} must be a NumPy array or a torch tensor, not {type(plane).__name__}"
        )
    return plane


def _check_alike(weight: Any, plane: Any, name: str) -> None:
    if _is_tensor(weight) != _is_tensor(plane):
        raise TypeError(f"planes 'weight' and {name!r} must both be NumPy arrays or both tensors")
    if weight.shape[:-1] != plane.shape[:-1]:
        raise ValueError(
            f"plane {name!r} holds rows of shape {tuple(plane.shape[:-1])}, plane 'weight' of "
            f"{tuple(weight.shape[:-1])}"
        )


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray) or _is_tensor(value)


def _dtype_name(dtype: Any) -> str:
    """`"bfloat16"` for `torch.bfloat16`, `ml_dtypes.bfloat16` and `"bfloat16"`."""
    text = str(dtype)
    name = text.removeprefix("torch.")
    if name == text:
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = text
    return name


def _reinterpret(array: Any, name: str) -> Any:
    """The same memory read as another dtype, along the last axis; a copy where it must be one."""
    if _dtype_name(array.dtype) == name:
        return array
    if not _is_tensor(array):
        if array.strides[-1] != array.itemsize:
            array = np.ascontiguousarray(array)
        return array.view(_FLOATS.get(name, np.uint8))
    torch = sys.modules["torch"]
    dtype = getattr(torch, name)
    offsets = (array.storage_offset(), *array.stride()[:-1])
    if (
        array.stride(-1) != 1
        or array.data_ptr() % dtype.itemsize
        or any(offset * array.itemsize % dtype.itemsize for offset in offsets)
    ):
        array = array.clone(memory_format=torch.contiguous_format)
    return array.view(dtype)


def _cast(values: Any, name: str) -> Any:
    """`values` rounded once to dtype `name`, any NaN as the positive quiet NaN.

    Where a NaN's sign and payload go differs between processors, and between the vector part and
    the tail of one loop.
    """
    if _is_tensor(values):
        torch = sys.modules["torch"]
        rounded = values.to(getattr(torch, name))
        if values.is_floating_point():
            rounded = rounded.masked_fill(values.isnan(), math.nan)
        return rounded
    with np.errstate(all="ignore"):
        rounded = values.astype(_FLOATS[name])
        unordered = np.isnan(values)
    if unordered.any():
        rounded[unordered] = np.nan
    return rounded
