"""`engram.hasher`: families, tables, stored constants, tokenizers."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models

import engram
from engram.hashing import DeepSeekHash, QwenHash, compressed_token_map, token_map_checksum

QWEN = {
    "model_type": "qwen4_exp_text",
    "vocab_size": 97,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 16,
    "ple_embed_dim": 64,
    "eos_token_id": [7, 3],
    "split_ngram_parts": 512,
    "ple_layer_ids": [3, 2],
}
LONGCAT = {
    "model_type": "longcat_flash_ngram",
    "vocab_size": 31,
    "eos_token_id": 2,
    "ngram_vocab_size_ratio": 2,
    "emb_neighbor_num": 3,
    "emb_split_num": 2,
}
VOCAB = ["<a>", "<b>", "<pad>", "the", "The", "THE", "\u0120the", "x", "y", "<image>"]
DEEPSEEK = {
    "model_type": "deepseek_v41_text",
    "engram_layer_ids": [14, 1],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 2,
    "engram_vocab_size": 70,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 7,
}
PLE = "model.language_model.layers.{}.ple.ple_embedding."


def tokenizer(vocab=VOCAB):
    made = Tokenizer(models.BPE({token: id for id, token in enumerate(vocab)}, []))
    made.decoder = decoders.ByteLevel()
    return made


def constants(h):
    prefix = PLE.format(h.layer)
    return {
        f"{prefix}layer_multipliers": np.array(h.multipliers),
        f"{prefix}ngram_heads_vocab_sizes": np.array(h.head_sizes),
        f"{prefix}ngram_heads_offsets": np.array(h.head_offsets),
    }


def write(directory: Path, config, files, *, index=True):
    """A checkpoint of small files: `files` maps names to tensors."""
    (directory / "config.json").write_text(json.dumps(config))
    for name, tensors in files.items():
        save_file(tensors, directory / name)
    if index:
        weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (directory / "model.safetensors.index.json").write_text(text)
    return directory


@pytest.fixture
def qwen(tmp_path):
    """A checkpoint with stored constants of two layers in two files, beside other tensors."""
    first, second = QwenHash(QWEN, 0), QwenHash(QWEN, 1)
    other = {"model.embed.weight": np.zeros((3, 2), np.float32)}
    files = {
        "model-00001-of-00002.safetensors": other | constants(first),
        "model-00002-of-00002.safetensors": {PLE.format(2) + "hashstats_x": np.ones(3)}
        | constants(second),
    }
    return write(tmp_path, {"text_config": QWEN, "image_token_id": 96}, files)


def test_qwen_checkpoints_are_opened_by_any_of_their_paths(qwen):
    expected = QwenHash(QWEN, 1)
    for path in [
        qwen,
        str(qwen),
        qwen / "config.json",
        qwen / "model.safetensors.index.json",
        qwen / "model-00001-of-00002.safetensors",
    ]:
        h = engram.hasher(path, 1)
        assert (h.family, h.layer, h.filler) == ("qwen", 2, 7)
        assert h.multipliers == expected.multipliers
        assert h.ids([1, 2, 3]).tolist() == expected.ids([1, 2, 3]).tolist()


@pytest.mark.parametrize("name", ["typo", "typo/", "missing.safetensors", "below/typo"])
def test_a_path_to_nothing_takes_no_configuration_from_beside_it(qwen, name, monkeypatch):
    monkeypatch.chdir(qwen)
    for path in (f"{qwen}/{name}", name, qwen / name):
        with pytest.raises(FileNotFoundError, match=name.strip("/")):
            engram.hasher(path)
    with pytest.raises(FileNotFoundError, match="the path is empty"):
        engram.hasher("")


def test_tables_are_chosen_by_name_or_place(qwen):
    layers = [engram.hasher(qwen, table).layer for table in (0, 1, np.int64(1))]
    assert layers == [1, 2, 2]
    name = "model.language_model.layers.2.ple.ple_embedding.ngram_embedding"
    assert engram.hasher(qwen, name).layer == 2
    assert engram.hasher(qwen, f"{name}.shard_0.weight").layer == 2
    for table in (None, 2, -1, "layers.7.engram.embed", "lm_head.weight"):
        with pytest.raises(ValueError, match=rf"0: .*layers\.1\..*, 1: {name}"):
            engram.hasher(qwen, table)
    with pytest.raises(TypeError):
        engram.hasher(qwen, 1.5)


def test_layers_continue_each_others_primes():
    first, second = QwenHash(QWEN, 0), QwenHash(QWEN, 1)
    assert first.head_sizes == (53, 59, 61, 67)
    assert second.head_sizes == (71, 73, 79, 83)
    assert second.head_offsets[0] == 0
    assert first.multipliers != second.multipliers


@pytest.mark.parametrize(
    "name", ["layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"]
)
def test_stored_constants_that_disagree_are_refused(qwen, name):
    tensors = constants(QwenHash(QWEN, 0))
    tensor = PLE.format(1) + name
    tensors[tensor] = tensors[tensor] + 2
    save_file(
        tensors | {"model.embed.weight": np.zeros((3, 2), np.float32)},
        qwen / "model-00001-of-00002.safetensors",
    )
    derived = list(tensors[tensor] - 2)
    stored = list(tensors[tensor])
    with pytest.raises(engram.CheckpointError) as caught:
        engram.hasher(qwen, 0)
    message = str(caught.value)
    assert f"{tensor} is {list(map(int, stored))}" in message
    assert f"gives {list(map(int, derived))}" in message
    assert caught.value.path == str(qwen / "model-00001-of-00002.safetensors")
    assert caught.value.path in message
    assert (caught.value.table, caught.value.row, caught.value.offset) == (None, None, None)
    # The other layer's are untouched.
    assert engram.hasher(qwen, 1).layer == 2


def test_a_padded_vocabulary_is_noticed(qwen):
    config = {"text_config": QWEN | {"vocab_size": 128}}
    (qwen / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        engram.CheckpointError, match="a padded vocab_size changes every multiplier"
    ):
        engram.hasher(qwen, 0)


def test_constants_are_found_without_an_index(qwen):
    (qwen / "model.safetensors.index.json").unlink()
    assert engram.hasher(qwen, 0).layer == 1
    save_file({PLE.format(1) + "layer_multipliers": np.arange(3)}, qwen / "extra.safetensors")
    with pytest.raises(engram.CheckpointError, match=r"extra\.safetensors"):
        engram.hasher(qwen, 0)


def test_constants_of_an_unindexed_side_file_are_read(qwen):
    index = json.loads((qwen / "model.safetensors.index.json").read_text())
    index["weight_map"] = {"model.embed.weight": "model-00001-of-00002.safetensors"}
    (qwen / "model.safetensors.index.json").write_text(json.dumps(index))
    side = {PLE.format(1) + "ngram_embedding.head_vocab_sizes": np.array([53, 59, 61, 68])}
    save_file(side, qwen / "ngram_embedding.safetensors")
    with pytest.raises(engram.CheckpointError, match=r"head_vocab_sizes is \[53, 59, 61, 68\]"):
        engram.hasher(qwen, 0)


def test_indexed_constants_win_over_stray_copies(qwen):
    stray = {PLE.format(1) + "layer_multipliers": np.arange(3)}
    save_file(stray, qwen / "model.safetensors")
    assert engram.hasher(qwen, 0).layer == 1


@pytest.mark.case("F32")
def test_checkpoints_without_stored_constants_derive_them(tmp_path):
    files = {"model.safetensors": {"model.embed.weight": np.zeros((3, 2), np.float32)}}
    h = engram.hasher(write(tmp_path, {"text_config": QWEN}, files), 0)
    assert h.multipliers == QwenHash(QWEN).multipliers
    # A dtype that is no integer is a writer's mistake, not a constant to ignore.
    broken = {PLE.format(1) + "layer_multipliers": np.ones(3, np.float32)}
    with pytest.raises(engram.CheckpointError, match="is F32; hash constants are I64"):
        engram.hasher(write(tmp_path, {"text_config": QWEN}, {"model.safetensors": broken}), 0)


@pytest.mark.case("F32")
def test_missing_pieces_are_named(qwen, tmp_path):
    config = {"text_config": {key: value for key, value in QWEN.items() if key != "eos_token_id"}}
    with pytest.raises(ValueError, match=r"text_config\.eos_token_id is missing"):
        engram.hasher(config, 0)
    (qwen / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002"):
        engram.hasher(qwen, 1)
    (qwen / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        engram.hasher(qwen)
    (qwen / "config.json").write_text(json.dumps(DEEPSEEK))
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        engram.hasher(qwen, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header of 0 bytes"),
        ((10**6).to_bytes(8, "little") + b"{}", "header of 1000000 bytes in a file of 10"),
        ((2**63).to_bytes(8, "little") + b"{}", "header of"),
        ((2).to_bytes(8, "little") + b"[]", "no JSON object"),
        ((2).to_bytes(8, "little") + b"{x", "not JSON"),
    ],
)
def test_malformed_files_are_refused(qwen, content, message):
    (qwen / "model-00001-of-00002.safetensors").write_bytes(content)
    with pytest.raises(engram.CheckpointError, match=message):
        engram.hasher(qwen, 0)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "I64", "shape": [3], "data_offsets": [0, 16]}, "24 bytes, but its range has 16"),
        ({"dtype": "I64", "shape": [3], "data_offsets": [0, 24]}, "truncated"),
        ({"dtype": "I64", "shape": [-1], "data_offsets": [8, 0]}, "shape"),
        ({"dtype": "I64", "shape": [3]}, "malformed"),
        ("I64", "malformed"),
    ],
)
def test_malformed_tensors_are_refused(qwen, entry, message):
    header = {tensor: entry for tensor in constants(QwenHash(QWEN, 0))}
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(8)
    (qwen / "model-00001-of-00002.safetensors").write_bytes(content)
    with pytest.raises(engram.CheckpointError, match=message):
        engram.hasher(qwen, 0)


def test_malformed_indices_are_refused(qwen):
    index = qwen / "model.safetensors.index.json"
    name = PLE.format(1) + "layer_multipliers"
    for text, message in [
        ("{", "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        (json.dumps({"weight_map": {name: "../up.safetensors"}}), "outside its directory"),
        (json.dumps({"weight_map": {name: "/etc/passwd"}}), "outside its directory"),
        (
            json.dumps({"weight_map": {name: "model-00002-of-00002.safetensors"}}),
            "does not contain it",
        ),
    ]:
        index.write_text(text)
        with pytest.raises(engram.CheckpointError, match=message):
            engram.hasher(qwen, 0)
    (qwen / "config.json").write_text("{")
    with pytest.raises(engram.CheckpointError, match="not JSON"):
        engram.hasher(qwen, 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama", "vocab_size": 9}, "no n-gram fields.*model_type 'llama'"),
        ({"text_config": QWEN | {"ple_layer_ids": []}}, "text_config.ple_layer_ids"),
        ({"text_config": {"vocab_size_per_layer_input": 262_144}}, "id is the token's id"),
        ({"text_config": {}}, "no n-gram fields"),
    ],
)
def test_models_without_hashed_tables_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        engram.hasher(config)


def test_configurations_come_as_mappings_objects_or_paths():
    transformers_like = SimpleNamespace(to_dict=lambda: {"text_config": QWEN})
    assert engram.hasher(transformers_like, 0).multipliers == QwenHash(QWEN).multipliers
    with pytest.raises(TypeError, match="a int is no configuration"):
        engram.hasher(5)


def test_transformers_configurations_are_read():
    configuration = pytest.importorskip(
        "transformers.models.qwen4_exp.configuration_qwen4_exp"
    ).Qwen4ExpTextConfig(ple_layer_ids=[2], eos_token_id=248_044)
    h = engram.hasher(configuration)
    assert h.multipliers == (23703573157769, 20109073645365, 8052911324071)
    # Written to disk, a configuration keeps only what differs from the defaults.
    brief = {"ple_layer_ids": [2], "eos_token_id": 248_044}
    assert engram.hasher(brief).head_offsets == h.head_offsets


@pytest.fixture
def deepseek(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": DEEPSEEK, "image_token_id": 9})
    )
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_deepseek_checkpoints_bring_their_tokenizer(deepseek):
    h = engram.hasher(deepseek, 0, dead_id=-1)
    assert (h.family, h.layer, h.image_token_id, h.context_len) == ("deepseek", 1, 9, 3)
    assert h.token_map.tolist() == [0, 1, 2, 3, 3, 3, 3, 4, 5, 6]
    # Primes follow the configuration's order of layers, tables that of the layers.
    assert h.head_sizes == DeepSeekHash(DEEPSEEK, 1, h.token_map).head_sizes
    assert engram.hasher(deepseek, "layers.14.engram.embed").layer == 14
    assert h.ids([3, 9, 4])[1].tolist() == [-1] * 6
    assert h.ids([3, 7]).tolist() == h.ids([5, 7]).tolist()


def test_deepseek_without_a_path_needs_a_token_map(deepseek):
    with pytest.raises(ValueError, match=r"tokenizer\.json, or token_map="):
        engram.hasher(DEEPSEEK, 0)
    token_map = compressed_token_map(deepseek)
    h = engram.hasher(DEEPSEEK, 0, token_map=token_map)
    assert h.ids([3, 7]).tolist() == engram.hasher(deepseek, 0).ids([3, 7]).tolist()


@pytest.mark.case("D11")
def test_token_maps_of_another_tokenizer_are_noticed(deepseek):
    h = engram.hasher(deepseek, 0)
    # Another revision with as many compressed ids, two of them swapped: only the checksum tells.
    swapped = ["<a>", "<b>", "<pad>", "x", "The", "THE", "\u0120the", "the", "y", "<image>"]
    tokenizer(swapped).save(str(deepseek / "tokenizer.json"))
    other = engram.hasher(deepseek, 0)
    assert other.compressed_vocab_size == h.compressed_vocab_size
    assert other.token_map_checksum != h.token_map_checksum
    assert h.token_map_checksum == token_map_checksum(np.array([0, 1, 2, 3, 3, 3, 3, 4, 5, 6]))
    assert len(h.token_map_checksum) == 64
    # One of another size is refused.
    tokenizer([*VOCAB, "new"]).save(str(deepseek / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"engram_compressed_vocab_size is 7, but .* 8 compressed"):
        engram.hasher(deepseek, 0)


def test_added_tokens_are_in_the_map():
    made = tokenizer()
    made.add_special_tokens(["<extra>"])
    assert compressed_token_map(made).tolist()[-1] == 7
    wrapped = SimpleNamespace(backend_tokenizer=made)
    assert compressed_token_map(wrapped).tolist() == compressed_token_map(made).tolist()


def test_longcat():
    h = engram.hasher(LONGCAT)
    assert (h.family, h.layer, h.variant) == ("longcat", None, "hf")
    assert (
        engram.hasher(LONGCAT, "model.ngram_embeddings.embedders", variant="vllm").variant == "vllm"
    )
    assert engram.hasher(LONGCAT, 0).num_rows == 264
    with pytest.raises(ValueError, match="no table 1"):
        engram.hasher(LONGCAT, 1)


def test_arguments_of_another_family_are_refused():
    with pytest.raises(ValueError, match="only LongCat's hash has variants"):
        engram.hasher(QWEN, 0, variant="vllm")
    with pytest.raises(ValueError, match="only DeepSeek's hash maps tokens"):
        engram.hasher(QWEN, 0, token_map=[0])
