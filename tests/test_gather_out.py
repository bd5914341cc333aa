"""Where rows go: every form of `out`, and what is refused as one."""

from __future__ import annotations

import numpy as np
import pytest

import engram
from checkpoint_support import DEEPSEEK, opened, raises, raw, read_rows

NAME = "embed.weight"
IDS = np.array([3, 99, 0])


@pytest.fixture(scope="module")
def gather(plain):
    with engram.FileGather(plain, NAME) as opened_gather:
        yield opened_gather


@pytest.fixture(scope="module")
def planes(two_planes):
    with engram.FileGather(two_planes) as opened_gather:
        yield opened_gather


def both_planes(two_planes, ids):
    parts = [read_rows(two_planes, f"{DEEPSEEK}.{name}", ids) for name in ("weight", "scale")]
    return np.concatenate(parts, axis=-1)


def test_an_array_of_the_tables_dtype(plain, gather):
    out = np.empty((3, 7), np.float32)
    assert gather.gather(IDS, out=out) is out
    assert np.array_equal(raw(out), read_rows(plain, NAME, IDS))


def test_an_array_of_bytes(plain, gather):
    out = np.empty((3, 28), np.uint8)
    assert gather.gather(IDS, out=out) is out
    assert gather.gather(IDS.tolist(), out) is out
    assert np.array_equal(out, read_rows(plain, NAME, IDS))


def test_a_contiguous_part_of_an_array(plain, gather):
    whole = np.zeros((5, 7), np.float32)
    gather.gather(IDS, out=whole[1:4])
    assert not whole[[0, 4]].any()
    assert np.array_equal(raw(whole[1:4]), read_rows(plain, NAME, IDS))


def test_an_array_at_an_odd_address(plain, gather):
    memory = np.zeros(1 + 3 * 28, np.uint8)
    out = memory[1:].view(np.float32).reshape(3, 7)
    assert not out.flags.aligned
    gather.gather(IDS, out=out)
    assert memory[0] == 0
    assert np.array_equal(memory[1:].reshape(3, 28), read_rows(plain, NAME, IDS))


def test_an_array_in_a_file(plain, gather, tmp_path):
    out = np.memmap(tmp_path / "out", np.float32, "w+", shape=(3, 7))
    assert gather.gather(IDS, out=out) is out
    assert np.array_equal(raw(out), read_rows(plain, NAME, IDS))


@pytest.mark.parametrize("octets", [False, True])
def test_a_tensor(plain, gather, octets):
    torch = pytest.importorskip("torch")
    out = torch.empty(3, 28, dtype=torch.uint8) if octets else torch.empty(3, 7)
    assert gather.gather(torch.from_numpy(IDS), out=out) is out
    assert np.array_equal(raw(out), read_rows(plain, NAME, IDS))
    assert gather.gather(IDS[::-1], out=out) is out
    assert np.array_equal(raw(out), read_rows(plain, NAME, IDS[::-1]))


def test_a_contiguous_part_of_a_tensor(plain, gather):
    torch = pytest.importorskip("torch")
    whole = torch.zeros(5, 7)
    gather.gather(IDS, out=whole[1:4])
    assert not whole[[0, 4]].any()
    assert np.array_equal(raw(whole[1:4]), read_rows(plain, NAME, IDS))


def test_a_tensor_that_requires_gradients(plain, gather):
    torch = pytest.importorskip("torch")
    out = torch.empty(3, 7, requires_grad=True)
    assert gather.gather(IDS, out=out) is out
    assert np.array_equal(raw(out), read_rows(plain, NAME, IDS))


def test_several_planes_in_one_array_of_bytes(two_planes, planes):
    torch = pytest.importorskip("torch")
    expected = both_planes(two_planes, IDS)
    out = np.empty((3, 66), np.uint8)
    assert planes.gather(IDS, out=out) is out
    assert np.array_equal(out, expected)
    tensor = torch.empty(3, 66, dtype=torch.uint8)
    assert planes.gather(IDS, out=tensor) is tensor
    assert np.array_equal(tensor.numpy(), expected)


def test_several_planes_in_rows(two_planes, planes):
    torch = pytest.importorskip("torch")
    made = planes.gather(IDS)
    out = engram.Rows(weight=np.empty_like(made.weight), scale=np.empty((3, 2), np.uint8))
    assert planes.gather(IDS, out=out) is out
    mixed = engram.Rows(torch.empty(3, 64, dtype=torch.uint8), np.empty_like(made.scale))
    assert planes.gather(IDS, out=mixed) is mixed
    for rows in (out, mixed):
        side_by_side = np.concatenate([raw(rows.weight), raw(rows.scale)], axis=-1)
        assert np.array_equal(side_by_side, both_planes(two_planes, IDS))


def test_one_plane_in_rows(plain, gather):
    out = engram.Rows(np.empty((3, 7), np.float32))
    assert gather.gather(IDS, out=out) is out
    assert np.array_equal(raw(out.weight), read_rows(plain, NAME, IDS))


@pytest.mark.parametrize("count", [0, 1, 3, 100])
def test_several_planes_in_a_host_buffer(two_planes, planes, io, count):
    ids = np.arange(count)[::-1]
    buffer = engram.HostBuffer(planes.planes.nbytes(count))
    with opened(two_planes, None, io) as gather:
        assert gather.gather(ids, out=buffer) is buffer
    memory = np.frombuffer(buffer, np.uint8)
    end = 0
    for plane in planes.planes:
        offset = plane.offset(count)
        assert offset % 64 == 0
        assert end <= offset < end + 64
        end = offset + count * plane.row_bytes
        rows = memory[offset:end].reshape(count, plane.row_bytes)
        assert np.array_equal(rows, read_rows(two_planes, f"{DEEPSEEK}.{plane.name}", ids))
    assert end == len(memory)


def test_a_host_buffer_that_is_larger_than_needed(plain, gather):
    buffer = engram.HostBuffer(1000)
    gather.gather(IDS.reshape(3, 1), out=buffer)
    memory = np.frombuffer(buffer, np.uint8)
    assert np.array_equal(memory[:84].reshape(3, 28), read_rows(plain, NAME, IDS))
    assert not memory[84:].any()


def read_only(shape, dtype):
    array = np.empty(shape, dtype)
    array.flags.writeable = False
    return array


SHAPED = "ids of shape (3,) give rows of shape (3, 7)"
REFUSED = {
    "dtype": (np.empty((3, 7)), TypeError, ("float64", "float32")),
    "bytes of another kind": (np.empty((3, 28), np.int8), TypeError, ("int8", "float32")),
    "byte order": (np.empty((3, 7), ">f4"), TypeError, (">f4",)),
    "columns": (np.empty((3, 6), np.float32), ValueError, ("(3, 6)", SHAPED)),
    "rows": (np.empty((4, 7), np.float32), ValueError, ("(4, 7)", SHAPED)),
    "rank": (np.empty((1, 3, 7), np.float32), ValueError, ("(1, 3, 7)", SHAPED)),
    "flat": (np.empty(84, np.uint8), ValueError, ("84", "28")),
    "byte columns": (np.empty((3, 27), np.uint8), ValueError, ("27", "28")),
    "fortran": (np.empty((7, 3), np.float32).T, ValueError, ("not C-contiguous",)),
    "fortran bytes": (np.empty((28, 3), np.uint8).T, ValueError, ("not C-contiguous",)),
    "every second row": (np.empty((6, 7), np.float32)[::2], ValueError, ("not C-contiguous",)),
    "read-only": (read_only((3, 7), np.float32), ValueError, ("read-only",)),
    "read-only bytes": (read_only((3, 28), np.uint8), ValueError, ("read-only",)),
    "list": ([0.0] * 21, TypeError, ("list",)),
    "bytearray": (bytearray(84), TypeError, ("bytearray",)),
    "memoryview": (memoryview(bytearray(84)), TypeError, ("memoryview",)),
    "number": (np.float32(1), TypeError, ("float32",)),
    "small buffer": (engram.HostBuffer(83), ValueError, ("83 bytes", "84 are needed")),
    "rows of another dtype": (engram.Rows(np.empty((3, 7))), TypeError, ("out.weight", "float64")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_place_for_rows(plain, gather, case):
    out, kind, parts = REFUSED[case]
    with raises(kind, *parts, table=NAME):
        gather.gather(IDS, out=out)
    assert np.array_equal(raw(gather.gather(IDS)), read_rows(plain, NAME, IDS))


def test_tensors_that_are_no_place_for_rows(gather):
    torch = pytest.importorskip("torch")
    for out, kind, part in (
        (torch.empty(3, 7, dtype=torch.float16), TypeError, "torch.float16"),
        (torch.empty(7, 3).T, ValueError, "not contiguous"),
        (torch.empty(3, 14)[:, ::2], ValueError, "not contiguous"),
        (torch.empty(1).expand(3, 7), ValueError, "not contiguous"),
        (torch.empty(2, 7), ValueError, "(2, 7)"),
        (torch.empty(3, 7, device="meta"), TypeError, "meta"),
        (torch.empty(3, 27, dtype=torch.uint8), ValueError, "(3, 28)"),
    ):
        with raises(kind, part, table=NAME):
            gather.gather(IDS, out=out)


@pytest.mark.case("F33")
def test_a_table_of_another_dtype_than_wanted(two_planes, planes):
    torch = pytest.importorskip("torch")
    for wanted, name in ((torch.bfloat16, "torch.bfloat16"), (torch.float32, "torch.float32")):
        with raises(TypeError, name, "float8_e4m3fn", "dequantize", table=DEEPSEEK):
            out = engram.Rows(torch.empty(3, 64, dtype=wanted), np.empty((3, 2), np.uint8))
            planes.gather(IDS, out=out)
    values = engram.dequantize(planes.gather(torch.from_numpy(IDS)), planes, dtype=torch.bfloat16)
    assert (values.dtype, values.shape) == (torch.bfloat16, (3, 64))


def test_rows_without_a_plane_of_the_table(two_planes, planes):
    out = engram.Rows(np.empty((3, 64), np.uint8))
    with raises(ValueError, "no plane 'scale'", table=DEEPSEEK):
        planes.gather(IDS, out=out)
    with raises(TypeError, "float8", table=DEEPSEEK):
        planes.gather(IDS, out=np.empty((3, 64), planes.dtype))


def test_rows_have_planes_and_do_not_unpack(planes):
    rows = planes.gather(IDS)
    assert rows.keys() == ["weight", "scale"]
    assert rows["weight"] is rows.weight
    assert rows["scale"] is rows.scale
    assert rows.bias is None
    for absent in ("bias", "nothing", "keys", 0):
        with pytest.raises(KeyError):
            rows[absent]
    with pytest.raises(TypeError, match="does not unpack"):
        _weight, _scale = rows
    assert rows != planes.gather(IDS)
    assert rows == rows


def test_nothing_is_allocated_when_out_is_given(gather):
    import tracemalloc

    ids = np.arange(64)
    out = np.empty((64, 28), np.uint8)
    gather.gather(ids, out=out)
    tracemalloc.start()
    try:
        for _ in range(20):
            gather.gather(ids, out=out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2000, "less than one batch of rows"
