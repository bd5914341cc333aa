"""Dequantising on the device: the CPU's bits, inside a captured graph too."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engram.quant import Dequantizer, dequantize

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA does not answer")

WIDTHS = {
    "fp8_e4m3": (160,),
    "fp8_e4m3_e8m0_32": (160, 5),
    "nvfp4": (80, 10),
    "mxfp4": (80, 5),
    "mlx_affine4_32": (80, 10, 10),
    "bf16": (320,),
}


def table(encoding):
    constants = {"weight_scale": 0.000199, "weight_scale_2": 0.000123}
    return SimpleNamespace(encoding=encoding, logical_shape=(160,), constants=constants)


def random_rows(encoding, seed):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(0, 256, (48, sum(WIDTHS[encoding])), dtype=np.uint8))


def bits(values):
    return values.cpu().view({2: torch.int16, 4: torch.int32}[values.dtype.itemsize])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("encoding", WIDTHS)
def test_device_values_equal_the_cpu_to_the_bit(encoding, dtype):
    rows = random_rows(encoding, 1)
    on_device = dequantize(rows.cuda(), table(encoding), dtype)
    assert on_device.is_cuda
    assert torch.equal(bits(on_device), bits(dequantize(rows, table(encoding), dtype)))


@pytest.mark.parametrize("encoding", [name for name in WIDTHS if name != "bf16"])
def test_replays_of_a_captured_graph_follow_the_fixed_buffer(encoding):
    buffer = random_rows(encoding, 1).cuda()
    dequantizer = Dequantizer(table(encoding))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dequantizer(buffer)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values = dequantizer(buffer)
    for seed in range(20):
        rows = random_rows(encoding, seed)
        buffer.copy_(rows)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(values), bits(dequantizer(rows)))


def test_the_first_call_inside_a_capture_is_refused_with_the_reason():
    buffer = random_rows("mxfp4", 1).cuda()
    dequantizer = Dequantizer(table("mxfp4"))
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        buffer.zero_()  # torch warns about a graph without any work
        with pytest.raises(RuntimeError, match="dequantize once before"):
            dequantizer(buffer)
