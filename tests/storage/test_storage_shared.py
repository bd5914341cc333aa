"""Tables that the replicas of a machine share."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoints import check_rows, some_ids
from replicas import Replicas, run

import engram


def names_in_shared_memory():
    return sorted(path.name for path in Path("/dev/shm").iterdir())


def values(outcomes):
    for rank, outcome in enumerate(outcomes):
        assert not outcome.error, f"replica {rank}: {outcome.error}: {outcome.text}"
    return [outcome.value for outcome in outcomes]


def check(info, value):
    """The rows that a replica found are those of the checkpoint."""
    table = info.tables[0]
    ids = some_ids(table.rows, 2_000, 7)
    ids[3] = -1
    planes = {}
    for plane in table.planes:
        start = sum(other.row_bytes for other in before(table, plane))
        planes[plane.name] = value["rows"][:, start : start + plane.row_bytes]
    rows = engram.Rows(**planes) if len(planes) > 1 else planes["weight"]
    check_rows(rows, table, ids)


def before(table, plane):
    return table.planes[: table.planes.index(plane)]


@pytest.mark.parametrize("variant", ["qwen-fp8", "deepseek-fp8"])
def test_replicas_map_one_copy_and_get_the_same_rows(tmp_path, checkpoint, variant):
    info = checkpoint(variant)
    table = None if variant == "qwen-fp8" else 0
    found = values(run(3, tmp_path, "share", path=info.directory, table=table))
    for value in found:
        assert value["placement"] == "shared"
        assert value["nbytes"]["shared"] >= info.tables[0].nbytes
        assert value["nbytes"]["pinned"] == 0
        assert value["fallbacks"] == []
        check(info, value)
    segments = {value["segments"][0] for value in found}
    assert len(segments) == 1, "one inode"
    assert next(iter(segments))[1] != "0"


def test_nothing_has_a_name_at_any_moment(tmp_path, checkpoint):
    before = names_in_shared_memory()
    info = checkpoint()
    with Replicas(2, tmp_path, "share", path=info.directory, slow=0.5) as replicas:
        replicas.go()
        seen = set()
        while not replicas.pipes[1].poll(0.001):
            seen.update(name for name in names_in_shared_memory() if "engram" in name)
        values(replicas.outcomes())
    assert seen == set()
    assert [name for name in names_in_shared_memory() if "engram" in name] == [
        name for name in before if "engram" in name
    ]


@pytest.mark.case("P03")
def test_readers_wait_until_the_writer_is_through(tmp_path, checkpoint):
    info = checkpoint()
    found = values(run(2, tmp_path, "share", path=info.directory, slow=1.0))
    for value in found:
        assert value["seconds"] >= 1.0
        check(info, value)


@pytest.mark.case("P03")
def test_a_writer_that_makes_no_progress_is_named(tmp_path, checkpoint):
    info = checkpoint()
    outcomes = run(
        2, tmp_path, "share", path=info.directory, slow=3.0, topology_too={"timeout": 1.0}
    )
    assert outcomes[1].error == "TimeoutError"
    assert "replica that loads the shared table has made no progress for 1 s" in outcomes[1].text
    assert not outcomes[0].error


def test_a_writer_that_fails_says_why_everywhere(tmp_path, checkpoint):
    outcomes = run(3, tmp_path, "share", path=checkpoint().directory, fail="bad sector")
    assert outcomes[0].error == "OSError"
    for outcome in outcomes[1:]:
        assert outcome.error == "RuntimeError"
        assert "bad sector" in outcome.text


def test_a_writer_that_dies_while_loading_is_noticed_at_once(tmp_path, checkpoint):
    with Replicas(3, tmp_path, "share", path=checkpoint().directory, slow=20.0) as replicas:
        replicas.go()
        time.sleep(1.0)
        began = time.monotonic()
        replicas.kill(0)
        outcomes = replicas.outcomes()
    assert time.monotonic() - began < 2.0
    assert outcomes[0].error == "died"
    for outcome in outcomes[1:]:
        assert outcome.error == "RuntimeError"
        assert "died" in outcome.text


def test_a_replica_that_does_not_come_is_named(tmp_path, checkpoint):
    outcomes = run(
        3,
        tmp_path,
        "share",
        path=checkpoint().directory,
        each_stall=[0, 0, 3.0],
        topology_too={"timeout": 1.0},
    )
    assert [outcome.error for outcome in outcomes] == ["TimeoutError"] * 3
    for outcome in outcomes[:2]:
        assert re.search(r"waited 1 s for replica (\d, )*2 \(hello\)", outcome.text)
    assert "waited 1 s for replica 0 (hello)" in outcomes[2].text


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_replica_that_failed_once_is_met_at_the_next_attempt(tmp_path, checkpoint, victim):
    """It fails before it has met anybody, so the others wait in vain once, or twice."""
    info = checkpoint()
    outcomes = run(
        3,
        tmp_path,
        "retry",
        path=info.directory,
        each_fail_first=[rank == victim for rank in range(3)],
        topology_too={"timeout": 1.0},
    )
    found = values(outcomes)
    for rank, value in enumerate(found):
        assert value["placement"] == "shared"
        assert value["errors"][0] == ("FileNotFoundError" if rank == victim else "TimeoutError")
        check(info, value)
    assert len({value["segments"][0] for value in found}) == 1


def test_the_same_table_is_opened_and_shared_twice(tmp_path, checkpoint):
    info = checkpoint()
    for value in values(run(2, tmp_path, "share_twice", path=info.directory)):
        check(info, value)
        assert len(value["segments"]) == 2


@pytest.mark.case("P02")
@pytest.mark.parametrize("required", [False, True])
def test_an_offer_that_leads_elsewhere_is_no_segment(tmp_path, checkpoint, required):
    """As where process numbers mean other processes: the token does not match."""
    info = checkpoint()
    config = {"dp_shared_memory": True} if required else {}
    outcomes = run(
        2,
        tmp_path,
        "share",
        path=info.directory,
        config=config,
        each_offer=[{"token": "00" * 16}, None],
    )
    for outcome in outcomes:
        if required:
            assert outcome.error == "RuntimeError"
            assert "dp_shared_memory=True cannot be met" in outcome.text
            assert "is not the segment it offered" in outcome.text
        else:
            check(info, values([outcome])[0])
            assert outcome.value["placement"] == "pinned"
            assert outcome.value["nbytes"]["shared"] == 0
            assert len(outcome.warned) == 1
            assert "each holds its own copy" in outcome.warned[0]


@pytest.mark.case("P02")
def test_a_process_out_of_sight_shares_nothing(tmp_path, checkpoint):
    info = checkpoint()
    outcomes = run(2, tmp_path, "share", path=info.directory, each_offer=[{"pid": 1 << 22}, None])
    for value in values(outcomes):
        assert value["placement"] == "pinned"
        check(info, value)


@pytest.mark.case("P13")
@pytest.mark.parametrize("required", [False, True])
def test_replicas_on_two_machines_hold_tables_of_their_own(tmp_path, checkpoint, required):
    info = checkpoint()
    outcomes = run(
        2,
        tmp_path,
        "share",
        path=info.directory,
        config={"dp_shared_memory": True} if required else {},
        each_topology_too=[{"host": "one"}, {"host": "two"}],
    )
    for outcome in outcomes:
        if required:
            assert outcome.error == "RuntimeError"
            assert "run on 2 machines (one, two)" in outcome.text
        else:
            check(info, values([outcome])[0])
            assert outcome.value["placement"] == "pinned"
            assert "run on 2 machines (one, two)" in outcome.warned[0]


@pytest.mark.case("P13")
def test_a_machine_without_the_files_is_told_which(tmp_path, checkpoint):
    info = checkpoint()
    here = engram.synth.write(tmp_path / "half", "qwen", rows=5_000, dtype="fp8")
    missing = here.files[1]
    missing.unlink()
    outcomes = run(
        2,
        tmp_path,
        "share",
        each_path=[info.directory, here.directory],
        each_topology_too=[{"timeout": 1.0}, {}],
    )
    assert outcomes[1].error == "FileNotFoundError"
    assert str(missing) in outcomes[1].text
    assert outcomes[0].error == "TimeoutError"


@pytest.mark.case("M17")
@pytest.mark.parametrize("required", [False, True])
def test_without_shared_memory_each_replica_has_a_table(tmp_path, checkpoint, required):
    info = checkpoint()
    missing = tmp_path / "missing"
    outcomes = run(
        2,
        tmp_path,
        "share",
        path=info.directory,
        config={"dp_shared_memory": True} if required else {},
        shared_memory=missing,
    )
    for outcome in outcomes:
        if required:
            assert outcome.error == "RuntimeError"
            assert f"there is no {missing}" in outcome.text
        else:
            check(info, values([outcome])[0])
            assert outcome.value["placement"] == "pinned"
            assert len(outcome.warned) == 1
            assert f"there is no {missing}" in outcome.warned[0]


@pytest.mark.case("R05")
@pytest.mark.case("R06")
def test_what_lies_in_shared_memory_already_is_left_alone(tmp_path, checkpoint):
    """Other servers' segments, live or left over, under any name: none is looked at."""
    info = checkpoint()
    directory = tmp_path / "shm"
    directory.mkdir()
    for name in ("engram", "engram-0", "engram-shared-table"):
        (directory / name).write_bytes(b"of another server")
    found = values(run(2, tmp_path, "share", path=info.directory, shared_memory=directory))
    for value in found:
        assert value["placement"] == "shared"
        check(info, value)
    kept = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert kept == dict.fromkeys(
        ("engram", "engram-0", "engram-shared-table"), b"of another server"
    )


@pytest.mark.case("R05")
def test_two_servers_of_the_same_table_do_not_meet(tmp_path, checkpoint):
    info = checkpoint()
    with Replicas(2, tmp_path, "share", path=info.directory) as one:
        one.go()
        first = values(one.outcomes())
        second = values(run(2, tmp_path, "share", path=info.directory))
        assert first[0]["segments"] != second[0]["segments"]
        check(info, second[1])


def test_replicas_of_different_checkpoints_are_told_so(tmp_path, checkpoint):
    paths = [checkpoint().directory, checkpoint("qwen-bf16").directory]
    outcomes = run(2, tmp_path, "share", each_path=paths)
    for outcome in outcomes:
        assert outcome.error == "RuntimeError"
        assert "do not serve the same checkpoint" in outcome.text


def test_replicas_that_cannot_talk_hold_tables_of_their_own(checkpoint):
    info = checkpoint()
    parallel = {"data_parallel_size": 2, "data_parallel_rank": 1}
    with pytest.warns(UserWarning, match="cannot reach one another"):
        storage = engram.open_storage({}, info.directory, parallel=parallel)
    assert storage.placement == "pinned"
    ids = some_ids(storage.num_rows, 50)
    check_rows(storage.lookup(ids), info.tables[0], ids)
    with pytest.raises(RuntimeError, match="cannot reach one another"):
        engram.open_storage({"dp_shared_memory": True}, info.directory, parallel=parallel)


def test_memory_is_freed_with_its_last_user(tmp_path, checkpoint):
    info = checkpoint()
    with Replicas(2, tmp_path, "share", path=info.directory) as replicas:
        replicas.go()
        first, second = values(replicas.outcomes())
        assert first["segments"] == second["segments"]
        replicas.kill(0)
        replicas.processes[0].join()
        maps = Path(f"/proc/{replicas.processes[1].pid}/maps").read_text()
        assert second["segments"][0][1] in maps
    assert np.array_equal(first["rows"], second["rows"])


def test_killing_replicas_at_random_leaves_nothing_behind(tmp_path):
    """In a mount namespace with a /dev/shm of its own where the machine allows, to the byte."""
    script = [sys.executable, str(Path(__file__).with_name("kill_replicas.py")), "--kills", "8"]
    own = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/dev/shm"], capture_output=True
    )
    if own.returncode == 0:
        mount = 'mount -t tmpfs -o size=256m none /dev/shm && exec "$@"'
        script = ["unshare", "-m", "sh", "-c", mount, "sh", *script]
    done = subprocess.run(
        [*script, "--directory", str(tmp_path)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["kills"] == 8
    assert report["killed"] == {
        "DP3": {"0": 2, "1": 1, "2": 1},
        "TP2xDP2": {"0": 1, "1": 1, "2": 1, "3": 1},
    }
    assert report["hangs"] == 0
    assert report["left_behind"] == []
    assert report["killed_while_working"] >= 2, "the kills came too late to mean anything"
    # Others may let go of what they had in a /dev/shm that is not this test's own.
    assert report["bytes_left"] == 0 or (own.returncode != 0 and report["bytes_left"] < 0)
