"""Sharded look-ups of device tensors: one GPU without a group, several over NCCL."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest
import torch
import torch.distributed as dist

from engram.exchange import ReadOncePerNode, ShardedLookup
from engram.parallel import Groups, Shard, new_groups

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA does not answer")

ROWS, ROW_BYTES = 1001, 66


def table():
    return np.random.default_rng(1).integers(0, 256, (ROWS, ROW_BYTES), dtype=np.uint8)


def ids_of(replica, step):
    return np.random.default_rng([replica, step]).integers(-1, ROWS, (step * (replica + 1), 6))


def reference(ids):
    rows = table()[np.maximum(ids, 0)]
    rows[ids == -1] = 0
    return rows


def exchange(rank, size, rendezvous, tensor, backend, device, failures):
    """One rank: every step's rows against the unsharded look-up; mismatches go to `failures`."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    groups = new_groups(tensor, size // tensor, timeout=60)
    shard = Shard.of(ROWS, groups.rank, groups.size)
    stored = torch.from_numpy(table()[shard.first_row : shard.stop_row]).to(device)
    for slot_ids, check in ((None, True), (6 * 4 * size, True), (6 * 4 * size, False)):
        lookup = ShardedLookup(
            shard, stored.__getitem__, ROW_BYTES, groups, slot_ids=slot_ids, check=check
        )
        for step in range(5):
            ids = ids_of(rank // tensor, step)
            rows = lookup(torch.from_numpy(ids).to(device)).cpu().numpy()
            if not np.array_equal(rows, reference(ids)):
                failures.put((rank, slot_ids, check, step))
    dist.destroy_process_group()


def run(tmp_path, size, tensor, backend, device):
    context = multiprocessing.get_context("spawn")
    failures = context.Queue()
    arguments = (size, str(tmp_path / "rendezvous"), tensor, backend, device, failures)
    ranks = [context.Process(target=exchange, args=(rank, *arguments)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0] * size
    assert failures.empty()


def test_one_device_needs_no_group():
    stored = torch.from_numpy(table()).cuda()
    for check in (True, False):
        lookup = ShardedLookup(
            Shard.of(ROWS, 0, 1), stored.__getitem__, ROW_BYTES, Groups(), check=check
        )
        ids = ids_of(1, 7)
        rows = lookup(torch.from_numpy(ids).cuda())
        assert rows.is_cuda
        np.testing.assert_array_equal(rows.cpu().numpy(), reference(ids))


@pytest.mark.parametrize("by", ["data", "tensor", "both"])
def test_nccl_gives_the_unsharded_rows(tmp_path, by):
    devices = torch.cuda.device_count()
    size = 4 if by == "both" else 2
    if devices < size:
        pytest.skip(f"needs {size} GPUs, found {devices}")
    run(tmp_path, size, {"data": 1, "tensor": 2, "both": 2}[by], "nccl", "cuda")


def host_ids(rendezvous, failures):
    """One rank with NCCL groups of its own, which take no tensors on the host."""
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    group = dist.new_group([0], backend="nccl")
    stored = torch.from_numpy(table())
    ids = ids_of(1, 7)
    for groups in (Groups(data=group), Groups(tensor=group), Groups(group, group)):
        for device in ("cpu", "cuda"):
            there = stored.to(device)
            lookup = ShardedLookup(Shard.of(ROWS, 0, 1), there.__getitem__, ROW_BYTES, groups)
            rows = lookup(torch.from_numpy(ids).to(device))
            if rows.device.type != device or not np.array_equal(rows.cpu(), reference(ids)):
                failures.put((groups, device))
    once = ReadOncePerNode(lambda wanted: stored[wanted], ROW_BYTES, Groups(node=group))
    if not np.array_equal(once(np.maximum(ids, 0)), reference(np.maximum(ids, 0))):
        failures.put("read once")
    dist.destroy_process_group()


def test_nccl_groups_take_ids_on_the_host(tmp_path):
    context = multiprocessing.get_context("spawn")
    failures = context.Queue()
    process = context.Process(target=host_ids, args=(str(tmp_path / "one"), failures))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert failures.empty()
