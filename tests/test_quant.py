"""Stored rows to values: the recorded vectors, and a scalar oracle on exact fractions."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram.quant import dequantize
from quant_support import BLOCKS, DTYPES, FRAMEWORKS, as_bytes, bits, random_bytes, table
from softfloat import (
    add,
    bits_of,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    exact,
    multiply,
    round_to,
)

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden.json").read_text())
BF16_SCALE = float(np.uint16(14673).view(ml_dtypes.bfloat16))


# --- recorded vectors


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_fp8_with_a_scalar_scale_equals_the_recorded_vectors(framework):
    golden = GOLDEN["dequant_fp8_per_tensor"]
    rows = as_bytes(golden["fp8_bytes"], framework)
    fp8 = table("fp8_e4m3", 16, weight_scale=BF16_SCALE)
    assert golden["scale_bf16_bits"] == 14673
    assert bits(dequantize(rows, fp8)).tolist() == golden["out_bf16_bits"]

    case = golden["f32_scale_case"]
    fp8 = table("fp8_e4m3", 16, weight_scale=case["scale_f32"])
    expected = case["vllm_sglang(scale rounded to bf16 first)"]
    assert bits(dequantize(rows, fp8)).tolist() == expected
    assert expected != case["alt(f32 mul then bf16)"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("like", ["sglang", "vllm"])
@pytest.mark.parametrize("case", GOLDEN["dequant_e4m3_e8m0_block32"]["cases"], ids=str)
def test_fp8_with_block_scales_equals_the_recorded_vectors(framework, like, case):
    weight = as_bytes(GOLDEN["dequant_e4m3_e8m0_block32"]["fp8_bytes"], framework)
    rows = {"weight": weight, "scale": as_bytes(case["e8m0"], framework)}
    values = dequantize(rows, table("fp8_e4m3_e8m0_32", 64), like=like)
    assert bits(values).tolist() == case[f"{like}_bf16_bits"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", ["weight_scale_2", "weight_global_scale"])
def test_nvfp4_equals_the_recorded_vectors(framework, name):
    golden = GOLDEN["dequant_nvfp4"]
    rows = SimpleNamespace(
        weight=as_bytes(golden["packed_bytes"], framework),
        scale=as_bytes(golden["scale_bytes"], framework),
        bias=None,
    )
    nvfp4 = table("nvfp4", 32, **{name: golden["global_scale_f32"]})
    assert bits(dequantize(rows, nvfp4)).tolist() == golden["out_bf16_bits"]


# --- every byte against the oracle


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [BF16_SCALE, 0.000199, 1.0, 3.7, 1e30, 3e36, 1e-38])
def test_every_fp8_byte_equals_the_oracle(framework, dtype, scale):
    factor = round_to(round_to(exact(scale), "float32"), "bfloat16")
    expected = [
        bits_of(round_to(round_to(multiply(decode_e4m3(byte), factor), "float32"), dtype), dtype)
        for byte in range(256)
    ]
    fp8 = table("fp8_e4m3", 256, weight_scale=scale)
    values = dequantize(as_bytes(range(256), framework), fp8, dtype)
    assert bits(values).tolist() == expected


def block_oracle(encoding, weight, scale, dtype, like="sglang", constant=None):
    """The bits of one row, value by value."""
    block, per_byte = BLOCKS[encoding]
    expected = []
    for column in range(len(weight) * per_byte):
        if per_byte == 1:
            code = decode_e4m3(weight[column])
        else:
            code = decode_e2m1(weight[column // 2] >> 4 * (column % 2) & 15)
        stored = int(scale[column // block])
        factor = decode_e4m3(stored) if encoding == "nvfp4" else decode_e8m0(stored, like)
        value = round_to(multiply(code, factor), "float32")
        if constant is not None:
            value = round_to(multiply(value, exact(np.float32(constant))), "float32")
        expected.append(bits_of(round_to(value, dtype), dtype))
    return expected


@settings(max_examples=100, deadline=None)
@given(
    encoding=st.sampled_from(list(BLOCKS)),
    blocks=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    framework=st.sampled_from(FRAMEWORKS),
    like=st.sampled_from(["sglang", "vllm"]),
    constant=st.sampled_from([1.0, 0.000123, 7.25e-7, 1e20]),
    data=st.data(),
)
def test_block_encodings_equal_the_oracle(encoding, blocks, dtype, framework, like, constant, data):
    block, per_byte = BLOCKS[encoding]
    width = blocks * block // per_byte
    weight = data.draw(st.binary(min_size=width, max_size=width))
    edges = st.sampled_from([0, 1, 2, 126, 127, 128, 253, 254, 255])
    scale = data.draw(st.lists(edges | st.integers(0, 255), min_size=blocks, max_size=blocks))
    constants = {"weight_scale_2": constant} if encoding == "nvfp4" else {}
    rows = {
        "weight": as_bytes(list(weight), framework),
        "scale": as_bytes(scale, framework),
    }
    values = dequantize(rows, table(encoding, blocks * block, **constants), dtype, like=like)
    oracle = block_oracle(
        encoding, weight, scale, dtype, like, constant if encoding == "nvfp4" else None
    )
    assert bits(values).tolist() == oracle


@settings(max_examples=100, deadline=None)
@given(
    group=st.sampled_from([8, 32, 64]),
    groups=st.integers(1, 3),
    stored=st.sampled_from(["bfloat16", "float16", "float32"]),
    dtype=st.sampled_from([None, *DTYPES]),
    framework=st.sampled_from(FRAMEWORKS),
    seed=st.integers(0, 2**32 - 1),
)
def test_mlx_affine_equals_the_oracle(group, groups, stored, dtype, framework, seed):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, group * groups)
    words = (codes.reshape(-1, 8) << 4 * np.arange(8)).sum(axis=-1).astype(np.uint32)
    scale = rng.normal(0, 0.02, groups).astype(getattr(ml_dtypes, stored, stored))
    bias = rng.normal(0, 0.1, groups).astype(scale.dtype)
    rows = {"weight": words, "scale": scale, "bias": bias}
    if framework == "torch":
        rows = {
            "weight": torch.from_numpy(words),
            "scale": torch.from_numpy(scale.view(f"i{scale.itemsize}")).view(
                getattr(torch, stored)
            ),
            "bias": torch.from_numpy(bias.view(f"i{bias.itemsize}")).view(getattr(torch, stored)),
        }
    values = dequantize(rows, table(f"mlx_affine4_{group}", group * groups), dtype)
    out = dtype or stored
    assert str(values.dtype).removeprefix("torch.") == out
    expected = []
    for column, code in enumerate(codes):
        product = round_to(multiply(exact(code), exact(scale[column // group])), "float32")
        total = round_to(add(product, exact(bias[column // group])), "float32")
        expected.append(bits_of(round_to(total, out), out))
    assert bits(values).tolist() == expected


@settings(max_examples=100, deadline=None)
@given(
    encoding=st.sampled_from([*BLOCKS, "fp8_e4m3"]),
    rows=st.integers(0, 5),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_torch_numpy_and_whole_rows_agree_to_the_bit(encoding, rows, dtype, seed):
    columns = 160
    block, per_byte = BLOCKS.get(encoding, (0, 1))
    weight = random_bytes(seed, rows, 2, columns // per_byte)
    planes = {"weight": weight}
    if block:
        planes["scale"] = random_bytes(seed + 1, rows, 2, columns // block)
    one = table(encoding, columns, weight_scale=0.02, weight_scale_2=0.003)
    values = dequantize(planes, one, dtype)
    assert values.shape == (rows, 2, columns)
    tensors = {name: torch.from_numpy(plane) for name, plane in planes.items()}
    np.testing.assert_array_equal(bits(dequantize(tensors, one, dtype)), bits(values))
    whole = np.concatenate(list(planes.values()), axis=-1)
    np.testing.assert_array_equal(bits(dequantize(whole, one, dtype)), bits(values))
    whole = torch.from_numpy(whole)
    np.testing.assert_array_equal(bits(dequantize(whole, one, dtype)), bits(values))
