"""A whole model, wherever its tables live: the same bits as with tables of its own."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "Qwen4ExpConfig"):
    pytest.skip("this transformers has no Qwen4-Exp", allow_module_level=True)

from places import CONFIGURATIONS, PLACES, open_place  # noqa: E402

import engram  # noqa: E402
from engram.integrations.transformers import attach, from_pretrained  # noqa: E402
from engram.storage import Storage  # noqa: E402
from model_support import (  # noqa: E402
    PROMPTS,
    left_padded,
    make_directories,
    single_thread,
    tables_of,
)


@pytest.fixture(scope="module", autouse=True)
def quiet():
    with single_thread():
        yield


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return make_directories(tmp_path_factory.mktemp("models"))


def load(directory):
    return transformers.AutoModelForImageTextToText.from_pretrained(directory)


@torch.no_grad()
def outcome(model):
    """Logits of prompts and of a batch, and what the model writes greedily after them."""
    found = [model(input_ids=torch.tensor([row])).logits for row in PROMPTS]
    batch = torch.randint(0, 257, (3, 40), generator=torch.Generator().manual_seed(1))
    found.append(model(input_ids=batch).logits)
    written = model.generate(
        **left_padded(PROMPTS, pad=7),
        do_sample=False,
        max_new_tokens=6,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return [*found, written.sequences, *written.logits]


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def reference(request, directories):
    """A checkpoint, and what its model gives with tables in its own memory."""
    served, plain = directories[request.param]
    return served, outcome(load(plain))


def served_from(place, directory):
    """The model with its tables in one of `PLACES`."""
    if place in CONFIGURATIONS:
        return from_pretrained(directory, engram_config=CONFIGURATIONS[place])
    model = from_pretrained(directory)
    for layer in model.model.language_model.layers:
        if layer.ple:
            own = layer.ple.ple_embedding
            storage = open_place(place, directory, own._storage.info.name)
            layer.ple.ple_embedding = engram.NgramEmbedding(
                own.hasher, storage, dtype=own.dtype, layer_idx=own.layer_idx
            )
    return model


@pytest.mark.parametrize("place", PLACES)
def test_logits_and_generations_are_identical_from_everywhere(reference, place):
    directory, expected = reference
    model = served_from(place, directory)
    kinds = {"huge": "pinned", "tensor": "device"}
    for module in tables_of(model):
        if place != "file":
            assert module._storage.placement == kinds.get(place, place)
    for number, (mine, theirs) in enumerate(zip(outcome(model), expected, strict=True)):
        assert torch.equal(mine, theirs), number
    for module in tables_of(model):
        assert not list(module.parameters()) + list(module.buffers())
    assert not [name for name in model.state_dict() if "ple_embedding" in name]
    before = sum(parameter.numel() for parameter in model.parameters())
    ids = torch.tensor(PROMPTS[:1])
    values = tables_of(model)[0](ids)
    model.to(torch.float32)
    assert torch.equal(tables_of(model)[0](ids), values)
    assert sum(parameter.numel() for parameter in model.parameters()) == before


@torch.no_grad()
@pytest.mark.parametrize("place", ["device", "pinned", "file"])
def test_attaching_and_loading_a_second_time(directories, place):
    directory, plain = directories["bf16"]
    model = load(plain)
    ids = torch.tensor(PROMPTS[:1])
    before = model(input_ids=ids).logits
    attach(model, directory, engram_config=CONFIGURATIONS[place])
    assert torch.equal(model(input_ids=ids).logits, before)
    with pytest.raises(RuntimeError, match="attach once"):
        attach(model, directory, engram_config=CONFIGURATIONS[place])
    first, second = tables_of(model)
    with pytest.raises(RuntimeError, match="second table"):
        first.bind(second._storage)
    if place != "file":
        with (
            engram.FileGather(directory, first._storage.info.name) as gather,
            pytest.raises(RuntimeError, match=r"loaded already|second"),
        ):
            first._storage.load(gather)
    assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.case("C09")
def test_dummy_loading_reads_nothing_wherever_tables_would_live(directories, monkeypatch):
    directory, _ = directories["fp8"]
    monkeypatch.setattr(engram.FileGather, "gather", None)
    monkeypatch.setattr(Storage, "load", None)
    for config in CONFIGURATIONS.values():
        model = from_pretrained(directory, engram_config=config, load_format="dummy")
        rows = tables_of(model)[0](torch.tensor([[1, 2, 3]]))
        assert rows.shape == (1, 3, 64)
        assert not rows.any()


def test_zeros_of_a_dummy_storage(directories):
    directory, _ = directories["fp8"]
    model = from_pretrained(directory)
    own = tables_of(model)[0]
    storage = engram.open_storage({}, (directory, own._storage.info.name), load_format="dummy")
    module = engram.NgramEmbedding(own.hasher, storage, dtype=torch.bfloat16)
    values = module(torch.tensor([[1, 2, 3]]))
    assert values.shape == own(torch.tensor([[1, 2, 3]])).shape
    assert not values.any()


@pytest.mark.case("F27")
def test_a_table_without_rows_or_scales_is_not_served(directories, tmp_path):
    directory, _ = directories["fp8"]
    info = engram.tables(directory)[0]
    hasher = engram.hasher(directory, 0)
    announced = engram.open_storage({}, info)
    module = engram.NgramEmbedding(hasher, announced, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="no rows"):
        module(torch.tensor([[1, 2, 3]]))
    unscaled = engram.open_storage({}, dataclasses.replace(info, constants={}))
    with pytest.raises(ValueError, match="weight_scale"):
        engram.NgramEmbedding(hasher, unscaled, dtype=torch.bfloat16)


def test_the_topology_reaches_the_storage(directories):
    """Of two ranks that share a table, one serves its half and leaves the rest to the other."""
    directory, _ = directories["bf16"]
    whole = tables_of(from_pretrained(directory))[0]._storage
    halves = []
    for rank in range(2):
        parallel = {"tensor_parallel_size": 2, "rank": rank}
        model = from_pretrained(directory, engram_config={}, parallel=parallel)
        halves.append(tables_of(model)[0]._storage)
    assert [half.shard.rank for half in halves] == [0, 1]
    ids = torch.arange(whole.num_rows)
    both = sum(half.lookup(ids).view(torch.uint8) for half in halves)
    assert torch.equal(both, whole.gather(ids).view(torch.uint8))


def test_a_configuration_that_cannot_be_had_is_refused_before_weights_are_read(
    directories, monkeypatch
):
    directory, _ = directories["bf16"]
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", None)
    with pytest.raises(ValueError, match="dp_shared_memory"):
        from_pretrained(directory, engram_config={"dp_shared_memory": True, "use_thp": True})
    with pytest.raises(ValueError, match="data_parallel_size"):
        from_pretrained(directory, engram_config={"dp_shared_memory": True})
