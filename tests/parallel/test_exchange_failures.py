"""Ranks that cannot do their part: all others hear of it, in bounded time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from process_group import Processes, check, ids_for, per_rank, reference, values

BAD_IDS = [
    (np.array([[0, 1], [101, 2]]), "IndexError", "row id 101 at position 2", (101, 2)),
    (np.array([5, -2]), "IndexError", "row id -2 at position 1", (-2, 1)),
    (np.array([2**64 - 1], np.uint64), "IndexError", "at position 0", (2**63 - 1, 0)),
    (np.array([0.0]), "TypeError", "integers, not float64", (None, None)),
    (np.array([True]), "TypeError", "integers, not bool", (None, None)),
    ([1, 2], "TypeError", "not list", (None, None)),
    (np.arange(40), "ValueError", "40 ids do not fit slots of slot_ids=30", (None, None)),
]


@pytest.mark.parametrize(
    ("bad", "error", "text", "place"), BAD_IDS, ids=lambda value: str(value)[:20]
)
@pytest.mark.parametrize("slot_ids", [None, 30])
def test_refused_ids_raise_everywhere_and_the_next_step_works(
    processes, bad, error, text, place, slot_ids
):
    if error == "ValueError" and slot_ids is None:
        slot_ids = 30
    good = [ids_for(8, 4, 2), ids_for(9, 3, 2)]
    each = per_rank(2, 2, [[bad, good[0]], [ids_for(7, 5, 2), good[1]]])
    outcomes = values(
        processes.run("exchange", tensor=2, data=2, each_steps=each, slot_ids=slot_ids)
    )
    for rank, (results, _) in enumerate(outcomes):
        failed, after = results
        if rank < 2:
            assert failed.error == error
            assert text in failed.text
            assert (failed.attributes["row"], failed.attributes["position"]) == place
        else:
            assert failed.error == "RuntimeError"
            assert "the ids of replica 0 were refused there" in failed.text
        np.testing.assert_array_equal(after, reference(good[rank // 2]))


def test_within_a_replica_all_ranks_refuse_the_same_ids(processes):
    each = [[np.array([101]), np.array([3])]] * 2
    for results, _ in values(
        processes.run("exchange", range(2), tensor=2, data=1, each_steps=each)
    ):
        assert results[0].error == "IndexError"
        np.testing.assert_array_equal(results[1], reference(np.array([3])))


@pytest.mark.parametrize(("tensor", "data"), [(1, 3), (3, 1), (2, 2)])
def test_a_failed_read_raises_everywhere_and_the_next_step_works(processes, tensor, data):
    size = tensor * data
    each = [[np.arange(101), np.arange(50)]] * size
    fail_at = [1 if rank == 1 else None for rank in range(size)]
    outcomes = values(
        processes.run(
            "exchange",
            range(size),
            tensor=tensor,
            data=data,
            each_steps=each,
            each_fail_at=fail_at,
        )
    )
    for rank, (results, _) in enumerate(outcomes):
        failed, after = results
        if rank == 1:
            assert failed.error == "OSError"
            assert "model.safetensors" in failed.text
        else:
            assert failed.error == "RuntimeError"
            assert "shard 1 could not read its rows" in failed.text
        np.testing.assert_array_equal(after, reference(np.arange(50)))


@pytest.mark.case("P05")
@pytest.mark.case("R08")
def test_a_rank_that_stays_away_is_named_within_the_time_limit(processes):
    steps = [np.arange(4)]
    each = [steps, steps, []]
    common = {"tensor": 1, "data": 3, "timeout": 1.0, "tag": "away", "keep": "away"}
    outcomes = processes.run("exchange", range(3), each_steps=each, **common)
    for results, _ in values(outcomes)[:2]:
        assert results[0].error == "TimeoutError"
        assert "gathering numbers of ids: waited 1 s for other ranks" in results[0].text
        assert "(ranks that did not come: 2)" in results[0].text
        assert "every rank must call on every step, also with no tokens" in results[0].text
    outcomes = processes.run("exchange", range(3), range(2), each_steps=each, **common)
    for results, _ in values(outcomes):
        assert results[0].error == "RuntimeError"
        assert "stopped working earlier" in results[0].text
        assert "ranks that did not come: 2" in results[0].text


def test_a_slow_rank_is_waited_for(processes):
    each = [[np.arange(101)]] * 2
    outcomes = processes.run(
        "exchange", range(2), tensor=2, data=1, each_steps=each, each_slow_at=[None, (1, 0.4)],
        timeout=5.0,
    )  # fmt: skip
    check(outcomes, each)


@pytest.mark.parametrize("when", ["between steps", "in a step"])
@pytest.mark.parametrize(("tensor", "data"), [(1, 3), (3, 1)])
def test_a_rank_that_dies_is_an_error_at_the_others_and_no_hang(tmp_path, when, tensor, data):
    pool = Processes(3, tmp_path)
    try:
        each = [[np.arange(101)]] * 3
        common = {"tensor": tensor, "data": data, "timeout": 20.0}
        check(pool.run("exchange", each_steps=each, **common), each)
        if when == "between steps":
            pool.processes[2].kill()
            pool.processes[2].join()
            outcomes = pool.run("exchange", range(3), range(2), each_steps=each, **common)
        else:
            outcomes = pool.run("exchange", each_steps=each, each_die_at=[None, None, 1], **common)
            assert outcomes.pop().error == "died"
        for results, _ in values(outcomes):
            assert results[0].error == "RuntimeError"
            assert "another rank died" in results[0].text
    finally:
        pool.close()


@pytest.mark.parametrize("when", ["between steps", "in a step"])
def test_a_death_in_another_group_is_passed_on(tmp_path, when):
    # Rank 0 shares no group with rank 3; it would wait for rank 1, which lost contact with rank 3.
    pool = Processes(4, tmp_path)
    try:
        each = [[np.arange(101)]] * 4
        common = {"tensor": 2, "data": 2, "timeout": 25.0}
        check(pool.run("exchange", each_steps=each, **common), each)
        if when == "between steps":
            pool.processes[3].kill()
            pool.processes[3].join()
            outcomes = pool.run("exchange", None, range(3), each_steps=each, **common)
        else:
            outcomes = pool.run("exchange", each_steps=each, each_die_at=[None] * 3 + [1], **common)
            assert outcomes.pop().error == "died"
        for rank, (results, _) in enumerate(values(outcomes)):
            assert results[0].error == "RuntimeError"
            assert "another rank died" in results[0].text
            assert ("a peer gave up: rank 1" in results[0].text) is (rank == 0)
    finally:
        pool.close()


def test_a_rank_that_stays_away_is_named_in_groups_without_it(processes):
    steps = [np.arange(4)]
    outcomes = processes.run(
        "exchange",
        tensor=2,
        data=2,
        each_steps=[steps] * 3 + [[]],
        each_timeout=[4, 1, 4, 4],
        tag="far",
    )
    rank_0, rank_1 = (outcome[0][0] for outcome in values(outcomes)[:2])
    assert rank_1.error == "TimeoutError"
    assert rank_0.error == "RuntimeError"
    for outcome in (rank_0, rank_1):
        assert "(ranks that did not come: 3)" in outcome.text
    assert "a peer gave up: rank 1" in rank_0.text


BACKENDS = {
    "nccl": {"cuda": "nccl"},
    "cuda:nccl": {"cuda": "nccl"},
    "cpu:gloo,cuda:nccl": {"cpu": "gloo", "cuda": "nccl"},
    "cpu:gloo,cuda:gloo": {"cpu": "gloo", "cuda": "gloo"},
    "": None,
}


@pytest.mark.parametrize("described", BACKENDS)
def test_tensors_are_carried_to_where_a_backend_takes_them(described, monkeypatch):
    """With `meta` in the place of a device."""
    from engram import collective

    monkeypatch.setattr(collective.distributed, "get_backend_config", lambda group: described)
    monkeypatch.setattr(collective, "_current_device", lambda: torch.device("meta"))
    assert collective._backends(object()) == BACKENDS[described]
    ids = torch.arange(3)
    there = collective.carried(ids, object())
    if BACKENDS[described] == {"cuda": "nccl"}:
        assert there.device.type == "meta"
    else:
        assert there is ids


def test_groups_that_torch_does_not_know_are_taken_as_they_are():
    from engram import collective

    ids = torch.arange(3)
    assert collective.carried(ids, object()) is ids
