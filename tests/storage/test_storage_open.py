"""Opening: dummy tables, pipeline stages, platforms, topologies, and what is refused."""

from __future__ import annotations

import json
import logging
import sys
import time
import types
from collections import Counter

import numpy as np
import pytest
import torch
from checkpoints import VARIANTS, check_rows, some_ids
from child import run
from places import CONFIGURATIONS

import engram
from engram.storage import Topology, preflight

REAL = {
    "architectures": ["Qwen4ExpForConditionalGeneration"],
    "text_config": {
        "ple_layer_ids": [2],
        "ple_embed_dim": 2560,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20_000_000,
        "make_ngram_vocab_size_divisible_by": 128,
        "num_hidden_layers": 48,
    },
}


@pytest.mark.case("C09")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_dummy_table_is_the_one_the_configuration_describes(variant, checkpoint, tmp_path):
    """With nothing but a `config.json`: the same rows, planes and names as the real table."""
    info = checkpoint(variant)
    config = json.loads(json.dumps(info.config))
    if variant in ("qwen-fp8", "qwen-nvfp4"):
        # How rows are quantised is seen in the files; a configuration may say so.
        named = {"qwen-fp8": "float8_e4m3fn", "qwen-nvfp4": "nvfp4"}[variant]
        config["text_config"]["ple_embedding_dtype"] = named
    (tmp_path / "config.json").write_text(json.dumps(config))
    real = engram.tables(info.directory)
    for place, table in enumerate(real):
        name = place if len(real) > 1 else None
        for source in ((tmp_path, name), (config, name)):
            storage = engram.open_storage({}, source, load_format="dummy")
            assert storage.placement == "dummy"
            assert storage.num_rows == table.rows
            assert storage.info.name == table.name
            assert storage.encoding == table.encoding
            assert storage.logical_shape == table.logical_shape
            shape = [(plane.name, plane.stored_dtype, plane.row_shape) for plane in table.planes]
            assert shape == [
                (plane.name, plane.stored_dtype, plane.row_shape) for plane in storage.planes
            ]
            values = engram.dequantize(storage.lookup([0, table.rows - 1]), storage)
            assert not np.asarray(values, np.float32).any()


@pytest.mark.case("C09")
def test_dummy_rows_are_zeros_and_checked_like_any_others(checkpoint):
    info = checkpoint("deepseek-fp8")
    with (
        engram.FileGather(info.directory, 0) as gather,
        engram.open_storage({}, gather, load_format="dummy") as dummy,
    ):
        assert dummy.stats()["instead_of"] == "pinned"
        out = np.full((3, gather.row_bytes), 7, np.uint8)
        assert dummy.lookup(np.arange(3), out) is out
        assert not out.any()
        rows = dummy.lookup(torch.arange(6).reshape(2, 3))
        assert rows.weight.shape == (2, 3, 256)
        assert rows.weight.dtype == torch.float8_e4m3fn
        assert not rows.scale.view(torch.uint8).any()
        buffer = engram.HostBuffer(gather.planes.nbytes(4))
        np.frombuffer(buffer, np.uint8)[:] = 9
        dummy.lookup([1, 2, 3, 4], buffer)
        assert not np.frombuffer(buffer, np.uint8)[: gather.planes[0].row_bytes * 4].any()
        for ids, pad in (([5, gather.num_rows], None), ([-1], None), ([-2], -1)):
            with pytest.raises(IndexError) as expected:
                gather.gather(np.array(ids), pad_id=pad)
            with pytest.raises(IndexError) as found:
                dummy.lookup(np.array(ids), pad_id=pad)
            assert str(found.value) == str(expected.value)
            assert found.value.position == expected.value.position
        dummy.lookup([-1], pad_id=-1)
        with pytest.raises(RuntimeError, match="loaded already"):
            dummy.load({})


@pytest.mark.case("C09")
def test_a_dummy_of_the_real_size_costs_nothing(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(REAL))
    for config in CONFIGURATIONS.values():
        began = time.monotonic()
        storage = engram.open_storage(config, tmp_path, load_format="dummy")
        assert storage.num_rows == 320_001_536
        assert set(storage.nbytes.values()) == {0}
        storage.lookup(np.full(1000, 320_001_535))
        assert time.monotonic() - began < 5


@pytest.mark.case("C09")
def test_a_dummy_reads_no_row_of_files_that_are_there(checkpoint, monkeypatch):
    info = checkpoint()
    monkeypatch.setattr(engram.FileGather, "__init__", None)
    storage = engram.open_storage({}, info.directory, load_format="dummy")
    assert storage.encoding == "fp8_e4m3", "the headers know better than a configuration"
    assert not storage.lookup([1, 2]).view(np.uint8).any()


def test_what_has_no_table_has_no_dummy(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="has no n-gram or per-layer table"):
        engram.open_storage({}, tmp_path, load_format="dummy")
    with pytest.raises(FileNotFoundError):
        engram.open_storage({}, tmp_path / "nowhere", load_format="dummy")
    with pytest.raises(TypeError, match="model configuration"):
        engram.open_storage({}, 5, load_format="dummy")
    incomplete = {"engram_layer_ids": [1], "engram_head_dim": 256}
    with pytest.raises(ValueError, match="not all the numbers"):
        engram.open_storage({}, incomplete, load_format="dummy")
    two = {"engram_layer_ids": [1, 3], "engram_head_dim": 64, "engram_num_embeddings": [5, 6]}
    with pytest.raises(ValueError, match="2 tables"):
        engram.open_storage({}, two, load_format="dummy")
    assert engram.open_storage({}, (two, 1), load_format="dummy").num_rows == 6
    assert (
        engram.open_storage({}, (two, "layers.1.engram.embed"), load_format="dummy").num_rows == 5
    )


@pytest.mark.case("P07")
class TestPipelineStages:
    """The table of Qwen's checkpoint is on decoder layer 1."""

    def open(self, info, **parallel):
        parallel = {"pipeline_parallel_size": 2, **parallel}
        return engram.open_storage({}, info.directory, parallel=parallel, device="cpu")

    def test_the_first_stage_serves_it(self, checkpoint):
        info = checkpoint()
        with self.open(info, pipeline_parallel_rank=0, pipeline_layers=(0, 4)) as storage:
            ids = some_ids(storage.num_rows, 20)
            check_rows(storage.lookup(ids), info.tables[0], ids)

    def test_a_stage_without_the_layer_opens_nothing(self, checkpoint):
        with self.open(checkpoint(), pipeline_parallel_rank=1, pipeline_layers=(4, 8)) as storage:
            assert storage.placement == "absent"
            assert set(storage.nbytes.values()) == {0}
            with pytest.raises(RuntimeError, match=r"layer 1; pipeline stage 1 of 2 holds layers"):
                storage.lookup([1])
            with pytest.raises(RuntimeError, match="holds layers 4 to 7"):
                storage.load({})

    def test_a_later_stage_with_the_layer_is_refused(self, checkpoint):
        with pytest.raises(ValueError, match="no token ids") as error:
            self.open(checkpoint(), pipeline_parallel_rank=1, pipeline_layers=(1, 8))
        assert "pipeline_parallel_size=2" in str(error.value)
        assert "decoder layer 1" in str(error.value)

    def test_stages_are_cut_as_vllm_cuts_them(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps(REAL))

        def placement(size, rank):
            parallel = {"pipeline_parallel_size": size, "pipeline_parallel_rank": rank}
            storage = engram.open_storage({}, tmp_path, parallel=parallel, load_format="dummy")
            return storage.placement

        assert [placement(4, rank) for rank in range(4)] == ["dummy", *["absent"] * 3]
        # 48 stages of one layer each: layer 1 is on the second, which has no tokens.
        with pytest.raises(ValueError, match="stage 1 of 48"):
            placement(48, 1)
        assert placement(48, 0) == "absent"
        assert placement(48, 2) == "absent"

    def test_unknown_layers_are_asked_for(self, checkpoint):
        announced = engram.tables(checkpoint().directory)[0]
        parallel = {"pipeline_parallel_size": 2, "pipeline_parallel_rank": 0}
        with pytest.raises(ValueError, match="pipeline_layers=\\(first, stop\\)"):
            engram.open_storage({}, announced, parallel=parallel)

    def test_tables_before_the_first_layer_are_on_the_first_stage(self, checkpoint):
        info = checkpoint("longcat-bf16")
        assert self.open(info, pipeline_parallel_rank=0).placement == "pinned"
        assert self.open(info, pipeline_parallel_rank=1).placement == "absent"


@pytest.mark.case("C08")
@pytest.mark.parametrize("platform", ["cuda", "rocm", "cpu"])
@pytest.mark.parametrize("place", ["device", "pinned", "huge", "file"])
def test_what_is_asked_for_is_active_or_an_error(platform, place, checkpoint, monkeypatch):
    from engram import storage as package

    monkeypatch.setattr(package, "detect_platform", lambda: platform)
    config = CONFIGURATIONS[place]
    if place == "file" and platform == "rocm":
        with pytest.raises(ValueError, match="not supported on platform 'rocm'"):
            engram.open_storage(config, checkpoint().directory)
        return
    with engram.open_storage(config, checkpoint().directory) as storage:
        assert storage.placement == {"huge": "pinned"}.get(place, place)
        assert storage.fallbacks == []
        if storage.placement == "pinned":
            # Private tables on ROCm always ask for huge pages.
            asked = storage.stats()["huge_page_share"] is not None
            assert asked == (place == "huge" or platform == "rocm")


@pytest.mark.case("C08")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_an_error(checkpoint):
    for config in CONFIGURATIONS.values():
        with pytest.raises(RuntimeError, match="finds no CUDA device"):
            engram.open_storage(config, checkpoint().directory, device="cuda")


def test_the_configuration_is_resolved_verified_and_logged_once(checkpoint, caplog):
    config = engram.EngramConfig()
    with caplog.at_level(logging.INFO, "engram"):
        engram.open_storage(config, checkpoint().directory, device="cpu").close()
        engram.open_storage(config, checkpoint().directory, device="cpu").close()
    assert config.dp_shared_memory is False
    logged = [record.message for record in caplog.records if "configuration" in record.message]
    assert len(logged) == 1
    with pytest.raises(ValueError, match="enable_elastic_ep"):
        engram.open_storage(
            {"disk_offload": True},
            checkpoint().directory,
            parallel={"tensor_parallel_size": 1, "enable_elastic_ep": True},
        )
    for form in ('{"host_file_gather": true}', {"host_file_gather": True}):
        with engram.open_storage(form, checkpoint().directory) as storage:
            assert storage.placement == "file"


def test_importing_and_opening_files_needs_no_torch(checkpoint):
    info = checkpoint()
    found = run(
        """
        for config in ({}, {"use_thp": True}, {"disk_offload": True}):
            storage = engram.open_storage(config, arguments["path"], device="cpu")
            ids = some_ids(storage.num_rows, 100)
            check_rows(storage.lookup(ids), engram.synth.load(arguments["path"]).tables[0], ids)
        report(loaded=sorted({"torch", "triton"} & set(sys.modules)))
        """,
        path=str(info.directory),
    )
    assert found["loaded"] == []


class TestTopology:
    def test_nothing_is_one_process(self):
        assert Topology.of(None) == Topology()

    def test_vllms_parallel_config(self):
        config = types.SimpleNamespace(
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            data_parallel_size=4,
            data_parallel_rank=3,
            data_parallel_size_local=2,
            local_world_size=4,
            enable_elastic_ep=False,
            rank=3,
            world_size=4,
        )
        topology = Topology.of(config)
        assert topology.tensor_parallel_rank == 1
        assert topology.pipeline_parallel_rank == 1
        assert topology.data_parallel_rank == 3
        assert topology.ranks_here == 4
        assert topology.shards_here == 2

    def test_ranks_must_be_known_and_inside(self):
        with pytest.raises(ValueError, match="give tensor_parallel_rank or rank"):
            Topology.of({"tensor_parallel_size": 2})
        with pytest.raises(ValueError, match="tensor_parallel_rank 2 is outside"):
            Topology.of({"tensor_parallel_size": 2, "tensor_parallel_rank": 2})
        with pytest.raises(ValueError, match="must be an integer"):
            Topology.of({"tensor_parallel_size": "2"})
        with pytest.raises(ValueError, match="at least 1"):
            Topology.of({"data_parallel_size": 0})
        with pytest.raises(TypeError, match="none of them"):
            Topology.of(object())

    def test_a_replica_that_does_not_know_its_number_cannot_shard(self, checkpoint):
        with pytest.raises(ValueError, match="needs data_parallel_rank"):
            engram.open_storage(
                {"embedding_across_dp": True},
                checkpoint().directory,
                parallel={"data_parallel_size": 2},
            )


def test_a_bar_is_drawn_for_people_only(monkeypatch, capsys):
    from engram.storage.progress_bar import bar

    assert bar(1 << 40) is None, "nobody watches a pipe"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert bar(1000) is None
    draw = bar(1 << 40)
    draw("loading rows", 1 << 39, 1 << 40)
    draw("loading rows", 1 << 40, 1 << 40)
    assert "loading rows" in capsys.readouterr().err


def test_a_bar_is_drawn_while_views_are_loaded(checkpoint, monkeypatch, capsys):
    from checkpoints import views

    from engram.storage import progress_bar

    info = checkpoint()
    announced = engram.tables(info.directory)[0]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress_bar, "LEAST_BYTES", 1)
    for config in ({}, {"cpu_offload": False}):
        with engram.open_storage(config, announced, device="cpu") as storage:
            storage.load(views(info))
            said = capsys.readouterr().err
            assert "loading rows" in said
            assert "100%" in said
        with engram.open_storage(config, announced, device="cpu") as storage:
            steps = Counter()
            storage.load(views(info), lambda stage, *_, steps=steps: steps.update([stage]))
            assert steps["loading rows"], "whoever asks to be told draws it"
            assert capsys.readouterr().err == ""


def test_errors_of_a_topology_carry_the_attributes_of_all_others(checkpoint, monkeypatch):
    path = checkpoint().directory
    table = checkpoint().tables[0].name
    monkeypatch.setattr(preflight, "memory_now", lambda: preflight.Memory(10, 10))
    unshared = {"data_parallel_size": 2, "data_parallel_rank": 1}
    calls = [
        (lambda: Topology(tensor_parallel_size=0), None),
        (lambda: Topology.of({"tensor_parallel_size": 2}), None),
        (lambda: Topology.of(object()), None),
        (lambda: engram.Shard.of("x", 0, 1), None),
        (lambda: engram.Shard.of(4, 3, 2), None),
        (lambda: engram.dequantize({}, engram.tables(path)[0]), None),
        (lambda: engram.dequantize({}, engram.tables(path)[0], "int8"), None),
        (lambda: engram.open_storage({}, path, device="cpu"), table),
        (lambda: engram.open_storage({}, path, device="cpu", numa=77), table),
        (
            lambda: engram.open_storage(
                {"dp_shared_memory": True}, path, parallel=unshared, device="cpu"
            ),
            table,
        ),
    ]
    for call, name in calls:
        with pytest.raises((MemoryError, RuntimeError, TypeError, ValueError)) as error:
            call()
        for attribute in ("path", "row", "position", "offset"):
            assert getattr(error.value, attribute) is None
        assert error.value.table == name


def test_the_released_size_is_served_from_files_and_refused_where_it_does_not_fit(
    tmp_path, monkeypatch
):
    info = engram.synth.write_sparse(tmp_path / "c", "qwen", dtype="fp8")
    with engram.open_storage({"disk_offload": True}, info.directory) as storage:
        assert storage.num_rows == 320_001_536
        table = storage.info.name
        marked = info.marked[table][:50]
        check_rows(storage.lookup(marked), info.tables[0], marked)
    monkeypatch.setattr(preflight, "memory_now", lambda: preflight.Memory(8 << 30, 16 << 30))
    with pytest.raises(MemoryError, match="not enough host memory"):
        engram.open_storage({}, info.directory, device="cpu")
