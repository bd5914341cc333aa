"""Steps as servers make them: chunks, drafts, padding, resumed requests, histories."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import engram
import hash_reference as reference
import hash_strategies as strategies
from engram.hashing import DeepSeekHash, QwenHash

CONFIG = {"vocab_size": 97, "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "eos_token_id": 7}


@pytest.fixture
def h():
    return QwenHash(CONFIG)


@st.composite
def sequences(draw):
    rule = draw(strategies.rules)
    return rule, draw(st.lists(strategies.tokens(rule), min_size=1, max_size=40))


@settings(deadline=None, max_examples=200)
@given(sequences(), st.lists(st.integers(0, 40), max_size=6))
def test_any_cut_gives_the_ids_of_the_whole(sequence, cuts):
    rule, tokens = sequence
    h = strategies.build(rule)
    history = engram.TokenHistory(h)
    history.start("request")
    edges = sorted({0, len(tokens), *(min(cut, len(tokens)) for cut in cuts)})
    rows = []
    for start, end in pairwise(edges):
        chunk = tokens[start:end]
        rows.append(h.ids(chunk, context=history.contexts(["request"])))
        history.commit("request", chunk)
    assert np.array_equal(np.concatenate(rows), h.ids(tokens))


@pytest.mark.case("D08")
@settings(deadline=None, max_examples=100)
@given(sequences(), st.data())
def test_a_rejected_tail_leaves_no_trace(sequence, data):
    rule, prompt = sequence
    h = strategies.build(rule)
    history = engram.TokenHistory(h)
    history.start("request", prompt)
    drafts = data.draw(st.lists(strategies.tokens(rule), min_size=1, max_size=4))
    accepted = data.draw(st.integers(0, len(drafts)))
    verified = h.ids(drafts, context=history.contexts(["request"]))
    history.commit("request", drafts[:accepted])
    after = data.draw(st.lists(strategies.tokens(rule), min_size=1, max_size=3))
    ids = h.ids(after, context=history.contexts(["request"]))

    fresh = h.ids([*prompt, *drafts[:accepted], *after])
    assert np.array_equal(ids, fresh[-len(after) :])
    assert np.array_equal(verified[:accepted], fresh[len(prompt) : len(prompt) + accepted])


@pytest.mark.case("D08")
def test_drafts_that_were_committed_can_be_taken_back(h):
    history = engram.TokenHistory(h)
    history.start(0, [5, 6])
    before = history.contexts([0])
    history.commit(0, [1, 2, 3, 4])
    history.truncate(0, 2)
    assert np.array_equal(history.contexts([0]), before)
    assert history.length(0) == 2


def test_requests_without_tokens_take_no_rows(h):
    ids = h.ids([3, 4, 5], [0, 0, 2, 2, 3, 3], [[1, 2]] * 5)
    alone = h.ids([3, 4], context=[1, 2]).tolist() + h.ids([5], context=[1, 2]).tolist()
    assert ids.tolist() == alone


@pytest.mark.case("D09")
def test_padding_is_ignored_and_marked():
    h = QwenHash(CONFIG, dead_id=-1)
    requests = [[3], [4, 5], [], [7, 8], [9]]
    contexts = [[1, 2], [7, 3], [0, 0], [96, 95], [7, 7]]
    expected = h.ids(reference.flat(requests), reference.starts(requests), contexts)
    # Five real requests padded to eight by empty ones; their context rows and the tokens past the
    # last start are whatever the buffers held before.
    starts = [*reference.starts(requests), 6, 6, 6]
    tokens = np.array([*reference.flat(requests), -1, 10**9, 97, -(2**40)])
    ids = h.ids(tokens, starts, [*contexts, [-1, -1], [10**9, 0], [97, -5]])
    assert np.array_equal(ids[:6], expected)
    assert (ids[6:] == -1).all()


@pytest.mark.case("D09")
def test_padding_without_a_dead_id_has_valid_ids(h):
    ids = h.ids([3, -1], [0, 1])
    assert ids[1].tolist() == h.ids([7])[0].tolist()
    h = DeepSeekHash(
        {
            "engram_layer_ids": [1],
            "engram_max_ngram_size": 3,
            "engram_n_heads": 2,
            "engram_vocab_size": 70,
        },
        1,
        range(10),
    )
    assert h.ids([3, -1], [0, 1])[1].tolist() == h.ids([2])[0].tolist()


@pytest.mark.case("D07")
@settings(deadline=None, max_examples=60)
@given(strategies.rules.filter(lambda rule: strategies.vocabulary(rule) > 3))
def test_placeholders_of_async_scheduling_are_refused(rule):
    h = strategies.build(rule)
    context = np.full((3, h.context_len), 3)
    context[2, 0] = -1
    place = r"context token -1 of request 2 \(context\[2, 0\]\)"
    with pytest.raises(ValueError, match=place):
        h.ids([1, 2, 3], [0, 1, 2, 3], context)
    place = r"token -1 at position 1 of request 2 \(tokens\[3\]\)"
    with pytest.raises(ValueError, match=place) as caught:
        h.ids([1, 2, 3, -1], [0, 1, 2, 4])
    assert caught.value.position == 3


@pytest.mark.case("D16")
def test_nothing_crosses_the_end_of_a_document(h):
    document = h.ids([3, 7, 4])
    other = h.ids([5, 6, 7, 4])
    assert np.array_equal(document[-1], other[-1])
    assert np.array_equal(document[-1], h.ids([4])[0])
    # The end belongs to the document it ends.
    assert not np.array_equal(document[1], h.ids([7])[0])


@pytest.mark.case("D17")
def test_a_slot_used_again_starts_afresh(h):
    history = engram.TokenHistory(h)
    history.start("slot", [1, 2, 3])
    history.start("slot", [5])
    assert history.contexts(["slot"]).tolist() == [[7, 5]]
    history.drop("slot")
    assert "slot" not in history
    with pytest.raises(KeyError, match="never started"):
        history.commit("slot", [6])


@pytest.mark.case("D18")
def test_the_first_call_returns_the_shape_of_later_ones():
    h = QwenHash(CONFIG)
    assert h.ids([1, 2]).shape == h.ids([1, 2]).shape == (2, 4)


def test_batches_of_equally_long_requests(h):
    batch = np.array([[1, 2, 7, 3], [4, 5, 6, 8]], np.int32)
    context = np.array([[9, 10], [7, 11]])
    flat = h.ids(batch.reshape(-1), [0, 4, 8], context)
    assert np.array_equal(h.ids(batch, context=context), flat.reshape(2, 4, 4))


def test_long_steps_are_shared_among_threads(h):
    tokens = np.random.default_rng(0).integers(0, 97, 200_000)
    starts = np.arange(0, 200_001, 8)
    alone, shared = np.empty((2, 200_000, 4), np.int64)
    h._native.ids(tokens, starts, None, alone, threads=1)
    h._native.ids(tokens, starts, None, shared, threads=5)
    assert np.array_equal(alone, shared)
    assert np.array_equal(alone[:8], h.ids(tokens[:8]))


def test_history_by_position(h):
    history = engram.TokenHistory(h)
    history.start("a", [1, 2, 3])
    history.start("b")
    assert len(history) == 2
    assert history.contexts(["b", "a"]).tolist() == [[7, 7], [2, 3]]
    assert history.contexts(["a", "a", "a"], [0, 1, 2]).tolist() == [[7, 7], [7, 1], [1, 2]]
    assert history.contexts([]).shape == (0, 2)
    with pytest.raises(ValueError, match=r"lengths\[0\] is 4, but request 'a' has 3"):
        history.contexts(["a"], [4])
    with pytest.raises(ValueError, match="2 lengths for 1 requests"):
        history.contexts(["a"], [1, 2])
    with pytest.raises(ValueError, match="length is 5"):
        history.truncate("a", 5)
    with pytest.raises(ValueError, match="does not fit 32 bits"):
        history.commit("a", [2**31])
    with pytest.raises(ValueError, match="one request"):
        history.commit("a", [[1]])
    with pytest.raises(TypeError, match="integers"):
        history.commit("a", [0.5])
