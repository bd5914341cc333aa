"""Ids on a CUDA device, eager and out of a captured graph."""

import numpy as np
import pytest
import torch

from engram.hashing import DeepSeekHash, LongCatHash, QwenHash

HASHES = {
    "qwen": QwenHash({"ngram_size": 3, "eos_token_id": 248_044}),
    "deepseek": DeepSeekHash(
        {
            "engram_layer_ids": [1, 14],
            "engram_max_ngram_size": 4,
            "engram_n_heads": 8,
            "engram_vocab_size": 16_000_000,
        },
        14,
        np.arange(129_280) % 99_092,
        129_264,
        dead_id=-1,
    ),
    "longcat": LongCatHash(
        {
            "vocab_size": 131_072,
            "eos_token_id": 2,
            "ngram_vocab_size_ratio": 78,
            "emb_neighbor_num": 4,
            "emb_split_num": 4,
        }
    ),
}


def step(h, seed):
    """Five requests, one empty, padded to 64 tokens."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, h.vocab_size, 64)
    tokens[random.integers(0, 64, 6)] = h.filler
    starts = np.array([0, 1, 1, 9, 40, 55])
    return tokens, starts, random.integers(0, h.vocab_size, (5, h.context_len))


@pytest.mark.parametrize("h", HASHES.values(), ids=HASHES)
def test_cuda_equals_native(h):
    device = h.to_device("cuda")
    arguments = step(h, 0)
    ids = device.ids(*(torch.from_numpy(argument).cuda() for argument in arguments))
    assert ids.is_cuda
    assert np.array_equal(ids.cpu().numpy(), h.ids(*arguments))
    device.raise_if_seen()


@pytest.mark.parametrize("h", HASHES.values(), ids=HASHES)
def test_a_captured_graph_follows_its_inputs(h):
    device = h.to_device("cuda")
    inputs = [torch.from_numpy(argument).cuda() for argument in step(h, 0)]
    out = torch.empty(64, h.heads, dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        device.ids(*inputs, out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        device.ids(*inputs, out)
    for seed in range(1, 5):
        arguments = step(h, seed)
        for fixed, argument in zip(inputs, arguments, strict=True):
            fixed.copy_(torch.from_numpy(argument))
        graph.replay()
        assert np.array_equal(out.cpu().numpy(), h.ids(*arguments))
    inputs[0][3] = -1
    graph.replay()
    with pytest.raises(ValueError, match="outside the vocabulary"):
        device.raise_if_seen()
