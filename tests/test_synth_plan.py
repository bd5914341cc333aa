"""What a synthetic checkpoint derives before it is written: hash constants, sizes, arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engram import synth
from engram.synth import constants

GOLDEN = json.loads((Path(__file__).parent / "data" / "hash_constants.json").read_text())


def test_released_qwen_geometry_and_constants():
    golden = GOLDEN["qwen4exp_real"]
    derived = constants.qwen_constants(
        tables=1,
        vocab_size=248320,
        ngram_size=3,
        heads_per_ngram=8,
        vocab_size_base=20_000_000,
        seed=1234,
    )[0]
    assert list(derived.multipliers) == golden["layer_multipliers"]
    assert list(derived.sizes) == golden["ngram_heads_vocab_sizes"]
    assert list(derived.offsets) == golden["ngram_heads_offsets"]
    planned = synth.plan("qwen", rows=320_001_536, parts=128, files=131)
    assert planned.config["text_config"]["ngram_vocab_size_base"] == 20_000_000
    table = planned.tables[0]
    assert (table.rows, table.row_bytes, table.nbytes) == (320_001_536, 320, 102_400_491_520)
    assert {piece.rows for piece in table.planes[0].pieces} == {golden["shard_rows"]}


@pytest.mark.parametrize("size", ["real", "tiny"])
def test_deepseek_constants_and_rows(size):
    golden = GOLDEN[f"deepseek_v41_{size}"]
    config = golden["config"]
    derived = constants.deepseek_constants(
        layer_ids=config["engram_layer_ids"],
        compressed_vocab_size=config["engram_compressed_vocab_size"],
        max_ngram_size=config["engram_max_ngram_size"],
        heads=config["engram_n_heads"],
        vocab_size=config["engram_vocab_size"],
    )
    assert [list(entry.multipliers) for entry in derived] == golden["multipliers"]
    flat = [[size for order in layer for size in order] for layer in golden["primes"]]
    assert [list(entry.sizes) for entry in derived] == flat
    overrides = {
        k: v for k, v in config.items() if k not in ("engram_layer_ids", "engram_num_embeddings")
    }
    planned = synth.plan("deepseek", config=overrides, layers=config["engram_layer_ids"])
    assert [table.rows for table in planned.tables] == golden["rows_per_layer"]
    text = planned.config["text_config"]
    assert text["engram_num_embeddings"] == golden["rows_per_layer"]
    weight, scale = planned.tables[0].planes
    assert (weight.dtype, scale.dtype) == ("F8_E4M3", "F8_E8M0")
    assert (
        scale.pieces[0].offset == weight.pieces[0].offset + weight.row_bytes * weight.pieces[0].rows
    )
    assert len({table.planes[0].pieces[0].file for table in planned.tables}) == 2


def test_longcat_sizes():
    golden = GOLDEN["longcat_tiny"]
    config = {k: v for k, v in golden["config"].items()}
    planned = synth.plan("longcat", config={**config, "hidden_size": 64})
    assert [piece.rows for piece in planned.tables[0].planes[0].pieces] == golden["embedder_rows"]
    assert planned.tables[0].rows == golden["total_rows"]
    released = synth.plan("longcat", config={"ngram_vocab_size_ratio": 78})
    assert (released.tables[0].rows, released.tables[0].nbytes) == (122_683_536, 62_813_970_432)


@pytest.mark.parametrize("value", GOLDEN["splitmix64"])
def test_splitmix64(value):
    assert constants.splitmix64(value[0]) == value[1]


@given(st.integers(0, 4000))
def test_prime_test_agrees_with_trial_division(number):
    naive = number > 1 and all(number % divisor for divisor in range(2, number))
    assert constants.is_prime(number) == naive


def test_strong_pseudoprimes_are_not_primes():
    # Composites that pass Miller-Rabin to base 2, to bases 2-7, and to bases 2-23.
    assert not any(map(constants.is_prime, (2047, 3215031751, 3825123056546413051)))


@settings(max_examples=40, deadline=None)
@given(
    family=st.sampled_from(["qwen", "deepseek", "longcat", "gemma"]),
    rows=st.integers(6000, 50_000_000),
)
def test_rows_come_out_near_what_was_asked_for(family, rows):
    planned = synth.plan(family, rows=rows)
    mean = sum(table.rows for table in planned.tables) / len(planned.tables)
    assert abs(mean - rows) <= max(400, rows / 50)
    text = planned.config.get("text_config", planned.config)
    if family == "longcat":
        total = int(text["ngram_vocab_size_ratio"] * text["vocab_size"])
        sizes = constants.longcat_sizes(ngram_vocab_size=total, max_ngram_size=4, splits=4)
        assert sum(sizes) == planned.tables[0].rows


def test_size_counts_all_tables_together():
    planned = synth.plan("deepseek", size=1 << 28)
    total = sum(table.nbytes for table in planned.tables)
    assert abs(total - (1 << 28)) < (1 << 28) / 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"family": "llama"}, "unknown family 'llama'; known: qwen"),
        ({"family": "gemma", "dtype": "fp8"}, "gemma has no dtype 'fp8'; known: bf16"),
        ({"rows": 1000, "size": 5000}, "give only one"),
        ({"rows": 1000, "config": {"ngram_vocab_size_base": 5}}, "ngram_vocab_size_base"),
        ({"config": {"ngram_vocab_size_bsae": 5}}, "'ngram_vocab_size_bsae'"),
        ({"rows": 5}, "5 rows are too few"),
        ({"rows": 0}, "rows must be from 1"),
        ({"rows": 2**63}, "rows must be from 1"),
        ({"size": 2**63}, "size must be from 1"),
        ({"config": {"ngram_vocab_size_base": 2**63}}, "does not fit 64 bits"),
        ({"layers": 10**12}, "more than 1000 tables"),
        ({"size": 100}, "less than one row of 320 bytes"),
        ({"files": 0}, "at least 1"),
        ({"layers": []}, "at least one"),
        ({"layers": [-1]}, "zero-based"),
        ({"family": "longcat", "layers": 2}, "one table for all layers"),
        ({"family": "deepseek", "parts": 3}, "not cut into parts"),
        ({"config": {"ple_embed_dim": 100}}, "no multiple of 16 heads"),
        ({"dtype": "nvfp4", "config": {"ple_embed_dim": 128}}, "multiple of 16 values"),
        ({"family": "deepseek", "config": {"engram_head_dim": 40}}, "multiple of 32"),
        ({"dtype": "nvfp4", "layout": synth.Layout(naming="whole")}, "without block scales"),
        (
            {"dtype": "nvfp4", "files": 1, "layout": synth.Layout(scales_apart=True)},
            "at least two files",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        synth.plan(**arguments)
