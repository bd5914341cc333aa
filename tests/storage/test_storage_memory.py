"""What tables take of the machine's memory, and what happens when there is not enough."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import check_rows, make, some_ids, views
from child import own_shared_memory, run, start
from places import CONFIGURATIONS

import engram
from engram.storage import hosted, hugepages, preflight, segment
from engram.storage.hosted import PinnedStorage
from engram.storage.preflight import Memory

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A table of 65 MiB."""
    rows = 65 * MIB // 320
    return make(tmp_path_factory.mktemp("large") / "c", "qwen-bf16", rows=rows)


@pytest.mark.case("M01")
@pytest.mark.case("M02")
def test_host_memory_is_the_table_and_no_more(large):
    """Measured in a process of its own: what was allocated, and what was in use at the worst."""
    found = run(
        """
        import threading, time
        from child import anonymous_bytes
        announced = engram.tables(arguments["path"])[0]
        # Imports, thread pools and the like are there before it counts.
        engram.open_storage({}, announced, device="cpu").close()
        with engram.open_storage({"disk_offload": True}, arguments["path"]) as files:
            files.lookup(np.arange(10_000))
        before = anonymous_bytes()
        highest = before
        done = False
        def watch():
            global highest
            while not done:
                highest = max(highest, anonymous_bytes())
                time.sleep(0.002)
        thread = threading.Thread(target=watch)
        thread.start()
        storage = engram.open_storage({}, announced, device="cpu")
        opened = anonymous_bytes()
        with engram.FileGather(arguments["path"]) as gather:
            storage.load(gather)
        loaded = anonymous_bytes()
        done = True
        thread.join()
        report(opened=opened - before, loaded=loaded - before, highest=highest - before,
               nbytes=storage.stats()["nbytes"])
        """,
        path=str(large.directory),
    )
    table = large.tables[0].nbytes
    assert found["nbytes"]["pinned"] == table
    assert found["opened"] < 2 * MIB, "nothing is allocated before there are rows"
    assert table <= found["loaded"] < table + 5 * MIB
    assert found["highest"] < table + 8 * MIB, "no second copy, not even for a moment"


@pytest.mark.case("M02")
@pytest.mark.parametrize("place", ["device", "pinned", "file"])
def test_opening_allocates_nothing_of_the_tables_size(place, large, monkeypatch):
    def refuse(*arguments, **keywords):
        raise AssertionError(f"allocation of {arguments}")

    announced = engram.tables(large.directory)[0]
    with monkeypatch.context() as patch:
        patch.setattr(hosted, "HostBuffer", refuse)
        patch.setattr(torch, "empty", refuse)
        patch.setattr(torch, "zeros", refuse)
        storage = engram.open_storage(CONFIGURATIONS[place], announced, device="cpu")
        assert set(storage.nbytes.values()) == {0}
    if place == "file":
        storage.load(views(large))
    else:
        with engram.FileGather(large.directory) as gather:
            storage.load(gather)
    ids = some_ids(storage.num_rows, 100)
    check_rows(storage.lookup(ids), large.tables[0], ids)


@pytest.mark.case("M05")
def test_the_sum_over_the_ranks_of_a_machine_must_fit(checkpoint, monkeypatch):
    info = checkpoint()
    table = info.tables[0].nbytes
    monkeypatch.setattr(hosted, "HostBuffer", None)
    monkeypatch.setattr(preflight, "memory_now", lambda: Memory(table, table - 1000))
    parallel = {"tensor_parallel_size": 4, "tensor_parallel_rank": 2}
    with pytest.raises(MemoryError) as error:
        engram.open_storage({}, info.directory, parallel=parallel, device="cpu")
    text = str(error.value)
    assert "not enough host memory for table" in text
    assert "needed by this rank" in text
    assert f"{table // 4:,} bytes" in text
    assert "needed by 4 ranks on this machine" in text
    assert f"{table - 1000:,} bytes" in text
    assert "disk_offload=True" in text
    # One rank of as much alone would fit.
    monkeypatch.undo()
    engram.open_storage({}, info.directory, parallel=parallel, device="cpu").close()


@pytest.mark.case("M05")
def test_replicas_known_to_be_here_count_too(checkpoint, monkeypatch):
    info = checkpoint()
    table = info.tables[0].nbytes
    monkeypatch.setattr(preflight, "memory_now", lambda: Memory(table * 3, table * 3))
    parallel = {
        "data_parallel_size": 4,
        "data_parallel_rank": 0,
        "data_parallel_size_local": 4,
    }
    config = {"dp_shared_memory": False}
    with pytest.raises(MemoryError, match="needed by 4 ranks on this machine"):
        engram.open_storage(config, info.directory, parallel=parallel, device="cpu")
    parallel["data_parallel_size_local"] = 2
    engram.open_storage(config, info.directory, parallel=parallel, device="cpu").close()


@pytest.mark.case("M05")
def test_what_is_taken_already_is_not_available(checkpoint, monkeypatch):
    info = checkpoint()
    monkeypatch.setattr(preflight, "memory_now", lambda: Memory(1000, GIB))
    for place in ("device", "pinned"):
        with pytest.raises(MemoryError, match="available now"):
            engram.open_storage(CONFIGURATIONS[place], info.directory, device="cpu")
    engram.open_storage({"disk_offload": True}, info.directory).close()


@contextlib.contextmanager
def control_group(limit):
    """A control group whose processes may use `limit` bytes; skips where none can be made."""
    roots = [
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ]
    for root, name in roots:
        group = root / f"engram-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(limit))
        except OSError:
            group.rmdir()
            continue
        try:
            yield group
        finally:
            for _ in range(50):
                with contextlib.suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.1)
        return
    pytest.skip("no memory control group can be made here")


@pytest.mark.case("M05")
def test_a_control_groups_limit_is_refused_before_it_kills(large):
    with control_group(160 * MIB) as group:
        prefix = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
        code = """
        found = {}
        for place, config in {"pinned": {}, "file": {"disk_offload": True}}.items():
            try:
                storage = engram.open_storage(
                    config, arguments["path"], device="cpu", parallel=arguments["parallel"]
                )
            except MemoryError as error:
                found[place] = str(error)
            else:
                found[place] = len(storage.lookup([1, 2, 3]))
                storage.close()
        report(**found)
        """
        ranks = {"tensor_parallel_size": 1}
        assert run(code, prefix, path=str(large.directory), parallel=ranks)["pinned"] == 3
        ranks = {"tensor_parallel_size": 4, "tensor_parallel_rank": 0, "local_replicas": 3}
        refused = run(code, prefix, path=str(large.directory), parallel=ranks)
    assert "needed by 12 ranks on this machine" in refused["pinned"]
    assert f"{160 * MIB:,} bytes" in refused["pinned"]
    assert refused["file"] == 3


@pytest.mark.case("M06")
def test_files_are_mapped_read_only_and_never_copied_on_write(large):
    tensors = views(large)
    with engram.open_storage({"disk_offload": True}, large.directory) as files:
        files.lookup(some_ids(files.num_rows, 1000))
        mapped = [
            line.split()
            for line in Path("/proc/self/maps").read_text().splitlines()
            if str(large.directory) in line
        ]
        ours = [fields for fields in mapped if fields[1][3] == "s"]
        assert ours
        assert {fields[1] for fields in ours} == {"r--s"}
    for place in ("device", "pinned"):
        announced = engram.tables(large.directory)[0]
        with engram.open_storage(CONFIGURATIONS[place], announced, device="cpu") as storage:
            storage.load(tensors)
    # The loader's own mappings are private and writable: reading from them copied nothing.
    assert anonymous_pages_of(large.directory) == 0


def anonymous_pages_of(directory):
    """Bytes of file mappings under `directory` that have become anonymous."""
    inside, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
            inside = str(directory) in line
        elif inside and line.startswith("Anonymous:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.case("M06")
def test_rows_on_their_way_to_a_device_pass_through_other_memory(checkpoint, monkeypatch):
    from engram.storage import device

    passed = []
    storage = device.DeviceStorage(engram.tables(checkpoint().directory)[0], device="cpu")
    storage._device = torch.device("meta")  # Any device that is not the host.
    monkeypatch.setattr(device, "_from_numpy", lambda part: passed.append(part) or part)

    class Target:
        def __getitem__(self, _):
            return self

        def copy_(self, part):
            assert part is passed[-1]

    given = np.arange(1000, dtype=np.uint8).reshape(10, 100)
    storage._copy_in(Target(), given)
    assert len(passed) == 1
    assert not np.shares_memory(passed[0], given)
    np.testing.assert_array_equal(passed[0], given)


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

    def unpin(self):
        self.note("unregister")


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


@pytest.mark.case("M16")
@pytest.mark.parametrize("required", [False, True])
def test_a_small_dev_shm_is_noticed_before_it_kills(large, required):
    prefix = own_shared_memory("8m")
    if prefix is None:
        pytest.skip("no file system can be mounted here")
    found = run(
        """
        import torch.distributed as dist
        from engram.storage.shared import SharedStorage
        from places import alone
        gather = engram.FileGather(arguments["path"])
        storage = SharedStorage(gather.info, topology=alone(), required=arguments["required"])
        text = placement = ""
        try:
            storage.load(gather)
            ids = some_ids(storage.num_rows, 1000)
            check_rows(storage.lookup(ids), engram.synth.load(arguments["path"]).tables[0], ids)
            placement = storage.placement
        except RuntimeError as error:
            text = str(error)
        report(text=text, placement=placement, nbytes=storage.nbytes)
        """,
        prefix,
        path=str(large.directory),
        required=required,
    )
    text = found["text"] if required else found["warned"][0]
    assert "/dev/shm cannot hold table" in text
    assert f"{large.tables[0].nbytes:,} bytes" in text
    assert f"{8 * MIB:,} bytes" in text
    assert "--shm-size" in text
    assert "--ipc=host" in text
    assert found["placement"] == ("" if required else "pinned")


@pytest.mark.case("M16")
def test_space_that_is_taken_meanwhile_is_noticed_too(checkpoint, monkeypatch):
    """The check and the reservation are two moments; the reservation decides."""
    needs = preflight.Needs("t", "shared", 4 * MIB, 1)
    refused = []

    def reserve(fd, start_, length):
        refused.append(fd)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    before = open_files()
    with pytest.raises(OSError, match="cannot hold table") as error:
        segment.Segment.create(needs, [])
    assert error.value.errno == 28
    assert refused
    assert open_files() == before, "nothing is left open"


def open_files():
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_shared_memory_is_reserved_before_it_is_used():
    prefix = own_shared_memory("64m")
    if prefix is None:
        pytest.skip("no file system can be mounted here")
    found = run(
        """
        import os
        from engram.storage.segment import Segment
        from engram.storage.preflight import Needs
        def used():
            status = os.statvfs("/dev/shm")
            return (status.f_blocks - status.f_bfree) * status.f_frsize
        before = used()
        segment = Segment.create(Needs("t", "shared", 20 << 20, 1), [])
        reserved = used() - before
        mode = os.fstat(segment._fd).st_mode & 0o777
        links = os.fstat(segment._fd).st_nlink
        names = os.listdir("/dev/shm")
        segment.close_file()
        mapped = used() - before
        del segment
        report(reserved=reserved, mode=mode, links=links, names=names, mapped=mapped,
               after=used() - before)
        """,
        prefix,
    )
    assert found["reserved"] >= 20 * MIB
    assert found["mode"] == 0o600
    assert found["links"] == 0
    assert found["names"] == []
    assert found["mapped"] == found["reserved"], "the mapping alone keeps it"
    assert found["after"] == 0


@pytest.mark.case("M20")
@pytest.mark.parametrize("place", ["device", "pinned", "huge", "file"])
def test_no_process_is_started(place, checkpoint):
    before = children()
    with engram.open_storage(CONFIGURATIONS[place], checkpoint().directory) as storage:
        storage.lookup(some_ids(storage.num_rows, 10_000))
        assert children() == before


def children():
    return {
        child
        for task in Path("/proc/self/task").iterdir()
        for child in (task / "children").read_text().split()
    }


def test_the_limit_on_locked_memory_does_not_matter(large):
    found = run(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        storage = engram.open_storage({}, arguments["path"], device="cpu")
        ids = some_ids(storage.num_rows, 1000)
        check_rows(storage.lookup(ids), engram.synth.load(arguments["path"]).tables[0], ids)
        report(placement=storage.placement)
        """,
        path=str(large.directory),
    )
    assert found["placement"] == "pinned"
    assert found["warned"] == []


def test_a_limit_on_address_space_is_an_error_with_its_number(large):
    done = start(
        """
        import resource
        storage = engram.open_storage({}, engram.tables(arguments["path"])[0], device="cpu")
        gather = engram.FileGather(arguments["path"], io="pread")
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        limit = used + (20 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            storage.load(gather)
        except OSError as error:
            report(errno=error.errno, text=str(error))
        """,
        path=str(large.directory),
    )
    assert done.returncode == 0, done.stderr
    assert '"errno": 12' in done.stdout
    assert "bytes of host memory" in done.stdout
