"""Rows equal the stored bytes, in request order, for every form of ids."""

from __future__ import annotations

import array

import ml_dtypes
import numpy as np
import pytest

import engram
from checkpoint_support import (
    DEEPSEEK,
    STORED,
    checkpoint,
    opened,
    raises,
    raw,
    read_rows,
    safetensors,
    shards,
    tensor,
)

NAME = "embed.weight"
INTEGERS = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i2", ">u4", ">i8", ">u8"]


@pytest.fixture(scope="module")
def gather(plain):
    with engram.FileGather(plain, NAME) as opened_gather:
        yield opened_gather


def stored(plain, ids):
    return read_rows(plain, NAME, ids)


def test_rows_in_request_order_with_repeats(plain, io):
    ids = np.array([[99, 0, 0], [50, 99, 1]])
    with opened(plain, NAME, io) as gather:
        rows = gather.gather(ids)
    assert (rows.shape, rows.dtype) == ((2, 3, 7), np.float32)
    assert np.array_equal(raw(rows), stored(plain, ids))
    assert rows.flags.writeable
    assert rows.flags.owndata


@pytest.mark.case("D15")
@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_integer_dtype(plain, gather, dtype):
    ids = np.array([5, 99, 0, 5], dtype)
    assert np.array_equal(raw(gather.gather(ids)), stored(plain, [5, 99, 0, 5]))


@pytest.mark.case("D15")
@pytest.mark.parametrize(
    "dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"]
)
def test_every_torch_integer_dtype(plain, gather, dtype):
    torch = pytest.importorskip("torch")
    ids = torch.tensor([5, 99, 0, 5], dtype=getattr(torch, dtype))
    rows = gather.gather(ids)
    assert isinstance(rows, torch.Tensor)
    assert rows.dtype == torch.float32
    assert np.array_equal(raw(rows), stored(plain, [5, 99, 0, 5]))


STRIDED = np.arange(60, dtype=np.int64).reshape(3, 4, 5)


@pytest.mark.parametrize(
    "ids",
    [
        STRIDED[:, ::2, ::-1],
        STRIDED.T,
        np.asfortranarray(STRIDED[0]),
        STRIDED.astype(np.uint8)[::-2],
        np.broadcast_to(np.int64(7), (2, 3)),
        np.frombuffer(b"x" + np.arange(4).tobytes(), np.uint8)[1:].view(np.int64),
        STRIDED[:1, :1, :1],
        np.int64(3),
        np.array(3, np.uint16),
        17,
    ],
    ids=[
        "reversed",
        "transposed",
        "fortran",
        "bytes",
        "broadcast",
        "unaligned",
        "ones",
        "scalar",
        "0-d",
        "int",
    ],
)
def test_every_stride_and_rank(plain, gather, ids):
    rows = gather.gather(ids)
    assert rows.shape == (*np.shape(ids), 7)
    assert np.array_equal(raw(rows), stored(plain, ids))
    out = np.empty((*np.shape(ids), gather.row_bytes), np.uint8)
    assert gather.gather(ids, out=out) is out
    assert np.array_equal(out, stored(plain, ids))


def test_every_torch_stride_and_rank(plain, gather):
    torch = pytest.importorskip("torch")
    base = torch.arange(60).reshape(3, 4, 5)
    for ids in (base[:, ::2], base.permute(2, 0, 1), base[0, 0, 0], base[:1].expand(4, 4, 5)):
        rows = gather.gather(ids)
        assert rows.shape == (*ids.shape, 7)
        assert np.array_equal(raw(rows), stored(plain, ids.numpy()))


@pytest.mark.parametrize(
    "ids",
    [
        [3, 1, 2],
        (3, 1, 2),
        [[3], [1]],
        range(4),
        [np.int32(5), np.uint8(6)],
        array.array("i", [4, 5]),
        array.array("Q", [4, 5]),
        memoryview(array.array("h", [9, 8])),
        bytearray(b"\x01\x02"),
        memoryview(np.arange(12, dtype=np.int32).reshape(3, 4)),
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_sequences_and_buffers(plain, gather, ids):
    rows = gather.gather(ids)
    assert isinstance(rows, np.ndarray)
    assert np.array_equal(raw(rows), stored(plain, np.asarray(ids)))


@pytest.mark.case("D13")
@pytest.mark.parametrize("shape", [(0,), (0, 16), (4, 0), (2, 0, 3)])
def test_no_ids_give_no_rows_and_no_reads(two_planes, io, shape):
    with opened(two_planes, None, io) as gather:
        rows = gather.gather(np.empty(shape, np.int64))
        assert rows.weight.shape == (*shape, 64)
        assert rows.weight.dtype == ml_dtypes.float8_e4m3fn
        assert rows.scale.shape == (*shape, 2)
        out = np.empty((*shape, 66), np.uint8)
        assert gather.gather(np.empty(shape, np.int32), out=out) is out
        assert gather.gather(np.empty(shape, np.int64), out=out) is out
        assert gather.stats()["reads"] == 0


@pytest.mark.case("D13")
def test_no_torch_ids_give_no_rows(gather):
    torch = pytest.importorskip("torch")
    for shape in ((0,), (0, 16), (4, 0)):
        rows = gather.gather(torch.empty(shape, dtype=torch.int32))
        assert (rows.shape, rows.dtype) == ((*shape, 7), torch.float32)


@pytest.mark.case("D15")
def test_an_empty_list_is_integers_an_empty_float_array_is_not(gather):
    assert gather.gather([]).shape == (0, 7)
    assert gather.gather([[], []]).shape == (2, 0, 7)
    with raises(TypeError, "float64", table=NAME):
        gather.gather(np.array([]))


@pytest.mark.case("D15")
@pytest.mark.parametrize(
    ("ids", "named"),
    [
        ([1.0, 2.0], "float64"),
        (np.float32([1]), "float32; pass ids.astype(numpy.int64)"),
        ([True, False], "bool"),
        (np.array([1, 2], object), "object"),
        ("abc", "U3"),
        (b"ab", "S2"),
        (None, "not None"),
        ({1, 2}, "not a set; pass a list or an array"),
        ((each for each in (1, 2)), "not a generator; pass a list or an array"),
        ([1j], "complex128"),
        (np.array(["2020"], "M8[D]"), "datetime64"),
        ([1, 2.5], "float64"),
        ([2**70, "x"], "integers"),
    ],
    ids=str,
)
def test_ids_that_are_no_integers(plain, gather, ids, named):
    with raises(TypeError, "ids must be integers", named, table=NAME) as caught:
        gather.gather(ids)
    assert ("astype" in str(caught.value)) == isinstance(ids, np.ndarray) * ("float" in named)
    assert np.array_equal(raw(gather.gather([1])), stored(plain, [1]))


def test_torch_ids_that_are_no_integers(gather):
    torch = pytest.importorskip("torch")
    for ids in (torch.tensor([]), torch.tensor([True]), torch.ones(3, requires_grad=True)):
        with raises(TypeError, "ids must be integers", table=NAME):
            gather.gather(ids)
    with raises(TypeError, "not float32; pass ids.long()", table=NAME):
        gather.gather(torch.ones(3))
    with raises(TypeError, "ids are on meta", "Stage", table=NAME):
        gather.gather(torch.empty(3, dtype=torch.int64, device="meta"))
    with raises(TypeError, table=NAME):
        gather.gather(torch.eye(3, dtype=torch.int64).to_sparse())


def test_ragged_ids(gather):
    with raises(ValueError, table=NAME):
        gather.gather([[1], [2, 3]])


@pytest.mark.parametrize(
    ("ids", "row", "position"),
    [
        ([0, -1], -1, 1),
        ([[0, 1], [100, 2]], 100, 2),
        (np.int8([-128]), -128, 0),
        (np.int64([2, -(2**63)]), -(2**63), 1),
        (np.uint64([2, 2**63 - 1]), 2**63 - 1, 1),
        (np.uint64([1, 2, 2**64 - 1]), 2**64 - 1, 2),
        (np.uint64([[1], [2**63]]), 2**63, 1),
        ([1, 2**63], 2**63, 1),
        ([-1, 2**63], 2**63, 1),
        ([1, 2**64], 2**64, 1),
        ([5, 6, -(2**70)], -(2**70), 2),
        (100, 100, 0),
    ],
    ids=str,
)
def test_ids_outside_the_table_are_named(plain, gather, ids, row, position):
    with raises(
        IndexError,
        f"row id {row} at position {position}",
        repr(NAME).replace("'", '"'),
        "100 rows",
        table=NAME,
        row=row,
        position=position,
    ) as caught:
        gather.gather(ids)
    assert ("pad_id" in str(caught.value)) == (-(2**63) <= row < 0)
    assert np.array_equal(raw(gather.gather([99])), stored(plain, [99]))


def test_torch_ids_outside_the_table_are_named(gather):
    torch = pytest.importorskip("torch")
    with raises(IndexError, "row id 256", table=NAME, row=256, position=1):
        gather.gather(torch.tensor([1, 256], dtype=torch.int16))


@pytest.mark.parametrize("pad_id", [-1, 7, 100, 2**63 - 1, -(2**63), np.int32(-1)])
def test_the_pad_id_is_a_row_of_zeros(plain, io, pad_id):
    ids = np.array([3, int(pad_id), 99, int(pad_id)])
    with opened(plain, NAME, io) as gather:
        rows = raw(gather.gather(ids, out=np.full((4, 7), np.nan, np.float32), pad_id=pad_id))
        assert not rows[[1, 3]].any()
        assert np.array_equal(rows[[0, 2]], stored(plain, [3, 99]))
        with raises(IndexError, "row id 101", row=101, position=0, table=NAME):
            gather.gather([101, int(pad_id)], pad_id=pad_id)
        only = gather.gather(np.full(3, pad_id), pad_id=pad_id)
        assert not raw(only).any()


def test_padding_is_not_read(two_planes):
    with opened(two_planes, None, "pread") as gather:
        gather.gather([-1, -1], pad_id=-1)
        assert gather.stats()["reads"] == 0
        assert gather.stats()["rows_padded"] == 2


def test_only_the_pad_id_may_lie_outside(gather):
    with raises(IndexError, "row id -1", row=-1, position=2, table=NAME):
        gather.gather([-2, 4, -1], pad_id=-2)
    with raises(IndexError, "row id -1", row=-1, position=0, table=NAME):
        gather.gather([-1], pad_id=None)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"pad_id": "x"}, TypeError),
        ({"pad_id": 1.0}, TypeError),
        ({"pad_id": 2**63}, ValueError),
        ({"pad_id": -(2**70)}, ValueError),
        ({"timeout": "x"}, TypeError),
        ({"timeout": -1}, ValueError),
        ({"timeout": float("nan")}, ValueError),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_used(gather, fast, arguments, kind):
    ids = np.arange(3)
    out = np.empty((3, 28), np.uint8) if fast else None
    with raises(kind, table=NAME):
        gather.gather(ids, out=out, **arguments)


@pytest.mark.parametrize("pad_id", ["x", 1.0, True, np.float32(1), [1]], ids=repr)
def test_a_pad_id_is_an_integer_as_ids_are(gather, pad_id):
    with raises(TypeError, "pad_id=", "must be an integer or None", table=NAME):
        gather.gather([1, 2], pad_id=pad_id)
    with raises(TypeError, "pad_id="):
        gather.submit([1, 2], pad_id=pad_id)
    with raises(TypeError, "pad_id="):
        engram.TableSet([gather]).gather({NAME: [1, 2]}, pad_id=pad_id)


@pytest.mark.parametrize("timeout", [0.5, 5, np.float32(5), 1e300, float("inf")])
def test_a_timeout_may_be_any_number_of_seconds(plain, gather, timeout):
    assert np.array_equal(raw(gather.gather([4], timeout=timeout)), stored(plain, [4]))


def test_a_timeout_that_passes(tmp_path, io):
    path = safetensors(tmp_path / "big.safetensors", tensor("t", "U8", (4096, 256)))
    ids = np.random.default_rng(0).integers(0, 4096, 1_000_000)
    with opened(path, "t", io) as gather:
        out = np.empty((len(ids), 256), np.uint8)
        with raises(TimeoutError, "timed out", table="t"):
            gather.gather(ids, out=out, timeout=1e-9)
        ids = ids[:1000]
        assert np.array_equal(gather.gather(ids), read_rows(path, "t", ids))


@pytest.mark.case("D14")
@pytest.mark.parametrize("reading", ["pread", "uring", "direct"])
def test_each_distinct_row_is_read_once(tmp_path, reading):
    path = safetensors(tmp_path / "t.safetensors", tensor("t", "U8", (1000, 5000)))
    generator = np.random.default_rng(0)
    ids = generator.permutation(np.repeat(generator.choice(1000, 40, replace=False), 10))
    with opened(path, "t", reading) as gather:
        rows = gather.gather(ids)
        stats = gather.stats()
    assert np.array_equal(rows, read_rows(path, "t", ids))
    assert stats["rows"] == 400
    assert stats["rows_fetched"] == 400
    assert stats["unique_rows_fetched"] == 40
    assert stats["reads"] <= 40


@pytest.mark.case("D18")
def test_the_first_call_is_like_every_other(two_planes):
    with opened(two_planes) as gather:
        first, second = gather.gather([5, 6]), gather.gather([5, 6])
    assert first.weight.shape == second.weight.shape == (2, 64)
    for name in ("weight", "scale"):
        assert np.array_equal(raw(first[name]), raw(second[name]))


@pytest.mark.case("F23")
@pytest.mark.parametrize("dtype", STORED)
def test_every_stored_dtype_in_numpy_and_torch(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    path = safetensors(tmp_path / "t.safetensors", tensor("t", dtype, (20, 6)), residue=3)
    ids = [19, 0, 7]
    with opened(path, "t") as gather:
        assert gather.dtype == STORED[dtype]
        rows = gather.gather(ids)
        assert rows.dtype == STORED[dtype]
        assert rows.shape == (3, 6)
        assert np.array_equal(raw(rows), read_rows(path, "t", ids))
        tensors = gather.gather(torch.tensor(ids))
        assert tensors.shape == (3, 6)
        assert np.array_equal(raw(tensors), read_rows(path, "t", ids))
        out = torch.zeros(3, 6, dtype=tensors.dtype)
        assert gather.gather(ids, out=out) is out
        assert np.array_equal(raw(out), read_rows(path, "t", ids))
        octets = np.empty((3, gather.row_bytes), np.uint8)
        assert gather.gather(ids, out=octets) is octets
        assert np.array_equal(octets, read_rows(path, "t", ids))


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("BF16", "bfloat16"),
        ("F8_E4M3", "float8_e4m3fn"),
        ("F8_E5M2", "float8_e5m2"),
        ("F8_E8M0", "float8_e8m0fnu"),
        ("U16", "uint16"),
        ("BOOL", "bool"),
        ("C64", "complex64"),
    ],
)
def test_torch_dtypes_are_torchs_own(tmp_path, dtype, name):
    torch = pytest.importorskip("torch")
    path = safetensors(tmp_path / "t.safetensors", tensor("t", dtype, (4, 6)))
    with opened(path, "t") as gather:
        assert gather.gather(torch.tensor([1])).dtype == getattr(torch, name)


@pytest.mark.case("F24")
def test_fp8_needs_no_fp8_kernels(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    path = safetensors(tmp_path / "t.safetensors", tensor("t", "F8_E4M3", (50, 8)))

    def refuse(*_arguments, **_named):
        raise NotImplementedError("not implemented for 'Float8_e4m3fn'")

    for name in ("index_select", "gather", "take", "embedding", "index_put", "stack", "cat"):
        monkeypatch.setattr(torch, name, refuse, raising=False)
    for name in ("__getitem__", "index_select", "copy_", "index_copy_", "fill_", "zero_"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    ids = torch.arange(49, -1, -7)
    with opened(path, "t") as gather:
        rows = gather.gather(ids, pad_id=49)
        out = torch.empty(8, 8, dtype=torch.float8_e4m3fn)
        gather.gather(ids, out=out)
    monkeypatch.undo()
    assert not raw(rows)[0].any()
    assert np.array_equal(raw(rows)[1:], read_rows(path, "t", ids[1:].numpy()))
    assert np.array_equal(raw(out), read_rows(path, "t", ids.numpy()))


def test_planes_come_back_by_name(two_planes):
    torch = pytest.importorskip("torch")
    ids = np.array([[7, 99], [0, 7]])
    with opened(two_planes) as gather:
        rows, tensors = gather.gather(ids), gather.gather(torch.from_numpy(ids))
    assert tensors.weight.dtype == torch.float8_e4m3fn
    assert tensors.scale.dtype == torch.float8_e8m0fnu
    assert rows.scale.dtype == ml_dtypes.float8_e8m0fnu
    for name in ("weight", "scale"):
        expected = read_rows(two_planes, f"{DEEPSEEK}.{name}", ids)
        assert np.array_equal(raw(rows[name]), expected)
        assert np.array_equal(raw(tensors[name]), expected)


@pytest.mark.parametrize("rows", [1, 5, 2047, 2048, 5000])
def test_batches_of_every_size_over_several_files(tmp_path, io, rows):
    pieces = shards([700, 1, 300, 999], 24)
    directory = tmp_path / "c"
    checkpoint(directory, {"b.safetensors": pieces[::2], "a.safetensors": pieces[1::2]})
    whole = np.frombuffer(b"".join(piece.data for piece in pieces), np.uint8).reshape(2000, 48)
    ids = np.random.default_rng(rows).integers(0, 2000, rows)
    with opened(directory, None, io, threads=2) as gather:
        assert np.array_equal(raw(gather.gather(ids)), whole[ids])
