"""Any checkpoint, any ids, any way of reading: rows equal what a seek and a read find."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import engram
from checkpoint_support import (
    IO_MODES,
    STORED,
    Tensor,
    checkpoint,
    raises,
    raw,
    read_rows,
    safetensors,
    tensor,
)

torch = pytest.importorskip("torch")

QUICK = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def modes(tmp_path_factory):
    """The ways of reading that this machine has."""
    path = safetensors(tmp_path_factory.mktemp("m") / "t.safetensors", tensor("t", "U8", (1, 1)))
    found = []
    for io in IO_MODES:
        with contextlib.suppress(OSError), engram.FileGather(path, "t", io=io):
            found.append(io)
    assert {"auto", "mmap", "pread", "direct"} <= set(found)
    return found


@contextlib.contextmanager
def directory():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@st.composite
def ids_for(draw, rows: int, pad_id: int | None):
    """Ids as numpy, torch or list, of any dtype that can hold them, and as plain int64."""
    inside = st.integers(0, rows - 1) if rows else st.nothing()
    element = inside if pad_id is None else inside | st.just(pad_id)
    if rows == 0 and pad_id is None:
        shape = (0,)
    else:
        shape = tuple(draw(st.lists(st.integers(0, 6), min_size=0, max_size=3)))
    count = int(np.prod(shape, dtype=np.int64))
    pool = draw(st.lists(element, min_size=1, max_size=10)) if count else [0]
    picks = draw(st.lists(st.sampled_from(pool), min_size=count, max_size=count))
    plain = np.array(picks, np.int64).reshape(shape)
    fitting = [
        name
        for name in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4", ">i8")
        if plain.astype(name).tolist() == plain.tolist()
    ]
    array = plain.astype(draw(st.sampled_from(fitting)))
    form = draw(st.sampled_from(["numpy", "strided", "fortran", "torch", "list"]))
    if form == "list":
        return plain.tolist(), np.array(plain.tolist(), np.int64)
    if form == "torch":
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="))), plain
    if form == "fortran" and array.ndim:
        return np.asfortranarray(array), plain
    if form == "strided" and array.ndim:
        spread = np.repeat(array, 2, axis=-1)
        return spread[..., ::2], plain
    return array, plain


@QUICK
@given(data=st.data())
def test_one_plain_table(modes, data):
    dtype = data.draw(st.sampled_from(sorted(STORED)))
    rows, columns = data.draw(st.integers(0, 300)), data.draw(st.integers(1, 70))
    before = tensor("a", "U8", (data.draw(st.integers(0, 9)),))
    after = tensor("z", "U8", (data.draw(st.integers(0, 5000)),))
    pad_id = data.draw(st.none() | st.sampled_from([-1, 0, rows, 2**63 - 1, -(2**63)]))
    ids, plain = data.draw(ids_for(rows, pad_id))
    with directory() as folder:
        path = safetensors(
            folder / "t.safetensors",
            before,
            tensor("t", dtype, (rows, columns)),
            after,
            residue=data.draw(st.none() | st.integers(0, 4095)),
        )
        padded = np.zeros(plain.shape, bool) if pad_id is None else plain == pad_id
        row_bytes = columns * STORED[dtype].itemsize
        expected = np.zeros((*plain.shape, row_bytes), np.uint8)
        expected[~padded] = read_rows(path, "t", plain[~padded]) if rows else 0
        for io in data.draw(st.lists(st.sampled_from(modes), min_size=1, max_size=2, unique=True)):
            with engram.FileGather(path, "t", io=io) as gather:
                found = gather.gather(ids, pad_id=pad_id)
                assert found.shape == (*plain.shape, columns)
                assert np.array_equal(raw(found).reshape(expected.shape), expected)
                out = np.full(expected.shape, 0xA5, np.uint8)
                gather.gather(ids, out=out, pad_id=pad_id)
                assert np.array_equal(out, expected)


@st.composite
def cut_tables(draw):
    """A table of one or two planes, cut into pieces of any size."""
    columns = 32 * draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(0, 60), min_size=1, max_size=14).filter(any))
    scaled = draw(st.booleans())
    return sizes, columns, scaled


@pytest.mark.case("F30")
@QUICK
@given(data=st.data(), table=cut_tables())
def test_tables_cut_over_files(modes, data, table):
    sizes, columns, scaled = table
    naming = data.draw(st.sampled_from(["shard_{}", "shards.{}"]))
    stem = "model.layers.3.ple.ple_embedding.ngram_embedding"
    weights, scales = [], []
    for number, rows in enumerate(sizes):
        name = f"{stem}.{naming.format(number)}"
        dtype, width = ("U8", columns // 2) if scaled else ("BF16", columns)
        weights.append(tensor(f"{name}.weight", dtype, (rows, width)))
        if scaled:
            scales.append(tensor(f"{name}.weight_scale", "F8_E4M3", (rows, columns // 16)))
    constant = Tensor(f"{stem}.weight_scale_2", "F32", (1,), np.float32(0.5).tobytes())
    tensors = [*weights, *scales, *([constant] if scaled else [])]
    count = data.draw(st.integers(1, 4))
    files = {f"{place}.safetensors": [] for place in range(count)}
    for each in data.draw(st.permutations(tensors)):
        files[f"{data.draw(st.integers(0, count - 1))}.safetensors"].append(each)
    total = sum(sizes)
    ids = np.array(data.draw(st.lists(st.integers(0, total - 1), max_size=40)), np.int64)
    planes = [
        np.concatenate(
            [np.frombuffer(w.data, np.uint8).reshape(w.shape[0], -1) for w in part if w.shape[0]]
        )
        for part in (weights, scales)
        if part
    ]
    expected = np.concatenate([plane[ids] for plane in planes], axis=-1)
    with directory() as folder:
        checkpoint(folder / "c", files)
        io = data.draw(st.sampled_from(modes))
        with engram.FileGather(folder / "c", io=io) as gather:
            assert gather.num_rows == total
            assert gather.encoding == ("nvfp4" if scaled else "bf16")
            out = np.empty((len(ids), gather.row_bytes), np.uint8)
            gather.gather(ids, out=out)
            assert np.array_equal(out, expected)
            buffer = engram.HostBuffer(gather.planes.nbytes(len(ids)))
            gather.gather(ids, out=buffer)
            memory = np.frombuffer(buffer, np.uint8) if len(ids) else np.empty(0, np.uint8)
            for plane, rows in zip(gather.planes, planes, strict=True):
                start = plane.offset(len(ids))
                part = memory[start : start + len(ids) * plane.row_bytes]
                assert np.array_equal(part.reshape(len(ids), plane.row_bytes), rows[ids])


@QUICK
@given(
    data=st.data(),
    wrong=st.integers(-(2**65), 2**65),
    good=st.integers(0, 30),
)
def test_any_id_outside_is_named_with_its_position(plain, data, wrong, good):
    if 0 <= wrong < 100:
        wrong = -1 - wrong
    ids = data.draw(st.lists(st.integers(0, 99), min_size=good, max_size=good))
    position = data.draw(st.integers(0, len(ids)))
    ids.insert(position, wrong)
    with engram.FileGather(plain, "embed.weight") as gather:
        with raises(
            IndexError,
            f"row id {wrong} at position {position}",
            row=wrong,
            position=position,
            table="embed.weight",
        ):
            gather.gather(ids)
        if -(2**63) <= wrong < 2**63:
            rows = gather.gather(ids, pad_id=wrong)
            assert not rows[position].any()
