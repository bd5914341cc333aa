"""Published constants and ids, number by number."""

import json
from pathlib import Path

import numpy as np
import pytest

import engram
from engram.hashing import DeepSeekHash, LongCatHash, QwenHash, compressed_token_map

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden.json").read_text())
FLOOR = "ids_floor_mod(transformers,vllm,sglang-torch)"


def cases(*keys):
    return [
        pytest.param(key, sequence, id=f"{key}-{sequence['name']}")
        for key in keys
        for sequence in GOLDEN[key]["sequences"]
    ]


@pytest.mark.parametrize("key", ["qwen4exp_real", "qwen4exp_tiny_layer0"])
def test_qwen_constants(key):
    golden = GOLDEN[key]
    h = QwenHash(golden["config"], golden["ple_layer_index"])
    assert list(h.multipliers) == golden["layer_multipliers"]
    assert list(h.head_sizes) == golden["ngram_heads_vocab_sizes"]
    assert list(h.head_offsets) == golden["ngram_heads_offsets"]
    assert h.num_rows == golden["total_rows"]
    assert h.padded_rows == golden["padded_rows"]
    assert h.row_dim == golden["row_dim"]
    assert h.filler == golden["eos_used_for_hash"]


@pytest.mark.case("D16")
@pytest.mark.parametrize(("key", "sequence"), cases("qwen4exp_real", "qwen4exp_tiny_layer0"))
def test_qwen_ids(key, sequence):
    h = QwenHash(GOLDEN[key]["config"])
    assert h.ids(sequence["tokens"]).tolist() == sequence["ids"]
    context = [sequence["initial_context"]]
    assert h.ids(sequence["tokens"], context=context).tolist() == sequence["ids"]


def test_qwen_batched_step():
    golden = GOLDEN["qwen4exp_real_batched_step"]
    h = QwenHash(GOLDEN["qwen4exp_real"]["config"])
    tokens = [token for chunk in golden["chunks"] for token in chunk]
    ids = h.ids(tokens, golden["query_start_loc"], golden["ngram_context_oldest_first"])
    assert ids.tolist() == golden["ids"]


@pytest.mark.parametrize("case", GOLDEN["qwen4exp_real_wraparound"], ids=lambda case: case["name"])
def test_qwen_wraparound(case):
    config = GOLDEN["qwen4exp_real"]["config"]
    h = QwenHash(config, out_of_vocab="wrap")
    assert h.ids(case["tokens"]).tolist() == case[FLOOR]
    with pytest.raises(ValueError, match="outside the vocabulary of 248320"):
        QwenHash(config).ids(case["tokens"])


def deepseek(key, layer, token_map):
    golden = GOLDEN[key]
    return DeepSeekHash(golden["config"], layer, token_map, golden["image_token_id"])


def token_map_of(key):
    golden = GOLDEN[key]
    # The real vectors are in compressed ids already.
    if "token_map" in golden and isinstance(golden["token_map"], list):
        return golden["token_map"]
    return np.arange(golden["config"]["engram_compressed_vocab_size"])


@pytest.mark.parametrize("key", ["deepseek_v41_real", "deepseek_v41_tiny"])
def test_deepseek_constants(key):
    golden = GOLDEN[key]
    for index, layer in enumerate(golden["config"]["engram_layer_ids"]):
        h = deepseek(key, layer, token_map_of(key))
        assert list(h.multipliers) == golden["multipliers[layer][shift]"][index]
        primes = golden["primes[layer][ngram-2][head]"][index]
        assert list(h.head_sizes) == [prime for order in primes for prime in order]
        assert list(h.head_offsets) == golden["offsets[layer][col]"][index]
        assert h.num_rows == h.padded_rows == golden["rows_per_layer"][index]
        assert h.row_dim == golden["config"]["engram_head_dim"]


@pytest.mark.case("D10")
@pytest.mark.parametrize(("key", "sequence"), cases("deepseek_v41_real", "deepseek_v41_tiny"))
def test_deepseek_ids(key, sequence):
    expected = np.array(sequence["ids[token][layer][col]"])
    for index, layer in enumerate(GOLDEN[key]["config"]["engram_layer_ids"]):
        h = deepseek(key, layer, token_map_of(key))
        assert np.array_equal(h.ids(sequence["tokens"]), expected[:, index])


@pytest.mark.parametrize("layer", [1, 15])
def test_engram_demo(layer):
    golden = GOLDEN["engram_demo"]
    config = golden["config"] | {"pad_id": golden["config"]["pad_id_compressed"]}
    expected = golden["per_layer"][str(layer)]
    h = DeepSeekHash(config, layer, np.arange(config["compressed_vocab_size"]))
    assert h.demo
    assert list(h.multipliers) == expected["multipliers"]
    assert list(h.head_sizes) == [size for order in expected["head_sizes"] for size in order]
    ids = h.ids(golden["tokens_compressed"])
    assert ids.tolist() == expected["ids_global"]
    assert (ids - h.head_offsets).tolist() == expected["ids_local"]
    assert h.row_dim == 64


@pytest.mark.parametrize("sequence", GOLDEN["longcat_tiny"]["sequences"], ids=lambda s: s["name"])
def test_longcat(sequence):
    golden = GOLDEN["longcat_tiny"]
    h = LongCatHash(golden["config"])
    assert list(h.head_sizes) == golden["embedder_rows"]
    assert list(h.head_offsets) == golden["global_offsets"]
    assert h.num_rows == golden["total_rows"]
    powers = [head for order in golden["vocab_power_mods[ngram-2][k][delta]"] for head in order]
    assert [
        list(powers[: len(own)]) for own, powers in zip(h.multipliers, powers, strict=True)
    ] == [list(own) for own in h.multipliers]
    ids = h.ids(sequence["tokens"])
    assert ids.tolist() == sequence["ids_global(HF,sglang)"]
    assert (ids - h.head_offsets).tolist() == sequence["ids_local(HF)"]

    vllm = LongCatHash(golden["config"], variant="vllm").ids(sequence["tokens"])
    differ = np.flatnonzero((vllm != ids).any(axis=1)).tolist()
    assert differ == sequence["vllm_positions_that_differ"]
    assert vllm[differ].tolist() == sequence["vllm_ids_global_at_those"]


def test_compressed_token_map():
    from tokenizers import Tokenizer, decoders, models

    golden = GOLDEN["deepseek_compressed_token_map_toy"]
    vocab = {token: id for id, token in enumerate(golden["vocab_in_id_order_bytelevel"])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    decoded = [tokenizer.decode([id], skip_special_tokens=False) for id in range(len(vocab))]
    assert decoded == golden["decoded"]
    token_map = compressed_token_map(tokenizer)
    assert token_map.tolist() == golden["lookup"]
    assert token_map.max() + 1 == golden["compressed_vocab_size"]


def test_numpy_generator_draws_are_the_multipliers():
    golden = GOLDEN["numpy_default_rng_pcg64"]
    identity = np.arange(golden["compressed_vocab_size"])
    config = GOLDEN["deepseek_v41_real"]["config"]
    layers = sorted(int(layer) for layer in golden["by_layer_id"])
    config = config | {"engram_layer_ids": layers, "engram_num_embeddings": None}
    for layer in layers:
        expected = golden["by_layer_id"][str(layer)]["multipliers"]
        assert list(DeepSeekHash(config, layer, identity).multipliers) == expected


def test_primes_below_the_quirk_of_some_engines_are_found():
    # 61 is prime; an engine whose test says otherwise would start at 67.
    golden = GOLDEN["deepseek_prime_quirk"]
    assert "61" in golden["note"]
    config = GOLDEN["deepseek_v41_tiny"]["config"]
    config = config | {"engram_vocab_size": 60, "engram_num_embeddings": None}
    h = DeepSeekHash(config, 1, GOLDEN["deepseek_v41_tiny"]["token_map"])
    assert h.head_sizes[0] == 61


def test_hasher_opens_the_released_configuration():
    config = {"text_config": GOLDEN["qwen4exp_real"]["config"] | {"ple_layer_ids": [2]}}
    h = engram.hasher(config)
    assert (h.family, h.layer, h.padded_rows) == ("qwen", 1, 320_001_536)
