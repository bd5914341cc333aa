"""A Qwen4-Exp model with rows from files against the same model with its tables in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "Qwen4ExpConfig"):
    pytest.skip("this transformers has no Qwen4-Exp", allow_module_level=True)

import engram  # noqa: E402
from engram.integrations.transformers import attach, from_pretrained  # noqa: E402
from model_support import (  # noqa: E402
    END,
    PROMPTS,
    SHARD,
    left_padded,
    make_directories,
    rewritten,
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


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def models(request, directories):
    """The model with rows from files, and its reference with tables in memory."""
    served, plain = directories[request.param]
    reference = transformers.AutoModelForImageTextToText.from_pretrained(plain)
    return from_pretrained(served), reference


@torch.no_grad()
def test_logits_are_identical(models):
    served, reference = models
    for row in PROMPTS:
        ids = torch.tensor([row])
        assert torch.equal(served(input_ids=ids).logits, reference(input_ids=ids).logits)
    batch = torch.randint(0, 260, (3, 40), generator=torch.Generator().manual_seed(1))
    batch[:, ::7] = END
    assert torch.equal(served(input_ids=batch).logits, reference(input_ids=batch).logits)


@torch.no_grad()
def test_the_table_matters(models):
    """Or else identical logits would say nothing about rows."""
    served, _ = models
    ids = torch.tensor([PROMPTS[0]])
    whole = served(input_ids=ids).logits
    kept = [module._storage for module in tables_of(served)]
    try:
        for module in tables_of(served):
            module._storage = None
        assert not torch.equal(served(input_ids=ids).logits, whole)
    finally:
        for module, storage in zip(tables_of(served), kept, strict=True):
            module._storage = storage
    assert torch.equal(served(input_ids=ids).logits, whole)


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[1], [2, 3], [1, 2, 3, 9], [16]])
def test_chunked_input_is_identical(models, cuts):
    ids = torch.tensor(PROMPTS[2:3] * 2)
    ids[1, 10:] = ids[0, 5:-5]
    found = []
    for model in models:
        cache, logits = None, []
        for piece in torch.tensor_split(ids, cuts, dim=1):
            out = model(input_ids=piece, cache=cache, use_cache=True)
            cache = out.cache
            logits.append(out.logits)
        found.append(torch.cat(logits, 1))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_cache": False},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "temperature": 1.3},
        {"prefill_chunk_size": 5},
    ],
    ids=lambda options: "-".join(options) or "greedy",
)
def test_generations_are_identical(models, options):
    found = []
    for model in models:
        torch.manual_seed(3)
        given = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, **options}
        inputs = (
            left_padded(PROMPTS, pad=7)
            if "prefill_chunk_size" not in options
            else {"input_ids": torch.tensor(PROMPTS[:1])}
        )
        out = model.generate(**inputs, **given, return_dict_in_generate=True, output_logits=True)
        found.append((out.sequences, torch.stack(out.logits)))
    (served, served_logits), (reference, reference_logits) = found
    assert torch.equal(served, reference)
    assert torch.equal(served_logits, reference_logits)
    assert served.shape[1] > max(map(len, PROMPTS[:1]))


def test_the_module_holds_no_table_and_casts_leave_it_alone(directories):
    path, _ = directories["bf16"]
    model = from_pretrained(path)
    reference = transformers.AutoModelForImageTextToText.from_pretrained(path)
    assert type(model) is type(reference)
    own = {name for name in reference.state_dict() if "ple_embedding" in name}
    assert set(model.state_dict()) == set(reference.state_dict()) - own
    rest = {name: value for name, value in reference.state_dict().items() if name not in own}
    assert all(torch.equal(value, rest[name]) for name, value in model.state_dict().items())
    for module in tables_of(model):
        assert not list(module.parameters())
        assert not list(module.buffers())
    model.to(torch.float32)
    assert tables_of(model)[0](torch.tensor([[1, 2]])).dtype == torch.bfloat16


@torch.no_grad()
def test_other_dtypes(directories):
    path, _ = directories["bf16"]
    ids = torch.tensor(PROMPTS[:1])
    served = from_pretrained(path, dtype=torch.float32)
    reference = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    assert torch.equal(served(input_ids=ids).logits, reference(input_ids=ids).logits)


@torch.no_grad()
def test_attaching_replaces_the_tables_of_a_model_in_memory(directories):
    path, _ = directories["bf16"]
    model = transformers.AutoModelForImageTextToText.from_pretrained(path)
    ids = torch.tensor(PROMPTS[:1])
    before = model(input_ids=ids).logits
    attach(model, path, engram_config={"host_file_gather": True})
    assert all(isinstance(module, engram.NgramEmbedding) for module in tables_of(model))
    assert torch.equal(model(input_ids=ids).logits, before)
    with pytest.raises(RuntimeError, match="attach once"):
        attach(model, path)
    with pytest.raises(RuntimeError, match="second table"):
        tables_of(model)[0].bind(tables_of(model)[1]._storage)
    with pytest.raises(ValueError, match="no n-gram embedding"):
        attach(torch.nn.Linear(1, 1), path)


@torch.no_grad()
@pytest.mark.case("C09")
def test_dummy_loading_serves_zeros_without_a_table(directories, tmp_path):
    path, _ = directories["bf16"]
    copy = rewritten(
        path, tmp_path / "no", lambda found: {n: t for n, t in found.items() if SHARD not in n}
    )
    model = from_pretrained(copy, load_format="dummy")
    rows = tables_of(model)[0](torch.tensor([[1, 2, 3]]))
    assert rows.shape == (1, 3, 64)
    assert not rows.any()
    reference = transformers.AutoModelForImageTextToText.from_pretrained(path)
    for module in tables_of(reference):
        module.ngram_embedding.weight.zero_()
    ids = torch.tensor(PROMPTS[:1])
    assert torch.equal(model(input_ids=ids).logits, reference(input_ids=ids).logits)


def test_what_cannot_be_served_is_refused(directories, tmp_path):
    path, _ = directories["bf16"]
    with pytest.raises(ValueError, match="load_format"):
        from_pretrained(path, load_format="other")
    with pytest.raises(FileNotFoundError, match="no such checkpoint directory"):
        from_pretrained(tmp_path / "nowhere")
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="needs a model with n-gram"):
        from_pretrained(plain)


def test_hub_names_are_downloaded(directories, monkeypatch):
    import huggingface_hub

    path, _ = directories["bf16"]
    asked = []

    def download(name, **options):
        asked.append((name, options))
        return str(path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    from_pretrained("owner/model", revision="main")
    assert asked == [("owner/model", {"revision": "main"})]


MEMORY = """
import json, pathlib, re, sys, threading
import torch, transformers
import engram
from engram.integrations.transformers import from_pretrained
torch.set_num_threads(1)
transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()

def memory(folder):
    anonymous = mapped = 0
    ours = False
    for line in open("/proc/self/smaps"):
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = folder in line
        elif line.startswith("Anonymous:"):
            anonymous += int(line.split()[1]) << 10
        elif line.startswith("Rss:") and ours:
            mapped += int(line.split()[1]) << 10
    return anonymous, mapped

path, how, small = sys.argv[1:]
plain = transformers.AutoModelForImageTextToText.from_pretrained
load = from_pretrained if how == "served" else plain
ids = torch.randint(0, 250, (2, 50), generator=torch.Generator().manual_seed(1))
# Whatever the libraries import and pool on first use is there before anything is measured.
load(small).generate(ids, max_new_tokens=2, do_sample=False)
# Pages that are cached already may be mapped by the folio, wanted or not.
engram.drop_cache(list(pathlib.Path(path).glob("*.safetensors")))

def totals():
    # Of all mappings, libraries included: quick enough to be asked again and again.
    text = open("/proc/self/smaps_rollup").read()
    rss, anonymous = (
        int(re.search(rf"{name}:\\s+(\\d+)", text)[1]) << 10 for name in ("Rss", "Anonymous")
    )
    return anonymous, rss - anonymous

before, _ = memory(path)
base = totals()
samples, over = [], threading.Event()

def watch():
    while not over.wait(0.005):
        samples.append(totals())

thread = threading.Thread(target=watch)
thread.start()
try:
    model = load(path)
    loaded = len(samples)
    out = model.generate(ids, max_new_tokens=5, do_sample=False)
finally:
    over.set()
    thread.join()
anonymous, mapped = memory(path)
most = [max(sizes) - then for sizes, then in zip(zip(*samples), base)]
peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
found = {"grown": anonymous - before, "mapped": mapped, "peak": peak, "out": out.tolist()}
found["during"] = {"loading": loaded, "generating": len(samples) - loaded, "most": most}
print(json.dumps(found))
"""


@pytest.mark.case("M02")
def test_the_process_never_holds_the_table(tmp_path, directories):
    """On a table much larger than the rest of the model, in processes of their own."""
    import safetensors

    small, _ = directories["bf16"]
    config = transformers.AutoConfig.from_pretrained(small)
    config.text_config.ngram_vocab_size_base = 200_000
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "big", max_shard_size="10MB")
    del model
    path = tmp_path / "big"
    table = rest = 0
    for file in path.glob("*.safetensors"):
        with safetensors.safe_open(file, "pt") as reader:
            for name in reader.keys():  # noqa: SIM118 - the reader is no dict
                size = reader.get_tensor(name).nbytes
                table, rest = (table + size, rest) if SHARD in name else (table, rest + size)
    assert table > 20 * rest
    found = {}
    for how in ("served", "plain"):
        result = subprocess.run(
            [sys.executable, "-c", MEMORY, str(path), how, str(small)],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        found[how] = json.loads(result.stdout)
    assert found["served"]["out"] == found["plain"]["out"]
    during = {how: found[how]["during"] for how in found}
    assert min(during["served"]["loading"], during["served"]["generating"]) > 0, during
    assert sum(during["plain"]["most"]) > table, "these samples see tables, too"
    assert all(size < table / 2 for size in during["served"]["most"]), during
    assert found["plain"]["grown"] + found["plain"]["mapped"] > table, "the measure sees tables"
    assert found["served"]["mapped"] < table / 4
    assert found["served"]["grown"] < table / 2
    saved = found["plain"]["peak"] - found["served"]["peak"]
    assert saved > table * 0.8, (found["plain"]["peak"], found["served"]["peak"], table)
    assert Path(path / "config.json").exists()
