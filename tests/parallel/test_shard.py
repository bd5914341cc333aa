"""Every row has one owner, whatever the numbers."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram.parallel import Shard


def shards(num_rows, world_size, **options):
    return [Shard.of(num_rows, rank, world_size, **options) for rank in range(world_size)]


def naive_owner(parts, row):
    owners = [part.rank for part in parts if part.first_row <= row < part.stop_row]
    assert len(owners) == 1
    return owners[0]


@settings(deadline=None)
@given(num_rows=st.integers(0, 300), world_size=st.integers(1, 40))
def test_parts_cover_the_table_once_and_differ_by_one_row_at_most(num_rows, world_size):
    parts = shards(num_rows, world_size)
    rows = [row for part in parts for row in range(part.first_row, part.stop_row)]
    assert rows == list(range(num_rows))
    sizes = [part.num_local_rows for part in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.case("P06")
def test_sizes_that_do_not_divide():
    assert [part.num_local_rows for part in shards(101, 4)] == [25, 25, 25, 26]
    offsets = [10 * head for head in range(24)]
    parts = shards(245, 5, by="heads", head_offsets=offsets)
    assert [part.num_local_rows for part in parts] == [40, 50, 50, 50, 55]
    with pytest.raises(ValueError, match="24 heads cannot be shared by 25 ranks"):
        Shard.of(245, 0, 25, "heads", head_offsets=offsets)


def test_real_tables_are_cut_evenly():
    assert {part.num_local_rows for part in shards(320_001_536, 8)} == {40_000_192}
    assert {part.num_local_rows for part in shards(384_006_168, 7)} == {54_858_024}


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=30),
    padding=st.integers(0, 9),
    data=st.data(),
)
def test_heads_stay_whole(sizes, padding, data):
    world_size = data.draw(st.integers(1, len(sizes)))
    offsets = [sum(sizes[:head]) for head in range(len(sizes))]
    num_rows = sum(sizes) + padding
    parts = shards(num_rows, world_size, by="heads", head_offsets=offsets)
    assert [part.starts for part in parts] == [parts[0].starts] * world_size
    assert parts[0].starts[0] == 0
    assert parts[0].starts[-1] == num_rows
    assert set(parts[0].starts[:-1]) <= set(offsets)
    heads = [sum(part.first_row <= start < part.stop_row for start in offsets) for part in parts]
    assert sum(heads) == len(sizes)
    assert max(heads) - min(heads) <= 1


@pytest.mark.case("D03")
@settings(deadline=None)
@given(
    num_rows=st.integers(1, 120),
    world_size=st.sampled_from([1, 2, 3, 4, 7, 150]),
    seed=st.integers(0, 2**32 - 1),
    as_tensor=st.booleans(),
)
def test_ids_translate_both_ways_and_have_one_owner(num_rows, world_size, seed, as_tensor):
    parts = shards(num_rows, world_size)
    ids = np.random.default_rng(seed).integers(-2, num_rows + 2, (4, 5))
    given_ids = torch.from_numpy(ids) if as_tensor else ids
    expected = np.full(ids.shape, -1)
    for place, row in np.ndenumerate(ids):
        if 0 <= row < num_rows:
            expected[place] = naive_owner(parts, row)
    kind = torch.Tensor if as_tensor else np.ndarray
    for part in parts:
        owner, owned = part.owner(given_ids), part.owns(given_ids)
        local = part.to_local(given_ids)
        back = part.to_global(local)
        assert all(isinstance(value, kind) for value in (owner, owned, local, back))
        np.testing.assert_array_equal(owner, expected)
        np.testing.assert_array_equal(owned, expected == part.rank)
        np.testing.assert_array_equal(local, np.where(owned, ids - part.first_row, -1))
        np.testing.assert_array_equal(back, np.where(owned, ids, -1))


def test_single_ids_are_integers():
    part = Shard.of(101, 1, 2)
    assert (part.owner(50), part.owner(49), part.owner(-1), part.owner(101)) == (1, 0, -1, -1)
    assert (part.to_local(50), part.to_local(49), part.to_global(0), part.to_global(-1)) == (
        0,
        -1,
        50,
        -1,
    )
    assert part.owns(50)
    assert not part.owns(-1)


@pytest.mark.case("P10")
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_any_number_of_ranks_serves_the_same_files(world_size):
    table = np.random.default_rng(1).integers(0, 256, (101, 16), dtype=np.uint8)
    files = [table[part.first_row : part.stop_row] for part in shards(101, world_size)]
    np.testing.assert_array_equal(np.concatenate(files), table)


@pytest.mark.parametrize(
    "table",
    [
        101,
        np.int64(101),
        SimpleNamespace(num_rows=101),
        SimpleNamespace(rows=101),
        SimpleNamespace(num_rows=101, rows=lambda: 7),
    ],
)
def test_a_table_is_a_number_of_rows_or_has_one(table):
    assert Shard.of(table, 1, 2) == Shard.of(101, 1, 2)


def test_a_table_may_bring_its_head_offsets():
    table = SimpleNamespace(num_rows=30, head_offsets=[0, 10, 20])
    assert Shard.of(table, 0, 3, "heads").starts == (0, 10, 20, 30)


@pytest.mark.parametrize("table", [None, "101", 10.0, True, object()])
def test_anything_else_is_no_table(table):
    with pytest.raises(TypeError, match="number of rows"):
        Shard.of(table, 0, 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((101, 2, 2), "rank 2 is outside a group of 2 ranks"),
        ((101, -1, 2), "rank must be an integer of at least 0, got -1"),
        ((101, 0, 0), "world_size must be an integer of at least 1, got 0"),
        ((101, 0, 1.0), "world_size must be an integer of at least 1, got 1.0"),
        ((101, True, 2), "rank must be an integer"),
        ((-1, 0, 1), "num_rows must be an integer of at least 0, got -1"),
        ((101, 0, 1, "columns"), "by must be 'rows' or 'heads', got 'columns'"),
        ((101, 0, 1, "heads"), "needs head_offsets"),
    ],
)
def test_numbers_that_make_no_shard_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        Shard.of(*arguments)


@pytest.mark.parametrize("offsets", [[], [1, 2], [0, 5, 5], [0, 7, 3], [0, 101], [0, 200]])
def test_head_offsets_must_ascend_within_the_table(offsets):
    with pytest.raises(ValueError, match="head_offsets must ascend from 0"):
        Shard.of(101, 0, 1, "heads", head_offsets=offsets)


def test_a_shard_travels_between_processes():
    part = Shard.of(101, 1, 3)
    assert pickle.loads(pickle.dumps(part)) == part
    assert hash(part) == hash(Shard.of(101, 1, 3))


def test_shards_need_no_torch():
    program = (
        "import sys, numpy; from engram.parallel import Shard; "
        "print(Shard.of(101, 1, 2).owner(numpy.array([3, 60])).tolist(), 'torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[0, 1] False\n"
