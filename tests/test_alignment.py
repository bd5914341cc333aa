"""Rows begin wherever headers and earlier tensors leave them: no alignment is assumed."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import engram
from checkpoint_support import STORED, opened, raw, safetensors, tensor


@pytest.mark.case("F21")
def test_rows_begin_at_every_byte_of_a_page(tmp_path):
    table = tensor("table", "BF16", (40, 96))
    expected = np.frombuffer(table.data, np.uint8).reshape(40, 192)
    path = tmp_path / "t.safetensors"
    ids = np.array([39, 0, 21, 22])
    starts = set()
    for residue in range(4096):
        safetensors(path, table, residue=residue)
        io = ("auto", "pread")[residue % 2]
        with engram.FileGather(path, "table", io=io) as gather:
            starts.add(gather.planes[0].pieces[0].offset % 4096)
            assert np.array_equal(raw(gather.gather(ids)), expected[ids]), residue
    assert len(starts) == 4096


@pytest.mark.case("F21")
@pytest.mark.parametrize("dtype", ["BF16", "F32", "F64", "U32", "F8_E4M3"])
def test_rows_after_an_odd_tensor_are_not_aligned_to_their_elements(tmp_path, dtype, io):
    path = tmp_path / "t.safetensors"
    table = tensor("table", dtype, (50, 10))
    expected = np.frombuffer(table.data, np.uint8).reshape(50, 10 * STORED[dtype].itemsize)
    for odd in range(16):
        safetensors(path, tensor("odd", "U8", (odd,)), table, residue=7)
        with contextlib.suppress(OSError), engram.FileGather(path, "table", io=io) as gather:
            rows = gather.gather(np.arange(49, -1, -1))
            assert rows.flags.aligned
            assert np.array_equal(raw(rows), expected[::-1])


@pytest.mark.case("I19")
@pytest.mark.parametrize("start", [4096, 8192 + 37, 1])
def test_one_table_whose_rows_begin_at_every_byte_of_a_page(tmp_path, io, start):
    # 97 and 4096 have no common divisor.
    table = tensor("table", "U8", (4096, 97))
    path = safetensors(tmp_path / "t.safetensors", table, residue=start - 8)
    with opened(path, "table", io) as gather:
        first = gather.planes[0].pieces[0].offset
        assert first % 4096 == start % 4096
        assert len({(first + 97 * row) % 4096 for row in range(4096)}) == 4096
        expected = np.frombuffer(table.data, np.uint8).reshape(4096, 97)
        ids = np.random.default_rng(0).permutation(4096)
        assert np.array_equal(gather.gather(ids), expected[ids])
        for row in (0, 4095, 2048):
            assert np.array_equal(gather.gather([row])[0], expected[row])


@pytest.mark.case("I18")
def test_the_last_row_of_files_of_every_length(tmp_path, io):
    for tail in (0, 1, 123, 511, 512, 4095):
        rows = 50
        table = tensor("table", "U8", (rows, 160))
        residue = (tail - 8 - rows * 160) % 4096
        path = safetensors(tmp_path / "t.safetensors", table, residue=residue)
        assert path.stat().st_size % 4096 == tail
        with opened(path, "table", io) as gather:
            assert gather.gather([rows - 1]).tobytes() == table.data[-160:]
            assert gather.gather(np.arange(rows)).tobytes() == table.data
