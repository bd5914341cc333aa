"""Equality with transformers' own Qwen4-Exp module, run live on generated configurations."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hash_reference as reference
from engram.hashing import QwenHash

modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
from transformers.cache_utils import DynamicCache  # noqa: E402
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig  # noqa: E402


class Ids(torch.nn.Module):
    """Stands in for the embedding, so that the module returns the ids it would look up."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, ids):
        return ids.unsqueeze(-1)


@dataclass
class Model:
    config: Qwen4ExpTextConfig
    module: torch.nn.Module

    def ids(self, batch, cuts=()):
        """Ids of equally long requests, fed in pieces through the model's own cache."""
        tokens = torch.tensor(batch)
        cache = DynamicCache(config=self.config) if cuts else None
        pieces = torch.tensor_split(tokens, sorted(cuts), dim=1)
        ids = [self.module(piece, cache) for piece in pieces if piece.shape[1]]
        return torch.cat(ids, 1)


@st.composite
def models(draw):
    vocab_size = draw(st.integers(2, 400))
    ngram_size = draw(st.integers(2, 5))
    heads = draw(st.integers(1, 9))
    layers = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3, unique=True))
    eos = draw(st.integers(0, vocab_size - 1))
    config = Qwen4ExpTextConfig(
        vocab_size=vocab_size,
        ngram_size=ngram_size,
        heads_per_ngram=heads,
        ngram_vocab_size_base=draw(st.integers(2, 20_000)),
        make_ngram_vocab_size_divisible_by=draw(st.integers(1, 200)),
        ple_embed_dim=(ngram_size - 1) * heads,
        seed=draw(st.integers(0, 2**40)),
        eos_token_id=draw(st.sampled_from([eos, [eos], [eos, 0]])),
        ple_layer_ids=layers,
        num_hidden_layers=4,
        hidden_size=64,
    )
    index = draw(st.integers(0, len(layers) - 1))
    layer = config.ple_layer_ids[index] - 1
    module = modeling.Qwen4ExpTextNGramEmbedding(config, config.ple_embed_dim, layer, index)
    rows = module.ngram_embedding.num_embeddings
    module.ngram_embedding = Ids()
    h = QwenHash(config, index)
    # Constants first: ids of a few tokens might agree by chance.
    assert list(h.multipliers) == module.layer_multipliers.tolist()
    assert list(h.head_sizes) == module.ngram_heads_vocab_sizes.tolist()
    assert list(h.head_offsets) == module.ngram_heads_offsets.tolist()
    assert (h.padded_rows, h.layer, h.filler) == (rows, layer, eos)
    return Model(config, module), h


LENGTHS = st.integers(1, 24)


def tokens(h, length=LENGTHS):
    token = st.one_of(st.integers(0, h.vocab_size - 1), st.just(h.filler))
    return length.flatmap(lambda n: st.lists(token, min_size=n, max_size=n))


LIVE = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@settings(LIVE, max_examples=250)
@given(st.data())
def test_batches_of_equal_length(data):
    model, h = data.draw(models())
    length = data.draw(st.integers(1, 24))
    row = tokens(h, st.just(length))
    batch = data.draw(st.lists(row, min_size=1, max_size=4))
    expected = model.ids(batch)
    assert torch.equal(h.ids(torch.tensor(batch)), expected)
    ids = h.ids(reference.flat(batch), reference.starts(batch))
    assert ids.tolist() == expected.flatten(0, 1).tolist()


@settings(LIVE, max_examples=200)
@given(st.data())
def test_cuts_through_the_models_cache(data):
    model, h = data.draw(models())
    request = data.draw(tokens(h))
    cuts = data.draw(st.lists(st.integers(0, len(request)), max_size=5).map(sorted))
    expected = model.ids([request], cuts)[0]
    # Each piece as a request of its own, in one step, with what precedes it as context.
    edges = [0, *cuts, len(request)]
    pieces = [request[a:b] for a, b in pairwise(edges)]
    padded = [h.filler] * h.context_len
    contexts = [[*padded, *request[:a]][-h.context_len :] for a in edges[:-1]]
    ids = h.ids(request, reference.starts(pieces), contexts)
    assert ids.tolist() == expected.tolist()


@settings(LIVE, max_examples=30)
@given(st.data())
def test_left_padding_hidden_by_the_attention_mask(data):
    model, h = data.draw(models())
    request = data.draw(tokens(h))
    # The model writes EOS over hidden positions before it hashes them.
    padded = [h.filler] * data.draw(st.integers(1, 5)) + request
    expected = model.ids([padded])[0, -len(request) :]
    assert h.ids(torch.tensor(request)).tolist() == expected.tolist()
