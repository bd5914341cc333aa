"""Graphs that are launched before their rows are there, on a device that is a thread."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import engram  # noqa: E402
from engram import _notices, late, synth  # noqa: E402
from late_support import (  # noqa: E402
    ROOM,
    Device,
    Graph,
    Server,
    check_a_launch_that_nobody_fills,
    check_a_step_that_fails,
    check_many_steps,
    steps_of,
)
from stage_support import SIZES, Opened, step  # noqa: E402


@pytest.fixture(scope="module", params=SIZES)
def opened(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("late") / request.param
    found = Opened(synth.write(directory, request.param, **SIZES[request.param]), request.param)
    yield found
    found.tables.close()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    info = synth.write(tmp_path_factory.mktemp("late") / "q", "qwen", **SIZES["qwen"])
    found = Opened(info, "qwen")
    yield found
    found.tables.close()


@pytest.fixture
def device():
    made = Device()
    yield made
    made.stop()


@pytest.mark.case("C11")
def test_a_graph_waits_for_its_rows(opened, device):
    with Server(opened, device) as server:
        check_many_steps(server, 60)
        assert device.waited >= 6


def right_steps(opened, device, count=12):
    """How many of many steps, launched as fast as they can be, read their own rows."""
    steps = steps_of(opened, count, first=1)
    with Server(opened, device) as server:
        for arguments in steps:
            server.run(arguments)
        assert device.idle()
        return sum(map(server.right, server.seen, steps))


@pytest.mark.case("R01")
def test_rows_stay_until_the_graph_has_fetched_them(opened):
    device = Device(slow=0.005)
    assert right_steps(opened, device) == 12
    device.stop()


@pytest.mark.case("R01")
def test_a_word_given_back_before_the_copy_is_caught_by_the_test_above(qwen):
    device = Device(slow=0.005, early=True)
    assert right_steps(qwen, device) < 6
    device.stop()


def test_a_step_that_fails_runs_on_zeros_and_raises_afterwards(opened, device):
    with Server(opened, device) as server:
        check_a_step_that_fails(server)


def test_a_failed_read_fails_its_step_only(tmp_path, device):
    info = synth.write(tmp_path / "c", "qwen", **SIZES["qwen"])
    found = Opened(info, "qwen")
    found.tables.close()
    found.tables = engram.TableSet(info.directory, io="pread")
    path = Path(next(iter(found.tables.gathers.values())).files[0])
    good, bad = steps_of(found, 2, first=3)
    with Server(found, device) as server:
        server.run(good)
        whole = path.read_bytes()
        os.truncate(path, 4096)
        with pytest.raises(OSError, match="cut to 4096 bytes"):
            server.run(bad)
        with path.open("r+b") as file:
            file.write(whole)
        for gather in found.tables.gathers.values():
            gather.reopen()
        server.run(good)
        assert device.idle()
        assert [server.right(seen, good) for seen in server.seen] == [True, False, True]
        assert server.zeros(server.seen[1])
    found.tables.close()


def test_an_error_that_nobody_asked_for_is_raised_by_the_next_launch(qwen, device):
    (good,) = steps_of(qwen, 1, first=3)
    with Server(qwen, device) as server:
        server.launch()
        server.late.fill([-7])
        with pytest.raises(ValueError, match="-7"):
            server.launch()
        server.run(good)
        assert device.idle()
        assert len(server.seen) == 2, "the launch that raised launched nothing"
        assert server.right(server.seen[1], good)


def test_calls_out_of_order_are_refused(qwen, device):
    (good,) = steps_of(qwen, 1, first=3)
    with Server(qwen, device) as server:
        with pytest.raises(RuntimeError, match="fill without a launch"):
            server.late.fill([1])
        server.launch()
        with pytest.raises(RuntimeError, match="the launch before has no rows"):
            server.launch()
        with pytest.raises(RuntimeError, match="while a graph waits for its rows"):
            server.stage.prepare([1])
        assert server.stage.prefetch([1]), "which asks nothing of the device"
        away = torch.empty(3, dtype=torch.int64, device="meta")
        assert server.late.fill(away) == 0
        with pytest.raises(TypeError, match="on the host, not on meta"):
            server.late.finish()
        server.launch()
        with pytest.raises(RuntimeError, match="fill was not called"):
            server.late.finish()
        server.run(good)
        assert device.idle()
        assert [server.right(seen, good) for seen in server.seen] == [False, False, True]


@pytest.mark.case("R08")
def test_a_launch_that_nobody_fills_goes_on_by_itself(qwen, device):
    with Server(qwen, device, patience=0.1) as server:
        check_a_launch_that_nobody_fills(server)


@pytest.mark.case("R08")
@pytest.mark.parametrize("writes", [False, True])
def test_a_gather_that_hangs_holds_nothing_up(qwen, monkeypatch, writes):
    """Its graph reads zeros: neither the rows of the step before, nor its own while they arrive."""
    good, other = steps_of(qwen, 2, first=3)
    device = Device(slow=0.01)
    with Server(qwen, device, patience=0.1) as server:
        release, native = threading.Event(), server.late._gathered.native

        class Hanging:
            def run(self, *arguments):
                while not release.wait(0.001):
                    if writes:
                        native.run(*arguments)
                return native.run(*arguments)

        server.run(other)
        assert device.idle()
        monkeypatch.setattr(server.late._gathered, "native", Hanging())
        server.launch()
        counts = []
        filler = threading.Thread(
            target=lambda: counts.append(server.late.fill(*good)), daemon=True
        )
        filler.start()
        assert device.idle(), "the graph goes on"
        assert not counts
        assert server.right(server.seen[0], other)
        assert server.zeros(server.seen[1])
        release.set()
        filler.join(20)
        assert counts == [0]
        with pytest.raises(TimeoutError, match="the gather did not end"):
            server.late.finish()
        for _ in range(2):
            server.run(good)
        assert device.idle()
        assert all(server.right(seen, good) for seen in server.seen[2:])
        assert len(server.seen) == 4
    device.stop()


@pytest.mark.case("R08")
def test_a_graph_that_never_fetches_its_rows_ends_in_an_error(qwen, device):
    (good,) = steps_of(qwen, 1, first=3)
    server = Server(qwen, device, patience=0.1)
    hanging = threading.Event()
    device.queue.put(hanging.wait)
    server.run(good)
    with pytest.raises(TimeoutError, match=r"has not fetched its rows after 0\.1 s"):
        server.run(good)
    begun = time.monotonic()
    with pytest.warns(UserWarning, match="its memory is kept"):
        server.stage.close()
    assert time.monotonic() - begun < 5
    assert server.late in late._watch, "it and its memory stay"
    hanging.set()
    assert device.idle(), "the second graph got its zeros from the watch"
    assert server.right(server.seen[0], good)
    assert server.zeros(server.seen[1])
    server.late.close()
    assert server.late not in late._watch


@pytest.mark.parametrize("closed_by", ["late", "stage", "exit", "exception"])
def test_closing_lets_a_waiting_graph_go_on(qwen, device, closed_by):
    server = Server(qwen, device)
    (good,) = steps_of(qwen, 1, first=3)
    server.run(good)
    server.launch()
    assert not device.idle(0.005)
    if closed_by == "late":
        server.late.close()
    elif closed_by == "stage":
        server.stage.close()
    elif closed_by == "exit":
        late._watch.release()
    else:
        with pytest.raises(ZeroDivisionError), server.stage:
            server.late.launch(server.graph.replay) if not server.late.pending else 1 / 0
    assert device.idle()
    assert server.zeros(server.seen[1])
    assert server.late not in late._watch
    for call in (server.launch, lambda: server.late.fill([1]), server.late.wait):
        with pytest.raises(ValueError, match="closed"):
            call()
    server.late.close()
    server.stage.close()


def test_closing_while_rows_are_gathered(qwen, device, monkeypatch):
    good, other = steps_of(qwen, 2, first=3)
    server = Server(qwen, device)
    server.run(other)
    assert device.idle()
    begun, release, native = threading.Event(), threading.Event(), server.late._gathered.native

    class Slow:
        def run(self, *arguments):
            begun.set()
            release.wait(20)
            return native.run(*arguments)

    monkeypatch.setattr(server.late._gathered, "native", Slow())
    server.launch()
    filler = threading.Thread(target=server.late.fill, args=good, daemon=True)
    filler.start()
    assert begun.wait(20)
    server.late.close()
    assert device.idle()
    assert server.zeros(server.seen[1]), "not the rows of the step before"
    release.set()
    filler.join(20)
    assert server.late._word.get() == 0, "no rows are left for a graph that is not to come"
    server.stage.close()


def test_interrupts_are_raised_at_once_and_hold_nothing_up(qwen, device, monkeypatch):
    good, other = steps_of(qwen, 2, first=3)
    with Server(qwen, device) as server:
        native = server.late._gathered.native

        class Interrupted:
            def run(self, *arguments):
                raise KeyboardInterrupt

        monkeypatch.setattr(server.late._gathered, "native", Interrupted())
        server.launch()
        with pytest.raises(KeyboardInterrupt):
            server.late.fill(*good)
        assert device.idle()
        assert server.zeros(server.seen[0])
        monkeypatch.setattr(server.late._gathered, "native", native)
        server.late.finish()
        server.run(good)
        assert device.idle()
        assert server.right(server.seen[1], good)

        def refused():
            raise RuntimeError("the driver refused")

        with pytest.raises(RuntimeError, match="the driver refused"):
            server.late.launch(refused)
        assert not server.late.pending
        server.run(good)
        assert device.idle()
        assert server.right(server.seen[2], good)

        def filled_then_refused():
            assert server.late.fill(*other) == other[1][-1]
            raise RuntimeError("the driver refused")

        with pytest.raises(RuntimeError, match="the driver refused"):
            server.late.launch(filled_then_refused)
        server.run(good)
        assert device.idle()
        assert server.right(server.seen[3], good), "not the rows of the launch that was not"

        def interrupted():
            server.graph.replay()
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            server.late.launch(interrupted)
        assert device.idle()
        with pytest.raises(ValueError, match="a launch was interrupted"):
            server.launch()


@pytest.mark.case("R02")
@pytest.mark.case("C11")
def test_what_belongs_outside_of_a_capture(qwen, device):
    with Server(qwen, device) as server:
        work = len(server.graph.work)
        assert work == 4, "wait, copy, reset, forward"
        server.late.wait()
        assert device.idle(), "a run that warms up waits for nothing"
        with Graph(device):
            with pytest.raises(RuntimeError, match="being captured"):
                server.stage.prepare([1])
            with pytest.raises(RuntimeError, match="being captured"):
                server.stage.late()
        with pytest.raises(RuntimeError, match=r"call wait\(\) in its capture"):
            server.stage.late(driver=device).launch(server.replay)
        for wrong, error in ((0, ValueError), (65, ValueError), (1.5, TypeError)):
            with pytest.raises(error):
                server.stage.late(wrong)
        held = server.stage.rows(0)
        held.data = torch.zeros_like(held)
        with Graph(device), pytest.raises(RuntimeError, match="was replaced"):
            server.late.wait()


def test_steps_prepared_and_late_take_turns(qwen, device):
    with Server(qwen, device) as server:
        long, short = step(qwen.hashers[0], 1, tokens=40), step(qwen.hashers[0], 2, tokens=2)
        (good,) = steps_of(qwen, 1, first=3)
        server.stage.prepare(*long)
        device.log.clear()
        server.stage.release()
        server.run(good)
        assert device.log == ["read", "reread"], "the next copy waits for the graph"
        assert device.idle()
        assert server.right(server.seen[0], good)
        behind = server.seen[0][0, "weight"][ROOM:40]
        assert np.array_equal(behind, qwen.expected(0, *long)["weight"][ROOM:]), "left as it was"
        server.stage.prepare(*short)
        assert device.idle()
        server.forward()
        wanted = qwen.expected(0, *short)["weight"]
        assert np.array_equal(server.seen[1][0, "weight"][:2], wanted)
        assert not server.seen[1][0, "weight"][2:].any()
        server.run(good)
        server.stage.prepare(*short)
        assert device.idle()
        server.forward()
        assert not server.seen[3][0, "weight"][2:].any()


def test_where_graphs_cannot_wait_they_are_launched_with_their_rows(qwen, caplog, monkeypatch):
    monkeypatch.setattr(_notices, "_said", set())
    device = Device(why_not="the package cuda-bindings is not installed")
    good, other = steps_of(qwen, 2, first=3)
    with caplog.at_level(logging.WARNING, "engram"), Server(qwen, device) as server:
        assert not server.late.waits
        assert server.late.reason == "the package cuda-bindings is not installed"
        assert "cuda-bindings is not installed" in repr(server.late)
        assert len(server.graph.work) == 1, "nothing but the forward"
        server.launch()
        assert device.idle()
        assert not server.seen, "kept back"
        assert server.late.fill(*good) == good[1][-1]
        server.late.finish()
        with pytest.raises(ValueError, match="-5"):
            server.run(([-5],))
        with pytest.raises(ValueError, match=f"17 tokens; at most {ROOM} fit"):
            server.run(step(qwen.hashers[0], 1, tokens=17))
        server.launch()
        with pytest.raises(RuntimeError, match="fill was not called"):
            server.late.finish()
        server.run(other)
        server.stage.late(3, driver=device)
        assert device.idle()
        assert server.right(server.seen[0], good)
        assert all(server.zeros(seen) for seen in server.seen[1:4])
        assert server.right(server.seen[4], other)
        assert len(server.seen) == 5
    assert [record.message for record in caplog.records] == [
        "graphs are launched after their rows are there, not before: the package cuda-bindings is "
        "not installed"
    ]
    device.stop()


def test_a_stage_on_the_host_says_that_there_are_no_graphs(qwen):
    with engram.Stage(qwen.tables, qwen.hashers, max_tokens=8, device="cpu") as stage:
        made = stage.late()
        assert made.tokens == 8
        assert "no graphs" in made.reason
        seen = []
        (tokens, starts, context) = step(qwen.hashers[0], 3, tokens=5)
        made.run(lambda: seen.append(stage.rows(0).clone()), tokens, starts, context)
        held = seen[0].view(torch.uint8).reshape(8, -1).numpy()
        assert np.array_equal(held[:5], qwen.expected(0, tokens, starts, context)["weight"])


def test_the_memory_of_a_late_step_counts(qwen, device):
    with Server(qwen, device) as server:
        before = server.stage.stats()["host_bytes"]
        server.stage.late(64, driver=device)
        assert server.stage.stats()["host_bytes"] > before


def test_the_watch_ends_when_there_is_nothing_to_watch(qwen, device):
    with Server(qwen, device, patience=0.1):
        assert late._watch._thread is not None
    limit = time.monotonic() + 20
    while late._watch._thread is not None and time.monotonic() < limit:
        time.sleep(0.01)
    assert late._watch._thread is None
