"""Huge pages and memory nodes: asked for in the right order, reported as they are."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from checkpoints import check_rows, some_ids
from child import run

import engram
from engram.storage import hosted, hugepages
from engram.storage.hosted import PinnedStorage

MIB = 1 << 20


@pytest.mark.case("M11")
def test_huge_pages_that_are_forbidden_are_reported_and_change_nothing(large):
    found = run(
        """
        import ctypes
        PR_SET_THP_DISABLE = 41
        assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
        storage = engram.open_storage({"use_thp": True}, arguments["path"], device="cpu")
        ids = some_ids(storage.num_rows, 2000)
        check_rows(storage.lookup(ids), engram.synth.load(arguments["path"]).tables[0], ids)
        report(share=storage.stats()["huge_page_share"])
        """,
        path=str(large.directory),
    )
    assert found["share"] == 0.0
    assert len(found["warned"]) == 1
    assert "use_thp: 0% of the table is in huge pages" in found["warned"][0]
    assert "PR_SET_THP_DISABLE" in found["warned"][0]


def test_huge_pages_are_used_where_the_kernel_gives_them(large):
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("transparent huge pages are off")
    found = run(
        """
        storage = engram.open_storage({"use_thp": True}, arguments["path"], device="cpu")
        report(share=storage.stats()["huge_page_share"], nbytes=storage.nbytes["pinned"])
        """,
        path=str(large.directory),
    )
    assert large.tables[0].nbytes <= found["nbytes"] < large.tables[0].nbytes + 2 * MIB
    assert found["nbytes"] % (2 * MIB) == 0
    if found["share"] < hugepages.ENOUGH:
        assert "huge pages" in found["warned"][0]
    else:
        assert found["warned"] == []


class Recorder(engram.HostBuffer):
    """A buffer that notes what is asked of it."""

    calls: list[str] = []  # noqa: RUF012

    def __new__(cls, nbytes, huge_pages=False, *, fd=None):
        cls.calls.append("allocate")
        return super().__new__(cls, nbytes, huge_pages, fd=fd)

    def note(self, name):
        if not self.calls or self.calls[-1] != name:
            self.calls.append(name)

    def place(self, nodes, interleave):
        self.note(f"place {nodes} {interleave}")

    def prefault(self, offset, nbytes):
        self.note("prefault")
        super().prefault(offset, nbytes)

    def collapse(self, offset, nbytes):
        self.note("collapse")

    def pin(self, progress=None):
        self.note("register")
        return self

    @property
    def is_pinned(self):
        return "register" in self.calls

    def unpin(self):
        self.note("unregister")

    def device_address(self):
        return self.address


@pytest.fixture
def recorded(monkeypatch):
    """Every step of opening a table in private memory, in order."""
    calls = []
    Recorder.calls = calls
    monkeypatch.setattr(hosted, "HostBuffer", Recorder)
    monkeypatch.setattr(hosted, "drop_cache", lambda files: calls.append("drop cache"))
    monkeypatch.setattr(hugepages, "coverage", lambda buffer: calls.append("measure") or 1.0)
    original = hosted.fill

    def fill(*arguments):
        calls.append("load")
        original(*arguments)

    monkeypatch.setattr(hosted, "fill", fill)
    return calls


@pytest.mark.case("M13")
@pytest.mark.case("M21")
@pytest.mark.case("M22")
def test_the_order_of_things(checkpoint, recorded, monkeypatch, tmp_path):
    """Placed before the first touch; caches released before huge pages are asked for; one attempt
    to collapse, before registration; and nothing moves afterwards."""
    two_nodes(monkeypatch, tmp_path)
    info = checkpoint()
    with engram.FileGather(info.directory) as gather:
        storage = PinnedStorage(gather.info, device=torch.device("cuda"), numa=1, huge_pages=True)
        storage.load(gather)
    ids = some_ids(storage.num_rows, 100)
    check_rows(storage.lookup(ids), info.tables[0], ids)
    storage.close()
    assert recorded == [
        "allocate",
        "place [1] False",
        "drop cache",
        "prefault",
        "load",
        "collapse",
        "measure",
        "register",
        "unregister",
    ]


def two_nodes(monkeypatch, tmp_path):
    """A machine with two memory nodes; this process may run on the CPUs of both."""
    from engram.storage import numa

    nodes = tmp_path / "devices/system/node"
    nodes.mkdir(parents=True)
    (nodes / "has_memory").write_text("0-1\n")
    cpus = sorted(os.sched_getaffinity(0))
    for node, mine in ((0, cpus[:1]), (1, cpus[1:])):
        (nodes / f"node{node}").mkdir()
        (nodes / f"node{node}" / "cpulist").write_text(",".join(map(str, mine)) + "\n")
    monkeypatch.setattr(numa, "SYSTEM", tmp_path)
    monkeypatch.setattr(numa, "_warned", set())


@pytest.mark.case("M21")
def test_the_node_is_that_of_the_cpus_this_process_has(monkeypatch, tmp_path):
    from engram.storage import numa

    two_nodes(monkeypatch, tmp_path)
    allowed = os.sched_getaffinity(0)
    assert numa.choose_node(None) is None
    if len(allowed) > 1:
        assert numa.choose_node("auto") is None, "CPUs of both"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {min(allowed)})
    assert numa.choose_node("auto") == 0
    with pytest.raises(ValueError, match=r"numa=5: this machine has memory nodes \[0, 1\]"):
        numa.choose_node(5)
    with pytest.raises(ValueError, match="numa must be"):
        numa.choose_node("all")


@pytest.mark.case("M21")
def test_one_node_needs_no_placing(checkpoint, recorded):
    from engram.storage import numa

    if len(numa.memory_nodes()) > 1:
        pytest.skip("this machine has several nodes")
    engram.open_storage({}, checkpoint().directory, device="cpu").close()
    assert not [call for call in recorded if call.startswith("place")]


@pytest.mark.case("M26")
@pytest.mark.case("M23")
@pytest.mark.parametrize("errno", [1, 38])
def test_refused_placement_is_said_once_and_the_table_served(checkpoint, errno):
    """System calls 237 to 239 and 256 as a container's default profile has them, or as a kernel
    without memory nodes does."""
    info = checkpoint("deepseek-fp8")
    found = run(
        """
        from child import refuse_calls
        import errno
        if not refuse_calls([237, 238, 239, 256], arguments["errno"]):
            report(skipped=True)
            sys.exit()
        tables = engram.synth.load(arguments["path"]).tables
        for place, table in enumerate(tables):
            storage = engram.open_storage({}, (arguments["path"], place), numa=0, device="cpu")
            ids = some_ids(storage.num_rows, 500)
            check_rows(storage.lookup(ids), table, ids)
        report(skipped=False)
        """,
        path=str(info.directory),
        errno=errno,
    )
    if found["skipped"]:
        pytest.skip("no system call filter can be installed here")
    assert len(found["warned"]) == 1, "two tables, one warning"
    assert "mbind" in found["warned"][0]
    assert "CAP_SYS_NICE" in found["warned"][0]


@pytest.mark.case("M14")
def test_collapsing_ends_in_time_and_holds_nobody_up(checkpoint, monkeypatch):
    info = checkpoint()
    served = engram.open_storage({}, info.directory, device="cpu")
    looked_up = []

    class Slow(Recorder):
        def collapse(self, offset, nbytes):
            before = len(looked_up)
            time.sleep(0.2)
            looked_up.append("collapse") if len(looked_up) == before else None

    done = threading.Event()

    def look_up():
        ids = some_ids(served.num_rows, 100)
        while not done.is_set():
            served.lookup(ids)
            looked_up.append(1)

    monkeypatch.setattr(hosted, "HostBuffer", Slow)
    monkeypatch.setattr(hugepages, "SLICE_BYTES", 4096)
    monkeypatch.setattr(hugepages, "collapse", bounded(hugepages.collapse, 0.5))
    monkeypatch.setattr(hugepages, "coverage", lambda buffer: 0.5)
    thread = threading.Thread(target=look_up)
    thread.start()
    began = time.monotonic()
    try:
        with pytest.warns(UserWarning, match="0.5 s were not enough"):
            engram.open_storage({"use_thp": True}, info.directory, device="cpu")
    finally:
        done.set()
        thread.join()
    assert time.monotonic() - began < 5.0
    assert "collapse" not in looked_up, "a look-up waited"


@pytest.mark.case("M11")
@pytest.mark.parametrize(
    "refusal",
    [
        OSError(12, "Cannot allocate memory"),
        # What the native half makes of that errno.
        MemoryError("Cannot allocate memory (os error 12)"),
    ],
    ids=["OSError", "MemoryError"],
)
def test_memory_that_cannot_be_prefaulted_is_loaded_all_the_same(checkpoint, monkeypatch, refusal):
    info = checkpoint()

    class Full(Recorder):
        def prefault(self, offset, nbytes):
            raise refusal

        def collapse(self, offset, nbytes):
            raise refusal

    monkeypatch.setattr(hosted, "HostBuffer", Full)
    monkeypatch.setattr(hugepages, "coverage", lambda buffer: 0.25)
    monkeypatch.setattr(hugepages, "_SETTING", Path("/proc/self/comm"))
    with pytest.warns(UserWarning, match="use_thp: 25% of the table is in huge pages") as warned:
        storage = engram.open_storage({"use_thp": True}, info.directory, device="cpu")
    assert len(warned) == 1
    assert "prefaulting: Cannot allocate memory" in str(warned[0].message)
    assert storage.stats()["huge_page_share"] == 0.25
    ids = some_ids(storage.num_rows, 100)
    check_rows(storage.lookup(ids), info.tables[0], ids)


def bounded(collapse, seconds):
    return lambda buffer: collapse(buffer, seconds)


@pytest.mark.case("M15")
def test_files_are_never_mapped_with_huge_pages(checkpoint):
    with pytest.warns(UserWarning, match="use_thp=True is ignored beside disk_offload=True"):
        config = engram.EngramConfig(disk_offload=True, use_thp=True)
    info = checkpoint("qwen-bf16")
    with engram.open_storage(config, info.directory) as storage:
        assert storage.placement == "file"
        flags = mapping_flags(info.directory)
    assert flags
    assert not any("hg" in flag.split() for flag in flags)


def mapping_flags(directory):
    inside, found = False, []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
            inside = str(directory) in line
        elif inside and line.startswith("VmFlags:"):
            found.append(line)
    return found
