"""Every family against the naive reference, natively and on a torch device."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hash_reference as reference
import hash_strategies as strategies


@st.composite
def steps(draw, token_of):
    rule = draw(strategies.rules)
    token = token_of(rule)
    requests = draw(strategies.requests(token))
    histories = [draw(st.lists(token, max_size=6)) for _ in requests]
    return rule, requests, histories


@settings(deadline=None, max_examples=300)
@given(steps(strategies.any_tokens), st.integers(0, 3))
def test_native_equals_the_reference(step, padding):
    rule, requests, histories = step
    h = strategies.build(rule, out_of_vocab="wrap")
    assert list(h.head_sizes) == rule.sizes
    assert list(h.head_offsets) == rule.offsets
    assert h.num_rows == rule.rows
    expected = reference.batch_ids(rule, requests, histories)
    flat = reference.flat(requests)
    tokens = np.array(flat + [-(2**63)] * padding, np.int64)
    context = strategies.contexts(rule, histories, h)
    ids = h.ids(tokens, reference.starts(requests), context)
    assert ids[: len(flat)].tolist() == expected
    # Padding: the ids of an n-gram of nothing.
    assert ids[len(flat) :].tolist() == padding_ids(rule, h) * padding


def padding_ids(rule, h):
    if isinstance(rule, reference.LongCat):
        return [rule.offsets]
    return [rule.ids([h.filler])]


@settings(deadline=None, max_examples=300)
@given(steps(strategies.any_tokens), st.sampled_from([None, -1]), st.integers(0, 3))
def test_torch_equals_native(step, dead_id, padding):
    rule, requests, histories = step
    h = strategies.build(rule, out_of_vocab="wrap", dead_id=dead_id)
    device = h.to_device("cpu")
    tokens = torch.tensor(reference.flat(requests) + [-1] * padding, dtype=torch.int64)
    starts = torch.tensor(reference.starts(requests))
    context = torch.tensor(strategies.contexts(rule, histories, h))
    expected = h.ids(tokens, starts, context)
    assert torch.equal(device.ids(tokens, starts, context), expected)
    assert torch.equal(device.ids(tokens, starts), h.ids(tokens, starts))
    assert torch.equal(device.ids(tokens), h.ids(tokens))
    out = torch.empty_like(expected)
    assert device.ids(tokens, starts, context, out) is out
    assert torch.equal(out, expected)
    assert not device.out_of_vocab_seen


@settings(deadline=None, max_examples=200)
@given(steps(strategies.any_tokens))
def test_ids_stay_inside_their_head_whatever_the_tokens(step):
    rule, requests, _ = step
    h = strategies.build(rule, out_of_vocab="wrap")
    ids = h.ids(np.array(reference.flat(requests), np.int64), reference.starts(requests))
    first = np.array(h.head_offsets)
    assert ((ids >= first) & (ids < first + np.array(h.head_sizes))).all()


@pytest.mark.case("D10")
@settings(deadline=None, max_examples=200)
@given(strategies.deepseek(demo=False), st.data())
def test_dead_tokens_take_the_dead_id_and_nothing_else_changes(rule, data):
    requests = data.draw(strategies.requests(strategies.tokens(rule)))
    arguments = reference.flat(requests), reference.starts(requests)
    plain = strategies.build(rule).ids(*arguments)
    marked = strategies.build(rule, dead_id=-1).ids(*arguments)
    dead = np.array([rule.is_dead(token) for token in arguments[0]], bool)
    assert (marked[dead] == -1).all()
    assert np.array_equal(marked[~dead], plain[~dead])
    # Without a dead id, every dead token has the ids of an n-gram of pad tokens.
    assert (plain[dead] == rule.ids([rule.pad])).all()


@settings(deadline=None, max_examples=100)
@given(steps(strategies.tokens), st.sampled_from([np.int8, np.int16, np.int32, np.uint16]))
def test_integer_dtypes_give_the_same_ids(step, dtype):
    rule, requests, histories = step
    h = strategies.build(rule)
    if strategies.vocabulary(rule) > np.iinfo(dtype).max:
        dtype = np.int64
    flat, starts = reference.flat(requests), reference.starts(requests)
    context = strategies.contexts(rule, histories, h)
    expected = h.ids(flat, starts, context)
    strided = np.repeat(np.array(flat, dtype), 2)[::2]
    ids = h.ids(strided, np.array(starts, np.int32), np.asfortranarray(np.array(context, dtype)))
    assert np.array_equal(ids, expected)
