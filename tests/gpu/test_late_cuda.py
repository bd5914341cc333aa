"""Graphs that wait on a CUDA device for rows that the host brings after their launch."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from engram import late, synth
from late_support import (
    LONG,
    ROOM,
    BaseServer,
    check_a_launch_that_nobody_fills,
    check_a_step_that_fails,
    check_many_steps,
    planes_of,
    steps_of,
)
from stage_support import SIZES, Opened

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA does not answer")


class CudaServer(BaseServer):
    """Everything is allocated beforehand: an allocation would wait for the graph that waits."""

    def __init__(self, opened, patience=LONG, steps=8):
        super().__init__(opened, device="cuda", patience=patience)
        self.late = self.stage.late(ROOM)
        if not self.late.waits:
            reason = self.late.reason
            self.stage.close()
            pytest.skip(f"graphs cannot wait on this device: {reason}")
        rows = {key: plane[:ROOM] for key, plane in planes_of(self.stage)}
        self.read = {key: torch.empty_like(plane) for key, plane in rows.items()}
        self.kept = [
            {key: torch.empty_like(plane) for key, plane in rows.items()} for _ in range(steps)
        ]
        self.replays = 0
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.forward(rows)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.forward(rows)

    def forward(self, rows):
        self.late.wait()
        for key, plane in rows.items():
            self.read[key].copy_(plane)

    def replay(self):
        self.graph.replay()
        for key, plane in self.read.items():
            self.kept[self.replays][key].copy_(plane)
        self.replays += 1

    @property
    def seen(self):
        assert self.idle()
        return [
            {key: plane.cpu().numpy() for key, plane in kept.items()}
            for kept in self.kept[: self.replays]
        ]

    def idle(self, seconds=LONG):
        done = torch.cuda.Event()
        done.record()
        limit = time.monotonic() + seconds
        while not done.query():
            if time.monotonic() > limit:
                return False
            time.sleep(1e-4)
        return True


@pytest.fixture(scope="module", params=SIZES)
def opened(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("late") / request.param
    found = Opened(synth.write(directory, request.param, **SIZES[request.param]), request.param)
    yield found
    found.tables.close()


@pytest.mark.case("C11")
def test_a_thousand_graphs_wait_for_their_rows(opened):
    with CudaServer(opened, steps=1000) as server:
        check_many_steps(server, 1000)


def test_a_step_that_fails_runs_on_zeros_and_raises_afterwards(opened):
    with CudaServer(opened) as server:
        check_a_step_that_fails(server)


@pytest.mark.case("R08")
def test_a_launch_that_nobody_fills_goes_on_by_itself(opened):
    with CudaServer(opened, patience=0.5) as server:
        check_a_launch_that_nobody_fills(server)


@pytest.mark.parametrize("closed_by", ["stage", "exit"])
def test_closing_lets_a_waiting_graph_go_on(opened, closed_by):
    server = CudaServer(opened)
    server.run(steps_of(opened, 1, first=3)[0])
    server.launch()
    assert not server.idle(0.01)
    server.stage.close() if closed_by == "stage" else late._watch.release()
    assert server.idle()
    assert server.zeros(server.seen[1])
    server.stage.close()


def test_two_graphs_of_one_stage_take_turns(opened):
    with CudaServer(opened) as one:
        good, other = steps_of(opened, 2, first=3)
        small = one.stage.late(4)
        kept = torch.empty_like(next(planes_of(one.stage))[1][:4])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            small.wait()
            kept.copy_(next(planes_of(one.stage))[1][:4])
        one.run(good)
        small.run(graph.replay, [1, 2, 3])
        one.run(other)
        assert one.idle()
        assert one.right(one.seen[0], good)
        assert one.right(one.seen[1], other)
        (key, _) = next(planes_of(one.stage))
        wanted = opened.expected(key[0], [1, 2, 3])[key[1]]
        assert (kept.cpu().numpy()[:3] == wanted).all()
        assert not kept[3].any()
