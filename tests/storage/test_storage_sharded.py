"""Tables of which each rank holds a part: the rows are those of the whole table."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import some_ids
from places import CONFIGURATIONS
from replicas import run

import engram

TOPOLOGIES = {"TP1": (1, 1), "TP2": (2, 1), "TP3": (3, 1), "DP2": (1, 2), "TP2xDP2": (2, 2)}
"""Tensor-parallel ranks and replicas."""

COMBINATIONS = [
    (name, place)
    for name, (_, data) in TOPOLOGIES.items()
    for place in ("device", "pinned", "shared", "file")
    if place != "shared" or data > 1  # One replica has nobody to share with.
]


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


@pytest.mark.parametrize(("name", "place"), COMBINATIONS)
def test_every_topology_gives_the_same_ten_thousand_rows(name, place, checkpoint, tmp_path):
    tensor, data = TOPOLOGIES[name]
    shared = place == "shared"
    settings = {"dp_shared_memory": True} if shared else {}
    if data > 1 and place in ("device", "pinned"):
        settings["embedding_across_dp"] = True
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
        config={**CONFIGURATIONS.get(place, {}), **settings},
        ids_of_replicas=each,
    )
    for rank, outcome in enumerate(outcomes):
        assert not outcome.error, f"rank {rank}: {outcome.error}: {outcome.text}"
        for found, ids in zip(outcome.value["rows"], each[rank // tensor], strict=True):
            assert isinstance(found, np.ndarray), found
            np.testing.assert_array_equal(found, whole(info, ids))
        assert outcome.value["placement"] == place
        held = outcome.value["nbytes"]
        assert held[{"file": "mapped"}.get(place, place)] > 0
    shards = [outcome.value["shard"] for outcome in outcomes]
    assert shards[0][0] == 0
    assert shards[-1][1] == rows
    parts = {"shared": tensor, "file": 1}.get(place, tensor * data)
    assert len(set(shards)) == parts


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
        f"{rows - 1})",
    )
    assert first[0][0] == "RuntimeError"
    if pad is None:
        assert first[1][0] == "IndexError"
        assert "row id -1 at position 1" in first[1][1]
        assert first[1][1].endswith("; pass pad_id=-1 if this id marks padding")
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


WRONG = {
    "ragged": ([[1, 2], [3]], None),
    "beyond int64": ([3, 2**70], None),
    "beyond int64, mixed": ([-1, 2**63], None),
    "objects": (np.array([1, 2**80], object), None),
    "uint64": (np.array([2**64 - 1], np.uint64), None),
    "text": (["a"], None),
    "floats": (np.array([0.5]), None),
    "nothing": (None, None),
    "pad beyond int64": ([1], 2**63),
    "pad below int64": ([1], -(2**64)),
    "pad no integer": ([1], "x"),
    "least": (np.array([np.iinfo(np.int64).min]), None),
    "minus one": ([4, -1], None),
    "minus one beside another pad": ([4, -1], 4),
}
"""Ids and a pad id that no table takes."""


def outcome_alone(table, ids, pad):
    """What a storage that is not sharded raises."""
    with pytest.raises((IndexError, TypeError, ValueError)) as error:
        table.lookup(ids, pad_id=pad)
    return error.value


@pytest.mark.parametrize(("tensor", "data"), [(1, 2), (2, 2), (2, 1)])
def test_whatever_is_wrong_with_ids_the_others_hear_of_it(tensor, data, checkpoint, tmp_path):
    """The same errors as from an unsharded table, nobody waits, and the next step works."""
    info = checkpoint()
    good = some_ids(info.tables[0].rows, 40)
    wrong = [step for call in WRONG.values() for step in (call, (good, None))]
    steps = [wrong] + [[(good, None)] * len(wrong)] * (data - 1)
    outcomes = run(
        tensor * data,
        tmp_path,
        "look_up",
        patience=60,
        path=info.directory,
        tensor=tensor,
        data=data,
        config={"embedding_across_dp": data > 1},
        steps=steps,
    )
    for rank, outcome in enumerate(outcomes):
        assert not outcome.error, f"rank {rank}: {outcome.error}: {outcome.text}"
        found = outcome.value["steps"]
        for after in found[1::2]:
            np.testing.assert_array_equal(after, whole(info, good))
        if rank >= tensor:
            for kind, text, _ in found[::2]:
                assert kind == "RuntimeError"
                assert "the ids of replica 0 were refused there" in text
    with engram.open_storage({}, info.directory, device="cpu") as alone:
        for (name, (ids, pad)), found in zip(
            WRONG.items(), outcomes[0].value["steps"][::2], strict=True
        ):
            expected = outcome_alone(alone, ids, pad)
            assert found[0] == type(expected).__name__, name
            # What no integer can be made of is worded by whoever tries.
            assert found[1] in str(expected), name
            for attribute, value in found[2].items():
                assert value == getattr(expected, attribute), (name, attribute)


def test_one_rank_of_a_machine_reads_files_for_all(checkpoint, tmp_path):
    info = checkpoint("deepseek-fp8")
    rows = info.tables[0].rows
    ids = some_ids(rows, 10_000)
    padded = ids[:50].copy()
    padded[::3] = -1
    none = np.arange(0)
    steps = [[(ids, None), (padded, -1), (none, None), (np.array([3, rows]), None), (ids, None)]]
    common = {
        "path": info.directory,
        "table": 0,
        "tensor": 2,
        "data": 1,
        "config": {"disk_offload": True},
        "io": "direct",
        "steps": steps,
    }
    once = run(2, tmp_path, "look_up", topology_too={"read_once_per_node": True}, **common)
    each = run(2, tmp_path, "look_up", **common)
    for outcome in [*once, *each]:
        assert not outcome.error, outcome.text
        found = outcome.value["steps"]
        assert outcome.value["placement"] == "file"
        for rows_found, wanted in zip(found[:3], (ids, padded, none), strict=True):
            np.testing.assert_array_equal(rows_found, whole(info, wanted))
        assert found[3][0] == "IndexError"
        assert found[3][1] == each[0].value["steps"][3][1]
        np.testing.assert_array_equal(found[4], whole(info, ids))
    read = [outcome.value["stats"]["gather"]["bytes_read"] for outcome in each]
    assert read[0] == read[1]
    assert read[0] > 0, "every rank reads for itself"
    reader, other = (outcome.value["stats"] for outcome in once)
    assert reader["gather"]["bytes_read"] == read[0]
    assert other["gather"]["bytes_read"] == 0, "handed over"
    assert other["gather"]["rows"] == 0
    looked_up = 2 * len(ids) + len(padded)
    assert reader["read_once_per_node"] == {
        "steps": 4,
        "rows_read": looked_up,
        "bytes_read": looked_up * info.tables[0].row_bytes,
    }
    assert other["read_once_per_node"] == {"steps": 4, "rows_read": 0, "bytes_read": 0}
    assert each[0].value["stats"]["read_once_per_node"] is None


def test_reading_once_is_refused_where_it_means_nothing(checkpoint):
    path = checkpoint().directory
    once = {"tensor_parallel_size": 1, "read_once_per_node": True}
    for config in ({}, {"cpu_offload": False}):
        with pytest.raises(ValueError, match="read_once_per_node=True is for tables in files"):
            engram.open_storage(config, path, parallel=once, device="cpu")
    with pytest.raises(ValueError, match="read_once_per_node=True needs groups"):
        engram.open_storage({"disk_offload": True}, path, parallel=once)
    with pytest.raises(ValueError, match="read_once_per_node must be True or False, got 1"):
        engram.open_storage(
            {"disk_offload": True}, path, parallel={**once, "read_once_per_node": 1}
        )
    alone = {**once, "groups": engram.Groups()}
    with engram.open_storage({"disk_offload": True}, path, parallel=alone) as storage:
        assert "reads its rows itself" in storage.stats()["fallbacks"][0]
        assert len(storage.lookup([1, 2])) == 2
