"""Several tables in one call."""

from __future__ import annotations

import numpy as np
import pytest

import engram
from checkpoint_support import (
    QWEN,
    checkpoint,
    opened,
    raises,
    raw,
    read_rows,
    safetensors,
    shards,
    tensor,
)

OTHER = QWEN.replace("layers.1", "layers.2")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    pieces = [*shards([300, 200], 12), *shards([150], 8, stem=OTHER)]
    directory = tmp_path_factory.mktemp("set") / "c"
    return checkpoint(directory, {"a.safetensors": pieces[::2], "b.safetensors": pieces[1::2]})


def whole(stem, sizes, columns):
    data = b"".join(piece.data for piece in shards(sizes, columns, stem=stem))
    return np.frombuffer(data, np.uint8).reshape(sum(sizes), 2 * columns)


FIRST = whole(QWEN, [300, 200], 12)
SECOND = whole(OTHER, [150], 8)


def test_every_table_of_a_checkpoint(model, io):
    generator = np.random.default_rng(0)
    ids = {OTHER: generator.integers(0, 150, (4, 3)), QWEN: generator.integers(0, 500, 3000)}
    try:
        tables = engram.TableSet(model, io=io)
    except OSError as error:
        pytest.skip(f"no {io} here: {error}")
    with tables:
        assert list(tables.gathers) == [QWEN, OTHER]
        rows = tables.gather(ids)
        assert list(rows) == [OTHER, QWEN]
        assert np.array_equal(raw(rows[QWEN]), FIRST[ids[QWEN]])
        assert np.array_equal(raw(rows[OTHER]), SECOND[ids[OTHER]])
        assert QWEN in repr(tables)
    assert all(gather.closed for gather in tables.gathers.values())


def test_one_table_may_be_left_out_and_ids_may_be_empty(model):
    with engram.TableSet(model) as tables:
        assert list(tables.gather({OTHER: [3]})) == [OTHER]
        assert tables.gather({}) == {}
        rows = tables.gather({QWEN: [], OTHER: [149]})
        assert rows[QWEN].shape == (0, 12)
        assert np.array_equal(raw(rows[OTHER]), SECOND[[149]])


def test_where_rows_go_may_be_given_for_some(model):
    torch = pytest.importorskip("torch")
    out = np.empty((2, 24), np.uint8)
    with engram.TableSet(model) as tables:
        rows = tables.gather({QWEN: [1, 499], OTHER: torch.tensor([0])}, out={QWEN: out})
    assert rows[QWEN] is out
    assert np.array_equal(out, FIRST[[1, 499]])
    assert isinstance(rows[OTHER], torch.Tensor)
    assert np.array_equal(raw(rows[OTHER]), SECOND[[0]])


def test_padding_is_for_every_table(model):
    with engram.TableSet(model) as tables:
        rows = tables.gather({QWEN: [-1, 2], OTHER: [2, -1]}, pad_id=-1)
    assert not raw(rows[QWEN])[0].any()
    assert not raw(rows[OTHER])[1].any()
    assert np.array_equal(raw(rows[QWEN])[1], FIRST[2])
    assert np.array_equal(raw(rows[OTHER])[0], SECOND[2])


def test_places_in_layer_order_stand_for_names(model):
    out = np.empty((2, 24), np.uint8)
    with engram.TableSet(model) as tables:
        rows = tables.gather({np.int64(1): [5], 0: [1, 499]}, out={QWEN: out})
        assert list(rows) == [1, 0], "by the keys that were given, in their order"
        assert np.array_equal(raw(rows[1]), SECOND[[5]])
        assert rows[0] is out
        assert np.array_equal(out, FIRST[[1, 499]])
        mixed = tables.gather({QWEN: [3], 1: [4]})
        assert np.array_equal(raw(mixed[QWEN]), FIRST[[3]])
        assert np.array_equal(raw(mixed[1]), SECOND[[4]])
        ticket = tables.submit({1: [5], QWEN: [6]})
        assert list(ticket.wait()) == [1, QWEN]
        assert np.array_equal(raw(ticket.wait()[1]), SECOND[[5]])
        for call in (tables.gather, tables.submit):
            with raises(ValueError, "no table 2 in this set", QWEN, OTHER):
                call({2: [1]})
            with raises(ValueError, "count from 0"):
                call({-1: [1]})
            with raises(ValueError, "twice", QWEN):
                call({QWEN: [1], 0: [1]})
            for wrong in (True, 1.0, None):
                with pytest.raises((TypeError, ValueError)):
                    call({wrong: [1]})
        with raises(IndexError, "row id 150", table=OTHER):
            tables.submit({1: [150]}).wait()


def test_gathers_of_several_checkpoints_and_ways_of_reading(model, two_planes, io):
    with opened(model, 0, io) as first, opened(two_planes) as second:
        tables = engram.TableSet({"a": first, "b": second, "again": first})
        rows = tables.gather({"a": [7], "b": [99], "again": [8]})
        assert np.array_equal(raw(rows["a"]), FIRST[[7]])
        assert np.array_equal(raw(rows["again"]), FIRST[[8]])
        expected = read_rows(two_planes, "layers.1.engram.embed.scale", [99])
        assert np.array_equal(raw(rows["b"].scale), expected)
        by_name = engram.TableSet([first, second])
        assert list(by_name.gathers) == [QWEN, "layers.1.engram.embed"]


@pytest.mark.case("D19")
def test_equal_ids_of_two_tables_are_different_rows(model, io):
    with opened(model, QWEN, io) as first, opened(model, OTHER, io) as second:
        rows = engram.TableSet([first, second]).gather({QWEN: [5, 6], OTHER: [5, 6]})
    assert np.array_equal(raw(rows[QWEN]), FIRST[[5, 6]])
    assert np.array_equal(raw(rows[OTHER]), SECOND[[5, 6]])


def test_what_is_no_set_of_tables(model, tmp_path):
    lone = safetensors(tmp_path / "a.safetensors", tensor("t", "U8", (2, 2)))
    with raises(ValueError, "no n-gram", path=lone):
        engram.TableSet(lone)
    for wrong in ([5], {"a": "b"}, [lone], None, 5):
        with raises(TypeError):
            engram.TableSet(wrong)
    with engram.FileGather(model, 0) as gather:
        with raises(ValueError, QWEN):
            engram.TableSet([gather, gather])
        assert engram.TableSet([]).gather({}) == {}


def test_errors_name_the_table_and_the_next_call_works(model):
    with engram.TableSet(model) as tables:
        with raises(ValueError, "'nothing'", QWEN, OTHER):
            tables.gather({"nothing": [1]})
        with raises(ValueError, "'nothing'", QWEN, OTHER):
            tables.gather({QWEN: [1]}, out={"nothing": np.empty(1)})
        for ids, out in (([1, 2], None), (None, None), ({QWEN: [1]}, [1])):
            with raises(TypeError):
                tables.gather(ids, out)
        with raises(IndexError, "row id 150", OTHER, table=OTHER, row=150, position=1):
            tables.gather({QWEN: [1, 2], OTHER: [2, 150]})
        with raises(TypeError, "float64", table=OTHER):
            tables.gather({QWEN: [1], OTHER: [1.5]})
        with raises(ValueError, "shape", table=QWEN):
            tables.gather({QWEN: [1]}, out={QWEN: np.empty((2, 24), np.uint8)})
        with raises(ValueError, "pad_id"):
            tables.gather({QWEN: [1]}, pad_id=2**64)
        with raises(ValueError, "timeout"):
            tables.gather({QWEN: [1]}, timeout=-1)
        assert np.array_equal(raw(tables.gather({QWEN: [499]})[QWEN]), FIRST[[499]])


def test_a_closed_table_of_a_set(model):
    tables = engram.TableSet(model)
    tables.gathers[OTHER].close()
    with raises(ValueError, "closed"):
        tables.gather({QWEN: [1], OTHER: [1]})
    assert np.array_equal(raw(tables.gather({QWEN: [1]})[QWEN]), FIRST[[1]])
    tables.close()
    tables.close()
