"""The stage on a CUDA device: pinned slots, ordered copies, captured forwards."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import engram
from engram import synth
from stage_support import SIZES, Opened, addresses, assert_rows, step
from step_overhead import AIM, STAGE, excess, median_seconds, report

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA does not answer")


@pytest.fixture(scope="module", params=SIZES)
def opened(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("cuda") / request.param
    found = Opened(synth.write(directory, request.param, **SIZES[request.param]), request.param)
    yield found
    found.tables.close()


@pytest.fixture
def stage(opened):
    with engram.Stage(opened.tables, opened.hashers, max_tokens=64, device="cuda") as made:
        yield made


def test_slots_are_pinned_as_torch_sees_it(stage):
    assert stage.stats()["pinned"]
    for slot in stage._slots:
        assert torch.frombuffer(slot.memory, dtype=torch.uint8).is_pinned()


@pytest.mark.case("R01")
def test_steps_of_all_sizes_from_host_and_device(opened, stage):
    places = addresses(stage)
    for seed in range(60):
        tokens, starts, context = step(opened.hashers[0], seed, (seed * 7) % 65, padding=seed % 3)
        given = tokens
        if seed % 2:
            given = torch.from_numpy(np.maximum(tokens, 0)).cuda()
        stage.prepare(given, starts, context)
        assert_rows(stage, opened, (tokens, starts, context))
    assert addresses(stage) == places


@pytest.mark.case("R01")
def test_copies_in_flight_keep_their_slots(opened, stage):
    """Steps are enqueued without a look at the device between them."""
    steps = [step(opened.hashers[0], seed) for seed in range(40)]
    landed = []
    for arguments in steps:
        stage.prepare(*arguments)
        rows = stage.rows(0)
        landed.append((rows if isinstance(rows, torch.Tensor) else rows.weight).clone())
    torch.cuda.synchronize()
    for arguments, rows in zip(steps, landed, strict=True):
        wanted = opened.expected(0, *arguments)["weight"]
        held = rows.cpu().view(torch.uint8).reshape(64, -1).numpy()
        assert np.array_equal(held[: len(wanted)], wanted)


@pytest.mark.case("C11")
@pytest.mark.case("R02")
def test_a_thousand_replays_read_the_rows_of_their_step(opened):
    h, gather = opened.hashers[0], next(iter(opened.tables.gathers.values()))
    with engram.Stage(gather, h, max_tokens=32, device="cuda") as stage:
        module = engram.NgramEmbedding(h, dtype=torch.bfloat16)
        module.bind_stage(stage)
        tokens = torch.zeros(32, dtype=torch.int64, device="cuda")
        stage.prepare(np.zeros(32, np.int64), [0])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            module(tokens)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            values = module(tokens)
            with pytest.raises(RuntimeError, match="being captured"):
                stage.prepare([1])
            assert stage.prefetch([1]) is False
        place = values.data_ptr()
        # Compared on the device, so that no replay is followed by a synchronisation.
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        compared = 0
        for seed in range(1000):
            arguments = step(h, seed, tokens=1 + seed % 32)
            stage.prepare(*arguments)
            graph.replay()
            ids = torch.from_numpy(h.ids(*arguments))
            wanted = engram.dequantize(gather.gather(ids), gather, "bfloat16").flatten(-2)
            wanted = torch.nn.functional.pad(wanted, (0, 0, 0, 32 - len(ids)))
            wanted = wanted.pin_memory().cuda(non_blocking=True).view(torch.int16)
            wrong += (values.view(torch.int16) != wanted).sum()
            compared += len(ids)
        assert compared == sum(1 + seed % 32 for seed in range(1000))
        assert wrong.item() == 0
        assert values.data_ptr() == place
        # What is compared can differ.
        stage.prepare(*step(h, 1, tokens=32))
        graph.replay()
        assert (values.view(torch.int16) != wanted).any()


def test_a_failed_step_leaves_zeros_and_the_next_works(opened, stage):
    good = step(opened.hashers[0], 1)
    stage.prepare(*good)
    with pytest.raises(ValueError, match="-5"):
        stage.prepare([1, -5])
    torch.cuda.synchronize()
    rows = stage.rows(0)
    weight = rows if isinstance(rows, torch.Tensor) else rows.weight
    assert not weight.view(torch.uint8).any()
    stage.prepare(*good)
    assert_rows(stage, opened, good)


def test_copies_overlap_work_that_reads_no_rows(opened, stage):
    good = step(opened.hashers[0], 2)
    stage.prepare(*good)
    torch.cuda.synchronize()
    stage.release()
    torch.cuda._sleep(2_000_000_000)
    stage.prepare(*good)
    fence = stage._slots[(stage._turn - 1) % 2]._fence
    patience = time.monotonic() + 5
    while not fence.done() and time.monotonic() < patience:
        pass
    assert fence.done()
    assert not torch.cuda.current_stream().query(), "the copy was done before the other work"
    torch.cuda.synchronize()
    assert_rows(stage, opened, good)


def test_overhead_of_a_decode_step(tmp_path, capsys):
    info = synth.write(tmp_path / "c", "qwen", rows=200_000, dtype="fp8")
    # The best of three: others may use the processors meanwhile.
    for _ in range(3):
        found = median_seconds(info.directory, "cuda")
        first = found[STAGE][1]
        for name, (_, rows) in found.items():
            assert np.array_equal(rows, first), name
        with capsys.disabled():
            print("", *report(found), sep="\n")
        if excess(found) <= AIM:
            return
    pytest.fail(report(found)[-1])
