"""Generated rules of every family, the library's hash of the same constants, and steps for them."""

from __future__ import annotations

from hypothesis import strategies as st

import hash_reference as reference
from engram.hashing import DeepSeekHash, LongCatHash, QwenHash


@st.composite
def qwen(draw):
    vocab_size = draw(st.integers(2, 300))
    return reference.Qwen(
        vocab_size=vocab_size,
        eos=draw(st.integers(0, vocab_size - 1)),
        ngram_size=draw(st.integers(2, 6)),
        heads=draw(st.integers(1, 9)),
        base=draw(st.sampled_from([1, 50, 400, 20_000])),
        divisor=draw(st.integers(1, 64)),
        seed=draw(st.integers(0, 2**63 - 1)),
        ple_index=draw(st.integers(0, 2)),
    )


@st.composite
def deepseek(draw, *, demo=None):
    layers = draw(st.lists(st.integers(0, 40), min_size=1, max_size=3, unique=True))
    size = draw(st.integers(3, 40))
    compressed = draw(st.integers(1, size))
    # Every compressed id occurs, in first-seen order or not.
    extra = st.lists(
        st.integers(0, compressed - 1), min_size=size - compressed, max_size=size - compressed
    )
    token_map = draw(st.permutations([*range(compressed), *draw(extra)]))
    ngram = draw(st.integers(2, 5))
    is_demo = draw(st.booleans()) if demo is None else demo
    start = st.sampled_from([2, 60, 700, 20_000])
    return reference.DeepSeek(
        layers=layers,
        layer=draw(st.sampled_from(layers)),
        token_map=list(token_map),
        ngram=ngram,
        heads=draw(st.integers(1, 9)),
        starts=[draw(start) for _ in range(ngram - 1)] if is_demo else draw(start),
        pad=draw(st.integers(0, size - 1)),
        image=draw(st.none() | st.integers(0, size - 1)),
        seed=draw(st.integers(0, 2**20)) if is_demo else 0,
        demo=is_demo,
    )


@st.composite
def longcat(draw):
    vocab_size = draw(st.integers(3, 300))
    return reference.LongCat(
        vocab_size=vocab_size,
        eos=draw(st.integers(0, vocab_size - 1)),
        ratio=draw(st.sampled_from([1, 2, 3.5, 78, 200])),
        ngram=draw(st.integers(2, 5)),
        splits=draw(st.integers(1, 5)),
        variant=draw(st.sampled_from(["hf", "vllm"])),
        ignored=draw(st.lists(st.integers(0, vocab_size - 1), max_size=2)),
    )


rules = st.one_of(qwen(), deepseek(), longcat())


def build(rule, **options):
    """The library's hash of a rule."""
    if isinstance(rule, reference.Qwen):
        return QwenHash(rule.config(), rule.ple_index, **options)
    if isinstance(rule, reference.DeepSeek):
        return DeepSeekHash(rule.config(), rule.layer, rule.token_map, rule.image, **options)
    return LongCatHash(rule.config(), variant=rule.variant, **options)


def vocabulary(rule) -> int:
    return len(rule.token_map) if isinstance(rule, reference.DeepSeek) else rule.vocab_size


def special(rule) -> int:
    """The token at which windows change."""
    if isinstance(rule, reference.DeepSeek):
        return rule.pad if rule.image is None else rule.image
    return rule.eos


def tokens(rule):
    return st.one_of(st.integers(0, vocabulary(rule) - 1), st.just(special(rule)))


def any_tokens(rule):
    """Tokens inside and outside the vocabulary, as far as the family's engines define them."""
    if isinstance(rule, reference.DeepSeek) and rule.demo:
        return st.one_of(tokens(rule), st.integers(-(2**63), -1))
    return st.one_of(tokens(rule), st.just(-1), st.integers(-(2**63), 2**63 - 1))


def requests(token, *, longest=20):
    return st.lists(st.lists(token, max_size=longest), min_size=1, max_size=6)


def contexts(rule, histories, h):
    """The `context` argument for requests with these histories."""
    padded = [h.filler] * h.context_len
    return [[*padded, *history][-h.context_len :] for history in histories]
