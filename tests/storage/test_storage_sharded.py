"""Tables of which each rank holds a part: the rows are those of the whole table."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import some_ids
from places import CONFIGURATIONS
from replicas import run

import engram

TOPOLOGIES = {
    "TP2": (2, 1, {}),
    "DP2": (1, 2, {"embedding_across_dp": True}),
    "TP2xDP2": (2, 2, {"embedding_across_dp": True}),
    "TP2xDP2 shared": (2, 2, {}),
    "TP3": (3, 1, {}),
}


def whole(info, ids, place=0):
    """The rows of ids, side by side, without any storage; zeros where an id is -1."""
    planes = info.tables[place].expected(np.where(ids < 0, 0, ids))
    rows = np.concatenate([planes[plane.name] for plane in info.tables[place].planes], axis=-1)
    rows[ids < 0] = 0
    return rows


@pytest.mark.parametrize("variant", ["qwen-fp8", "deepseek-fp8"])
@pytest.mark.parametrize("place", ["device", "pinned"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_parts_without_groups_add_up_to_the_whole(variant, place, world_size, checkpoint):
    """Rows of other ranks are zero bytes, so summing bytes as integers gives the row."""
    info = checkpoint(variant)
    table = 0 if len(info.tables) > 1 else None
    rows = info.tables[0].rows
    ids = some_ids(rows, 3_000)
    ids[5] = -1
    total = np.zeros((len(ids), info.tables[0].row_bytes), np.uint8)
    bytes_held = 0
    for rank in range(world_size):
        parallel = {"tensor_parallel_size": world_size, "tensor_parallel_rank": rank}
        with engram.open_storage(
            CONFIGURATIONS[place], (info.directory, table), parallel=parallel, device="cpu"
        ) as part:
            out = np.full_like(total, 0xAA)
            part.lookup(ids, out, pad_id=-1)
            owned = (ids >= part.shard.first_row) & (ids < part.shard.stop_row)
            assert not out[~owned].any()
            total += out
            bytes_held += sum(part.nbytes.values())
            with pytest.raises(IndexError, match=f"row id {rows} at position 0"):
                part.lookup(np.array([rows]))
    np.testing.assert_array_equal(total, whole(info, ids))
    # Planes are aligned to 64 bytes, in every part.
    assert bytes_held - info.tables[0].nbytes in range(64 * world_size)


@pytest.mark.case("P06")
def test_rows_that_no_group_divides_are_shared_all_the_same(checkpoint):
    info = checkpoint()
    rows = info.tables[0].rows
    world_size = 7
    assert rows % world_size
    held = []
    for rank in range(world_size):
        parallel = {"tensor_parallel_size": world_size, "tensor_parallel_rank": rank}
        with engram.open_storage({}, info.directory, parallel=parallel, device="cpu") as part:
            held.append(part.shard.num_local_rows)
            last = np.array([part.shard.stop_row - 1])
            np.testing.assert_array_equal(
                part.lookup(last).view(np.uint8).reshape(1, -1), whole(info, last)
            )
    assert sum(held) == rows
    assert max(held) - min(held) == 1


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("place", ["device", "pinned"])
def test_every_topology_gives_the_same_ten_thousand_rows(name, place, checkpoint, tmp_path):
    tensor, data, settings = TOPOLOGIES[name]
    shared = name.endswith("shared")
    if shared and place == "device":
        pytest.skip("only host memory is shared")
    info = checkpoint("deepseek-fp8")
    rows = info.tables[0].rows
    # Uneven batches, and a rank that is idle in one step.
    each = [
        [some_ids(rows, 10_000, replica), some_ids(rows, 100 * replica + 2, 9), np.arange(0)]
        for replica in range(data)
    ]
    if data > 1:
        each[1][1] = np.arange(0)
    outcomes = run(
        tensor * data,
        tmp_path,
        "exchange",
        patience=60,
        path=info.directory,
        table=0,
        tensor=tensor,
        data=data,
        config={**CONFIGURATIONS[place], **settings},
        ids_of_replicas=each,
    )
    for rank, outcome in enumerate(outcomes):
        assert not outcome.error, f"rank {rank}: {outcome.error}: {outcome.text}"
        for found, ids in zip(outcome.value["rows"], each[rank // tensor], strict=True):
            assert isinstance(found, np.ndarray), found
            np.testing.assert_array_equal(found, whole(info, ids))
        assert outcome.value["placement"] == ("shared" if shared else place)
    shards = [outcome.value["shard"] for outcome in outcomes]
    assert shards[0][0] == 0
    assert shards[-1][1] == rows
    assert len(set(shards)) == (tensor if shared else tensor * data)


@pytest.mark.parametrize("pad", [None, -1])
def test_ids_that_one_rank_refuses_stop_nobody(pad, checkpoint, tmp_path):
    info = checkpoint()
    rows = info.tables[0].rows
    bad = np.array([1, rows])
    padded = np.array([4, -1, 2])
    each = [[some_ids(rows, 50), padded, np.arange(5)], [bad, np.arange(3), np.arange(7)]]
    outcomes = run(
        2,
        tmp_path,
        "exchange",
        path=info.directory,
        tensor=1,
        data=2,
        config={"embedding_across_dp": True},
        ids_of_replicas=each,
        pad=pad,
    )
    first, second = (outcome.value["rows"] for outcome in outcomes)
    name = info.tables[0].name
    assert second[0] == (
        "IndexError",
        f'row id {rows} at position 1 is outside table "{name}" with {rows} rows (valid ids: 0 to '
        f"{rows - 1}); pass pad_id={rows} if this id marks padding",
    )
    assert first[0][0] == "RuntimeError"
    if pad is None:
        assert first[1][0] == "IndexError"
        assert "row id -1 at position 1" in first[1][1]
        assert second[1][0] == "RuntimeError"
    else:
        np.testing.assert_array_equal(first[1], whole(info, padded))
    np.testing.assert_array_equal(first[2], whole(info, np.arange(5)))
    np.testing.assert_array_equal(second[2], whole(info, np.arange(7)))


def test_files_need_no_exchange(checkpoint, tmp_path):
    info = checkpoint()
    each = [[some_ids(info.tables[0].rows, 100)], [some_ids(info.tables[0].rows, 30, 3)]]
    outcomes = run(
        2,
        tmp_path,
        "exchange",
        path=info.directory,
        tensor=1,
        data=2,
        config={"disk_offload": True},
        ids_of_replicas=each,
    )
    for outcome, ids in zip(outcomes, each, strict=True):
        np.testing.assert_array_equal(outcome.value["rows"][0], whole(info, ids[0]))
        assert outcome.value["shard"] == (0, info.tables[0].rows)


@pytest.mark.parametrize("place", ["device", "pinned"])
def test_more_ranks_than_rows_leave_some_with_nothing(place, tmp_path):
    from safetensors.numpy import save_file

    table = np.arange(24, dtype=np.float32).reshape(3, 8)
    save_file({"embed.weight": table}, tmp_path / "model.safetensors")
    path = tmp_path / "model.safetensors"
    total = np.zeros((4, 32), np.uint8)
    for rank in range(5):
        parallel = {"tensor_parallel_size": 5, "tensor_parallel_rank": rank}
        with engram.open_storage(
            CONFIGURATIONS[place], (path, "embed.weight"), parallel=parallel, device="cpu"
        ) as part:
            out = np.full_like(total, 7)
            total += part.lookup(np.array([2, 0, 1, 2]), out)
        announced = engram.FileGather(path, "embed.weight").info
        with engram.open_storage(
            CONFIGURATIONS[place], announced, parallel=parallel, device="cpu"
        ) as part:
            part.load({"embed.weight": table})
            found = part.lookup([1])
            owned = part.shard.owns(1)
            np.testing.assert_array_equal(found, table[1:2] * owned)
    np.testing.assert_array_equal(total.view(np.float32), table[[2, 0, 1, 2]])
