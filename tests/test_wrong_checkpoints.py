"""Directories and indices that contradict their files, and tables whose parts do not fit."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import engram
from checkpoint_support import (
    DEEPSEEK,
    INDEX,
    QWEN,
    Tensor,
    check_os_error,
    checkpoint,
    raises,
    raw,
    safetensors,
    scalar,
    shards,
    tensor,
    write_index,
)
from engram import CheckpointError

SIZES = [5, 3, 4]


@pytest.fixture
def model(tmp_path):
    """Three shards in two files, with an index."""
    pieces = shards(SIZES, 8)
    return checkpoint(
        tmp_path / "c", {"a.safetensors": pieces[:2], "b.safetensors": pieces[2:]}, config={}
    )


def whole(sizes=SIZES, columns=8):
    data = b"".join(piece.data for piece in shards(sizes, columns))
    return np.frombuffer(data, np.uint8).reshape(sum(sizes), 2 * columns)


def served(path, table=None, expected=None):
    """Every row of the table, side by side; checked against `expected`."""
    with engram.FileGather(path, table) as gather:
        out = np.empty((gather.num_rows, gather.row_bytes), np.uint8)
        gather.gather(np.arange(gather.num_rows), out=out)
    if expected is not None:
        assert np.array_equal(out, expected)
    return out


def refused(path, *parts, kind=CheckpointError, table=None, at=None):
    place = {"table": table} if at is None else {"table": table, "path": at}
    for call in (engram.tables, engram.FileGather):
        with raises(kind, *parts, **place):
            call(path)


@pytest.mark.case("F16")
def test_a_second_copy_beside_the_indexed_files_is_ignored(model):
    stray = [
        Tensor(each.name, each.dtype, each.shape, bytes(len(each.data)))
        for each in shards(SIZES, 8)
    ]
    safetensors(model / "0-stray.safetensors", *stray)
    served(model, None, whole())
    assert all("stray" not in file for file in engram.tables(model)[0].files)


@pytest.mark.case("F16")
def test_a_copy_of_another_shape_beside_the_indexed_files_is_ignored(model):
    safetensors(model / "z.safetensors", tensor(f"{QWEN}.shard_1.weight", "F32", (2, 3)))
    served(model, None, whole())


@pytest.mark.case("F16")
def test_without_an_index_no_tensor_may_be_there_twice(model):
    (model / INDEX).unlink()
    served(model, None, whole())
    safetensors(model / "z.safetensors", shards(SIZES, 8)[1])
    refused(model, f'"{QWEN}.shard_1.weight"', "a.safetensors", "z.safetensors")
    (model / "z.safetensors").unlink()
    served(model, None, whole())


@pytest.mark.case("F16")
def test_a_side_file_may_hold_a_table_that_the_index_does_not_name(tmp_path):
    directory = checkpoint(tmp_path / "c", {"a.safetensors": [tensor("other", "U8", (3, 3))]})
    safetensors(directory / "ngram_embedding.safetensors", *shards(SIZES, 8))
    served(directory, None, whole())
    served(directory / INDEX, None, whole())
    safetensors(directory / "more.safetensors", *shards(SIZES, 8))
    refused(directory, f'"{QWEN}.shard_', "ngram_embedding.safetensors", "more.safetensors")


def test_an_index_that_leaves_out_a_piece_is_stale(model):
    index = json.loads((model / INDEX).read_text())["weight_map"]
    left_out = f"{QWEN}.shard_1.weight"
    good = dict(index)
    del index[left_out]
    write_index(model, index)
    refused(model, "stale index", f'"{left_out}"', at=model / "a.safetensors")
    write_index(model, good)
    served(model, None, whole())


@pytest.mark.case("F17")
def test_every_missing_file_is_listed(model):
    hidden = model.parent / "hidden"
    hidden.mkdir()
    for count, missing in enumerate((["b.safetensors"], ["a.safetensors", "b.safetensors"]), 1):
        for name in missing:
            if (model / name).exists():
                shutil.move(model / name, hidden / name)
        for path in (model, model / INDEX):
            for call in (engram.tables, engram.FileGather, engram.TableSet):
                with raises(
                    FileNotFoundError, "incomplete", f"{count} of the 2 files", *missing
                ) as caught:
                    call(path)
                check_os_error(caught.value, 2, model / missing[0])
    for name in ("a.safetensors", "b.safetensors"):
        shutil.move(hidden / name, model / name)
    served(model, None, whole())


@pytest.mark.case("F17")
def test_an_empty_directory(tmp_path):
    for call in (engram.tables, engram.FileGather):
        with raises(FileNotFoundError, "no .safetensors file") as caught:
            call(tmp_path)
        check_os_error(caught.value, 2, tmp_path)


@pytest.mark.case("F18")
def test_an_index_that_points_to_the_wrong_file(model):
    index = json.loads((model / INDEX).read_text())["weight_map"]
    wrong = f"{QWEN}.shard_1.weight"
    write_index(model, {**index, wrong: "b.safetensors"})
    refused(model, f'"{wrong}"', "b.safetensors", "a.safetensors", at=model / "b.safetensors")
    write_index(model, {**index, "nowhere": "b.safetensors"})
    refused(model, '"nowhere"', "b.safetensors", at=model / "b.safetensors")
    write_index(model, index)
    served(model, None, whole())


@pytest.mark.case("F20")
def test_an_index_of_64_megabytes(tmp_path):
    names = [f"model.layers.{number}.{'long_' * 40}name" for number in range(20_000)]
    directory = tmp_path / "c"
    checkpoint(directory, {"a.safetensors": [Tensor(name, "U8", (0,), b"") for name in names]})
    pieces = shards(SIZES, 8)
    safetensors(directory / "b.safetensors", *pieces)
    weight_map = dict.fromkeys(names, "a.safetensors")
    weight_map |= dict.fromkeys([piece.name for piece in pieces], "b.safetensors")
    document = {"metadata": {"note": "x" * (64 << 20)}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(document))
    assert (directory / INDEX).stat().st_size > 64 << 20
    served(directory, None, whole())


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "not valid"),
        ("{", "not valid"),
        ("[]", "not valid"),
        ("{}", '"weight_map"'),
        ('{"weight_map": []}', "not valid"),
        ('{"weight_map": {"a": 5}}', "not valid"),
        ('{"weight_map": {"a": "/etc/passwd.safetensors"}}', "absolute"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "leaves the checkpoint directory"),
        ('{"weight_map": {"a": "a/../../x.safetensors"}}', "leaves the checkpoint directory"),
        ('{"weight_map": {"a": "x.bin"}}', "no .safetensors file"),
        ('{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}', "twice"),
        ('{"weight_map": {"a": "x\\u0000.safetensors"}}', "NUL"),
    ],
)
def test_an_index_that_is_none(model, text, part):
    good = (model / INDEX).read_text()
    (model / INDEX).write_text(text)
    refused(model, part, at=model / INDEX)
    refused(model / INDEX, part, at=model / INDEX)
    (model / INDEX).write_text(good)
    served(model, None, whole())


def test_several_indices(model):
    (model / INDEX).rename(model / "x.safetensors.index.json")
    served(model, None, whole())
    shutil.copy(model / "x.safetensors.index.json", model / "y.safetensors.index.json")
    refused(model, "x.safetensors.index.json", "y.safetensors.index.json", at=model)
    served(model / "y.safetensors.index.json", None, whole())


def test_a_configuration_that_is_none(model):
    for text, part in (("{", "not valid JSON"), ("[]", "not a JSON object")):
        (model / "config.json").write_text(text)
        refused(model, part, at=model / "config.json")
    (model / "config.json").write_text('{"x": NaN}')
    served(model, None, whole())


@pytest.mark.case("F30")
@pytest.mark.parametrize("sizes", [[3] * 12, list(range(1, 13)), [5, 0, 2, 0], [1] * 101])
def test_pieces_are_joined_in_numeric_order_under_every_name(tmp_path, sizes):
    expected = whole(sizes)
    for place, naming in enumerate(("shard_{}", "shards.{}")):
        pieces = shards(sizes, 8, naming)
        order = np.random.default_rng(place).permutation(len(pieces))
        files = {"b.safetensors": [pieces[at] for at in order[::2]]}
        files["a.safetensors"] = [pieces[at] for at in order[1::2]]
        served(checkpoint(tmp_path / str(place), files), None, expected)
    data = b"".join(piece.data for piece in shards(sizes, 8))
    one = Tensor(f"{QWEN}.weight", "BF16", (sum(sizes), 8), data)
    served(safetensors(tmp_path / "one.safetensors", one), None, expected)


@pytest.mark.case("F30")
@pytest.mark.parametrize(
    ("numbers", "part"),
    [
        ([0, 1, 3], "piece 2 is missing"),
        ([1, 2], "piece 0 is missing"),
        ([0, "01"], "01"),
        ([0, -1], "-1"),
        ([0, "x"], "x"),
    ],
    ids=str,
)
def test_pieces_with_gaps_and_numbers_that_are_none(tmp_path, numbers, part):
    pieces = [tensor(f"{QWEN}.shard_{number}.weight", "BF16", (2, 8)) for number in numbers]
    path = safetensors(tmp_path / "t.safetensors", *pieces)
    refused(path, part, table=QWEN)


@pytest.mark.case("F30")
def test_pieces_that_repeat_each_other(tmp_path):
    name = f"{QWEN}.shard_1.weight"
    again = [*shards([2, 2], 8), tensor(f"{QWEN}.shards.1.weight", "BF16", (2, 8))]
    refused(safetensors(tmp_path / "t.safetensors", *again), name, "piece 1", table=QWEN)
    both = [*shards([2, 2], 8), tensor(f"{QWEN}.weight", "BF16", (4, 8))]
    refused(safetensors(tmp_path / "u.safetensors", *both), f"{QWEN}.weight", table=QWEN)


@pytest.mark.parametrize(
    ("dtype", "shape", "parts"),
    [
        ("F16", (2, 8), ("F16", "BF16")),
        ("BF16", (2, 9), ("9 columns", "8")),
        ("BF16", (2,), ("[2]", "two dimensions")),
        ("BF16", (2, 2, 4), ("[2, 2, 4]", "two dimensions")),
    ],
)
def test_pieces_that_do_not_fit_together(tmp_path, dtype, shape, parts):
    odd = tensor(f"{QWEN}.shard_1.weight", dtype, shape)
    path = safetensors(tmp_path / "t.safetensors", shards([2], 8)[0], odd)
    refused(path, odd.name, *parts, at=path, table=QWEN)


@pytest.mark.case("F27")
def test_a_scale_that_is_missing_is_named(tmp_path):
    fp8 = tensor(f"{QWEN}.shard_0.weight", "F8_E4M3", (4, 32))
    path = safetensors(tmp_path / "a.safetensors", fp8)
    refused(path, fp8.name, f'"{QWEN}.weight_scale"', at=path, table=QWEN)
    packed = tensor(f"{QWEN}.shard_0.weight", "U8", (4, 16))
    blocks = tensor(f"{QWEN}.shard_0.weight_scale", "F8_E4M3", (4, 2))
    refused(safetensors(path, packed), f'"{QWEN}.shard_0.weight_scale"', table=QWEN)
    refused(safetensors(path, packed, blocks), f'"{QWEN}.weight_scale_2"', table=QWEN)
    engram_weight = tensor(f"{DEEPSEEK}.weight", "F8_E4M3", (4, 64))
    refused(safetensors(path, engram_weight), f'"{DEEPSEEK}.scale"', table=DEEPSEEK)
    served(safetensors(path, fp8, scalar(f"{QWEN}.weight_scale", 0.5, "BF16")))


@pytest.mark.case("F27")
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_was_never_set(tmp_path, value):
    fp8 = tensor(f"{QWEN}.shard_0.weight", "F8_E4M3", (4, 32))
    path = safetensors(tmp_path / "a.safetensors", fp8, scalar(f"{QWEN}.weight_scale", value))
    refused(path, f'"{QWEN}.weight_scale"', "no usable scale", table=QWEN)


@pytest.mark.case("F28")
@pytest.mark.parametrize(("weights", "scales"), [("a", "b"), ("b", "a")])
def test_scales_in_another_file(tmp_path, weights, scales):
    weight = tensor(f"{DEEPSEEK}.weight", "F8_E4M3", (9, 64))
    scale = tensor(f"{DEEPSEEK}.scale", "F8_E8M0", (9, 2))
    files = {f"{weights}.safetensors": [weight], f"{scales}.safetensors": [scale]}
    parts = [np.frombuffer(each.data, np.uint8).reshape(9, -1) for each in (weight, scale)]
    directory = checkpoint(tmp_path / "c", files)
    served(directory, None, np.concatenate(parts, axis=1))
    for file in (f"{weights}.safetensors", f"{scales}.safetensors"):
        refused(directory / file, DEEPSEEK, table=DEEPSEEK)
    fp8 = tensor(f"{QWEN}.shard_0.weight", "F8_E4M3", (4, 32))
    constant = scalar(f"{QWEN}.weight_scale", 0.25, "BF16")
    files = {f"{weights}.safetensors": [fp8], f"{scales}.safetensors": [constant]}
    with engram.FileGather(checkpoint(tmp_path / "d", files)) as gather:
        assert gather.constants == {"weight_scale": 0.25}
        assert raw(gather.gather(np.arange(4))).tobytes() == fp8.data


@pytest.mark.parametrize(
    ("scale", "parts"),
    [
        (("F8_E8M0", (8, 2)), ("8 rows", "9")),
        (("F8_E8M0", (9, 3)), ("3 scales a row", "64")),
        (("F8_E4M3", (9, 2)), (f"{DEEPSEEK}.weight",)),
    ],
)
def test_scales_that_do_not_fit_their_rows(tmp_path, scale, parts):
    weight = tensor(f"{DEEPSEEK}.weight", "F8_E4M3", (9, 64))
    path = safetensors(tmp_path / "a.safetensors", weight, tensor(f"{DEEPSEEK}.scale", *scale))
    refused(path, *parts, table=DEEPSEEK)


@pytest.mark.case("F32")
def test_what_a_checkpoint_lacks_is_named(tmp_path):
    scale_only = scalar(f"{QWEN}.weight_scale", 0.5)
    path = safetensors(tmp_path / "a.safetensors", scale_only)
    refused(path, f"{QWEN}.weight", f"{QWEN}.shard_0.weight", table=QWEN)
    text = {"ple_layer_ids": [2], "ngram_size": 3, "heads_per_ngram": 1, "split_ngram_parts": 3}
    text |= {"ngram_vocab_size_base": 5, "make_ngram_vocab_size_divisible_by": 4}
    config = {"text_config": text}
    directory = checkpoint(tmp_path / "c", {"a.safetensors": shards([4, 4], 8)}, config)
    refused(directory, "config.json implies 12 rows", "8", table=QWEN)
    checkpoint(tmp_path / "d", {"a.safetensors": shards([4, 4, 4], 8)}, config)
    served(tmp_path / "d", None, whole([4, 4, 4]))


@pytest.mark.case("I34")
def test_links_of_a_hub_cache(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    made = checkpoint(tmp_path / "made", {"a.safetensors": shards(SIZES, 8)}, config={})
    for file in sorted(made.iterdir()):
        shutil.move(file, blobs / f"blob-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob-{file.name}")
    served(snapshot, None, whole())
    with engram.FileGather(snapshot / "a.safetensors") as gather:
        assert gather.files == (str(blobs / "blob-a.safetensors"),)
        (snapshot / "a.safetensors").unlink()
        assert np.array_equal(raw(gather.gather([3])), whole()[[3]])
    (snapshot / "a.safetensors").symlink_to("../../blobs/blob-a.safetensors")
    gone = tmp_path / "gone"
    blobs.rename(gone)
    for path, link in ((snapshot, snapshot / INDEX), (snapshot / "a.safetensors",) * 2):
        for call in (engram.tables, engram.FileGather):
            with raises(
                FileNotFoundError, str(link), "../../blobs/blob-", "blobs directory"
            ) as caught:
                call(path)
            check_os_error(caught.value, 2, link)
    gone.rename(blobs)
    served(snapshot, None, whole())
    with raises(FileNotFoundError, "snapshots"):
        engram.tables(tmp_path)


@pytest.mark.case("I34")
def test_links_that_leave_the_directory_are_refused(model):
    outside = model.parent / "outside.safetensors"
    shutil.move(model / "b.safetensors", outside)
    (model / "b.safetensors").symlink_to(outside)
    refused(model, str(outside), "outside", at=model / "b.safetensors")
    (model / "b.safetensors").unlink()
    shutil.move(outside, model / "b.safetensors")
    served(model, None, whole())
