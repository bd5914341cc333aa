"""Synthetic checkpoints: bytes, layout, hash constants, and behaviour when writing fails."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from engram import synth
from engram.synth import constants, pattern

GOLDEN = json.loads((Path(__file__).parent / "data" / "hash_constants.json").read_text())
SMALL = {
    "qwen": {"rows": 5000, "config": {"ple_embed_dim": 256}},
    "deepseek": {"rows": 5000, "config": {"engram_head_dim": 64, "hidden_size": 16}},
    "longcat": {"rows": 2000, "config": {"hidden_size": 192}},
    "gemma": {"rows": 300, "config": {"num_hidden_layers": 3, "hidden_size": 16}},
}
VARIANTS = [(name, dtype) for name, family in synth.FAMILIES.items() for dtype in family.dtypes]


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def header_of(path: Path) -> tuple[int, dict[str, dict[str, object]]]:
    """Naive reader: where data begins, and the header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return 8 + length, header


def tensor_bytes(path: Path, name: str) -> bytes:
    start, header = header_of(path)
    begin, end = header[name]["data_offsets"]
    with path.open("rb") as file:
        file.seek(start + begin)
        return file.read(end - begin)


def int64s(info: synth.SynthInfo, name: str) -> list[int]:
    for path in info.files:
        if name in header_of(path)[1]:
            return np.frombuffer(tensor_bytes(path, name), "<i8").tolist()
    raise KeyError(name)


def stored_plane(info: synth.SynthInfo, table: synth.SynthTable, name: str) -> np.ndarray:
    """Every row of a plane, read by seeking to each piece's planned offset."""
    plane = table.plane(name)
    chunks = []
    for piece in plane.pieces:
        with (info.directory / piece.file).open("rb") as file:
            file.seek(piece.offset)
            data = file.read(piece.rows * plane.row_bytes)
        chunks.append(np.frombuffer(data, np.uint8).reshape(piece.rows, plane.row_bytes))
    return np.concatenate(chunks)


def byte_by_definition(key: pattern.Pattern, row: int, column: int) -> int:
    """The documented byte function in plain integers."""
    mask64 = (1 << 64) - 1
    table_key = constants.splitmix64(
        (
            constants.splitmix64(key.seed & mask64)
            + 16 * key.table
            + {"weight": 0, "scale": 1}[key.plane]
        )
        & mask64
    )
    row_key = constants.splitmix64((table_key + row) & mask64)
    word = row_key * (constants.splitmix64(column // 8) | 1) & mask64
    word &= pattern.MASKS.get(key.dtype, mask64)
    return word >> (8 * (column % 8)) & 0xFF


@given(
    seed=st.integers(0, 2**64 - 1),
    table=st.integers(0, 15),
    plane=st.sampled_from(["weight", "scale"]),
    dtype=st.sampled_from(["BF16", "F8_E4M3", "F8_E8M0", "U8"]),
    row_bytes=st.integers(1, 70),
    ids=st.lists(st.integers(0, 2**40), min_size=1, max_size=5),
)
def test_rows_are_the_documented_function_of_every_byte(seed, table, plane, dtype, row_bytes, ids):
    key = pattern.Pattern(seed, table, plane, dtype, row_bytes)
    naive = [[byte_by_definition(key, row, column) for column in range(row_bytes)] for row in ids]
    assert key.rows(ids).tolist() == naive


def test_known_bytes_stay_as_they_are():
    rows = pattern.Pattern(0, 0, "weight", "U8", 10).rows([0, 1])
    assert [row.tobytes().hex() for row in rows] == ["1f62cd9ac7af9fe551c7", "6d3f095f522124fbe3d5"]


def test_rows_keep_the_shape_of_the_ids():
    key = pattern.Pattern(0, 0, "weight", "BF16", 6)
    assert key.rows(np.zeros((2, 0, 3), np.int32)).shape == (2, 0, 3, 6)
    ids = np.arange(12, dtype=np.uint32).reshape(3, 4)[:, ::2]
    assert np.array_equal(key.rows(ids)[2, 1], key.rows(10))


@pytest.mark.parametrize(
    ("dtype", "numpy_dtype"),
    [
        ("BF16", ml_dtypes.bfloat16),
        ("F16", np.float16),
        ("F32", np.float32),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("F8_E8M0", ml_dtypes.float8_e8m0fnu),
    ],
)
def test_float_rows_are_finite_and_below_two(dtype, numpy_dtype):
    rows = pattern.Pattern(3, 0, "weight", dtype, 64).rows(np.arange(4000))
    values = np.abs(rows.view(numpy_dtype).astype(np.float64))
    assert values.max() < 2
    assert len(np.unique(rows.reshape(-1))) > 100


@pytest.mark.parametrize(("family", "dtype"), VARIANTS)
def test_every_row_on_disk_is_the_expected_row(tmp_path, family, dtype):
    info = synth.write(tmp_path / "c", family, dtype=dtype, seed=5, **SMALL[family])
    assert sum(path.stat().st_size for path in info.files) == info.nbytes
    for table in info.tables:
        expected = table.expected(np.arange(table.rows))
        assert list(expected) == [plane.name for plane in table.planes]
        for name, rows in expected.items():
            assert np.array_equal(stored_plane(info, table, name), rows)


@pytest.mark.parametrize(("family", "dtype"), VARIANTS)
def test_the_reference_reader_accepts_every_file(tmp_path, family, dtype):
    info = synth.write(tmp_path / "c", family, dtype=dtype, **SMALL[family])
    names: dict[str, str] = {}
    for path in info.files:
        with safe_open(path, framework="np") as reader:
            assert reader.metadata() == {"format": "pt"}
            names.update(dict.fromkeys(reader.keys(), path.name))
    if len(info.files) > 1:
        index = json.loads((info.directory / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == names
        assert list(index["weight_map"]) != list(names)
    for table in info.tables:
        for plane in table.planes:
            assert sum(piece.rows for piece in plane.pieces) == table.rows
            for piece in plane.pieces:
                start, header = header_of(info.directory / piece.file)
                assert header[piece.tensor]["dtype"] == plane.dtype
                assert header[piece.tensor]["shape"] == [piece.rows, plane.columns]
                assert start + header[piece.tensor]["data_offsets"][0] == piece.offset


def test_rows_read_through_torch_agree(tmp_path):
    torch = pytest.importorskip("torch")
    info = synth.write(tmp_path / "c", "qwen", dtype="bf16", **SMALL["qwen"])
    piece = info.tables[0].planes[0].pieces[3]
    with safe_open(info.directory / piece.file, framework="pt") as reader:
        rows = reader.get_slice(piece.tensor)[10:20]
    assert rows.dtype == torch.bfloat16
    want = synth.expected_rows(info, np.arange(10, 20) + piece.first_row)["weight"]
    assert np.array_equal(rows.contiguous().view(torch.uint8).numpy(), want)


@pytest.mark.case("F21")
def test_headers_are_odd_and_rows_misaligned(tmp_path):
    info = synth.write(tmp_path / "c", "qwen", files=6, **SMALL["qwen"])
    residues = set()
    for path in info.files:
        start, header = header_of(path)
        assert (start - 8) % 2 == 1
        assert path.read_bytes()[start - 1] == ord("}")
        begins = [
            start + entry["data_offsets"][0] for name, entry in header.items() if ".shard_" in name
        ]
        residues.add(min(begins) % 8)
        assert list(header) != sorted(header, key=lambda name: header[name]["data_offsets"][0])
    assert residues == {2, 1, 5, 7, 3, 6}


@pytest.mark.case("F30")
def test_pieces_are_numbered_plainly_shuffled_and_uneven(tmp_path):
    info = synth.write(tmp_path / "c", "qwen", parts=12, files=2, **SMALL["qwen"])
    pieces = info.tables[0].planes[0].pieces
    assert [piece.tensor.rsplit(".", 2)[1] for piece in pieces] == [
        f"shard_{index}" for index in range(12)
    ]
    assert pieces[-1].rows < pieces[0].rows
    per_file = [[p.tensor for p in pieces if p.file == path.name] for path in info.files]
    assert [len(names) for names in per_file] == [6, 6]
    assert [piece.file for piece in pieces] != sorted(piece.file for piece in pieces)


@pytest.mark.case("F30")
def test_all_three_namings_hold_the_same_rows(tmp_path):
    stored = []
    for naming in ("shard", "shards", "whole"):
        layout = synth.Layout(naming=naming)
        info = synth.write(tmp_path / naming, "qwen", layout=layout, **SMALL["qwen"])
        stored.append(stored_plane(info, info.tables[0], "weight"))
    assert info.tables[0].planes[0].pieces[0].tensor.endswith("ngram_embedding.weight")
    assert np.array_equal(stored[0], stored[1])
    assert np.array_equal(stored[0], stored[2])


@pytest.mark.case("F28")
@pytest.mark.parametrize(("family", "dtype"), [("qwen", "nvfp4"), ("deepseek", "fp8")])
def test_scales_can_lie_in_another_file_than_their_rows(tmp_path, family, dtype):
    layout = synth.Layout(scales_apart=True)
    info = synth.write(tmp_path / "c", family, dtype=dtype, layout=layout, **SMALL[family])
    weight, scale = info.tables[0].planes
    for left, right in zip(weight.pieces, scale.pieces, strict=True):
        assert left.first_row == right.first_row
        assert left.file != right.file
    assert np.array_equal(
        stored_plane(info, info.tables[0], "scale"),
        info.tables[0].expected(np.arange(info.tables[0].rows))["scale"],
    )


@settings(max_examples=20, deadline=None)
@given(residue=st.integers(0, 4095))
def test_header_length_can_be_chosen_modulo_a_page(residue):
    layout = synth.Layout(header_residue=residue)
    planned = synth.plan("qwen", layout=layout, **SMALL["qwen"])
    for file in planned.files:
        length = int.from_bytes(file.header[:8], "little")
        assert length % 4096 == residue
        assert length == len(file.header) - 8


def test_trailing_empty_parts_are_stored_only_when_asked_for(tmp_path):
    request = {
        "config": {
            "ngram_vocab_size_base": 2,
            "heads_per_ngram": 1,
            "make_ngram_vocab_size_divisible_by": 16,
            "ple_embed_dim": 8,
        },
        "parts": 12,
    }
    info = synth.write(tmp_path / "a", "qwen", **request)
    assert [piece.rows for piece in info.tables[0].planes[0].pieces] == [2] * 8
    layout = synth.Layout(empty_parts=True)
    info = synth.write(tmp_path / "b", "qwen", layout=layout, **request)
    names = [name for path in info.files for name in header_of(path)[1]]
    assert sum(".shard_" in name for name in names) == 12
    assert [piece.rows for piece in info.tables[0].planes[0].pieces] == [2] * 8


def test_tiny_qwen_stores_the_reference_constants(tmp_path):
    golden = GOLDEN["qwen4exp_tiny_layer0"]
    config = {k: v for k, v in golden["config"].items() if k not in ("seed", "split_ngram_parts")}
    info = synth.write(tmp_path / "c", "qwen", config=config, parts=7, layers=(1, 2))
    module = "model.language_model.layers.1.ple.ple_embedding."
    for leaf in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"):
        assert int64s(info, module + leaf) == golden[leaf]
    assert info.tables[0].rows == golden["padded_rows"]
    assert [piece.rows for piece in info.tables[0].planes[0].pieces] == [35] * 6 + [30]
    second = "model.language_model.layers.2.ple.ple_embedding.ngram_heads_vocab_sizes"
    assert int64s(info, second) == [71, 73, 79, 83]
    assert info.config["text_config"]["ple_layer_ids"] == [2, 3]
    assert "seed" not in info.config["text_config"]
    leaves = {name.rsplit(".", 1)[1] for path in info.files for name in header_of(path)[1]}
    assert {"hashstats_hits", "token_lookup"} <= leaves


def test_expected_rows_of_several_tables_and_wrong_ids(tmp_path):
    info = synth.write(tmp_path / "c", "deepseek", **SMALL["deepseek"])
    with pytest.raises(ValueError, match="table must be one of"):
        synth.expected_rows(info, [0])
    by_place = synth.expected_rows(info, [3], table=1)
    by_name = synth.expected_rows(info, [3], table="layers.14.engram.embed")
    assert np.array_equal(by_place["scale"], by_name["scale"])
    assert not np.array_equal(by_place["weight"], info.tables[0].expected([3])["weight"])
    for wrong in (-1, info.tables[0].rows):
        with pytest.raises(IndexError, match="ids must be from 0"):
            info.tables[0].expected([wrong])


def test_load_finds_what_write_made(tmp_path):
    layout = synth.Layout(scales_apart=True, header_residue=77)
    info = synth.write(
        tmp_path / "c",
        "qwen",
        dtype="nvfp4-draft",
        seed=9,
        layers=2,
        layout=layout,
        **SMALL["qwen"],
    )
    assert synth.load(tmp_path / "c") == info
    with pytest.raises(FileNotFoundError):
        synth.load(tmp_path)
    (tmp_path / "c" / synth.MANIFEST).write_text("{}")
    with pytest.raises(ValueError, match="not the manifest"):
        synth.load(tmp_path / "c")


def test_same_arguments_write_the_same_bytes(tmp_path):
    one, two = (synth.write(tmp_path / name, **SMALL["qwen"]) for name in "ab")
    for left, right in zip(one.files, two.files, strict=True):
        assert left.read_bytes() == right.read_bytes()


def test_a_directory_with_anything_in_it_is_refused_and_untouched(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match="not empty"):
            synth.write(tmp_path, overwrite=overwrite, **SMALL["qwen"])
    assert names_in(tmp_path) == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == b"mine"


def test_overwrite_replaces_an_earlier_checkpoint_completely(tmp_path):
    synth.write(tmp_path, files=5, **SMALL["qwen"])
    info = synth.write(tmp_path, files=2, seed=1, overwrite=True, **SMALL["qwen"])
    assert names_in(tmp_path) == sorted(
        [
            *(path.name for path in info.files),
            "config.json",
            "model.safetensors.index.json",
            synth.MANIFEST,
        ]
    )


def test_a_manifest_cannot_delete_files_outside_the_directory(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("keep me")
    synth.write(tmp_path / "c", **SMALL["gemma"], family="gemma")
    manifest = tmp_path / "c" / synth.MANIFEST
    document = json.loads(manifest.read_text())
    document["files"] += ["../victim", str(victim)]
    manifest.write_text(json.dumps(document))
    synth.write(tmp_path / "c", **SMALL["gemma"], family="gemma", overwrite=True)
    assert victim.read_text() == "keep me"


def test_interruption_leaves_nothing_behind(tmp_path):
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    threads = threading.active_count()
    for directory in (tmp_path / "new" / "deep", tmp_path / "there"):
        (tmp_path / "there").mkdir(exist_ok=True)
        with pytest.raises(KeyboardInterrupt):
            synth.write(directory, rows=40_000, progress=interrupt)
    assert not (tmp_path / "new" / "deep").exists()
    assert names_in(tmp_path / "there") == []
    assert threading.active_count() == threads


def test_a_killed_run_is_recognised(tmp_path):
    info = synth.write(tmp_path / "c", **SMALL["qwen"])
    manifest = tmp_path / "c" / synth.MANIFEST
    document = json.loads(manifest.read_text())
    document["complete"] = False
    manifest.write_text(json.dumps(document))
    info.files[0].unlink()
    with pytest.raises(ValueError, match="never finished"):
        synth.load(tmp_path / "c")
    synth.write(tmp_path / "c", overwrite=True, **SMALL["qwen"])
    assert synth.load(tmp_path / "c").files[0].exists()


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match="1000 are free") as caught:
        synth.write(tmp_path / "c", **SMALL["qwen"])
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "c")


def test_progress_reaches_the_total(tmp_path):
    calls = []
    info = synth.write(tmp_path / "c", progress=lambda *call: calls.append(call), **SMALL["qwen"])
    assert calls[-1] == (info.nbytes, info.nbytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


@pytest.mark.case("K04")
@pytest.mark.parametrize("family", ["qwen", "deepseek"])
def test_sparse_files_have_the_released_shapes_and_marked_rows(tmp_path, family):
    info = synth.write_sparse(tmp_path / "c", family)
    allocated = sum(path.stat().st_blocks * 512 for path in info.files)
    assert sum(path.stat().st_size for path in info.files) == info.nbytes > 100e9
    assert allocated < 100e6
    shapes = {tuple(e["shape"]) for p in info.files for e in header_of(p)[1].values()}
    if family == "qwen":
        assert (2_500_012, 160) in shapes
    else:
        assert {(384_006_168, 256), (384_006_168, 8), (384_016_682, 256)} <= shapes
    assert info.marked is not None
    for table in info.tables:
        marked = info.marked[table.name]
        assert {0, table.rows - 1} <= set(marked.tolist())
        assert len(marked) > 2 * len(table.planes[0].pieces)
        expected = table.expected(marked)
        for plane in table.planes:
            for row, want in zip(marked.tolist(), expected[plane.name], strict=True):
                piece = [p for p in plane.pieces if p.first_row <= row][-1]
                with (info.directory / piece.file).open("rb") as file:
                    file.seek(piece.offset + (row - piece.first_row) * plane.row_bytes)
                    assert file.read(plane.row_bytes) == want.tobytes()
    loaded = synth.load(tmp_path / "c")
    assert np.array_equal(loaded.marked[table.name], marked)
