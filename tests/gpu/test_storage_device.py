"""Tables on a device and in registered host memory, looked up by device ids."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import engram

sys.path.insert(0, str(Path(__file__).parents[1] / "storage"))
from checkpoints import check_rows, make, some_ids

CONFIGURATIONS = {
    "device": {"cpu_offload": False},
    "pinned": {},
    "huge": {"use_thp": True},
    "file": {"disk_offload": True},
}


@pytest.fixture(scope="module", params=["qwen-fp8", "qwen-nvfp4", "deepseek-fp8"])
def opened(request, tmp_path_factory):
    info = make(tmp_path_factory.mktemp("checkpoint") / "c", request.param, rows=200_000)
    table = 0 if len(info.tables) > 1 else None
    storages = {
        place: engram.open_storage(config, (info.directory, table))
        for place, config in CONFIGURATIONS.items()
    }
    yield info.tables[0], storages
    for storage in storages.values():
        storage.close()


def test_device_ids_give_device_rows(opened):
    table, storages = opened
    ids = some_ids(table.rows, 10_000)
    ids[4] = -1
    for storage in storages.values():
        rows = storage.lookup(torch.from_numpy(ids).cuda().reshape(100, 100), pad_id=-1)
        first = rows.weight if isinstance(rows, engram.Rows) else rows
        assert first.device.type == "cuda"
        assert first.shape[:2] == (100, 100)
        check_rows(rows, table, ids)
        out = torch.full((10_000, storage.row_bytes), 7, dtype=torch.uint8, device="cuda")
        assert storage.lookup(torch.from_numpy(ids).cuda(), out, pad_id=-1) is out
        check = np.empty((10_000, storage.row_bytes), np.uint8)
        storage.lookup(ids, check, pad_id=-1)
        np.testing.assert_array_equal(out.cpu().numpy(), check)


def test_wrong_device_ids_are_errors(opened):
    table, storages = opened
    for storage in storages.values():
        for bad in (table.rows, -1):
            with pytest.raises(IndexError, match=f"row id {bad} at position 1"):
                storage.lookup(torch.tensor([0, bad], device="cuda"))
        with pytest.raises(TypeError, match="the ids are on cuda"):
            storage.lookup(torch.tensor([0], device="cuda"), torch.zeros(1, storage.row_bytes))
        storage.lookup(torch.tensor([0], device="cuda"))


def test_pinned_tables_are_known_to_cuda(opened):
    _, storages = opened
    for place in ("pinned", "huge"):
        assert storages[place].stats()["registered"]
        memory = torch.frombuffer(storages[place]._buffer, dtype=torch.uint8)
        assert memory.is_pinned()


@pytest.mark.parametrize("place", ["device", "pinned"])
def test_look_ups_are_captured_in_a_graph(opened, place):
    table, storages = opened
    storage = storages[place]
    ids = torch.zeros(256, dtype=torch.int64, device="cuda")
    out = torch.zeros(256, storage.row_bytes, dtype=torch.uint8, device="cuda")
    storage.lookup(ids, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        storage.lookup(ids, out)
    for step in range(100):
        wanted = some_ids(table.rows, 256, step)
        ids.copy_(torch.from_numpy(wanted))
        graph.replay()
        expected = np.empty((256, storage.row_bytes), np.uint8)
        storage.lookup(wanted, expected)
        np.testing.assert_array_equal(out.cpu().numpy(), expected)


def test_a_table_that_does_not_fit_the_device_is_refused(opened, monkeypatch):
    table, _ = opened
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (table.nbytes // 2, 1 << 40))
    announced = opened[1]["file"].info
    with pytest.raises(MemoryError, match="free on the device"):
        engram.open_storage({"cpu_offload": False}, announced)
