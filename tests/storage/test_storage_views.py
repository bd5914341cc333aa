"""Tables from the views that loaders hand out."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import VARIANTS, check_rows, mapped_views, some_ids, views

import engram
from engram.synth import Layout


def tables_of(info):
    return [table.name for table in info.tables]


def bind(info, tensors, place=0):
    loader = engram.ViewLoader(info.tables[place].rows)
    for name, tensor in tensors.items():
        loader.add(name, tensor)
    return loader.bind(place if len(info.tables) > 1 else None)


def one_table(info, tensors):
    """The tensors of the first table alone."""
    name = info.tables[0].name
    return {key: tensor for key, tensor in tensors.items() if key.startswith(name)}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("source", [views, mapped_views])
def test_rows_are_those_of_the_files(checkpoint, variant, source):
    info = checkpoint(variant)
    tensors = source(info)
    names = sorted(tensors)
    np.random.default_rng(1).shuffle(names)
    for place, table in enumerate(info.tables):
        loader = engram.ViewLoader(info.config)
        kept = [loader.add(name, tensors[name]) for name in names]
        assert kept == [any(name.startswith(table) for table in tables_of(info)) for name in names]
        with loader.bind(table.name) as gather:
            assert gather.num_rows == table.rows
            assert gather.info == engram.FileGather(info.directory, table.name).info
            ids = some_ids(table.rows, 300, place)
            check_rows(gather.gather(ids), table, ids)


@pytest.mark.case("F28")
@pytest.mark.parametrize("reverse", [False, True])
def test_scales_may_lie_in_another_file_and_come_first_or_last(checkpoint, reverse):
    for variant in ("qwen-nvfp4", "deepseek-fp8"):
        info = checkpoint(variant, layout=Layout(scales_apart=True), files=4)
        tensors = views(info)
        scales = {name for name in tensors if "scale" in name}
        order = sorted(tensors, key=lambda name: (name in scales) != reverse)
        gather = bind(info, {name: tensors[name] for name in order})
        assert len({piece.file for plane in gather.planes for piece in plane.pieces}) > 1
        ids = some_ids(gather.num_rows, 200)
        check_rows(gather.gather(ids), info.tables[0], ids)


@pytest.mark.case("F27")
@pytest.mark.parametrize("variant", ["qwen-fp8", "qwen-nvfp4", "deepseek-fp8"])
def test_a_scale_that_was_not_handed_over_is_named(checkpoint, variant):
    info = checkpoint(variant)
    tensors = one_table(info, views(info))
    scale = next(name for name in sorted(tensors) if "scale" in name)
    del tensors[scale]
    with pytest.raises(engram.CheckpointError, match="scale") as error:
        bind(info, tensors)
    assert scale.rsplit(".", 1)[1] in str(error.value)
    assert error.value.table == info.tables[0].name


@pytest.mark.case("I32")
def test_copies_are_refused_by_name_and_by_what_backs_them(checkpoint):
    info = checkpoint()
    tensors = views(info)
    name = next(name for name in tensors if "shard_1.weight" in name)
    copies = {
        "anonymous memory": tensors[name].clone(),
        "shared memory": tensors[name].clone().share_memory_(),
    }
    for backing, copy in copies.items():
        with pytest.raises(ValueError, match="is backed by") as error:
            bind(info, {**tensors, name: copy})
        text = str(error.value)
        assert repr(name).strip("'") in text
        assert backing in text or "the heap" in text
        assert "engram.FileGather(path)" in text


@pytest.mark.case("I32")
def test_a_small_copy_on_the_heap_is_refused_too(checkpoint):
    info = checkpoint()
    tensors = views(info)
    scale = next(name for name in tensors if name.endswith("weight_scale"))
    tensors[scale] = tensors[scale].clone()
    with pytest.raises(ValueError, match=r"weight_scale\" is backed by (the heap|anonymous)"):
        bind(info, tensors)


def test_a_deleted_file_is_refused(tmp_path, checkpoint):
    copied = shutil.copytree(checkpoint().directory, tmp_path / "copy")
    info = engram.synth.load(copied)
    tensors = views(info)
    files = list(info.files)
    files[0].unlink()
    with pytest.raises(ValueError, match="a file that has been deleted"):
        bind(info, tensors)


def test_tensors_changed_in_memory_are_refused(checkpoint):
    info = checkpoint("qwen-bf16")
    tensors = views(info)
    name = next(name for name in tensors if "shard_1.weight" in name)
    tensors[name].view(torch.uint8)[-1, -1] ^= 255
    with pytest.raises(engram.CheckpointError, match="differs from the file it is mapped from"):
        bind(info, tensors)


def test_hub_cache_links_are_followed(tmp_path, checkpoint):
    info = checkpoint()
    blobs = tmp_path / "blobs"
    snapshot = tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(info.directory.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    linked = engram.synth.load(snapshot)
    gather = bind(linked, views(linked))
    assert {Path(file).parent for file in gather.files} == {blobs}
    ids = some_ids(gather.num_rows, 50)
    check_rows(gather.gather(ids), info.tables[0], ids)


def test_names_with_and_without_language_model_are_one_table(checkpoint):
    info = checkpoint()
    tensors = {
        name.replace("language_model.", "") if "shard_2" in name or "scale" in name else name: view
        for name, view in views(info).items()
    }
    gather = bind(info, tensors)
    assert gather.info.name == info.tables[0].name.replace("language_model.", "")
    ids = some_ids(gather.num_rows, 50)
    check_rows(gather.gather(ids), info.tables[0], ids)


def test_pieces_must_make_up_exactly_the_padded_rows(checkpoint):
    info = checkpoint("qwen-bf16")
    tensors = one_table(info, views(info))
    last = max(tensors, key=lambda name: int(name.rsplit("shard_", 1)[1].split(".")[0]))
    fewer = {name: view for name, view in tensors.items() if name != last}
    with pytest.raises(engram.CheckpointError, match="a piece has not been added"):
        bind(info, fewer)
    with pytest.raises(engram.CheckpointError, match=r"config\.json implies"):
        engram.FileGather.from_views(fewer, num_rows=info.config)
    with pytest.raises(engram.CheckpointError, match="belong to another table"):
        engram.FileGather.from_views(tensors, num_rows=7)
    middle = next(name for name in tensors if "shard_1." in name)
    with pytest.raises(engram.CheckpointError, match="piece 1 is missing"):
        bind(info, {name: view for name, view in tensors.items() if name != middle})


def test_empty_pieces_have_no_place_and_need_none(checkpoint):
    info = checkpoint("qwen-bf16", rows=1_000, parts=700, layout=Layout(empty_parts=True))
    tensors = views(info)
    assert any(0 in tensor.shape for tensor in tensors.values())
    ids = some_ids(info.tables[0].rows, 50)
    check_rows(bind(info, tensors).gather(ids), info.tables[0], ids)


def test_weights_are_loaded_once(checkpoint):
    info = checkpoint()
    tensors = one_table(info, views(info))
    loader = engram.ViewLoader(info.tables[0].rows)
    name, view = next(iter(tensors.items()))
    assert loader.add(name, view)
    with pytest.raises(ValueError, match="was added before"):
        loader.add(name.replace("language_model.", ""), view)
    for other, tensor in list(tensors.items())[1:]:
        loader.add(other, tensor)
    assert len(loader) == len(tensors)
    loader.bind()
    assert len(loader) == 0
    with pytest.raises(RuntimeError, match="loaded once"):
        loader.add(name, view)
    with pytest.raises(RuntimeError, match="loaded once"):
        loader.bind()


def test_two_tables_are_bound_one_by_one(checkpoint):
    info = checkpoint("deepseek-fp8")
    first, second = info.tables
    loader = engram.ViewLoader(info.config)
    for name, tensor in views(info).items():
        loader.add(name, tensor)
    with pytest.raises(ValueError, match="2 tables"):
        loader.bind()
    for table in (second, first):
        ids = some_ids(table.rows, 20)
        check_rows(loader.bind(table.name).gather(ids), table, ids)


def test_what_cannot_be_a_view_is_refused_at_once(checkpoint):
    info = checkpoint("qwen-bf16")
    name = f"{info.tables[0].name}.shard_0.weight"
    loader = engram.ViewLoader(10)
    with pytest.raises(TypeError, match="list"):
        loader.add(name, [[1, 2]])
    with pytest.raises(TypeError, match="meta"):
        loader.add(name, torch.empty(2, 2, device="meta"))
    with pytest.raises(ValueError, match="not contiguous"):
        loader.add(name, torch.zeros(4, 4).t())
    with pytest.raises(ValueError, match="not contiguous"):
        loader.add(name, np.zeros((4, 4)).T)
    with pytest.raises(TypeError, match="complex64"):
        loader.add(name, torch.zeros(2, 2, dtype=torch.complex64))
    assert not loader.add("lm_head.weight", torch.zeros(2, 2))
    with pytest.raises(ValueError, match="none of the 1 tensors given belongs to"):
        loader.bind()
    with pytest.raises(ValueError, match="no tensor was added"):
        engram.ViewLoader(10).bind()


def test_the_number_of_rows_must_be_known(checkpoint):
    info = checkpoint("qwen-bf16")
    tensors = views(info)
    with pytest.raises(ValueError, match="at least 1"):
        engram.ViewLoader(0)
    with pytest.raises(TypeError, match="number of rows"):
        engram.ViewLoader(None)
    with pytest.raises(ValueError, match="pass num_rows"):
        engram.FileGather.from_views(tensors, num_rows={"ple_layer_ids": [2]})
    for config in (info.directory, info.directory / "config.json"):
        gather = engram.FileGather.from_views(tensors, num_rows=config)
        assert gather.num_rows == info.tables[0].rows


def test_configurations_of_transformers_count_rows(checkpoint):
    transformers = pytest.importorskip("transformers")
    info = checkpoint("qwen-bf16")
    config = transformers.AutoConfig.from_pretrained(info.directory)
    gather = engram.FileGather.from_views(views(info), num_rows=config)
    assert gather.num_rows == info.tables[0].rows

    class ModelConfig:
        hf_config = config

    assert engram.FileGather.from_views(views(info), num_rows=ModelConfig()).num_rows > 0
