"""The short way for plain numpy arrays, and what takes the long one: the same rows either way."""

import numpy as np
import pytest

import engram
from engram import synth

ROWS = 500


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plain")
    info = synth.write(directory, "qwen", rows=ROWS, files=2, layers=1, dtype="fp8")
    with engram.FileGather(info.directory) as gather:
        yield gather, info.tables[0]


def right(table, ids):
    stored = table.expected(np.asarray(ids, np.int64).reshape(-1))["weight"]
    return stored.reshape(*np.shape(ids), stored.shape[-1])


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 3, 4), (0,), (4, 0)])
def test_plain_arrays_are_filled_in_place(made, shape):
    gather, table = made
    ids = np.random.default_rng(0).integers(0, gather.num_rows, shape)
    out = np.full((*shape, gather.row_bytes), 0xA5, np.uint8)
    assert gather._native.gather(ids, out) is True
    assert np.array_equal(out, right(table, ids))
    assert gather.gather(ids, out) is out


class Subclass(np.ndarray):
    pass


def strange_arrays(ids, out):
    """Arrays that hold these ids, or these places, in another way."""
    shifted = np.empty(ids.nbytes + 1, np.uint8)[1:].view()
    shifted[:] = ids.view(np.uint8)
    yield "list", ids.tolist(), out
    yield "other integers", ids.astype(np.int32), out
    yield "other byte order", ids.astype(">i8"), out
    yield "strided ids", np.repeat(ids, 2)[::2], out
    yield "subclass of ids", ids.view(Subclass), out
    yield "subclass of out", ids, out.view(Subclass)
    yield "another dtype of out", ids, out.view(np.int8).view(np.uint8)[...]
    yield "long long", ids.astype(np.longlong), out
    yield "unaligned ids", np.frombuffer(shifted, np.int64), out


def test_other_arrays_take_the_long_way_to_the_same_rows(made):
    gather, table = made
    ids = np.random.default_rng(1).integers(0, gather.num_rows, 9)
    out = np.empty((9, gather.row_bytes), np.uint8)
    for kind, some_ids, some_out in strange_arrays(ids, out):
        out[:] = 0xA5
        assert gather.gather(some_ids, some_out) is some_out, kind
        assert np.array_equal(out, right(table, ids)), kind


def test_a_table_row_by_row_through_both_ways(made):
    gather, table = made
    ids = np.arange(gather.num_rows)
    short = np.empty((ids.size, gather.row_bytes), np.uint8)
    long = np.empty((ids.size, gather.row_bytes), np.uint8)
    assert gather._native.gather(ids, short)
    gather.gather(ids.astype(np.int32), long)
    assert np.array_equal(short, long)
    assert np.array_equal(short, right(table, ids))


def test_what_is_not_ready_is_left_alone_by_the_short_way(made):
    gather, _ = made
    ids = np.arange(4)
    size = gather.row_bytes
    fixed = np.zeros((4, size), np.uint8)
    fixed.setflags(write=False)
    for kind, some_ids, out in [
        ("no out", ids, None),
        ("too few places", ids, np.zeros((3, size), np.uint8)),
        ("another shape", ids, np.zeros((2, 2, size), np.uint8)),
        ("short rows", ids, np.zeros((4, size - 1), np.uint8)),
        ("read-only", ids, fixed),
        ("turned", ids, np.zeros((size, 4), np.uint8).T),
        ("a single number", np.array(1), np.zeros(size, np.uint8)),
        ("floats", ids.astype(float), np.zeros((4, size), np.uint8)),
        ("other dtype", ids, np.zeros((4, size), np.int8)),
        ("buffer", ids, engram.HostBuffer(gather.planes.nbytes(4))),
    ]:
        before = None if out is None else bytes(out)
        assert gather._native.gather(some_ids, out) is False, kind
        assert before is None or bytes(out) == before, kind
    with pytest.raises(ValueError, match="shape"):
        gather.gather(ids, np.zeros((3, size), np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        gather.gather(ids, fixed)
    with pytest.raises(IndexError, match=str(gather.num_rows)):
        gather.gather(np.array([gather.num_rows]), np.zeros((1, size), np.uint8))


def test_a_pad_id_is_as_strict_as_ids_either_way(made):
    gather, table = made
    ids = np.array([3, -1, 4])
    out = np.full((3, gather.row_bytes), 0xA5, np.uint8)
    gather.gather(ids, out, pad_id=-1)
    assert np.array_equal(out[[0, 2]], right(table, [3, 4]))
    assert not out[1].any()
    gather.gather(ids, out, pad_id=np.int64(-1))
    assert not out[1].any()
    for wrong in (True, 1.0, "x"):
        with pytest.raises(TypeError, match="pad_id"):
            gather.gather(ids, out, pad_id=wrong)
    with pytest.raises(ValueError, match="64 bits"):
        gather.gather(ids, out, pad_id=1 << 70)
