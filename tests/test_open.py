"""Which table a path and a name mean, and what a gather says about itself."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import engram
from checkpoint_support import (
    DEEPSEEK,
    INDEX,
    QWEN,
    check_os_error,
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
LAYER_4 = QWEN.replace("layers.1", "layers.4")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two Qwen tables over two files, a plain matrix and a vector."""
    first = shards([4, 3], 8)
    second = shards([5], 8, "shard_{}", LAYER_4)
    others = [tensor("lm_head.weight", "BF16", (6, 4)), tensor("norm.weight", "BF16", (4,))]
    return checkpoint(
        tmp_path_factory.mktemp("model") / "c",
        {"a.safetensors": [first[1], *others], "b.safetensors": [*second, first[0]]},
    )


@pytest.mark.parametrize("form", [str, Path, os.fsencode])
def test_paths_are_text_bytes_or_path_like(plain, form):
    path = form(str(plain)) if form is not os.fsencode else os.fsencode(plain)
    expected = read_rows(plain, NAME, [5])
    with engram.FileGather(path, NAME) as gather:
        assert np.array_equal(raw(gather.gather([5])), expected)
        assert gather.files == (str(plain.resolve()),)
    assert [info.name for info in engram.tables(path, plain=True)] == [NAME]
    assert engram.drop_cache(path) >= 0


def test_a_path_relative_to_the_working_directory(plain, monkeypatch):
    monkeypatch.chdir(plain.parent)
    for path in (plain.name, Path(plain.name), ".", "./" + plain.name):
        with engram.FileGather(path, NAME) as gather:
            monkeypatch.chdir("/")
            assert np.array_equal(raw(gather.gather([5])), read_rows(plain, NAME, [5]))
            assert gather.files == (str(plain.resolve()),)
            monkeypatch.chdir(plain.parent)


def test_file_names_that_are_not_text(tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.safetensors")
    safetensors(path, tensor("t", "U8", (4, 3)))
    with engram.FileGather(path, "t") as gather:
        assert gather.files == (str(path),)
        assert Path(gather.files[0]).exists()
        assert engram.drop_cache(gather.files) >= 0
        assert np.array_equal(gather.gather([2]), read_rows(path, "t", [2]))
    path.write_bytes(b"")
    with raises(engram.CheckpointError, "empty", path=path):
        engram.tables(path)
    path.unlink()
    with pytest.raises(FileNotFoundError) as caught:
        engram.tables(path)
    check_os_error(caught.value, 2, path)


def test_a_directory_an_index_and_a_file_are_paths(model):
    for path in (model, model / INDEX):
        assert [info.name for info in engram.tables(path)] == [QWEN, LAYER_4]
        with engram.FileGather(path, 1) as gather:
            assert gather.num_rows == 5
    assert [info.name for info in engram.tables(model / "b.safetensors")] == [QWEN, LAYER_4]


def test_tables_come_in_layer_order_and_plain_ones_after_them(model):
    infos = engram.tables(model, plain=True)
    assert [(info.name, info.family, info.layer, info.rows) for info in infos] == [
        (QWEN, "qwen", 1, 7),
        (LAYER_4, "qwen", 4, 5),
        ("lm_head.weight", "plain", None, 6),
    ]
    assert engram.tables(model) == infos[:2]


def test_a_table_by_name_by_place_and_by_tensor(model):
    for table, rows in ((QWEN, 7), (0, 7), (np.int64(1), 5), (LAYER_4, 5), ("lm_head.weight", 6)):
        with engram.FileGather(model, table) as gather:
            assert gather.num_rows == rows
    with engram.FileGather(model, f"{LAYER_4}.shard_0.weight") as gather:
        assert (gather.num_rows, gather.info.name) == (5, LAYER_4)
    with engram.FileGather(model, f"{QWEN}.shard_1.weight") as gather:
        assert (gather.num_rows, gather.info.family) == (3, "plain")


@pytest.mark.parametrize("table", [None, 2, 2**70, "nothing", ""])
def test_a_table_that_does_not_exist_lists_the_choices(model, table):
    echoed = str(table) if isinstance(table, int) else ""
    with raises(ValueError, echoed, f'"{QWEN}"', f'"{LAYER_4}"', str(model)):
        engram.FileGather(model, table)


def test_a_checkpoint_without_a_table_names_tensors_to_open(plain):
    for table in (None, 0):
        with raises(ValueError, f'"{NAME}"', "full name", str(plain)):
            engram.FileGather(plain, table)
    with raises(ValueError, '"lm_head"', f'"{NAME}"'):
        engram.FileGather(plain, "lm_head")


def test_tensors_that_are_no_table(tmp_path):
    path = safetensors(
        tmp_path / "t.safetensors",
        tensor("vector", "F32", (4,)),
        tensor("cube", "F32", (2, 2, 2)),
        tensor("no_columns", "F32", (4, 0)),
        tensor("no_rows", "F32", (0, 4)),
    )
    for name, part in (("vector", "[4]"), ("cube", "[2, 2, 2]"), ("no_columns", "rows are empty")):
        with raises(ValueError, f'"{name}"', part):
            engram.FileGather(path, name)
    with opened(path, "no_rows") as gather:
        assert gather.num_rows == 0
        assert gather.gather([]).shape == (0, 4)
        with raises(IndexError, "row id 0", "0 rows", row=0, position=0, table="no_rows"):
            gather.gather([0])


@pytest.mark.parametrize(
    ("arguments", "kind", "part"),
    [
        ({"table": 1.0}, TypeError, "float"),
        ({"table": True}, TypeError, "bool"),
        ({"table": -1}, ValueError, "count from 0"),
        ({"io": "fast"}, ValueError, '"uring"'),
        ({"io": None}, TypeError, 'io=None must be a name such as "auto"'),
        ({"advice": None}, TypeError, 'advice=None must be a name such as "auto"'),
        ({"advice": "sequential"}, ValueError, '"random"'),
        ({"threads": 0}, ValueError, "threads=0"),
        ({"threads": -1}, ValueError, "threads=-1"),
        ({"threads": "abc"}, ValueError, "threads='abc'"),
        ({"threads": 2**64}, ValueError, "threads="),
        ({"threads": 1.5}, ValueError, "threads=1.5"),
        ({"threads": True}, ValueError, "threads=True"),
        ({"max_mapped_bytes": 0}, ValueError, "max_mapped_bytes=0"),
        ({"max_mapped_bytes": 2**64}, ValueError, "max_mapped_bytes="),
        ({"max_mapped_bytes": "much"}, ValueError, "max_mapped_bytes='much'"),
        ({"max_mapped_bytes": "0KiB"}, ValueError, "max_mapped_bytes='0KiB' must be at least 1"),
    ],
    ids=str,
)
@pytest.mark.case("C06")
def test_arguments_that_cannot_be_used(plain, arguments, kind, part):
    with raises(kind, part):
        engram.FileGather(plain, **{"table": NAME, **arguments})


@pytest.mark.parametrize("path", [5, None, 1.5, object()])
def test_what_is_no_path(path):
    for call in (engram.FileGather, engram.tables, engram.TableSet):
        with raises(TypeError):
            call(path)
    with raises(TypeError):
        engram.drop_cache([path])


@pytest.mark.parametrize("path", ["", "/nonexistent/model", "no/such.safetensors"])
def test_a_path_that_is_not_there(path):
    for call in (engram.FileGather, engram.tables, engram.TableSet, engram.drop_cache):
        with pytest.raises(FileNotFoundError) as caught:
            call(path)
        check_os_error(caught.value, 2, path)
        assert ("the path is empty" in str(caught.value)) == (not path)


def test_a_cap_may_be_written_as_a_size(plain):
    for cap in ("1MiB", "0.5GB", "25%", 1 << 20):
        with engram.FileGather(plain, NAME, max_mapped_bytes=cap) as gather:
            assert gather.gather([0]).shape[0] == 1


def test_the_cache_of_a_directory_is_not_dropped(plain, tmp_path):
    for given in (tmp_path, [plain, str(tmp_path)]):
        with pytest.raises(IsADirectoryError, match="pass the files in it") as caught:
            engram.drop_cache(given)
        check_os_error(caught.value, 21, str(tmp_path))


def test_the_name_of_a_repository_is_no_path():
    with raises(FileNotFoundError, "download", path="owner/model"):
        engram.FileGather("owner/model")


def test_a_path_with_a_nul_byte():
    for call in (engram.FileGather, engram.tables, engram.TableSet, engram.drop_cache):
        with raises(ValueError, "NUL"):
            call("a\0b")


def test_what_a_gather_says_about_itself(two_planes):
    with opened(two_planes) as gather:
        assert gather.info == engram.tables(two_planes)[0]
        assert (gather.num_rows, gather.row_shape, gather.row_bytes) == (100, (64,), 66)
        assert (gather.dtype, gather.nbytes) == (ml_dtypes.float8_e4m3fn, 6600)
        assert (gather.encoding, gather.logical_shape) == ("fp8_e4m3_e8m0_32", (64,))
        assert gather.constants == {}
        assert gather.files == (str(two_planes),)
        weight, scale = gather.planes
        assert gather.planes["scale"] is scale
        assert "bias" not in gather.planes
        assert (weight.name, weight.stored_dtype, weight.row_bytes) == ("weight", "fp8_e4m3", 64)
        assert (scale.name, scale.stored_dtype, scale.row_shape) == ("scale", "fp8_e8m0", (2,))
        assert [piece.tensor for piece in scale.pieces] == [f"{DEEPSEEK}.scale"]
        text = repr(gather)
        for part in (DEEPSEEK, "100 rows", "66 bytes", "fp8_e4m3_e8m0_32", "1 file"):
            assert part in text
        assert "closed" not in text
    assert "closed" in repr(gather)
    with pytest.raises(KeyError, match="bias"):
        gather.planes["bias"]


def test_stats_say_what_runs(plain, io):
    with opened(plain, NAME, io) as gather:
        gather.gather([1, 2, 3])
        stats = gather.stats()
    assert stats["io"]["asked"] == io
    assert stats["calls"] == 1
    assert stats["rows"] == 3
    assert stats["errors"] == 0
    assert stats["seconds"]["call"]["count"] == 1


def test_closing_twice_and_using_afterwards(plain, io):
    gather = opened(plain, NAME, io)
    assert not gather.closed
    gather.close()
    gather.close()
    assert gather.closed
    out = np.empty((1, 28), np.uint8)
    for call in (
        lambda: gather.gather([1]),
        lambda: gather.gather(np.array([1]), out=out),
        lambda: gather.prefetch([1]),
        gather.prewarm,
        gather.residency,
        gather.stats,
    ):
        with raises(ValueError, "closed"):
            call()
    assert gather.num_rows == 100
    assert gather.files == (str(plain),)


def test_a_context_manager_closes_also_when_it_fails(plain):
    with pytest.raises(ZeroDivisionError), engram.FileGather(plain, NAME) as gather:
        _ = 1 / 0
    assert gather.closed


def test_gathers_are_neither_pickled_nor_copied(plain):
    with engram.FileGather(plain, NAME) as gather, engram.TableSet([gather]) as tables:
        for held in (gather, tables, engram.HostBuffer(8)):
            for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
                with raises(TypeError, type(held).__name__):
                    duplicate(held)
        assert np.array_equal(raw(gather.gather([1])), read_rows(plain, NAME, [1]))


def test_descriptions_and_rows_are_pickled_and_copied(two_planes):
    info = engram.tables(two_planes)[0]
    with opened(two_planes) as gather:
        rows = gather.gather([1, 2])
    for duplicate in (copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        assert duplicate(info) == info
        assert duplicate(info).planes["scale"] == info.planes["scale"]
        assert np.array_equal(raw(duplicate(rows).scale), raw(rows.scale))


def test_prewarming_reports_what_it_does(two_planes, io):
    steps = []
    with opened(two_planes, None, io) as gather:
        assert gather.prewarm(progress=lambda done, total: steps.append((done, total))) == 6600
        assert steps[-1] == (6600, 6600)
        assert 0 < gather.prewarm(max_bytes=1000) <= 6600
        assert gather.prewarm("1GiB") == gather.prewarm(max_bytes="100%") == 6600
        assert gather.prewarm("1KiB") == gather.prewarm(1024)
        for wrong in (0, -1, "x", 1.5):
            with raises(ValueError, "max_bytes"):
                gather.prewarm(wrong)
        residency = gather.residency()
        assert residency.pages >= 2
        assert residency.resident in (None, residency.pages)


def test_an_exception_in_a_progress_callback_is_passed_on(two_planes):
    def fail(_done, _total):
        raise LookupError("mine")

    with opened(two_planes) as gather:
        with pytest.raises(LookupError, match="mine"):
            gather.prewarm(progress=fail)
        with pytest.raises(TypeError):
            gather.prewarm(progress=5)
        assert gather.prewarm() == 6600
