"""The tiny model: `transformers` loads it, its tables are found by name, text goes through."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from safetensors import safe_open

from engram import synth

TEXT = "Grüße, 世界!\n\x00\x7f end"


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Qwen4ExpConfig"):
        pytest.skip("this transformers has no Qwen4-Exp")
    return synth.write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def model(model_directory):
    import transformers

    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForImageTextToText.from_pretrained(model_directory)


def test_every_table_piece_is_a_slice_of_the_modules_weight(model_directory, model):
    import torch

    index = json.loads((model_directory / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    for layer in (1, 2):
        weight = model.model.language_model.layers[layer].ple.ple_embedding.ngram_embedding.weight
        assert weight.dtype == torch.bfloat16
        stem = f"model.language_model.layers.{layer}.ple.ple_embedding.ngram_embedding.shard_"
        pieces = []
        for part in range(7):
            name = f"{stem}{part}.weight"
            with safe_open(model_directory / index["weight_map"][name], framework="pt") as reader:
                pieces.append(reader.get_tensor(name))
        assert pieces[-1].shape[0] < pieces[0].shape[0]
        assert torch.equal(torch.cat(pieces).view(torch.int16), weight.detach().view(torch.int16))
        assert weight.detach().float().std() > 0


def test_text_goes_in_and_comes_out(model_directory, model):
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_directory)
    ids = tokenizer(TEXT)["input_ids"]
    assert ids == list(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.eos_token_id == model.config.text_config.eos_token_id == 256
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits
    assert torch.isfinite(logits).all()
    assert logits.shape[-1] == len(tokenizer)


def test_seed_decides_the_weights(model_directory, tmp_path):
    import torch

    state = torch.random.get_rng_state()
    same, other = (synth.write_model(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    name = "model-00001-of-00002.safetensors"
    assert (same / name).read_bytes() == (model_directory / name).read_bytes()
    assert (same / name).read_bytes() != (other / name).read_bytes()


def test_plan_and_transformers_agree_on_the_tables(model_directory):
    text = json.loads((model_directory / "config.json").read_text())["text_config"]
    fields = ("vocab_size", "hidden_size", "hc_count", "ple_embed_dim", "eos_token_id")
    fields += ("heads_per_ngram", "ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by")
    planned = synth.plan("qwen", layers=(1, 2), config={field: text[field] for field in fields})
    shapes = {}
    for path in model_directory.glob("*.safetensors"):
        with safe_open(path, framework="np") as reader:
            for name in reader.keys():  # noqa: SIM118 - the reader is no dict and cannot be iterated
                shapes[name] = reader.get_slice(name).get_shape()
                if name.endswith(("layer_multipliers", "vocab_sizes", "heads_offsets")):
                    planned_bytes = {
                        tensor.name: tensor.content
                        for file in planned.files
                        for tensor in file.tensors
                    }
                    stored = reader.get_tensor(name)
                    assert np.array_equal(np.frombuffer(planned_bytes[name], "<i8"), stored)
    for table in planned.tables:
        for piece in table.planes[0].pieces:
            assert shapes[piece.tensor] == [piece.rows, 16]


@pytest.mark.parametrize("missing", ["torch", "transformers", "tokenizers"])
def test_missing_packages_are_named_with_what_to_install(tmp_path, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"engram-gather\[torch,tokenizers\]"):
        synth.write_model(tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_wrong_arguments_and_directories_are_refused(tmp_path):
    for layers in ((), (3,), (-1, 1)):
        with pytest.raises(ValueError, match="among 0, 1 and 2"):
            synth.write_model(tmp_path / "c", layers=layers)
    with pytest.raises(ValueError, match="parts must be at least 1"):
        synth.write_model(tmp_path / "c", parts=0)
    (tmp_path / "mine").write_text("x")
    pytest.importorskip("transformers")
    with pytest.raises(FileExistsError, match="not empty"):
        synth.write_model(tmp_path)
