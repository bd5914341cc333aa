"""Files that lie are refused when they are opened, naming the tensor and the numbers at odds."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import pickle
import resource
from pathlib import Path

import numpy as np
import pytest

import engram
from checkpoint_support import (
    check_os_error,
    entries,
    raises,
    raw,
    raw_file,
    read_rows,
    safetensors,
    tensor,
)
from engram import CheckpointError


def one(shape, offsets, dtype="U8", name="table"):
    return {name: {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.fixture
def refused(tmp_path):
    """Checks that a file is refused, and that the good file put in its place is then served."""
    path = tmp_path / "model.safetensors"

    def check(header, data=b"", *parts):
        raw_file(path, header, data)
        check_file(*parts)

    def check_file(*parts):
        for call in (engram.tables, lambda path: engram.FileGather(path, "table")):
            with raises(CheckpointError, *parts, str(path), path=path, table=None, row=None):
                call(path)
        safetensors(path, tensor("table", "U8", (4, 4)))
        with engram.FileGather(path, "table") as gather:
            assert np.array_equal(gather.gather([3]), read_rows(path, "table", [3]))

    check.file = check_file
    check.path = path
    return check


@pytest.mark.case("F04")
@pytest.mark.parametrize(
    ("extra", "words"), [(1, "1 byte "), (2, "2 bytes "), (5000, "5000 bytes")]
)
def test_a_file_longer_than_its_header_says(refused, extra, words):
    header = entries(tensor("table", "U8", (4, 4)))
    refused(header, bytes(16 + extra), "longer", words)


def test_a_file_shorter_than_its_header_says(refused):
    header = json.dumps(entries(tensor("table", "U8", (4, 4))))
    total = 8 + len(header) + 16
    for missing in (1, 16):
        refused(header, bytes(16 - missing), f"expected {total}", f"found {total - missing}")


@pytest.mark.case("F06")
def test_a_hole_between_tensors(refused):
    header = {**one([16, 1], [0, 16]), **one([8, 1], [24, 32], name="next")}
    refused(header, bytes(32), "hole of 8 bytes", '"next"')


def test_tensors_that_overlap(refused):
    header = {**one([16, 1], [0, 16]), **one([8, 1], [12, 20], name="next")}
    refused(header, bytes(20), '"next"', '"table"', "overlap")


@pytest.mark.case("F07")
@pytest.mark.parametrize(
    ("offsets", "part"),
    [
        ([16, 0], "[16, 0]"),
        ([-16, 0], "-16"),
        ([0.0, 16.0], "0.0"),
        ([0, "16"], '"16"'),
        ([0, None], "null"),
        ([0, True], "true"),
        ([0, 2**64], "1.8446744073709552e19"),
        ([0], "1 number"),
        ([0, 8, 16], "3 numbers"),
    ],
    ids=str,
)
def test_offsets_that_are_none(refused, offsets, part):
    refused(one([16, 1], offsets), bytes(16), '"table"', part)


@pytest.mark.case("F08")
@pytest.mark.parametrize(
    ("shape", "dtype", "wanted"),
    [([1000, 1], "U8", 1000), ([8, 4], "F32", 128), ([3, 5], "U8", 15)],
)
def test_a_shape_that_disagrees_with_its_range(refused, shape, dtype, wanted):
    refused(one(shape, [0, 16], dtype), bytes(16), '"table"', f"{wanted} bytes", "16 bytes")


@pytest.mark.case("F09")
@pytest.mark.parametrize("shape", [[2**32, 2**32], [2**63, 2], [2**64 - 1, 1], [2**32, 2**32, 0]])
def test_a_shape_whose_size_overflows(refused, shape):
    refused(one(shape, [0, 16], "F32"), bytes(16), '"table"', "overflow")


@pytest.mark.case("F10")
def test_a_dtype_that_is_not_known(refused):
    refused(one([4, 4], [0, 16], "F9_XYZ"), bytes(16), '"table"', "F9_XYZ")
    header = {**one([4, 4], [0, 16]), **one([8], [16, 10**9], "F9_XYZ", "other")}
    refused(header, bytes(24), '"other"', "F9_XYZ")


@pytest.mark.case("F11")
@pytest.mark.parametrize(
    ("length", "part"),
    [(0, "0"), (10**6, "1000000"), (2**63, "9223372036854775808"), (2**64 - 1, str(2**64 - 1))],
)
def test_a_header_length_that_cannot_be(refused, length, part):
    safetensors(refused.path, tensor("table", "U8", (4, 4)))
    content = refused.path.read_bytes()
    refused.path.write_bytes(length.to_bytes(8, "little") + content[8:])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with raises(CheckpointError, part, path=refused.path):
        engram.tables(refused.path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 1024, "kibibytes"
    refused.file(part)


@pytest.mark.case("F12")
def test_a_header_beyond_the_limit(refused):
    with refused.path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(100_000_200)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused.file("100000001", "100000000")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 10 * 1024, "kibibytes"


@pytest.mark.case("F13")
def test_padding_of_a_header_is_spaces(refused):
    table = tensor("table", "U8", (4, 4))
    text = json.dumps(entries(table))
    refused(text + "\0\0\0", table.data, "3 NUL bytes", "spaces")
    raw_file(refused.path, text + "   ", table.data)
    with engram.FileGather(refused.path, "table") as gather:
        assert np.array_equal(gather.gather([1]), read_rows(refused.path, "table", [1]))


@pytest.mark.case("F14")
def test_order_of_keys_says_nothing_about_order_of_data(tmp_path):
    first, second = tensor("b", "U8", (5, 7)), tensor("a", "BF16", (3, 4))
    header = entries(first, second)
    shuffled = {"a": header["a"], "b": header["b"], "__metadata__": {"format": "pt"}}
    path = raw_file(tmp_path / "t.safetensors", shuffled, first.data + second.data)
    for name, rows in (("a", 3), ("b", 5)):
        with engram.FileGather(path, name) as gather:
            found = raw(gather.gather(np.arange(rows)))
            assert np.array_equal(found, read_rows(path, name, np.arange(rows)))


@pytest.mark.case("F15")
def test_a_tensor_defined_twice(refused):
    first = json.dumps(one([16, 1], [0, 16]))[1:-1]
    second = json.dumps(one([32, 1], [0, 32]))[1:-1]
    refused(f"{{{first},{second}}}", bytes(32), '"table"', "twice")
    refused(f"{{{first},{first}}}", bytes(16), '"table"', "twice")


@pytest.mark.parametrize(
    "header",
    [
        "",
        "{",
        "[]",
        "null",
        '"text"',
        "{}x",
        '{"table":5}',
        '{"table":{"dtype":"U8","shape":[1,1]}}',
        '{"table":{"dtype":5,"shape":[1,1],"data_offsets":[0,1]}}',
        '{"table":{"dtype":"U8","shape":1,"data_offsets":[0,1]}}',
        '{"table":{"dtype":"U8","dtype":"I8","shape":[1,1],"data_offsets":[0,1]}}',
        '{"table":{"dtype":"U8","shape":[-1,1],"data_offsets":[0,1]}}',
        '{"__metadata__":{"a":5}}',
        b"\xff\xfe{}",
        "{" * 3000,
    ],
    ids=lambda header: repr(header[:20]),
)
def test_a_header_that_is_no_header(refused, header):
    refused(header, b"\0")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "empty"),
        (b"\1\2", "2 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n", "git lfs pull"),
        (b"<!DOCTYPE html><html><body>Log in</body></html>", "HTML"),
        (b"<html><head></head></html>", "HTML"),
        (b'{"weight_map": {}}', "JSON"),
        (b"GGUF\3\0\0\0" + bytes(50), "GGUF"),
        (b"PK\3\4" + bytes(50), "zip"),
        (b"\x80\2}q\0" + bytes(50), "pickle"),
        (bytes(64), "header length is 0"),
    ],
    ids=lambda value: value[:8] if isinstance(value, bytes) else None,
)
def test_a_file_of_another_kind(refused, content, part):
    refused.path.write_bytes(content)
    refused.file(part)


def test_the_exception_is_known_by_its_public_name_and_crosses_processes(tmp_path):
    bad = tmp_path / "t.safetensors"
    bad.write_bytes(b"<html>")
    assert (CheckpointError.__module__, CheckpointError.__qualname__) == (
        "engram",
        "CheckpointError",
    )
    with pytest.raises(CheckpointError) as here:
        engram.tables(bad)
    copy = pickle.loads(pickle.dumps(here.value))
    assert type(copy) is CheckpointError
    assert (str(copy), copy.path, copy.row) == (str(here.value), str(bad), None)
    context = multiprocessing.get_context("spawn")
    with (
        concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool,
        pytest.raises(CheckpointError) as there,
    ):
        pool.submit(engram.tables, bad).result()
    assert (str(there.value), there.value.path) == (str(here.value), str(bad))


def test_what_the_kernel_refuses_keeps_errno_and_name(tmp_path):
    path = safetensors(tmp_path / "t.safetensors", tensor("table", "U8", (4, 4)))
    loop = tmp_path / "loop.safetensors"
    loop.symlink_to(loop)
    for bad, errno in ((loop, 40), (path / "below", 20), (Path("x" * 300), 36)):
        for call in (engram.tables, engram.FileGather):
            with pytest.raises(OSError, match=r"\[Errno") as caught:
                call(bad)
            check_os_error(caught.value, errno, bad)


def test_files_that_are_no_regular_files(tmp_path):
    import os

    fifo = tmp_path / "pipe.safetensors"
    os.mkfifo(fifo)
    for path, part in ((fifo, "pipe"), (Path("/dev/null"), "device")):
        with raises(CheckpointError, part, path=path):
            engram.tables(path)
