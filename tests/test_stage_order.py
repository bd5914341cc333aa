"""What a stage does when copies come late, never, or for the wrong step."""

from __future__ import annotations

import gc
import time
import tracemalloc

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import engram  # noqa: E402
from engram import slots, synth  # noqa: E402
from stage_support import SIZES, LateCopier, Opened, assert_rows, step  # noqa: E402


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    info = synth.write(tmp_path_factory.mktemp("order") / "q", "qwen", **SIZES["qwen"])
    found = Opened(info, "qwen")
    yield found
    found.tables.close()


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    info = synth.write(tmp_path_factory.mktemp("order") / "d", "deepseek", **SIZES["deepseek"])
    found = Opened(info, "deepseek")
    yield found
    found.tables.close()


def staged(opened, **options):
    options = {"max_tokens": 64, "device": "cpu", **options}
    return engram.Stage(opened.tables, opened.hashers, **options)


def wrong_steps(opened, copier, slots):
    """Steps whose copies, made late, brought other rows than those of the step."""
    steps = [step(opened.hashers[0], seed, tokens=1 + seed % 9) for seed in range(100)]
    with staged(opened, copier=copier, slots=slots) as stage:
        for arguments in steps:
            stage.prepare(*arguments)
        copier.flush()
    assert len(copier.landed) == len(steps)
    wrong = 0
    for arguments, (first, second) in zip(steps, copier.landed, strict=True):
        for place, landed in enumerate((first, second)):
            wanted = opened.expected(place, *arguments)["weight"]
            wrong += not np.array_equal(landed.numpy(), wanted)
    return wrong


@pytest.mark.case("R01")
@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("polls", [0, 3])
def test_a_slot_is_filled_again_only_after_its_copy(qwen, slots, polls):
    assert wrong_steps(qwen, LateCopier(polls), slots) == 0


@pytest.mark.case("R01")
def test_copies_that_only_claim_to_be_done_are_caught_by_the_test_above(qwen):
    copier = LateCopier()
    copier.lies = True
    assert wrong_steps(qwen, copier, 2) > 100


@pytest.mark.parametrize(("most", "copies"), [(slots.MOST_IN_PASSING, 2), (0, 4)])
def test_a_table_is_one_copy_also_of_several_planes(deepseek, monkeypatch, most, copies):
    """Planes of short rows come whole, with zeros where the step has no rows."""
    monkeypatch.setattr(slots, "MOST_IN_PASSING", most)
    h, copier = deepseek.hashers[0], LateCopier(0)
    with staged(deepseek, copier=copier) as stage:
        for seed, tokens in enumerate([64, 40, 3, 0, 7, 64, None, 1, 1, 0, 0, 20, 64, 64, None, 2]):
            if tokens is None:
                with pytest.raises(ValueError, match="-5"):
                    stage.prepare([1, -5])
                arguments = (np.empty(0, np.int64), None, None)
            else:
                arguments = step(h, seed, tokens=tokens)
                stage.prepare(*arguments)
            copier.flush()
            assert_rows(stage, deepseek, arguments)
            assert len(copier.landed[-1]) == (copies if tokens else 0)


@pytest.mark.case("R08")
def test_a_copy_that_never_ends_is_an_error_that_says_who_waits(qwen):
    copier = LateCopier(polls=10**9)
    stage = staged(qwen, copier=copier, patience=0.05)
    stage.prepare([1, 2])
    stage.prepare([3])
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"the copy from slot 0 is not done after 0\.05 s"):
        stage.prepare([4])
    assert time.monotonic() - start < 5
    copier.polls = 0
    copier.flush()
    for place in range(2):
        assert not stage.rows(place).view(torch.uint8).any(), "no rows of a step that failed"
    arguments = step(qwen.hashers[0], 1)
    stage.prepare(*arguments)
    copier.flush()
    assert_rows(stage, qwen, arguments)
    stage.close()


@pytest.mark.case("R02")
@pytest.mark.case("C11")
def test_capture_is_refused_with_the_reason_and_prefetch_is_off(qwen):
    copier = LateCopier()
    with staged(qwen, copier=copier) as stage:
        stage.prepare([1, 2])
        copier.is_capturing = True
        with pytest.raises(RuntimeError, match="while a CUDA graph is being captured"):
            stage.prepare([1, 2])
        assert stage.prefetch([1, 2]) is False
        copier.is_capturing = False
        assert copier.log == [("upload", 0)], "nothing was enqueued during the capture"
        stage.join()
        assert copier.log[-1] == ("join",)
        assert_rows(stage, qwen, (np.array([1, 2]), None, None))
        stage.release()
        assert copier.log[-1] == ("read",)


@pytest.mark.case("R03")
@pytest.mark.parametrize("family", ["qwen", "deepseek"])
def test_a_prefetch_serves_its_own_step_and_no_other(family, request):
    opened = request.getfixturevalue(family)
    h = opened.hashers[0]
    one, other = step(h, 1), step(h, 2)
    with staged(opened) as stage:
        # The same ids: served.
        assert stage.prefetch(*one)
        stage.prepare(*one)
        assert_rows(stage, opened, one)
        assert stage.stats()["prefetch_hits"] == 1
        # Other ids of the same number and count: gathered anew.
        stage.prefetch(*one)
        stage.prepare(*other)
        assert_rows(stage, opened, other)
        # One token less.
        stage.prefetch(*one)
        fewer = (one[0][:-1], np.minimum(one[1], len(one[0]) - 1), one[2])
        stage.prepare(*fewer)
        assert_rows(stage, opened, fewer)
        # Another context only.
        stage.prefetch(*one)
        changed = (one[0], one[1], other[2])
        stage.prepare(*changed)
        assert_rows(stage, opened, changed)
        counts = stage.stats()
        assert (counts["prefetch_hits"], counts["prefetch_misses"]) == (1, 3)
        # The right ids under the number of another step.
        stage.prefetch(*one, step=99)
        stage.prepare(*one)
        assert_rows(stage, opened, one)
        assert stage.stats()["prefetch_hits"] == 1
        stage.prepare(*one, step=99)
        assert stage.stats()["prefetch_hits"] == 2
        assert_rows(stage, opened, one)


@pytest.mark.case("R03")
def test_a_prefetch_of_a_step_that_was_skipped_is_dropped(qwen):
    with staged(qwen) as stage:
        for number in (1, 2, 3):
            stage.prefetch([number], step=number)
        stage.prepare([7], step=2)
        assert_rows(stage, qwen, (np.array([7]), None, None))
        assert list(stage._lookahead._ahead) == [3]
        stage.prepare([3])
        assert_rows(stage, qwen, (np.array([3]), None, None))
        assert stage.stats()["prefetch_hits"] == 1


def test_a_prefetch_that_fails_is_gathered_by_the_step(tmp_path):
    info = synth.write(tmp_path / "c", "qwen", **SIZES["qwen"])
    found = Opened(info, "qwen")
    with staged(found) as stage:
        arguments = step(found.hashers[0], 1)
        stage.prefetch(*arguments, deadline=0)
        stage.prepare(*arguments)
        assert_rows(stage, found, arguments)
        assert stage.stats()["prefetch_misses"] == 1
        with pytest.raises(ValueError, match="at most 64"):
            stage.prefetch(np.zeros(65, np.int64))
        stage.prefetch([1, 2])
    found.tables.close()


def away(values):
    """A tensor that is not on the host; the late copier alone knows its values."""
    tensor = torch.empty(np.shape(values), dtype=torch.int64, device="meta")
    tensor.real_values = torch.as_tensor(values)
    return tensor


def test_tokens_on_a_device_cost_one_copy_and_one_synchronisation(qwen):
    tokens, starts, context = step(qwen.hashers[0], 1, padding=4)
    copier = LateCopier()
    with staged(qwen, copier=copier) as stage:
        stage.prepare(away(tokens), starts, context)
        copier.flush()
        assert_rows(stage, qwen, (tokens, starts, context))
        assert copier.log == [("download", 1), ("upload", 0)]
        copier.log.clear()
        stage.prepare(away(tokens), away(starts), away(context))
        copier.flush()
        assert_rows(stage, qwen, (tokens, starts, context))
        assert copier.log == [("download", 3), ("upload", 1)]
        with pytest.raises(TypeError, match="int32 or int64"):
            stage.prepare(torch.empty(3, device="meta"))
        with pytest.raises(TypeError, match="on meta"):
            stage.prefetch(away(tokens))


def test_a_decode_step_allocates_no_arrays_or_tensors_after_the_first(qwen, monkeypatch):
    h = qwen.hashers[0]
    random = np.random.default_rng(5)
    tokens = random.integers(0, h.vocab_size, 32)
    starts = np.arange(33, dtype=np.int32)
    context = random.integers(0, h.vocab_size, (32, h.context_len))
    with staged(qwen) as stage:
        for _ in range(8):
            stage.prepare(tokens, starts, context)
        made = count_tensor_calls(monkeypatch)
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.take_snapshot()
            tracemalloc.reset_peak()
            held, _ = tracemalloc.get_traced_memory()
            for _ in range(50):
                stage.prepare(tokens, starts, context)
            _, peak = tracemalloc.get_traced_memory()
            after = tracemalloc.take_snapshot()
        finally:
            tracemalloc.stop()
        arrays = [tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)]
        assert not after.filter_traces(arrays).compare_to(before.filter_traces(arrays), "lineno")
        assert not made
        # In passing: less than the row ids of the step alone would take.
        assert peak - held < 32 * h.heads * 8
        # What stays allocated from step to step: nothing, bar the snapshot's own.
        own = [tracemalloc.Filter(True, "*/engram/*")]
        grown = after.filter_traces(own).compare_to(before.filter_traces(own), "lineno")
        assert sum(entry.size_diff for entry in grown) < 1024


def count_tensor_calls(monkeypatch):
    """Collects calls that make tensors or views of them."""
    made = []
    for name in ("__getitem__", "view", "reshape", "to", "clone"):
        original = getattr(torch.Tensor, name)

        def counted(self, *args, _name=name, _original=original, **kwargs):
            made.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    return made
