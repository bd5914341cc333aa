"""From tokens to rows in one call, against synthetic checkpoints and transformers."""

import numpy as np
import pytest

import engram
from engram import synth

SIZES = {
    "qwen": {"rows": 5000, "layers": 2, "config": {"ple_embed_dim": 256}},
    "deepseek": {"rows": 5000, "config": {"engram_head_dim": 64, "hidden_size": 16}},
    "longcat": {"rows": 2000, "config": {"hidden_size": 192}},
}
TOKEN_MAP = np.arange(129_280) % 99_092


def opened(directory, family, table=0, **options):
    token_map = TOKEN_MAP if family == "deepseek" else None
    h = engram.hasher(directory, table, token_map=token_map, **options)
    return h, engram.FileGather(directory, table)


def step(h, seed=0):
    """Four requests, one empty, and two tokens of padding."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, h.vocab_size, 40)
    tokens[random.integers(0, 40, 5)] = h.filler
    context = random.integers(0, h.vocab_size, (4, h.context_len))
    return tokens, np.array([0, 1, 1, 30, 38]), context


@pytest.fixture(params=SIZES)
def checkpoint(request, tmp_path):
    return request.param, synth.write(tmp_path / "c", request.param, **SIZES[request.param])


def test_rows_are_those_of_the_ids(checkpoint):
    family, info = checkpoint
    for place, table in enumerate(info.tables):
        h, gather = opened(info.directory, family, place)
        with gather:
            assert (h.padded_rows, h.layer) == (gather.num_rows, gather.info.layer)
            arguments = step(h)
            ids = h.ids(*arguments)
            out = np.empty((*ids.shape, gather.row_bytes), np.uint8)
            assert engram.gather_tokens(h, gather, *arguments, out=out) is out
            expected = np.concatenate(list(table.expected(ids).values()), axis=-1)
            assert np.array_equal(out, expected)


def test_rows_come_as_stored(checkpoint):
    family, info = checkpoint
    h, gather = opened(info.directory, family)
    with gather:
        arguments = step(h)
        rows = engram.gather_tokens(h, gather, *arguments)
        alone = gather.gather(h.ids(*arguments))
        assert type(rows) is type(alone)
        weight = rows if isinstance(rows, np.ndarray) else rows.weight
        assert weight.shape == (40, h.heads, *gather.row_shape)
        other = alone if isinstance(alone, np.ndarray) else alone.weight
        assert np.array_equal(weight.view(np.uint8), other.view(np.uint8))


@pytest.mark.case("D09")
@pytest.mark.case("D10")
def test_dead_tokens_are_zeros_without_a_read(tmp_path):
    info = synth.write(tmp_path / "c", "deepseek", **SIZES["deepseek"])
    h, gather = opened(info.directory, "deepseek", dead_id=-1)
    with gather:
        tokens = np.array([5, 129_264, 6, 7])
        out = np.ones((4, h.heads, gather.row_bytes), np.uint8)
        # An image token, and a token of padding.
        engram.gather_tokens(h, gather, tokens, [0, 3], out=out)
        assert not out[[1, 3]].any()
        alive = h.ids(tokens, [0, 3])[[0, 2]]
        expected = np.concatenate(list(info.tables[0].expected(alive).values()), axis=-1)
        assert np.array_equal(out[[0, 2]], expected)
        dead = np.array([129_264] * 10)
        before = gather.stats()
        engram.gather_tokens(h, gather, dead)
        after = gather.stats()
        assert after["bytes_read"] == before["bytes_read"]


def test_torch_in_torch_out(tmp_path):
    torch = pytest.importorskip("torch")
    info = synth.write(tmp_path / "c", "qwen", dtype="bf16", **SIZES["qwen"])
    h, gather = opened(info.directory, "qwen")
    with gather:
        tokens = torch.arange(12).reshape(2, 6)
        rows = engram.gather_tokens(h, gather, tokens)
        assert rows.dtype == torch.bfloat16
        assert rows.shape == (2, 6, 16, 16)
        alone = gather.gather(h.ids(tokens))
        assert torch.equal(rows.view(torch.int16), alone.view(torch.int16))


@pytest.mark.case("D13")
def test_no_tokens_give_no_rows(checkpoint):
    family, info = checkpoint
    h, gather = opened(info.directory, family)
    with gather:
        out = np.empty((0, h.heads, gather.row_bytes), np.uint8)
        assert engram.gather_tokens(h, gather, [], [0, 0], out=out) is out
        rows = engram.gather_tokens(h, gather, np.empty(0, np.int32))
        weight = rows if isinstance(rows, np.ndarray) else rows.weight
        assert weight.shape == (0, h.heads, *gather.row_shape)


def test_long_steps(checkpoint):
    family, info = checkpoint
    h, gather = opened(info.directory, family)
    with gather:
        tokens = np.random.default_rng(1).integers(0, h.vocab_size, 20_000)
        out = np.empty((20_000, h.heads, gather.row_bytes), np.uint8)
        engram.gather_tokens(h, gather, tokens, out=out)
        some = np.random.default_rng(2).integers(0, 20_000, 50)
        expected = info.tables[0].expected(h.ids(tokens)[some])
        assert np.array_equal(out[some], np.concatenate(list(expected.values()), axis=-1))


def test_a_hash_of_another_table_is_refused(tmp_path):
    info = synth.write(tmp_path / "c", "qwen", **SIZES["qwen"])
    h, _ = opened(info.directory, "qwen", 0)
    with (
        engram.FileGather(info.directory, 1) as gather,
        pytest.raises(ValueError, match="belong to different tables") as caught,
    ):
        engram.gather_tokens(h, gather, [1, 2])
    assert caught.value.table == info.tables[1].name


def test_refusals_of_either_half_reach_the_caller(checkpoint):
    family, info = checkpoint
    h, gather = opened(info.directory, family)
    with gather:
        with pytest.raises(ValueError, match=r"token -1 at position 1 of request 0"):
            engram.gather_tokens(h, gather, [1, -1])
        with pytest.raises(ValueError, match="query_start_loc ends at 3"):
            engram.gather_tokens(h, gather, [1, 2], [0, 3])
        with pytest.raises(TypeError, match="integers are needed"):
            engram.gather_tokens(h, gather, [0.5])
        with pytest.raises(ValueError, match="out has shape"):
            engram.gather_tokens(h, gather, [1], out=np.empty((1, gather.row_bytes), np.uint8))
        out = np.empty((2, h.heads, gather.row_bytes), np.uint8)
        engram.gather_tokens(h, gather, [1, 2], out=out)
    with pytest.raises(ValueError, match="closed"):
        engram.gather_tokens(h, gather, [1, 2], out=out)


def test_rows_equal_those_of_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Qwen4ExpConfig"):
        pytest.skip("this transformers has no Qwen4-Exp")
    directory = synth.write_model(tmp_path / "tiny")
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForImageTextToText.from_pretrained(directory)
    text = model.config.text_config
    random = torch.Generator().manual_seed(0)
    batch = torch.randint(0, text.vocab_size, (3, 50), generator=random)
    eos = text.eos_token_id[0] if isinstance(text.eos_token_id, list) else text.eos_token_id
    batch[torch.rand(batch.shape, generator=random) < 0.1] = eos
    for place, layer in enumerate(engram.tables(directory)):
        embedding = model.model.language_model.layers[layer.layer].ple.ple_embedding
        with torch.no_grad():
            expected = embedding(batch, None)
        h = engram.hasher(directory, place)
        with engram.FileGather(directory, place) as gather:
            rows = engram.gather_tokens(h, gather, batch).flatten(-2)
        assert torch.equal(rows.view(torch.int16), expected.view(torch.int16))
