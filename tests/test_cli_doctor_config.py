"""Configurations that make no sense: `engram doctor` says so, and never shows a traceback."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

import engram
from engram import synth
from engram.cli.app import app
from engram.cli.doctor import tables

ODD_CONFIGURATIONS = [
    "[]",
    "null",
    '"text"',
    "{",
    "{}",
    '{"text_config": null}',
    '{"text_config": []}',
    '{"text_config": {"vocab_size": null}}',
    '{"text_config": {"vocab_size": "many"}}',
    '{"vocab_size": 4611686018427387904}',
    '{"vocab_size": -5, "engram_compressed_vocab_size": {}}',
    '{"engram_layer_ids": "all", "ple_layer_ids": 7, "ngram_vocab_size_ratio": []}',
    "[" * 100_000,
]


@pytest.mark.parametrize("family", ["deepseek", "qwen", "longcat"])
@pytest.mark.parametrize("text", ODD_CONFIGURATIONS, ids=lambda text: text[:40])
def test_an_odd_configuration_gets_a_sentence_and_no_traceback(tmp_path, family, text):
    info = synth.write(tmp_path / "c", family, rows=3000)
    infos = engram.tables(info.directory)
    (info.directory / "config.json").write_text(text)
    found = tables.demand(info.directory, infos)
    assert found.rows is None
    assert found.unknown
    result = CliRunner().invoke(app, ["doctor", str(info.directory), "--quick"])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert result.exit_code in {0, 1, 2}
    assert result.stdout + result.stderr


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": None},
        {"vocab_size": 1 << 62},
        {"vocab_size": [5]},
        {"engram_compressed_vocab_size": "5"},
        {"engram_compressed_vocab_size": 1 << 40},
        {"engram_n_heads": None},
    ],
    ids=str,
)
def test_a_field_that_makes_no_sense_is_named(tmp_path, change):
    info = synth.write(tmp_path / "c", "deepseek", rows=3000)
    infos = engram.tables(info.directory)
    file = info.directory / "config.json"
    config = json.loads(file.read_text())
    config["text_config"] |= change
    file.write_text(json.dumps(config))
    found = tables.demand(info.directory, infos)
    assert found.rows is None
    # Where the vocabulary is not known, the next field that needs it is.
    named = "image_token_id" if change == {"vocab_size": None} else next(iter(change))
    assert named in found.unknown
