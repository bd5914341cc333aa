"""What callers pass, right and wrong."""

import array
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from engram.hashing import DeepSeekHash, LongCatHash, QwenHash

CONFIG = {"vocab_size": 97, "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "eos_token_id": 7}
IDS = [[49, 90, 128, 175], [39, 90, 116, 189], [32, 69, 114, 226]]


@pytest.fixture
def h():
    return QwenHash(CONFIG)


@pytest.mark.case("D15")
@pytest.mark.parametrize(
    "dtype",
    ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", ">i8", ">i4"],
)
def test_every_integer_dtype_is_taken(h, dtype):
    tokens = np.array([1, 2, 3], dtype)
    ids = h.ids(tokens, np.array([0, 3], dtype), np.array([[7, 7]], dtype))
    assert ids.dtype == np.int64
    assert ids.tolist() == IDS


@pytest.mark.case("D15")
@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "bool", "complex64", "datetime64[s]", "U1"]
)
def test_other_dtypes_are_refused(h, dtype):
    tokens = np.zeros(3, dtype)
    with pytest.raises(TypeError, match=r"tokens: integers are needed, not"):
        h.ids(tokens)
    with pytest.raises(TypeError, match=r"context: integers are needed, not"):
        h.ids([1], context=np.zeros((1, 2), dtype))
    with pytest.raises(TypeError, match=r"query_start_loc: integers are needed, not"):
        h.ids([1], np.zeros(2, dtype))


@pytest.mark.case("D15")
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64"])
def test_torch_in_torch_out(h, dtype):
    ids = h.ids(torch.tensor([1, 2, 3], dtype=getattr(torch, dtype)))
    assert isinstance(ids, torch.Tensor)
    assert ids.dtype == torch.int64
    assert ids.tolist() == IDS


@pytest.mark.case("D15")
def test_torch_floats_and_booleans_are_refused(h):
    for tensor in (torch.tensor([1.0]), torch.tensor([True]), torch.tensor([])):
        with pytest.raises(TypeError, match="integers are needed"):
            h.ids(tensor)


def test_tensors_on_a_device_are_refused(h):
    with pytest.raises(TypeError, match=r'tokens: on meta.*to_device\("meta"\)'):
        h.ids(torch.empty(3, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize(
    "tokens",
    [[1, 2, 3], (1, 2, 3), range(1, 4), array.array("q", [1, 2, 3]), memoryview(b"\x01\x02\x03")],
    ids=["list", "tuple", "range", "array", "memoryview"],
)
def test_sequences_and_buffers_are_taken(h, tokens):
    ids = h.ids(tokens)
    assert isinstance(ids, np.ndarray)
    assert ids.tolist() == IDS


def test_integers_in_place_are_not_copied(h):
    frozen = np.array([1, 2, 3], np.int32)
    frozen.flags.writeable = False
    assert h.ids(frozen).tolist() == IDS
    assert h.ids(np.array([3, 2, 1])[::-1]).tolist() == IDS
    unaligned = np.frombuffer(b"\0" + np.array([1, 2, 3]).tobytes(), np.uint8)[1:].view(np.int64)
    assert not unaligned.flags.aligned
    assert h.ids(unaligned).tolist() == IDS


@pytest.mark.case("D13")
@pytest.mark.parametrize(
    "empty", [[], (), np.empty(0, np.int32), torch.empty(0, dtype=torch.int64)]
)
def test_no_tokens_give_no_ids(h, empty):
    ids = h.ids(empty)
    assert tuple(ids.shape) == (0, 4)
    assert ids.dtype in (np.int64, torch.int64)
    assert isinstance(ids, torch.Tensor) == isinstance(empty, torch.Tensor)
    assert tuple(h.ids(empty, [0]).shape) == (0, 4)
    assert tuple(h.ids(empty, [0, 0, 0], np.full((2, 2), 7)).shape) == (0, 4)
    assert h.ids(np.empty((3, 0), np.int64)).shape == (3, 0, 4)
    assert h.ids(np.empty((0, 3), np.int64)).shape == (0, 3, 4)


@pytest.mark.case("D13")
def test_no_tokens_give_no_ids_on_a_device(h):
    device = h.to_device("cpu")
    none = torch.empty(0, dtype=torch.int64)
    assert device.ids(none).shape == (0, 4)
    assert device.ids(none, torch.tensor([0])).shape == (0, 4)
    assert device.ids(torch.tensor([1, 2]), torch.tensor([0])).shape == (2, 4)


def test_huge_integers_are_refused_not_wrapped(h):
    for tokens in (np.array([2**63], np.uint64), [2**64], [-(2**63) - 1]):
        with pytest.raises(ValueError, match="signed 64-bit"):
            h.ids(tokens)
    with pytest.raises(TypeError, match="integers are needed, not object"):
        h.ids([None, 1])


@pytest.mark.parametrize("token", [97, -1, 2**31, 2**62, -(2**63)])
def test_tokens_outside_the_vocabulary_are_refused(h, token):
    with pytest.raises(ValueError, match=f"token {token} at position 1 of request 0"):
        h.ids([1, token])
    with pytest.raises(
        ValueError, match=rf"context token {token} of request 0 \(context\[0, 1\]\)"
    ):
        h.ids([1], context=[3, token])


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([], "query_start_loc is empty"),
        ([1, 3], r"query_start_loc\[0\] is 1"),
        ([0, 2, 1], r"query_start_loc\[2\] is 1, below query_start_loc\[1\] = 2"),
        ([0, 4], "ends at 4, but there are only 3 tokens"),
        ([0, 2**62], "but there are only 3 tokens"),
        ([0, -1], "below"),
        ([[0, 3]], r"query_start_loc: shape is \(1, 2\)"),
    ],
)
def test_starts_that_describe_no_requests_are_refused(h, starts, message):
    with pytest.raises(ValueError, match=message):
        h.ids([1, 2, 3], np.array(starts, np.int64))


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ([[1, 2, 3]], "3 tokens per request, but this hash looks 2 back"),
        ([[1]], "1 tokens per request"),
        ([[1, 2], [3, 4]], "2 rows, but there are 1 requests"),
        ([[[1, 2]]], r"context: shape is \(1, 1, 2\)"),
        ([[1, 2], [3]], "context: "),
    ],
)
def test_contexts_of_another_shape_are_refused(h, context, message):
    with pytest.raises(ValueError, match=message):
        h.ids([1, 2, 3], context=context)


def test_a_flat_context_needs_a_single_request(h):
    assert h.ids([1], [0, 1], [2, 3]).tolist() == h.ids([1], context=[[2, 3]]).tolist()
    with pytest.raises(ValueError, match=r"context: shape is \(2,\)"):
        h.ids([1, 2], [0, 1, 2], [2, 3])


@pytest.mark.parametrize("tokens", [5, [[[1]]], np.zeros((2, 2, 2), int)])
def test_tokens_of_another_shape_are_refused(h, tokens):
    with pytest.raises(ValueError, match="tokens: shape is"):
        h.ids(tokens)


def test_a_batch_has_no_starts(h):
    with pytest.raises(ValueError, match="with query_start_loc"):
        h.ids([[1, 2]], [0, 2])


@pytest.mark.parametrize("make", [np.empty, torch.empty])
def test_out_is_filled_and_returned(h, make):
    out = make((3, 4), dtype=np.int64 if make is np.empty else torch.int64)
    assert h.ids([1, 2, 3], out=out) is out
    assert out.tolist() == IDS
    assert h.ids(torch.tensor([1, 2, 3]), None, None, out) is out


def test_out_that_cannot_take_the_ids_is_refused(h):
    frozen = np.empty((3, 4), np.int64)
    frozen.flags.writeable = False
    for out, error, message in [
        (np.empty((3, 4), np.int32), TypeError, "out: dtype is int32; ids are int64"),
        (torch.empty(3, 4), TypeError, "out: dtype is torch.float32"),
        (bytearray(96), TypeError, "out: a bytearray"),
        (torch.empty(3, 4, dtype=torch.int64, device="meta"), TypeError, "out: on meta"),
        (np.empty((3, 5), np.int64), ValueError, r"out: shape is \(3, 5\).*\(3, 4\)"),
        (np.empty(12, np.int64), ValueError, r"out: shape is \(12,\)"),
        (np.empty((3, 8), np.int64)[:, ::2], ValueError, "not C-contiguous"),
        (frozen, ValueError, "read-only"),
    ]:
        with pytest.raises(error, match=message):
            h.ids([1, 2, 3], out=out)


def test_ids_may_be_written_over_their_tokens(h):
    memory = np.arange(1, 13)
    h.ids(memory[:3], out=memory.reshape(3, 4))
    assert memory.reshape(3, 4).tolist() == IDS


def test_an_exception_leaves_the_hash_usable(h):
    with pytest.raises(ValueError, match="outside"):
        h.ids([1, 97])
    assert h.ids([1, 2, 3]).tolist() == IDS


def test_dead_ids_and_policies_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="dead_id is 5, a row of this table"):
        QwenHash(CONFIG, dead_id=5)
    with pytest.raises(ValueError, match="out_of_vocab is 'clamp'"):
        QwenHash(CONFIG, out_of_vocab="clamp")
    with pytest.raises(ValueError, match="variant is 'sglang'"):
        LongCatHash({}, variant="sglang")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("eos_token_id", None, "eos_token_id is missing"),
        ("eos_token_id", [], "eos_token_id is an empty list"),
        ("eos_token_id", 97, "eos_token_id is 97, outside vocab_size 97"),
        ("vocab_size", 0, "vocab_size is 0, below 1"),
        ("vocab_size", "97", "vocab_size is '97', not an integer"),
        ("vocab_size", 2**40, "vocab_size is 1099511627776, outside"),
        ("ngram_size", 1, "ngram_size is 1, below 2"),
        ("ngram_size", 17, "ngram_size is 17, outside 2..=16"),
        ("heads_per_ngram", True, "heads_per_ngram is True, not an integer"),
        ("heads_per_ngram", 10**6, "heads_per_ngram is 1000000, outside"),
        ("ngram_vocab_size_base", 2**62, "ngram_vocab_size_base is 4611686018427387904, outside"),
        ("ngram_vocab_size_base", 2**70, "does not fit 64 bits"),
        ("make_ngram_vocab_size_divisible_by", 0, "divisible_by is 0, below 1"),
        ("ple_embed_dim", 66, r"ple_embed_dim is 66, which is no multiple of 4 heads"),
        ("ple_layer_ids", [0], r"ple_layer_ids\[0\] is 0, below 1"),
        ("ple_layer_ids", 2, "ple_layer_ids is 2, not a list"),
    ],
)
def test_qwen_fields(field, value, message):
    with pytest.raises(ValueError, match=message):
        QwenHash(CONFIG | {field: value})


def test_fields_are_named_where_they_were_found():
    for field, value, message in [
        ("eos_token_id", None, "text_config.eos_token_id is missing"),
        ("vocab_size", 0, "text_config.vocab_size is 0, below 1"),
        ("eos_token_id", 97, "text_config.eos_token_id is 97, outside text_config.vocab_size 97"),
    ]:
        # The root is not asked where there is a text_config.
        config = CONFIG | {"text_config": CONFIG | {field: value}}
        with pytest.raises(ValueError, match=message):
            QwenHash(config)


def test_qwen_index():
    with pytest.raises(
        ValueError, match=r"ple_index is 2, but ple_layer_ids has 2 layers: \[2, 5\]"
    ):
        QwenHash(CONFIG | {"ple_layer_ids": [5, 2, 5]}, 2)
    with pytest.raises(ValueError, match="ple_index is -1"):
        QwenHash(CONFIG, -1)
    assert QwenHash(CONFIG | {"ple_layer_ids": [5, 2, 5]}, 1).layer == 4
    with pytest.raises(ValueError, match="ple_layer_ids is missing"):
        QwenHash({"vocab_size": 97, "eos_token_id": 7})


DEEPSEEK = {
    "engram_layer_ids": [1, 3],
    "engram_max_ngram_size": 3,
    "engram_n_heads": 2,
    "engram_vocab_size": 70,
    "engram_compressed_vocab_size": 10,
}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("engram_layer_ids", [], "engram_layer_ids is missing"),
        ("engram_layer_ids", [3], r"layer 1 has no Engram table: engram_layer_ids is \[3\]"),
        ("engram_max_ngram_size", None, "engram_max_ngram_size is missing"),
        ("engram_n_heads", 0, "engram_n_heads is 0, below 1"),
        ("engram_vocab_size", [70], r"engram_vocab_size has 1 entries, but .* 2 orders"),
        ("engram_pad_token_id", 10, "pad token 10 is outside the token map of 10 tokens"),
        ("engram_compressed_vocab_size", 11, "is 11, but the token map has 10 compressed ids"),
        ("engram_num_embeddings", [288], "engram_num_embeddings has 1 entries"),
        ("engram_num_embeddings", [300, 7], "layer 1 300 rows, but its head sizes add up to 306"),
    ],
)
def test_deepseek_fields(field, value, message):
    assert DeepSeekHash(DEEPSEEK, 1, range(10)).num_rows == 71 + 73 + 79 + 83
    with pytest.raises(ValueError, match=message):
        DeepSeekHash(DEEPSEEK | {field: value}, 1, range(10))


@pytest.mark.parametrize(
    ("token_map", "error", "message"),
    [
        ([], ValueError, "token_map: shape is"),
        ([[0, 1]], ValueError, "token_map: shape is"),
        ([0.0, 1.0], TypeError, "token_map: integers are needed"),
        ([0, 1, 2, 3, 4, 5, 6, 7, 9, 9], ValueError, "uses 9 compressed ids, but its largest is 9"),
        ([0, 1, 2, 3, 4, 5, 6, 7, -1, 9], ValueError, r"token_map\[8\] is -1"),
    ],
)
def test_token_maps(token_map, error, message):
    with pytest.raises(error, match=message):
        DeepSeekHash(DEEPSEEK, 1, token_map)


def test_image_tokens_outside_the_map():
    with pytest.raises(ValueError, match="image_token_id is 10, but the token map has 10 tokens"):
        DeepSeekHash(DEEPSEEK, 1, range(10), 10)


def test_the_demo_refuses_what_its_tokenizer_has_not():
    config = DEEPSEEK | {"engram_vocab_size": [70, 70], "seed": 3}
    h = DeepSeekHash(config, 1, range(10), out_of_vocab="wrap")
    assert h.demo
    assert h.ids([-5]).shape == (1, 4)
    with pytest.raises(ValueError, match="token 10 at position 0"):
        h.ids([10])


LONGCAT = {
    "vocab_size": 31,
    "eos_token_id": 2,
    "ngram_vocab_size_ratio": 2,
    "emb_neighbor_num": 3,
    "emb_split_num": 2,
}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vocab_size", None, "vocab_size is missing"),
        ("eos_token_id", 31, "eos_token_id is 31, outside the vocabulary of 31"),
        ("ngram_vocab_size_ratio", None, "ngram_vocab_size_ratio is missing"),
        ("ngram_vocab_size_ratio", "78", "ngram_vocab_size_ratio is '78', not a number"),
        ("ngram_vocab_size_ratio", -1, "ngram_vocab_size_ratio is -1"),
        ("ngram_vocab_size_ratio", float("inf"), "not a number"),
        ("ngram_vocab_size_ratio", 0.01, "is 0, outside"),
        ("emb_neighbor_num", 1, "emb_neighbor_num is 1, below 2"),
        ("emb_split_num", None, "emb_split_num is missing"),
        ("hidden_size", 7, "hidden_size is 7, which is no multiple of 4 heads"),
    ],
)
def test_longcat_fields(field, value, message):
    assert LongCatHash(LONGCAT).num_rows == 264
    with pytest.raises(ValueError, match=message):
        LongCatHash(LONGCAT | {field: value})


def test_longcat_older_and_sibling_names():
    older = {
        "vocab_size": 40,
        "text_vocab_size": 31,
        "eos_token_id": 2,
        "oe_vocab_size_ratio": 2.04,
        "oe_neighbor_num": 3,
        "oe_split_num": 2,
        "oe_ignored_token_ids": [35],
    }
    h, plain = LongCatHash(older), LongCatHash(LONGCAT)
    assert h.head_sizes == (64, 66, 68, 70)
    assert (h.vocab_size, plain.vocab_size) == (40, 31)
    assert h.ids([5, 35, 6]).tolist() == h.ids([5, 0, 6]).tolist()


@pytest.mark.parametrize(
    "h",
    [
        QwenHash(CONFIG | {"ple_layer_ids": [2, 3]}, 1, dead_id=-1),
        DeepSeekHash(DEEPSEEK, 3, range(10), 9, out_of_vocab="wrap"),
        LongCatHash(LONGCAT, variant="vllm"),
    ],
    ids=lambda h: h.family,
)
def test_hashes_can_be_sent_to_other_processes(h):
    copy = pickle.loads(pickle.dumps(h))
    assert repr(copy) == repr(h)
    assert (copy.dead_id, copy.out_of_vocab) == (h.dead_id, h.out_of_vocab)
    assert copy.ids([3, 2, 9]).tolist() == h.ids([3, 2, 9]).tolist()


def test_importing_the_hashes_imports_no_torch():
    code = (
        "import sys, engram, engram.hashing as hashing; "
        f"hashing.QwenHash({CONFIG!r}).ids([1]); engram.TokenHistory; "
        "assert not {'torch', 'pydantic', 'tokenizers'} & set(sys.modules); "
        "hashing.DeviceHash; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
