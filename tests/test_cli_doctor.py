"""The doctor's checks as functions of facts, and what the command prints of them."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import engram
from engram import _engram, synth
from engram.cli.app import app
from engram.cli.doctor import accelerator, command, facts, machine, rates, storage, tables
from engram.cli.doctor.estimate import PROMPT_TOKENS, cold, estimate, warm
from engram.cli.doctor.finding import Finding, worst

GIB = 1 << 30


def run(*arguments: object):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    directory = tmp_path_factory.mktemp("doctor") / "qwen"
    return synth.write(directory, "qwen", rows=20_000, dtype="fp8")


# the machine


@pytest.mark.parametrize(
    ("release", "verdict", "lacking"),
    [
        ("6.18.44-generic", "ok", []),
        ("6.1.0", "ok", []),
        ("5.15.0-91", "warning", ["alignment"]),
        ("5.10.1", "warning", ["io_uring", "page tables", "alignment"]),
        ("strange", "warning", ["io_uring"]),
    ],
)
def test_kernels(release, verdict, lacking):
    found = machine.kernel("Linux", release)
    assert found.verdict == verdict
    assert all(words in (found.advice or "") for words in lacking)
    assert machine.kernel("Darwin", release).verdict == "warning"


@pytest.mark.parametrize(
    ("refusal", "disabled", "seccomp", "release", "words"),
    [
        (errno.EPERM, 2, 0, "6.18.0", "kernel.io_uring_disabled is 2"),
        (errno.EPERM, 1, 0, "6.18.0", "kernel.io_uring_group"),
        (errno.EPERM, 0, 2, "6.18.0", "seccomp"),
        (errno.EPERM, 0, 0, "6.18.0", "security module"),
        (errno.EACCES, None, None, "6.18.0", "security module"),
        (errno.ENOSYS, None, 2, "6.18.0", "seccomp"),
        (errno.ENOSYS, None, 0, "5.4.0", "older than 5.11"),
        (errno.ENOSYS, None, 2, "5.4.0", "older than 5.11"),
        (errno.ENOMEM, 0, 0, "6.18.0", "ulimit -l"),
        (errno.EMFILE, 0, 0, "6.18.0", "ulimit -n"),
        (errno.EINVAL, 0, 0, "6.18.0", "report this"),
    ],
)
def test_who_forbids_rings(refusal, disabled, seccomp, release, words):
    found = machine.rings(refusal, disabled, seccomp, release)
    assert found.verdict == "warning"
    assert os.strerror(refusal) in found.found
    assert words in found.advice
    assert machine.rings(None, disabled, seccomp, release).verdict == "ok"


def test_rings_are_asked_for():
    assert _engram.ring_refusal() is None or _engram.ring_refusal() > 0


@pytest.mark.parametrize(
    ("soft", "release", "may_lock", "verdict"),
    [
        (None, "5.4.0", False, "ok"),
        (65536, "5.4.0", False, "warning"),
        (65536, "5.4.0", True, "ok"),
        (65536, "6.1.0", False, "ok"),
        (8 << 20, "5.4.0", False, "ok"),
    ],
)
def test_locked_memory(soft, release, may_lock, verdict):
    assert machine.locked_memory(soft, release, may_lock=may_lock).verdict == verdict


@pytest.mark.parametrize(
    ("soft", "needed", "verdict"),
    [
        (None, 500, "ok"),
        (1024, None, "ok"),
        (100, None, "warning"),
        (400, 131, "warning"),
        (100, 131, "problem"),
        (1024, 131, "ok"),
    ],
)
def test_open_files(soft, needed, verdict):
    found = machine.open_files(soft, 4096, needed)
    assert found.verdict == verdict
    assert (found.advice is None) == (verdict == "ok")


@pytest.mark.parametrize(
    ("total", "free", "needed", "verdict"),
    [
        (None, None, None, "warning"),
        (64 << 20, 64 << 20, None, "warning"),
        (8 * GIB, 8 * GIB, None, "ok"),
        (64 << 20, 64 << 20, 1 << 20, "ok"),
        (8 * GIB, 2 * GIB, 4 * GIB, "warning"),
    ],
)
def test_shared_memory(total, free, needed, verdict):
    found = machine.shared_memory(total, free, needed)
    assert found.verdict == verdict
    assert verdict == "ok" or "--shm-size" in found.advice


@pytest.mark.parametrize(
    ("enabled", "verdict"),
    [("always [madvise] never", "ok"), ("always madvise [never]", "warning"), (None, "warning")],
)
def test_huge_pages(enabled, verdict):
    assert machine.huge_pages(enabled, None).verdict == verdict


def test_memory_against_tables():
    enough = machine.memory(64 * GIB, 64 * GIB, 60 * GIB, 50 * GIB)
    assert enough.verdict == "ok"
    assert "group" not in enough.found
    small = machine.memory(64 * GIB, 16 * GIB, 10 * GIB, 40 * GIB)
    assert small.verdict == "warning"
    assert "a control group's limit; the machine has 64.0 GiB" in small.found
    assert "25% of the tables' 40.0 GiB" in small.found
    assert machine.memory(None, 1 << 63, GIB).verdict == "ok"


def test_memory_nodes(tmp_path):
    assert machine.numa([0], [0], 0).verdict == "ok"
    assert machine.numa([0, 1], [0], 0).verdict == "ok"
    assert "numactl" in machine.numa([0, 1], [0, 1], 0).advice
    assert "zone_reclaim_mode is 1" in machine.numa([0, 1], [0], 1).advice
    mine = sorted(os.sched_getaffinity(0))
    for node, cores in ((0, f"{mine[0]}"), (1, "9000-9003,9005")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    assert machine.nodes_of_cores([0, 1, 2], tmp_path) == [0]


def test_facts_are_read_or_are_none(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text("Name:\tx\nCapEff:\t0000000000004000\nSeccomp:\t2\n")
    (tmp_path / "meminfo").write_text("MemTotal:     2048 kB\nMemFree: 1 kB\n")
    assert facts.process(tmp_path) == facts.Process(2, 0x4000)
    assert facts.process(tmp_path).may_lock
    assert facts.memory_total(tmp_path) == 2 << 20
    assert facts.process(tmp_path / "absent") == facts.Process(None, 0)
    assert facts.memory_total(tmp_path / "absent") is None
    assert facts.number(tmp_path / "meminfo") is None
    assert facts.release_number("6.18.44-fc") == (6, 18)
    assert facts.chosen("always [madvise] never") == "madvise"
    assert facts.process().seccomp in {0, 1, 2, None}


# torch


@pytest.mark.parametrize(
    ("answer", "verdict", "words"),
    [
        ({"torch": None, "missing": "torch"}, "ok", "not installed"),
        ({"torch": None, "missing": "sympy"}, "warning", "does not import"),
        ({"torch": "2.9", "cuda": None, "devices": []}, "ok", "without CUDA"),
        ({"torch": "2.9", "cuda": "13.0", "devices": []}, "ok", "no device"),
        (
            {"torch": "2.9", "cuda": "13.0", "devices": ["H"], "pinned": True},
            "ok",
            "can be registered",
        ),
        (
            {"torch": "2.9", "cuda": "13", "devices": ["H"], "pinned": False, "reason": "no room"},
            "warning",
            "no room",
        ),
        ({"failure": "no answer within 1 s"}, "warning", "no answer"),
    ],
)
def test_torch(answer, verdict, words):
    found = accelerator.torch(answer)
    assert found.verdict == verdict
    assert words in found.found


def test_torch_is_asked_in_another_process(monkeypatch, tmp_path):
    known = accelerator.ask()
    assert "failure" not in known
    (tmp_path / "torch.py").write_text("import os; os.abort()")
    monkeypatch.syspath_prepend(tmp_path)
    assert "ended with status" in accelerator.ask()["failure"]
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")
    assert accelerator.ask(0.5)["failure"] == "no answer within 0.5 s"
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('x', name='torch')")
    assert accelerator.ask() == {"torch": None, "missing": "torch"}


# where files lie

MOUNTINFO = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,discard
30 27 0:44 / /mnt/with\\040blank rw - nfs4 server:/export rw,vers=4.2
31 27 0:45 / /mnt/ram rw - tmpfs tmpfs rw,size=64m
32 27 0:46 / /mnt/fuse rw - fuse.sshfs host:/ rw
33 27 253:7 / /mnt/ram rw - xfs /dev/mapper/data rw
a short line
"""


def test_the_mount_of_a_path():
    def mount(path):
        return storage.mount_of(Path(path), MOUNTINFO)

    assert mount("/home/x").kind == "ext4"
    assert mount("/mnt/with blank/a").source == "server:/export"
    assert mount("/mnt/with").kind == "ext4"
    assert mount("/mnt/ram/a").kind == "xfs", "the last of those that cover one another"
    assert mount("/mnt/fuse").is_remote
    assert storage.mount_of(Path("/x"), "") is None
    assert "discard" in mount("/x").options


def test_filesystems():
    mounts = {mount.kind: mount for mount in storage.mounts(MOUNTINFO)}
    assert storage.filesystem(mounts["ext4"]).verdict == "ok"
    assert "in memory" in storage.filesystem(mounts["tmpfs"]).found
    for kind in ("nfs4", "fuse.sshfs"):
        found = storage.filesystem(mounts[kind])
        assert found.verdict == "warning"
        assert "local disk" in found.advice
    assert storage.filesystem(None).verdict == "warning"


def device_tree(root, read_ahead="128", rotational="0"):
    """A disk with a partition, and a mapped device over it, as `/sys` has them."""
    disk = root / "devices/disk/vda"
    for folder in (disk / "queue", disk / "device", disk / "vda1", root / "dev/block"):
        folder.mkdir(parents=True)
    mapped = root / "devices/virtual/dm-7"
    for folder in (mapped / "queue", mapped / "slaves/vda1"):
        folder.mkdir(parents=True)
    for queue in (disk / "queue", mapped / "queue"):
        (queue / "read_ahead_kb").write_text(f"{read_ahead}\n")
        (queue / "rotational").write_text(f"{rotational}\n")
        (queue / "nr_requests").write_text("256\n")
    (disk / "device/model").write_text("FAST  \n")
    (disk / "vda1/partition").write_text("1\n")
    (root / "dev/block/254:1").symlink_to(disk / "vda1")
    (root / "dev/block/253:7").symlink_to(mapped)
    return root


def test_block_devices(tmp_path):
    sys_tree = device_tree(tmp_path)
    mounts = {mount.kind: mount for mount in storage.mounts(MOUNTINFO)}
    disk = storage.device_of(mounts["ext4"], sys_tree)
    assert disk == storage.Device("vda", "FAST", 128, False, 256, ())
    assert storage.device_of(mounts["xfs"], sys_tree).members == ("vda1",)
    assert storage.device_of(mounts["nfs4"], sys_tree) is None
    assert storage.device_of(None, sys_tree) is None
    assert storage.block_device(disk, mounts["ext4"]).verdict == "ok"
    assert storage.block_device(None, mounts["tmpfs"]).found == "memory"
    assert storage.block_device(None, mounts["nfs4"]).verdict == "ok"


def test_large_read_ahead_is_said(tmp_path):
    sys_tree = device_tree(tmp_path, read_ahead="8192", rotational="1")
    mount = storage.mount_of(Path("/x"), MOUNTINFO)
    found = storage.block_device(storage.device_of(mount, sys_tree), mount)
    assert found.verdict == "warning"
    assert "8.0 MiB" in found.found
    assert "moving parts" in found.found
    assert "blockdev --setra 256 /dev/vda" in found.advice


def test_direct_reads_refused():
    io = {"direct_alignment": None, "runs": "uring", "fallbacks": ["direct I/O refused on x"]}
    assert "refused on x" in storage.direct_io(io).found
    assert storage.direct_io({**io, "direct_alignment": 512}).verdict == "ok"
    assert storage.direct_io(None, "too many open files").verdict == "warning"


# rates and what follows from them


def measured(one=10_000.0, sixteen=80_000.0, many=120_000.0, direct=True):
    points = [
        rates.Point(depth, depth, rate)
        for depth, rate in zip(rates.DEPTHS, (one, sixteen, many), strict=True)
    ]
    return rates.Rates(tuple(points), direct, "uring-direct", 1 / one)


def test_rates_between_depths_lie_between_those_measured():
    device = measured()
    assert device.per_second(1) == 10_000
    assert math.isclose(device.per_second(16), 80_000)
    assert device.per_second(1000) == 120_000
    assert math.isclose(device.per_second(4), math.sqrt(10_000 * 80_000))
    assert device.seconds(0) == 0
    assert math.isclose(device.seconds(12_000), 0.1)


@given(st.integers(1, 100_000), st.integers(1, 100_000))
def test_more_reads_take_longer(few, more):
    few, more = sorted((few, more))
    device = measured()
    assert device.seconds(few) <= device.seconds(more) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("many", "direct", "in_memory", "verdict"),
    [
        (120_000.0, True, False, "ok"),
        (3_000.0, True, False, "warning"),
        (200.0, True, False, "problem"),
        (200.0, True, True, "ok"),
        (900_000.0, False, False, "warning"),
    ],
)
def test_verdicts_on_rates(many, direct, in_memory, verdict):
    device = measured(min(many, 100.0), min(many, 150.0), many, direct)
    found = rates.random_reads(device, in_memory=in_memory)
    assert found.verdict == verdict
    assert f"{many:,.0f}/s at 128" in found.found
    assert direct or "through the page cache" in found.found


def test_estimates_follow_from_rates():
    device, memory = measured(), rates.Warm(1000, 5e-6, 50e-9)
    cost = cold(device, 16)
    assert math.isclose(cost.decode_seconds, 16 / 80_000)
    assert math.isclose(cost.decode_64_seconds, 1024 / 120_000)
    assert math.isclose(cost.prefill_tokens_per_second, 120_000 / 16)
    cost = warm(memory, 16)
    assert cost.decode_seconds == 5e-6
    assert math.isclose(cost.decode_64_seconds, 1024 * 50e-9)
    assert math.isclose(cost.prefill_tokens_per_second, 1 / (16 * 50e-9))
    decode, prefill = estimate(16, 16, device, memory)
    assert "200.0 us cold (1.0% of 20 ms), 5.0 us warm" in decode.found
    assert decode.verdict == "ok"
    assert "7,500 tokens/s cold" in prefill.found
    assert PROMPT_TOKENS == 4096
    slow, _ = estimate(48, 96, measured(100, 150, 200), memory)
    assert slow.verdict == "warning"
    assert "prewarm" in slow.advice
    assert estimate(16, 16, None, None) == []


@pytest.mark.parametrize("io", ["direct", "pread", "uring"])
@pytest.mark.parametrize("depth", rates.DEPTHS)
def test_random_reads_are_really_made(qwen, io, depth):
    reader = _engram.Reader(str(qwen.directory), None, io, None, "auto", None, 0)
    seen = _engram.random_reads(reader, depth, 0.3, 1)
    assert seen["reads"] > 0
    assert seen["bytes"] >= 160 * seen["reads"]
    assert 0 < seen["depth"] <= depth
    assert 0.2 < seen["seconds"] < 5
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        _engram.random_reads(reader, depth, 0.05, 1)


def test_rows_per_token(tmp_path, qwen):
    assert tables.demand(qwen.directory, engram.tables(qwen.directory)) == tables.Demand(16, 16)
    info = synth.write(tmp_path / "d", "deepseek", rows=5000)
    found = tables.demand(info.directory, engram.tables(info.directory))
    assert found == tables.Demand(48, 96), "24 heads in each of two tables of two planes"
    info = synth.write(tmp_path / "g", "gemma", rows=300)
    assert tables.demand(info.directory, engram.tables(info.directory)).rows == 1
    (qwen.directory / "config.json").rename(tmp_path / "config.json")
    try:
        infos = engram.tables(qwen.directory)
        unknown = tables.demand(qwen.directory, infos)
        assert unknown.rows is None
        assert "config.json" in unknown.unknown
        assert tables.demand(qwen.directory, infos, 16) == tables.Demand(16, 16)
    finally:
        (tmp_path / "config.json").rename(qwen.directory / "config.json")


# the command


def test_the_machine_alone():
    result = run("--quick")
    assert result.exit_code == 0, result.stdout
    names = [line[9:].split("  ")[0].strip() for line in result.stdout.splitlines()]
    for name in ("kernel", "io_uring", "locked memory", "open files", "memory", "/dev/shm"):
        assert name in names
    assert "checkpoint" not in names


def test_a_checkpoint_is_measured(qwen, monkeypatch):
    monkeypatch.setattr(accelerator, "ask", lambda: {"torch": None, "missing": "torch"})
    result = run(qwen.directory, "--seconds", "0.3", "--json")
    assert result.exit_code in {0, 1}, result.stderr
    document = json.loads(result.stdout)
    assert document["schema_version"] == command.SCHEMA_VERSION
    assert document["engram"] == engram.__version__
    assert document["path"] == str(qwen.directory)
    found = {finding["name"]: finding for finding in document["findings"]}
    assert document["verdict"] == worst(
        [Finding(each["name"], each["verdict"], "") for each in found.values()]
    )
    assert (result.exit_code == 1) == (document["verdict"] == "problem")
    assert found["checkpoint"]["data"]["bytes"] == qwen.tables[0].nbytes
    assert found["memory"]["data"]["needed"] == qwen.tables[0].nbytes
    assert found["io=auto"]["data"]["runs"].startswith("mmap")
    assert found["filesystem"]["data"]["type"]
    assert set(found["random reads"]["data"]["per_second"]) == {"1", "16", "128"}
    assert found["decode step"]["data"]["rows_per_token"] == 16
    warm_cost = found["decode step"]["data"]["warm"]
    assert 0 < warm_cost["decode_seconds"] < 0.1
    assert found["prefill"]["data"]["cold"]["prefill_tokens_per_second"] > 0


def test_rows_that_are_not_known_are_asked_for(qwen, tmp_path, monkeypatch):
    monkeypatch.setattr(accelerator, "ask", lambda: {"torch": None, "missing": "torch"})
    alone = tmp_path / "alone"
    alone.mkdir()
    for path in qwen.directory.iterdir():
        if "safetensors" in path.name:
            (alone / path.name).write_bytes(path.read_bytes())
    result = run(alone, "--seconds", "0.1")
    assert "rows per token are not known" in result.stdout
    assert "--rows-per-token" in result.stdout
    result = run(alone, "--seconds", "0.1", "--rows-per-token", "16")
    assert "16 rows per token" in result.stdout


def test_a_damaged_checkpoint_is_a_problem(tmp_path):
    info = synth.write(tmp_path / "c", "qwen", rows=5000)
    info.files[1].unlink()
    result = run(info.directory, "--quick")
    assert result.exit_code == 1
    assert "problem  checkpoint" in result.stdout
    assert info.files[1].name in result.stdout
    assert "engram verify" in result.stdout
    (tmp_path / "model.safetensors").write_bytes(b"<html>not found</html>")
    result = run(tmp_path / "model.safetensors", "--quick", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["verdict"] == "problem"


@pytest.mark.parametrize("arguments", [["--table", "9"], ["--table", "nothing"]])
def test_no_such_table_is_status_2(qwen, arguments):
    result = run(qwen.directory, "--quick", *arguments)
    assert result.exit_code == 2
    assert qwen.tables[0].name in result.stderr
    assert result.stdout == ""


def test_the_worst_verdict_counts():
    ok, warning, problem = (Finding("x", verdict, "") for verdict in ("ok", "warning", "problem"))
    assert worst([]) == "ok"
    assert worst([ok, warning, ok]) == "warning"
    assert worst([problem, warning]) == "problem"


def test_the_doctor_needs_no_torch():
    before = set(sys.modules)
    run("--quick")
    assert "torch" not in set(sys.modules) - before
