"""What tables take of the machine's memory, and what happens when there is not enough."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest
import torch
from checkpoints import check_rows, some_ids, views
from child import own_shared_memory, run, start
from places import CONFIGURATIONS

import engram
from engram.storage import hosted, preflight, segment
from engram.storage.preflight import Memory

MIB = 1 << 20
GIB = 1 << 30


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
@pytest.mark.parametrize("variant", ["qwen-bf16", "deepseek-fp8"])
def test_rows_on_their_way_to_a_device_pass_through_other_memory(variant, checkpoint, monkeypatch):
    """What the device copies from is engram's own memory, never a mapping of a file."""
    from engram.storage import device

    info = checkpoint(variant)
    tensors = views(info)
    monkeypatch.setattr(device, "STAGING_BYTES", 10_000)
    addresses = set()
    original = device._from_numpy

    def from_numpy(part):
        addresses.add(part.__array_interface__["data"][0])
        return original(part)

    monkeypatch.setattr(device, "_from_numpy", from_numpy)
    storage = device.DeviceStorage(engram.tables(info.directory)[0], device="cpu")
    storage.load(tensors)
    assert len(addresses) == 1, "the same staging memory every time"
    ids = some_ids(storage.num_rows, 500)
    check_rows(storage.lookup(ids), info.tables[0], ids)


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


@pytest.mark.case("M16")
@pytest.mark.parametrize("required", [False, True])
def test_replicas_with_a_small_dev_shm_fall_back_together_or_fail(large, required, tmp_path):
    prefix = own_shared_memory("8m")
    if prefix is None:
        pytest.skip("no file system can be mounted here")
    found = run(
        """
        from pathlib import Path
        from replicas import run as run_replicas
        config = {"dp_shared_memory": True} if arguments["required"] else {}
        outcomes = run_replicas(
            2, Path(arguments["directory"]), "share", path=arguments["path"], config=config
        )
        table = engram.synth.load(arguments["path"]).tables[0]
        ids = some_ids(table.rows, 2000, 7)
        ids[3] = -1
        for outcome in outcomes:
            if not outcome.error:
                check_rows(outcome.value["rows"], table, ids)
        report(
            errors=[outcome.error for outcome in outcomes],
            texts=[outcome.text for outcome in outcomes],
            warnings=[outcome.warned for outcome in outcomes],
            places=[outcome.value and outcome.value["placement"] for outcome in outcomes],
        )
        """,
        prefix,
        path=str(large.directory),
        directory=str(tmp_path),
        required=required,
    )
    if required:
        assert found["errors"] == ["RuntimeError"] * 2
        said = found["texts"]
        assert all(text.startswith("dp_shared_memory=True cannot be met") for text in said)
    else:
        assert found["errors"] == [""] * 2
        assert found["places"] == ["pinned"] * 2
        assert [len(warned) for warned in found["warnings"]] == [1, 1]
        said = [warned[0] for warned in found["warnings"]]
    for text in said:
        assert "/dev/shm cannot hold table" in text
        assert f"{large.tables[0].nbytes:,} bytes" in text
        assert f"{8 * MIB:,} bytes" in text
        assert "--shm-size" in text
