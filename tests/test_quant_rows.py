"""What dequantising accepts as rows, what it refuses, and what it keeps for captured graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch

from engram.quant import Dequantizer, dequantize
from quant_support import BLOCKS, DTYPES, FRAMEWORKS, as_bytes, bits, random_bytes, table
from softfloat import bits_of, exact, round_to

# --- the dtypes planes come in


def test_planes_of_the_stored_dtype_equal_planes_of_bytes():
    weight, scale = random_bytes(1, 3, 64), random_bytes(2, 3, 2)
    one = table("fp8_e4m3_e8m0_32", 64)
    expected = bits(dequantize({"weight": weight, "scale": scale}, one))
    typed = {
        "weight": weight.view(ml_dtypes.float8_e4m3fn),
        "scale": scale.view(ml_dtypes.float8_e8m0fnu),
    }
    np.testing.assert_array_equal(bits(dequantize(typed, one)), expected)
    typed = {
        "weight": torch.from_numpy(weight).view(torch.float8_e4m3fn),
        "scale": torch.from_numpy(scale).view(torch.float8_e8m0fnu),
    }
    np.testing.assert_array_equal(bits(dequantize(typed, one)), expected)
    signed = {"weight": weight.view(np.int8), "scale": torch.from_numpy(scale).numpy()}
    np.testing.assert_array_equal(bits(dequantize(signed, one)), expected)


@pytest.mark.case("F24")
def test_no_fp8_kernel_of_torch_is_needed():
    weight = torch.from_numpy(random_bytes(3, 4, 160)).view(torch.float8_e4m3fn)
    one = table("fp8_e4m3", 160, weight_scale=0.5)
    expected = bits(dequantize(weight, one))

    class OnlyViews(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            fp8 = [item for item in args if getattr(item, "dtype", None) == torch.float8_e4m3fn]
            name = getattr(function, "__name__", "")
            allowed = {"view", "__get__", "stride", "data_ptr", "storage_offset", "dim"}
            if fp8 and name not in allowed:
                raise NotImplementedError(f"{name} is not implemented for Float8")
            return function(*args, **(kwargs or {}))

    with OnlyViews():
        values = dequantize(weight, one)
        with pytest.raises(NotImplementedError):
            weight.float()
    np.testing.assert_array_equal(bits(values), expected)


@pytest.mark.parametrize("encoding", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("given_as", ["stored", "bytes", "odd address"])
def test_plain_floats_pass_through(encoding, framework, given_as):
    stored = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[encoding]
    numbers = (
        np.random.default_rng(4).normal(size=(2, 3, 8)).astype(getattr(ml_dtypes, stored, stored))
    )
    raw = numbers.view(np.uint8)
    if given_as == "odd address":
        shifted = np.zeros((2, 3, raw.shape[-1] + 1), np.uint8)
        shifted[..., 1:] = raw
        raw = shifted[..., 1:]
    rows = torch.from_numpy(raw) if framework == "torch" else raw
    if given_as == "stored":
        rows = rows.view(getattr(torch, stored)) if framework == "torch" else numbers
    one = SimpleNamespace(encoding=encoding, logical_shape=[2, 4], constants={})
    values = dequantize(rows, one)
    assert values.shape == (2, 3, 2, 4)
    assert str(values.dtype).removeprefix("torch.") == stored
    np.testing.assert_array_equal(bits(values).reshape(2, 3, 8), bits(numbers))
    if given_as == "stored":
        shares = (
            values.data_ptr() == rows.data_ptr()
            if framework == "torch"
            else np.shares_memory(values, rows)
        )
        assert shares


@pytest.mark.case("F33")
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_floats_are_converted_when_asked(framework, dtype):
    numbers = np.array(
        [1.0, 1 + 2**-8, 1 + 3 * 2**-8, -(2.0**-30), 1e38, 70000.0, np.inf], np.float32
    )
    expected = [
        bits_of(round_to((1, "infinite") if np.isinf(x) else exact(x), dtype), dtype)
        for x in numbers
    ]
    rows = torch.from_numpy(numbers) if framework == "torch" else numbers
    assert bits(dequantize(rows, table("f32", 7), dtype)).tolist() == expected


@pytest.mark.parametrize("length", [1, 7, 64])
def test_a_nan_has_the_same_bits_everywhere(length):
    nan = np.full(length, 0xFFC12345, np.uint32).view(np.float32)
    fp8 = np.full(length, 0xFF, np.uint8)
    for rows, one in (
        (nan, table("f32", length)),
        (fp8, table("fp8_e4m3", length, weight_scale=1.0)),
    ):
        for dtype, quiet in (("bfloat16", 0x7FC0), ("float16", 0x7E00)):
            assert set(bits(dequantize(rows, one, dtype)).tolist()) == {quiet}
            tensor = torch.from_numpy(rows)
            assert set(bits(dequantize(tensor, one, dtype)).tolist()) == {quiet}


@pytest.mark.parametrize(
    "dtype", ["float32", np.float32, np.dtype("float32"), torch.float32, torch.float]
)
def test_a_dtype_may_come_from_either_library_and_the_result_follows_the_rows(dtype):
    raw = random_bytes(5, 2, 16)
    one = table("fp8_e4m3", 16, weight_scale=1.0)
    assert dequantize(raw, one, dtype).dtype == np.float32
    assert dequantize(torch.from_numpy(raw), one, dtype).dtype == torch.float32


@pytest.mark.parametrize(
    "dtype", [np.int32, torch.int8, "float64", float, torch.float8_e4m3fn, "x"]
)
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match="bfloat16"):
        dequantize(np.zeros((1, 4), np.uint8), table("f32", 1), dtype)


def test_default_dtype_is_bfloat16_for_quantised_rows():
    raw = np.zeros((1, 16), np.uint8)
    assert dequantize(raw, table("fp8_e4m3", 16, weight_scale=1.0)).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("item", [2, 4])
def test_mlx_numbers_may_be_bytes_and_rows_whole(item):
    weight = random_bytes(6, 3, 32)
    numbers = np.random.default_rng(7).normal(size=(2, 3, 2))
    numbers = numbers.astype(np.float32 if item == 4 else ml_dtypes.bfloat16)
    one = table("mlx_affine4_32", 64)
    expected = dequantize(
        {"weight": weight.view(np.uint32), "scale": numbers[0], "bias": numbers[1]}, one
    )
    raw = [weight, numbers[0].view(np.uint8), numbers[1].view(np.uint8)]
    values = dequantize(dict(zip(("weight", "scale", "bias"), raw, strict=True)), one)
    assert values.dtype == expected.dtype == numbers.dtype
    np.testing.assert_array_equal(bits(values), bits(expected))
    whole = np.concatenate(raw, axis=-1)
    np.testing.assert_array_equal(bits(dequantize(whole, one)), bits(expected))
    whole = torch.from_numpy(whole)
    np.testing.assert_array_equal(bits(dequantize(whole, one)), bits(expected))


def test_strided_rows_are_read_as_they_are():
    raw = random_bytes(8, 6, 64)
    one = table("fp8_e4m3", 32, weight_scale=1.0)
    expected = bits(dequantize(np.ascontiguousarray(raw[::2, ::2]), one))
    np.testing.assert_array_equal(bits(dequantize(raw[::2, ::2], one)), expected)
    tensor = torch.from_numpy(raw)[::2, ::2]
    np.testing.assert_array_equal(bits(dequantize(tensor, one)), expected)


@pytest.mark.case("D13")
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("lead", [(0,), (0, 16), (4, 0)])
def test_no_rows_give_no_values(framework, lead):
    one = table("mxfp4", 64)
    rows = {
        "weight": as_bytes(np.zeros((*lead, 32)), framework),
        "scale": as_bytes(np.zeros((*lead, 2)), framework),
    }
    assert dequantize(rows, one).shape == (*lead, 64)


# --- what is missing or does not fit


@pytest.mark.case("F27")
@pytest.mark.parametrize(
    ("encoding", "constants", "named"),
    [
        ("fp8_e4m3", {}, "weight_scale"),
        ("fp8_e4m3", {"weight_scale_2": 1.0}, "weight_scale;"),
        ("fp8_e4m3", {"weight_scale": None}, "weight_scale"),
        ("nvfp4", {}, "weight_scale_2 or weight_global_scale"),
        ("nvfp4", {"weight_scale": 1.0}, "weight_scale_2 or weight_global_scale"),
    ],
)
def test_a_missing_table_wide_scale_is_refused_by_name(encoding, constants, named):
    with pytest.raises(ValueError, match=f"needs the table-wide scale {named}"):
        Dequantizer(table(encoding, 16, **constants))


@pytest.mark.case("F27")
@pytest.mark.parametrize(
    "scale", [0.0, -1.0, np.nan, np.inf, float(np.finfo(np.float32).min), 1e-60]
)
@pytest.mark.parametrize(
    ("encoding", "name"), [("fp8_e4m3", "weight_scale"), ("nvfp4", "weight_scale_2")]
)
def test_a_scale_that_was_never_loaded_cannot_be_served(encoding, name, scale):
    with pytest.raises(ValueError, match=f"{name} is .* never loaded"):
        Dequantizer(table(encoding, 16, **{name: scale}))


def test_two_names_of_one_scale_must_agree():
    Dequantizer(table("nvfp4", 16, weight_scale_2=0.5, weight_global_scale=0.5))
    with pytest.raises(ValueError, match="given twice"):
        Dequantizer(table("nvfp4", 16, weight_scale_2=0.5, weight_global_scale=2.0))


@pytest.mark.case("F27")
@pytest.mark.parametrize("encoding", [*BLOCKS, "mlx_affine4_32"])
@pytest.mark.parametrize("missing", ["weight", "scale", "bias"])
def test_a_missing_plane_is_refused_by_name(encoding, missing):
    if missing == "bias" and encoding in BLOCKS:
        missing = "scale"
    one = table(encoding, 64, weight_scale_2=1.0)
    blocks = 64 // BLOCKS.get(encoding, (32, 2))[0]
    planes = {
        "weight": np.zeros((1, 64 // BLOCKS.get(encoding, (32, 2))[1]), np.uint8),
        "scale": np.zeros((1, blocks if encoding in BLOCKS else 2 * blocks), np.uint8),
        "bias": np.zeros((1, 2 * blocks), np.uint8),
    }
    dequantize(planes, one)
    for absent in ({name: plane for name, plane in planes.items() if name != missing},
                   SimpleNamespace(**planes | {missing: None})):  # fmt: skip
        with pytest.raises(ValueError, match=f"have no plane '{missing}'"):
            dequantize(absent, one)
    with pytest.raises(ValueError, match="need plane 'scale'"):
        dequantize(planes["weight"], one)


@pytest.mark.parametrize(
    ("rows", "error", "named"),
    [
        (np.zeros((2, 31), np.uint8), ValueError, r"'weight' has shape \(2, 31\) of uint8"),
        (np.zeros((2, 32), np.float32), TypeError, "'weight' is float32.*float8_e4m3fn"),
        (np.zeros((2, 32), ml_dtypes.float8_e5m2), TypeError, "'weight' is float8_e5m2"),
        (np.zeros((), np.uint8), ValueError, "stores 32 bytes a row"),
        ({"weight": [1, 2]}, TypeError, "not list"),
        (torch.zeros(2, 32), TypeError, "'weight' is float32"),
    ],
)
def test_planes_that_do_not_fit_are_refused(rows, error, named):
    with pytest.raises(error, match=named):
        dequantize(rows, table("fp8_e4m3", 32, weight_scale=1.0))


def test_planes_that_do_not_match_each_other_are_refused():
    one = table("mxfp4", 32)
    weight, scale = np.zeros((3, 16), np.uint8), np.zeros((2, 1), np.uint8)
    with pytest.raises(ValueError, match=r"'scale' holds rows of shape \(2,\)"):
        dequantize({"weight": weight, "scale": scale}, one)
    with pytest.raises(TypeError, match="both"):
        dequantize({"weight": weight, "scale": torch.zeros(3, 1, dtype=torch.uint8)}, one)
    mlx = {
        "weight": np.zeros((1, 16), np.uint8),
        "scale": np.zeros((1, 1), np.float32),
        "bias": np.zeros((1, 1), np.float16),
    }
    with pytest.raises(TypeError, match="'scale' is float32 and plane 'bias' float16"):
        dequantize(mlx, table("mlx_affine4_32", 32))


@pytest.mark.parametrize(
    "encoding", ["exl3_trellis", "fp8_e5m2", "u8", "mlx_affine4_0", "", "NVFP4"]
)
def test_encodings_without_known_values_are_refused(encoding):
    with pytest.raises(ValueError, match="has no known values"):
        dequantize(np.zeros((1, 4), np.uint8), table(encoding, 4))


@pytest.mark.parametrize(
    ("encoding", "columns"),
    [("nvfp4", 24), ("mxfp4", 16), ("fp8_e4m3_e8m0_32", 33), ("mlx_affine4_32", 40),
     ("mlx_affine4_4", 12), ("mxfp4", 0)],
)  # fmt: skip
def test_columns_that_blocks_do_not_divide_are_refused(encoding, columns):
    with pytest.raises(ValueError, match="do not divide"):
        Dequantizer(table(encoding, columns, weight_scale_2=1.0))


def test_like_names_an_engine():
    with pytest.raises(ValueError, match="'sglang' or 'vllm'"):
        dequantize(np.zeros((1, 4), np.uint8), table("f32", 1), like="spec")


# --- capture


class FakeCudaTensor:
    """Just enough of a CUDA device for the look-up table's upload."""

    type = "cuda"


@pytest.mark.case("C11")
def test_a_table_is_uploaded_before_capture_or_the_capture_refused(monkeypatch):
    dequantizer = Dequantizer(table("fp8_e4m3", 16, weight_scale=1.0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="dequantize once before"):
        dequantizer._device_table(FakeCudaTensor())


def test_repeated_calls_read_one_table_at_one_address():
    raw = torch.from_numpy(random_bytes(9, 4, 16))
    one = table("fp8_e4m3", 16, weight_scale=1.0)
    dequantizer = Dequantizer(one)
    dequantizer(raw)
    address = dequantizer._device_table(raw.device).data_ptr()
    dequantizer(raw)
    assert dequantizer._device_table(raw.device).data_ptr() == address


def test_numpy_rows_need_no_torch():
    program = (
        "import sys, types, numpy; from engram.quant import dequantize; "
        "one = types.SimpleNamespace(encoding='fp8_e4m3', logical_shape=(4,), "
        "constants={'weight_scale': 1.0}); "
        "print(dequantize(numpy.full((1, 4), 56, numpy.uint8), one).tolist(), "
        "'torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("]] ") == ["[[1.0, 1.0, 1.0, 1.0", "False\n"]
