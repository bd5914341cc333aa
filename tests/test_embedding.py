"""The module on its own: binding, dtypes, state dicts, contexts and staged rows."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import engram  # noqa: E402
from engram import synth  # noqa: E402
from engram.graphwait import NoWaits  # noqa: E402
from stage_support import SIZES, LateCopier, Opened, step  # noqa: E402


@pytest.fixture(scope="module", params=SIZES)
def opened(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("embedding") / request.param
    found = Opened(synth.write(directory, request.param, **SIZES[request.param]), request.param)
    yield found
    found.tables.close()


@pytest.fixture
def parts(opened):
    return opened.hashers[0], next(iter(opened.tables.gathers.values()))


def reference(parts, tokens, context=None, dtype="bfloat16"):
    h, gather = parts
    ids = h.ids(np.asarray(tokens), context=context)
    values = engram.dequantize(gather.gather(torch.as_tensor(ids)), gather, dtype)
    return values.flatten(-2)


class FakeCache:
    """Keeps the last tokens of a layer as transformers' caches do, zero-filled on the left."""

    def __init__(self):
        self.states = {}

    def get_conv_state(self, layer_idx, state_idx=0):
        return self.states.get((layer_idx, state_idx))

    def update_conv_state(self, values, layer_idx, state_idx=0, conv_kernel_size=None):
        held = self.states.get((layer_idx, state_idx))
        if held is None:
            missing = max(conv_kernel_size - values.shape[-1], 0)
            full = torch.nn.functional.pad(values, (missing, 0))
            self.states[layer_idx, state_idx] = full[..., -conv_kernel_size:].clone()
        else:
            full = torch.cat([held, values], -1)
            held.copy_(full[..., -conv_kernel_size:])
        return full


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_dequantised_rows_of_the_asked_dtype(parts, dtype):
    module = engram.NgramEmbedding(*parts, dtype=dtype)
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    values = module(tokens)
    assert values.dtype == dtype
    expected = reference(parts, tokens.numpy(), dtype=str(dtype).removeprefix("torch."))
    assert values.shape == (2, 4, parts[0].heads * parts[1].logical_shape[0])
    assert torch.equal(values, expected)
    assert torch.equal(module(tokens.int()), expected)
    assert module(torch.empty(2, 0, dtype=torch.int64)).shape == (2, 0, expected.shape[-1])


@pytest.mark.parametrize("cuts", [[1, 2, 3], [4], [1, 7]])
def test_pieces_through_a_cache_equal_the_whole(parts, cuts):
    h, _ = parts
    module = engram.NgramEmbedding(*parts, dtype=torch.bfloat16)
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, h.vocab_size, (3, 9)))
    whole = module(tokens)
    cache = FakeCache()
    pieces = [module(piece, cache) for piece in torch.tensor_split(tokens, cuts, dim=1)]
    assert torch.equal(torch.cat(pieces, 1), whole)
    held = cache.states[module.layer_idx, 2]
    assert torch.equal(held, tokens[:, -h.context_len :])
    # Beams and rejected drafts: the cache decides what precedes.
    held.copy_(held[[2, 0, 0]])
    after = module(torch.full((3, 1), 5), cache)
    again = torch.cat([tokens[[2, 0, 0]], torch.full((3, 1), 5)], 1)
    assert torch.equal(after, module(again)[:, -1:])


def test_a_table_is_bound_once(parts, opened):
    h, gather = parts
    module = engram.NgramEmbedding(h, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="no table"):
        module(torch.tensor([[1]]))
    module.bind(gather)
    with engram.Stage(gather, h, max_tokens=4, device="cpu") as stage:
        for bind in (
            lambda: module.bind(gather),
            module.bind_dummy,
            lambda: module.bind_stage(stage),
        ):
            with pytest.raises(RuntimeError, match="second table is refused"):
                bind()
    other = list(opened.tables.gathers.values())[1]
    with pytest.raises(ValueError, match="different tables"):
        engram.NgramEmbedding(h, other, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="bfloat16, float16 or float32"):
        engram.NgramEmbedding(h, gather, dtype=torch.int8)


@pytest.mark.case("C09")
def test_dummy_rows_are_zeros(parts):
    h, gather = parts
    module = engram.NgramEmbedding(h, dtype=torch.float16)
    module.bind_dummy()
    values = module(torch.tensor([[1, 2]]))
    assert values.shape == (1, 2, h.heads * gather.logical_shape[0])
    assert values.dtype == torch.float16
    assert not values.any()


def test_the_state_dict_is_empty_and_tables_are_not_loaded_through_it(parts):
    h, _ = parts
    model = torch.nn.Sequential()
    model.ple_embedding = engram.NgramEmbedding(*parts, dtype=torch.bfloat16)
    assert not model.state_dict()
    assert sum(parameter.numel() for parameter in model.parameters()) == 0
    model.load_state_dict({})
    prefix = "ple_embedding."
    with pytest.raises(RuntimeError, match="loading it as a weight is refused"):
        model.load_state_dict({f"{prefix}ngram_embedding.weight": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({f"{prefix}other": torch.zeros(1)})
    sizes = torch.tensor(h.head_sizes)
    model.load_state_dict({f"{prefix}ngram_heads_vocab_sizes": sizes})
    with pytest.raises(RuntimeError, match="another configuration"):
        model.load_state_dict({f"{prefix}ngram_heads_vocab_sizes": sizes + 2})


def test_casts_and_moves_leave_the_module_alone(parts):
    module = engram.NgramEmbedding(*parts, dtype=torch.bfloat16)
    tokens = torch.tensor([[3, 2, 1]])
    before = module(tokens)
    assert torch.equal(module.half().to("cpu", torch.float64)(tokens), before)
    assert "FileGather" in repr(module)


@pytest.mark.case("D07")
def test_tokens_outside_the_vocabulary_are_refused(parts):
    module = engram.NgramEmbedding(*parts, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="-1"):
        module(torch.tensor([[1, -1]]))


def test_staged_rows_are_those_of_the_last_step(opened, parts):
    h, gather = parts
    with engram.Stage(gather, h, max_tokens=32, device="cpu") as stage:
        module = engram.NgramEmbedding(h, dtype=torch.bfloat16)
        module.bind_stage(stage)
        for seed in range(3):
            tokens, starts, context = step(h, seed)
            stage.prepare(tokens, starts, context)
            ids = h.ids(tokens, starts, context)
            rows = gather.gather(torch.from_numpy(ids))
            expected = engram.dequantize(rows, gather, "bfloat16").flatten(-2)
            assert torch.equal(module(torch.zeros(20, dtype=torch.int64)), expected)
            with pytest.raises(ValueError, match="24 tokens, but the step in the stage has 20"):
                module(torch.zeros(4, 6, dtype=torch.int64))
            stage.prepare(np.concatenate([tokens, [-1] * 4]), starts, context)
            padded = module(torch.zeros(4, 6, dtype=torch.int64)).reshape(24, -1)
            assert torch.equal(padded[:20], expected)
            assert not padded[20:].float().abs().any()
        with pytest.raises(ValueError, match="the stage holds 32"):
            module(torch.zeros(33, dtype=torch.int64))


def test_a_forward_over_more_than_the_step_is_refused(parts):
    """Zeros would be taken for rows, above all after a step that failed."""
    h, gather = parts
    copier = LateCopier(0)
    with engram.Stage(gather, h, max_tokens=8, device="cpu", copier=copier) as stage:
        module = engram.NgramEmbedding(h, dtype=torch.bfloat16)
        module.bind_stage(stage)
        some, none = torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 0, dtype=torch.int64)
        assert module(none).shape[:2] == (1, 0)
        with pytest.raises(ValueError, match="3 tokens, but the step in the stage has 0"):
            module(some)
        stage.prepare([1, 2, 3])
        copier.flush()
        assert module(some).any()
        for failing in (lambda: stage.prepare([1, -5, 2]), lambda: stage.prepare([1] * 9)):
            stage.prepare([1, 2, 3])
            with pytest.raises(ValueError, match=r"-5|9 tokens"):
                failing()
            with pytest.raises(ValueError, match="the step before may have failed"):
                module(some)
        copier.is_capturing = True
        assert module(some).shape[:2] == (1, 3), "graphs are as long as they are"
        copier.is_capturing = False
        stage.prepare(np.zeros(3, np.int64), [0])
        assert module(some).shape[:2] == (1, 3), "a run that warms up"

        late = stage.late(4, driver=NoWaits("no graphs here"))
        seen = []
        longer = torch.zeros(4, dtype=torch.int64)
        late.run(lambda: seen.append(module(longer)), [1, 2])
        late.launch(lambda: seen.append(module(longer)))
        assert late.fill([-5]) == 0
        with pytest.raises(ValueError, match="-5"):
            late.finish()
        assert [len(values) for values in seen] == [4, 4]
        with pytest.raises(ValueError, match="step in the stage has 0"):
            module(longer)


def test_importing_engram_imports_no_torch():
    import subprocess
    import sys

    check = "import engram, sys; assert 'torch' not in sys.modules; engram.Ticket; print('ok')"
    result = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False
    )
    assert result.stdout == "ok\n", result.stderr
