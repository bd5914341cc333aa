"""Sharded look-ups between real processes equal the unsharded look-up, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from process_group import TABLE, check, ids_for, per_rank, reference, table_of, values

from engram.exchange import ReadOncePerNode, ShardedLookup
from engram.parallel import Groups, Shard
from engram.quant import dequantize

HEAD_OFFSETS = [0, 10, 31, 40, 70, 95]
TOPOLOGIES = [(1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (1, 4), (4, 1)]


@pytest.mark.case("D03")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"slot_ids": 64},
        {"lookup_ids": "global", "as_tensor": True},
        {"by": "heads", "head_offsets": HEAD_OFFSETS},
    ],
    ids=str,
)
@pytest.mark.parametrize(("tensor", "data"), TOPOLOGIES)
def test_every_topology_equals_the_unsharded_lookup(processes, tensor, data, options):
    replicas = [
        [ids_for(10 * replica + step, 1 + replica * 2 + step, 6) for step in range(3)]
        for replica in range(data)
    ]
    each = per_rank(tensor, data, replicas)
    outcomes = processes.run(
        "exchange", range(tensor * data), tensor=tensor, data=data, each_steps=each, **options
    )
    stats = check(outcomes, each)
    # Each row is read by its one owner, and padding by nobody.
    asked = sum(int((ids >= 0).sum()) for steps in replicas for ids in steps)
    assert sum(counts["rows_read"] for counts in stats) == asked
    assert {counts["steps"] for counts in stats} == {3}


@pytest.mark.case("P10")
@pytest.mark.parametrize(("tensor", "data"), TOPOLOGIES)
def test_ten_thousand_lookups_give_the_same_bytes(processes, tensor, data):
    ids = np.random.default_rng(5).integers(-1, TABLE[1], (10_000,))
    each = per_rank(tensor, data, [[part] for part in np.array_split(ids, data)])
    check(
        processes.run("exchange", range(tensor * data), tensor=tensor, data=data, each_steps=each),
        each,
    )


@pytest.mark.case("P06")
@pytest.mark.parametrize(
    ("num_rows", "options"),
    [
        (101, {}),
        (3, {}),
        (0, {}),
        (24, {"by": "heads", "head_offsets": list(range(0, 24, 4))}),
    ],
    ids=str,
)
def test_nothing_has_to_divide(processes, num_rows, options):
    table = (2, num_rows, 5)
    each = [[np.arange(-1, num_rows)], [np.arange(num_rows)[::-1]]] * 2
    outcomes = processes.run("exchange", tensor=1, data=4, each_steps=each, table=table, **options)
    for (results, _), steps in zip(values(outcomes), each, strict=True):
        expected = (
            table_of(*table)[np.maximum(steps[0], 0)] if num_rows else np.zeros((len(steps[0]), 5))
        )
        expected = expected.astype(np.uint8)
        expected[steps[0] == -1] = 0
        np.testing.assert_array_equal(results[0], expected)


@pytest.mark.case("P05")
@pytest.mark.case("D13")
@pytest.mark.parametrize(("tensor", "data"), [(1, 3), (2, 2)])
@pytest.mark.parametrize("slot_ids", [None, 60])
def test_an_idle_replica_takes_part_in_every_step(processes, tensor, data, slot_ids):
    replicas = []
    for replica in range(data):
        shapes = [(0 if (step + replica) % data == 0 or replica == 1 else 1 + step % 5, 6)
                  for step in range(100)]  # fmt: skip
        replicas.append([ids_for(step, *shape) for step, shape in enumerate(shapes)])
    each = per_rank(tensor, data, replicas)
    outcomes = processes.run(
        "exchange", range(tensor * data), tensor=tensor, data=data, each_steps=each,
        slot_ids=slot_ids,
    )  # fmt: skip
    assert {counts["steps"] for counts in check(outcomes, each)} == {100}


@pytest.mark.case("D13")
@pytest.mark.parametrize("shape", [(0,), (0, 16), (4, 0)])
@pytest.mark.parametrize(("tensor", "data"), [(1, 2), (2, 1), (2, 2)])
def test_a_step_without_any_token_gives_no_rows(processes, tensor, data, shape):
    each = [[np.zeros(shape, np.int64)]] * (tensor * data)
    outcomes = processes.run(
        "exchange", range(tensor * data), tensor=tensor, data=data, each_steps=each
    )
    for results, counts in values(outcomes):
        assert results[0].shape == (*shape, TABLE[2])
        assert counts == {"steps": 1, "rows_read": 0, "bytes_read": 0}


@pytest.mark.case("D15")
@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_ids_may_have_any_integer_dtype(processes, dtype, as_tensor):
    ids = ids_for(3, 7, 2, pad=0.0)[:, ::-1]
    each = [[ids.astype(dtype)], [np.asfortranarray(ids.astype(dtype))]]
    check(
        processes.run("exchange", range(2), tensor=1, data=2, each_steps=each, as_tensor=as_tensor),
        each,
    )


@pytest.mark.case("P08")
@pytest.mark.parametrize(("tensor", "data"), [(2, 1), (2, 2)])
def test_every_row_arrives_with_its_own_scales(processes, tensor, data):
    table = (6, 101, 64 + 2)
    encoded = SimpleNamespace(encoding="fp8_e4m3_e8m0_32", logical_shape=(64,), constants={})
    ids = np.arange(101)
    each = [[ids]] * (tensor * data)
    outcomes = processes.run(
        "exchange", range(tensor * data), tensor=tensor, data=data, each_steps=each, table=table
    )
    rows = table_of(*table)
    expected = dequantize({"weight": rows[:, :64], "scale": rows[:, 64:]}, encoded)
    for results, _ in values(outcomes):
        exchanged = dequantize(results[0], encoded)
        np.testing.assert_array_equal(exchanged.view(np.uint16), expected.view(np.uint16))
    assert expected.dtype == ml_dtypes.bfloat16


# --- one reader per node


@pytest.mark.case("P11")
def test_one_rank_of_a_node_reads_for_all(processes):
    steps = [ids_for(1, 5, 6, pad=0.0), np.zeros((0, 6), np.int64), np.arange(101)]
    outcomes = values(processes.run("read_once", range(2), tensor=2, each_steps=[steps] * 2))
    for rank, (results, counts, calls) in enumerate(outcomes):
        for rows, ids in zip(results, steps, strict=True):
            np.testing.assert_array_equal(rows, reference(ids))
        rows_read = 0 if rank else sum(ids.size for ids in steps)
        assert counts == {"steps": 3, "rows_read": rows_read, "bytes_read": 16 * rows_read}
        assert calls == (0 if rank else 2)


@pytest.mark.case("P11")
def test_only_owned_rows_are_read_by_each_rank(processes):
    each = [[np.arange(101)]] * 2
    outcomes = processes.run("exchange", range(2), tensor=2, data=1, each_steps=each)
    assert [counts["rows_read"] for counts in check(outcomes, each)] == [50, 51]


@pytest.mark.case("P13")
def test_every_node_has_its_own_reader(processes):
    hosts = "aabb"
    steps = [np.arange(101)]
    outcomes = values(
        processes.run(
            "read_once", tensor=4, each_steps=[steps] * 4, each_host=list(hosts), tag=hosts
        )
    )
    for results, _, _ in outcomes:
        np.testing.assert_array_equal(results[0], reference(steps[0]))
    assert [calls for _, _, calls in outcomes] == [1, 0, 1, 0]


def test_a_reader_that_fails_tells_the_others(processes):
    steps = [np.arange(5), np.arange(6)]
    outcomes = values(
        processes.run("read_once", range(2), tensor=2, each_steps=[steps] * 2, fail_at=1)
    )
    assert outcomes[0][0][0].error == "OSError"
    assert outcomes[1][0][0].error == "RuntimeError"
    assert "the reader could not read the rows" in outcomes[1][0][0].text
    for results, _, _ in outcomes:
        np.testing.assert_array_equal(results[1], reference(steps[1]))


def test_a_reader_that_stays_away_is_named_within_the_time_limit(processes):
    steps = [np.arange(5)]
    outcomes = values(
        processes.run(
            "read_once",
            range(2),
            tensor=2,
            each_steps=[steps] * 2,
            each_stay_away=[True, False],
            timeout=1.0,
            tag="reader away",
        )
    )
    assert outcomes[1][0][0].error == "TimeoutError"
    assert "(ranks that did not come: 0)" in outcomes[1][0][0].text


# --- without other processes


def test_a_single_rank_needs_no_group():
    rows = table_of(*TABLE)
    lookup = ShardedLookup(
        Shard.of(101, 0, 1), lambda ids: torch.from_numpy(rows)[ids], 16, Groups()
    )
    ids = ids_for(4, 9, 3)
    np.testing.assert_array_equal(lookup(ids), reference(ids))
    reader = ReadOncePerNode(lambda ids: rows[ids.numpy()], 16, Groups())
    assert reader.is_reader
    np.testing.assert_array_equal(reader(np.arange(7)), rows[:7])
    frozen = np.arange(7)
    frozen.flags.writeable = False
    np.testing.assert_array_equal(lookup(frozen), rows[:7])


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (
            np.zeros((3, 15), np.uint8),
            r"uint8 rows of shape \(3, 16\), got uint8 of shape \(3, 15\)",
        ),
        (np.zeros((2, 16), np.uint8), r"shape \(2, 16\)"),
        (np.zeros((3, 16), np.int8), "got int8"),
    ],
)
def test_a_lookup_that_returns_something_else_is_refused(returned, text):
    for lookup in (
        ShardedLookup(Shard.of(101, 0, 1), lambda ids: returned, 16, Groups()),
        ReadOncePerNode(lambda ids: returned, 16, Groups()),
    ):
        with pytest.raises(ValueError, match=text):
            lookup(np.arange(3))


@pytest.mark.case("D03")
@pytest.mark.parametrize("lookup_ids", ["local", "global"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 120])
def test_both_ways_of_reading_give_the_owned_rows_and_zeros(world_size, lookup_ids):
    # The second way is that of a device, whose shapes may not depend on the ids.
    whole = torch.from_numpy(table_of(*TABLE))
    ids = torch.from_numpy(ids_for(6, 3, 40))
    totals = [torch.zeros(3, 40, 16, dtype=torch.uint8) for _ in range(2)]
    for rank in range(world_size):
        shard = Shard.of(101, rank, world_size)
        stored = whole[shard.first_row : shard.stop_row] if lookup_ids == "local" else whole
        groups = SimpleNamespace(rank=rank, size=world_size, data=None, tensor=None)
        lookup = ShardedLookup(shard, stored.__getitem__, 16, groups, lookup_ids=lookup_ids)
        for total, read in zip(totals, (lookup._read_owned, lookup._read_all), strict=True):
            rows = torch.zeros_like(total)
            if shard.num_local_rows:
                read(ids, shard.owns(ids), rows)
            assert not rows[~shard.owns(ids)].any()
            total += rows
    for total in totals:
        np.testing.assert_array_equal(total.numpy(), reference(ids.numpy()))


@pytest.mark.case("D03")
def test_a_shard_of_another_rank_is_refused(processes):
    outcomes = processes.run("misplaced_shard", range(2), tensor=2, data=1)
    assert not outcomes[0].error
    assert outcomes[1].error == "ValueError"
    assert "shard 0 of 2 does not belong at place 1 of 2 ranks" in outcomes[1].text


def test_lookup_ids_are_local_or_global():
    with pytest.raises(ValueError, match="'local' or 'global'"):
        ShardedLookup(Shard.of(1, 0, 1), lambda ids: ids, 1, Groups(), lookup_ids="both")


# --- groups


@pytest.mark.parametrize(("tensor", "data"), TOPOLOGIES)
def test_groups_number_shards_replica_first(processes, tensor, data):
    outcomes = values(
        processes.run("describe_groups", range(tensor * data), tensor=tensor, data=data)
    )
    for rank, (members, place, size) in enumerate(outcomes):
        replica, within = divmod(rank, tensor)
        same_tokens = [replica * tensor + other for other in range(tensor)]
        same_place = [other * tensor + within for other in range(data)]
        assert members == [
            same_tokens if tensor > 1 else None,
            same_place if data > 1 else None,
            same_tokens if tensor > 1 else None,
        ]
        assert (place, size) == (rank, tensor * data)


@pytest.mark.case("P13")
@pytest.mark.parametrize(
    ("hosts", "nodes"),
    [
        ("abab", [[0, 2], [1, 3], [0, 2], [1, 3]]),
        ("aaab", [[0, 1, 2], [0, 1, 2], [0, 1, 2], None]),
        ("abcd", [None] * 4),
        ("zzzz", [[0, 1, 2, 3]] * 4),
    ],
)
def test_node_groups_hold_ranks_of_one_machine(processes, hosts, nodes):
    outcomes = values(
        processes.run("describe_groups", tensor=4, data=1, each_host=list(hosts), tag=hosts)
    )
    assert [members[2] for members, _, _ in outcomes] == nodes


def test_sizes_must_multiply_to_the_number_of_ranks(processes):
    for outcome in processes.run("describe_groups", range(3), tensor=2, data=2):
        assert outcome.error == "ValueError"
        assert "2 times data_parallel_size 2 is 4, but 3 ranks take part" in outcome.text


def test_groups_within_a_replica_leave_out_the_other_replicas():
    tensor, data = (
        SimpleNamespace(size=lambda: 2, rank=lambda: 1),
        SimpleNamespace(size=lambda: 3, rank=lambda: 2),
    )
    groups = Groups(tensor, data)
    assert (groups.rank, groups.size) == (5, 6)
    assert (groups.within_replica().rank, groups.within_replica().size) == (1, 2)
