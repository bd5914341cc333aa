"""Synthetic checkpoints seen through engram: the same tables, every gathered row as expected."""

from __future__ import annotations

import numpy as np
import pytest

import engram
from engram import synth

SMALL = {
    "qwen": {"rows": 5000, "config": {"ple_embed_dim": 256}, "layers": 2},
    "deepseek": {"rows": 5000, "config": {"engram_head_dim": 64, "hidden_size": 16}},
    "longcat": {"rows": 2000, "config": {"hidden_size": 192}},
    "gemma": {"rows": 300, "config": {"num_hidden_layers": 3, "hidden_size": 16}},
}
VARIANTS = [(name, dtype) for name, family in synth.FAMILIES.items() for dtype in family.dtypes]
LAYOUTS = [
    ("qwen", "bf16", synth.Layout(naming="shards")),
    ("qwen", "fp8", synth.Layout(naming="whole")),
    ("qwen", "nvfp4", synth.Layout(scales_apart=True)),
    ("deepseek", "fp8", synth.Layout(scales_apart=True)),
    ("qwen", "bf16", synth.Layout(header_residue=4095, table_files=1, shuffled=False)),
]


def side_by_side(table: synth.SynthTable, ids: np.ndarray) -> np.ndarray:
    return np.concatenate(list(table.expected(ids).values()), axis=-1)


def check(info: synth.SynthInfo, ids_of) -> None:
    found = {table.name: table for table in engram.tables(info.directory)}
    assert list(found) == [table.name for table in info.tables]
    for table in info.tables:
        seen = found[table.name]
        assert (seen.family, seen.layer, seen.rows) == (table.family, table.layer, table.rows)
        assert (seen.encoding, seen.bytes) == (table.encoding, table.nbytes)
        assert seen.logical_shape == (table.values_per_row,)
        assert dict(seen.constants) == dict(table.constants)
        for plane in table.planes:
            assert [
                (piece.tensor, piece.offset, piece.first_row, piece.rows)
                for piece in seen.planes[plane.name].pieces
            ] == [
                (piece.tensor, piece.offset, piece.first_row, piece.rows) for piece in plane.pieces
            ]
        ids = ids_of(table)
        out = np.empty((len(ids), table.row_bytes), np.uint8)
        with engram.FileGather(info.directory, table.name) as gather:
            assert gather.gather(ids, out=out) is out
        assert np.array_equal(out, side_by_side(table, ids))


@pytest.mark.parametrize(("family", "dtype"), VARIANTS)
def test_every_row_of_every_variant(tmp_path, family, dtype):
    info = synth.write(tmp_path / "c", family, dtype=dtype, seed=3, **SMALL[family])
    shuffle = np.random.default_rng(0).permutation
    check(info, lambda table: shuffle(table.rows))


@pytest.mark.case("F28")
@pytest.mark.case("F30")
@pytest.mark.parametrize(("family", "dtype", "layout"), LAYOUTS)
def test_every_row_of_every_layout(tmp_path, family, dtype, layout):
    info = synth.write(tmp_path / "c", family, dtype=dtype, layout=layout, **SMALL[family])
    check(info, lambda table: np.arange(table.rows)[::-1].copy())


@pytest.mark.case("K04")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen", "bf16"), ("qwen", "nvfp4"), ("deepseek", "fp8"), ("longcat", "bf16")],
)
def test_marked_rows_of_released_sizes(tmp_path, family, dtype):
    info = synth.write_sparse(tmp_path / "c", family, dtype=dtype)
    assert info.marked is not None
    check(info, lambda table: info.marked[table.name])


def test_rows_of_a_model_that_transformers_wrote(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Qwen4ExpConfig"):
        pytest.skip("this transformers has no Qwen4-Exp")
    directory = synth.write_model(tmp_path / "tiny")
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForImageTextToText.from_pretrained(directory)
    assert [table.layer for table in engram.tables(directory)] == [1, 2]
    for place, layer in enumerate((1, 2)):
        weight = model.model.language_model.layers[layer].ple.ple_embedding.ngram_embedding.weight
        with engram.FileGather(directory, place) as gather:
            rows = gather.gather(torch.arange(gather.num_rows))
        assert torch.equal(rows.view(torch.int16), weight.detach().view(torch.int16))
