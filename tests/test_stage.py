"""The step on fixed buffers: right rows at constant addresses, whatever came before."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import engram  # noqa: E402
from engram import synth  # noqa: E402
from stage_support import SIZES, LateCopier, Opened, addresses, assert_rows, step  # noqa: E402


@pytest.fixture(scope="module", params=SIZES)
def opened(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("stage") / request.param
    info = synth.write(directory, request.param, **SIZES[request.param])
    found = Opened(info, request.param)
    yield found
    found.tables.close()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    info = synth.write(tmp_path_factory.mktemp("stage") / "q", "qwen", **SIZES["qwen"])
    found = Opened(info, "qwen")
    yield found
    found.tables.close()


def staged(opened, **options):
    options = {"max_tokens": 64, "device": "cpu", **options}
    return engram.Stage(opened.tables, opened.hashers, **options)


@pytest.mark.case("C11")
def test_a_thousand_steps_of_all_sizes_at_constant_addresses(opened):
    with staged(opened) as stage:
        places = addresses(stage)
        for seed in range(1000):
            tokens = (seed * 7) % 65
            if seed % 20 and tokens > 8:
                tokens %= 8
            arguments = step(opened.hashers[0], seed, tokens, padding=seed % 3)
            assert stage.prepare(*arguments) == tokens == stage.tokens
            if seed % 20 == 0:
                assert_rows(stage, opened, arguments)
        assert addresses(stage) == places
        assert stage.stats()["steps"] == 1000


def test_rows_have_the_stored_type_and_full_shape(opened):
    with staged(opened) as stage:
        for place, name in enumerate(stage.tables):
            gather, heads = stage.gather_of(name), stage.hasher_of(place).heads
            rows = stage.rows(name)
            assert rows is stage.rows(place)
            for plane in gather.planes:
                held = rows if isinstance(rows, torch.Tensor) else rows[plane.name]
                assert held.shape == (64, heads, *plane.row_shape)
                assert held.element_size() * held[0, 0].numel() == plane.row_bytes


@pytest.mark.parametrize("shape", [(3, 5), (15,)])
def test_batches_lists_and_torch_tokens(opened, shape):
    with staged(opened) as stage:
        tokens = np.arange(15).reshape(shape)
        starts = [0, 5, 10, 15]
        flat = (tokens.reshape(-1), starts, None)
        given = None if tokens.ndim == 2 else starts
        for form in (tokens, tokens.tolist(), torch.from_numpy(tokens), tokens.astype(np.int16)):
            stage.prepare([1])
            assert stage.prepare(form, given) == 15
            assert_rows(stage, opened, flat)


@pytest.mark.case("D13")
def test_an_empty_step_gives_zeros(opened):
    with staged(opened) as stage:
        assert stage.prepare([]) == 0
        arguments = step(opened.hashers[0], 1)
        stage.prepare(*arguments)
        assert stage.prepare(np.empty(0, np.int64), [0, 0, 0]) == 0
        for place in range(2):
            rows = stage.rows(place)
            plane = rows if isinstance(rows, torch.Tensor) else rows.weight
            assert not plane.view(torch.uint8).any()
        stage.prepare(*arguments)
        assert_rows(stage, opened, arguments)


@pytest.mark.case("D09")
def test_padding_is_zeros_and_real_rows_are_unaffected(opened):
    with staged(opened) as stage:
        tokens, starts, context = step(opened.hashers[0], 2, tokens=5, requests=5)
        stage.prepare(*step(opened.hashers[0], 3, tokens=40))
        # Five requests padded to eight: empty requests with junk contexts, junk tokens behind.
        padded = np.concatenate([tokens, [-1, 10**12, 7]])
        longer = np.concatenate([starts, [5, 5, 5]])
        junk = np.concatenate([context, np.full((3, context.shape[1]), -77)])
        assert stage.prepare(padded, longer, junk) == 5
        assert_rows(stage, opened, (tokens, starts, context))


@pytest.mark.case("D07")
def test_a_placeholder_fails_the_step_and_leaves_zeros(opened):
    with staged(opened) as stage:
        good = step(opened.hashers[0], 4)
        stage.prepare(*good)
        tokens, starts, context = step(opened.hashers[0], 5)
        context[np.flatnonzero(np.diff(starts))[0], -1] = -1
        with pytest.raises(ValueError, match="-1"):
            stage.prepare(tokens, starts, context)
        assert stage.tokens == 0
        assert_zeros(stage)
        stage.prepare(*good)
        assert_rows(stage, opened, good)


def assert_zeros(stage):
    for place in range(len(stage.tables)):
        rows = stage.rows(place)
        planes = [rows] if isinstance(rows, torch.Tensor) else [rows[key] for key in rows.keys()]  # noqa: SIM118
        assert not any(plane.view(torch.uint8).any() for plane in planes)
    for slot in stage._slots:
        if slot is stage._slots[stage._turn]:
            assert not np.frombuffer(slot.memory, np.uint8).any()


def test_a_step_that_is_too_long_is_refused(qwen):
    with staged(qwen, max_tokens=4) as stage:
        stage.prepare([1, 2, 3, 4])
        with pytest.raises(ValueError, match="5 tokens; at most 4"):
            stage.prepare([1, 2, 3, 4, 5])
        assert_zeros(stage)
        assert stage.prepare([1, 2, 3, 4, 5, 6], [0, 2, 4]) == 4


def test_a_failed_read_leaves_zeros_and_the_next_step_works(tmp_path):
    info = synth.write(tmp_path / "c", "qwen", **SIZES["qwen"])
    found = Opened(info, "qwen")
    found.tables.close()
    found.tables = engram.TableSet(info.directory, io="pread")
    path = Path(found.tables.gathers[next(iter(found.tables.gathers))].files[0])
    with staged(found) as stage:
        good = step(found.hashers[0], 6)
        stage.prepare(*good)
        whole = path.read_bytes()
        os.truncate(path, 4096)
        with pytest.raises(OSError, match="cut to 4096 bytes"):
            stage.prepare(*step(found.hashers[0], 7, tokens=64))
        assert_zeros(stage)
        assert stage.stats()["failed"] == 1
        with path.open("r+b") as file:
            file.write(whole)
        for gather in found.tables.gathers.values():
            gather.reopen()
        stage.prepare(*good)
        assert_rows(stage, found, good)
    found.tables.close()


@pytest.mark.case("D08")
def test_rejected_drafts_leave_no_trace(opened):
    h = opened.hashers[0]
    random = np.random.default_rng(8)
    prompt, drafts = random.integers(0, h.vocab_size, 9), random.integers(0, h.vocab_size, 4)
    following = random.integers(0, h.vocab_size, 3)
    history = engram.TokenHistory(h)
    history.start("a", prompt)
    with staged(opened) as stage:
        stage.prepare(drafts, [0, 4], history.contexts(["a"]))
        history.commit("a", drafts[:1])
        assert_rows(stage, opened, (drafts, [0, 4], history.contexts(["a"], [9])))
        stage.prepare(following, [0, 3], history.contexts(["a"]))
        kept = stage.rows(0)
        plane = kept if isinstance(kept, torch.Tensor) else kept.weight
        after = plane[:3].view(torch.uint8).clone()
        whole = np.concatenate([prompt, drafts[:1], following])
        stage.prepare(whole)
        assert torch.equal(plane[10:13].view(torch.uint8), after)


@pytest.mark.case("D17")
def test_a_new_request_in_a_slot_never_sees_the_old_one(opened):
    h = opened.hashers[0]
    history = engram.TokenHistory(h)
    with staged(opened) as stage:
        history.start(0, [5, 6, 7, 8])
        stage.prepare([9], [0, 1], history.contexts([0]))
        history.start(0)
        short = np.array([11, 12])
        stage.prepare(short, [0, 2], history.contexts([0]))
        assert_rows(stage, opened, (short, None, None))


@pytest.mark.case("R11")
def test_a_swapped_buffer_is_noticed(qwen):
    with staged(qwen) as stage:
        stage.prepare([1, 2])
        held = stage.rows(1)
        held.data = torch.zeros_like(held)
        with pytest.raises(RuntimeError, match="was replaced"):
            stage.prepare([1, 2])


@pytest.mark.case("K03")
def test_pinning_that_cannot_be_had_is_an_error(qwen):
    with pytest.raises(RuntimeError, match="leave pin away"):
        staged(qwen, pin=True)
    with staged(qwen) as stage:
        assert not stage.stats()["pinned"]


def test_wrong_arguments_are_refused(qwen, opened):
    gathers = qwen.tables.gathers
    first, second = gathers
    for options, error, message in [
        ({"max_tokens": 0}, ValueError, "max_tokens is 0"),
        ({"max_tokens": 1.5}, TypeError, "integer"),
        ({"slots": 1}, ValueError, "at least 2"),
        ({"device": "meta"}, ValueError, "CUDA device or to the CPU"),
    ]:
        with pytest.raises(error, match=message):
            staged(qwen, **options)
    for tables, hashers, error, message in [
        (gathers[first], qwen.hashers, ValueError, "1 tables, but 2 hashers"),
        (gathers, dict(zip("ab", qwen.hashers, strict=True)), ValueError, "but hashers"),
        (list(gathers.values()), qwen.hashers[::-1], ValueError, "different tables"),
        ([gathers[first]] * 2, qwen.hashers, ValueError, "two tables of one name"),
        (gathers, 7, TypeError, "hashers are"),
        ([7], qwen.hashers[:1], TypeError, "tables are"),
        (gathers[first], [7], TypeError, "hashers are"),
    ]:
        with pytest.raises(error, match=message):
            engram.Stage(tables, hashers, max_tokens=4, device="cpu")
    dead = engram.hasher(qwen.info.directory, 1, dead_id=-1)
    with pytest.raises(ValueError, match="agree in dead_id"):
        engram.Stage(gathers, [qwen.hashers[0], dead], max_tokens=4, device="cpu")
    with engram.Stage(gathers[second], qwen.hashers[1], max_tokens=4, device="cpu") as stage:
        with pytest.raises(KeyError, match="no table 1"):
            stage.rows(1)
        stage.prepare([1])
    with pytest.raises(ValueError, match="closed"):
        stage.prepare([1])


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 1)], ids=str)
def test_a_device_without_a_driver_is_explained(qwen, device, monkeypatch):
    def refuse():
        raise RuntimeError("Found no NVIDIA driver on your system.")

    monkeypatch.setattr(torch.cuda, "current_device", refuse)
    with pytest.raises(RuntimeError, match="Found no NVIDIA driver") as caught:
        staged(qwen, device=device)
    for part in ("CUDA cannot be used", 'device="cpu"', "engram doctor"):
        assert part in str(caught.value)
    assert caught.value.path is None


def test_threads_take_turns(qwen):
    h = qwen.hashers[0]
    steps = [step(h, seed) for seed in range(8)]
    with staged(qwen) as stage:
        failures = []

        def run(arguments):
            try:
                for _ in range(30):
                    stage.prepare(*arguments)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(arguments,)) for arguments in steps]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert stage.stats()["steps"] == 240


def test_late_copier_is_a_copier():
    copier = LateCopier()
    for name in ("name", "host", "capturing", "upload", "download", "read", "reread", "join"):
        assert hasattr(copier, name)
