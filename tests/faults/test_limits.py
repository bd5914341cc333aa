"""Limits of the system, really set: what engram falls back to, and what it says."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from children import SYSCALLS, child

from checkpoint_support import INDEX, IO_MODES, checkpoint, safetensors, shards, tensor
from engram import synth

GATHER = """
directory = sys.argv[1]
info = synth.load(directory)
ids = np.arange(0, 19_000, 7)

def served(gather):
    return all(right(info, ids, gather.gather(ids)) for _ in range(2))
"""


@pytest.mark.case("I07")
def test_an_address_space_smaller_than_the_table(tmp_path):
    script = """
    import resource
    directory = sys.argv[1]
    info = synth.load(directory)
    used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGESIZE")
    limit = used + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    gather = engram.FileGather(directory, 0)
    ids = info.marked[info.tables[0].name]
    report(right=right(info, ids, gather.gather(ids)), io=gather.stats()["io"], size=gather.nbytes)
    """
    info = synth.write_sparse(tmp_path / "c", "qwen", dtype="fp8")
    seen = child(script, info.directory)
    assert seen["right"]
    assert seen["size"] > 1 << 34
    assert "mmap" not in seen["io"]["runs"]
    assert "Cannot allocate memory" in seen["io"]["fallbacks"][0]
    assert "RLIMIT_AS or vm.max_map_count" in seen["io"]["fallbacks"][0]
    assert seen["stderr"].count("RLIMIT_AS") == 1, "one warning"


@pytest.mark.case("I35")
def test_fewer_descriptors_than_tensors(tmp_path):
    script = """
    import resource
    directory, many = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    open_before = len(os.listdir("/proc/self/fd"))
    gather = engram.FileGather(directory)
    gather.gather(np.arange(gather.num_rows))
    opened = len(os.listdir("/proc/self/fd")) - open_before
    gather.close()
    try:
        engram.FileGather(many)
        error = None
    except OSError as refused:
        error = [refused.errno, str(refused), refused.path]
    gather = engram.FileGather(directory)
    rows = gather.gather(np.arange(gather.num_rows))
    report(opened=opened, error=error, files=len(gather.files), rows=len(rows))
    """
    made = []
    for name, files, others in (("few", 12, 128), ("many", 40, 1)):
        contents = {}
        for place, piece in enumerate(shards([10] * files, 32)):
            contents[f"model-{place + 1:05}-of-{files:05}.safetensors"] = [
                piece,
                *(tensor(f"other.{place}.{index}", "U8", (2,)) for index in range(others)),
            ]
        made.append(checkpoint(tmp_path / name, contents))
    seen = child(script, *made)
    assert (seen["files"], seen["rows"]) == (12, 120)
    assert seen["opened"] <= 12 + 2, "one per file, and a ring"
    number, text, path = seen["error"]
    assert number == errno.EMFILE
    assert "may hold 32 files open" in text
    assert "40 files" in text
    assert "ulimit -n" in text
    assert path


@pytest.mark.case("I35")
def test_descriptors_that_run_out_while_the_index_is_parsed(tmp_path):
    """Headers are read meanwhile; their files, kept open, must leave one for the configuration."""
    script = """
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    rows = []
    for _ in range(20):
        with engram.FileGather(sys.argv[1], "table.weight") as gather:
            rows.append(len(gather.gather(np.arange(gather.num_rows))))
    report(rows=rows)
    """
    contents = {
        f"model-{place:05}-of-00080.safetensors": [tensor(f"other.{place}.weight", "U8", (2, 2))]
        for place in range(1, 80)
    }
    contents["model-00080-of-00080.safetensors"] = [tensor("table.weight", "U8", (10, 32))]
    directory = checkpoint(tmp_path / "many", contents, config={})
    index = directory / INDEX
    described = json.loads(index.read_text())
    described["metadata"]["history"] = "x" * (4 << 20)  # So that parsing takes a while.
    index.write_text(json.dumps(described))
    assert child(script, directory)["rows"] == [10] * 20


def test_no_memory_may_be_locked(table):
    script = """
    import resource
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    for capability in range(64):
        LIBC.prctl(24, capability, 0, 0, 0)
    gathers = {io: engram.FileGather(directory, 0, io=io) for io in ("auto", "pread", "direct")}
    report(**{io: served(gather) for io, gather in gathers.items()})
    """
    seen = child(script, table.directory, before=GATHER)
    assert seen["auto"]
    assert seen["pread"]
    assert seen["direct"]


RINGS = [
    pytest.param(errno.EPERM, "io_uring_setup, io_uring_enter", marks=pytest.mark.case("I22")),
    pytest.param(errno.ENOSYS, "older than Linux 5.11", marks=pytest.mark.case("I23")),
    pytest.param(errno.ENOMEM, "ulimit -l"),
    pytest.param(errno.EMFILE, "Too many open files"),
]


@pytest.mark.skipif(not SYSCALLS, reason="system call numbers of this machine are not known here")
@pytest.mark.parametrize(("error", "hint"), RINGS)
def test_a_ring_that_is_refused(table, error, hint):
    script = """
    refuse("io_uring_setup", int(sys.argv[2]))
    gathers = {io: engram.FileGather(directory, 0, io=io) for io in ("auto", "auto", "direct")}
    try:
        engram.FileGather(directory, 0, io="uring")
        refusal = None
    except OSError as refused:
        refusal = [refused.errno, str(refused)]
    report(refusal=refusal, served=[served(gather) for gather in gathers.values()],
           io=[gather.stats()["io"] for gather in gathers.values()])
    """
    seen = child(script, table.directory, error, before=GATHER)
    assert seen["served"] == [True, True]
    auto, direct = seen["io"]
    assert (auto["runs"], direct["runs"]) == ("mmap+pread", "pread-direct")
    assert "io_uring refused" in auto["fallbacks"][0]
    assert os.strerror(error) in auto["fallbacks"][0]
    assert hint in auto["fallbacks"][0]
    assert seen["stderr"].count("io_uring refused") == 1, "one warning"
    number, text = seen["refusal"]
    assert number == error
    assert hint in text


@pytest.mark.skipif(not SYSCALLS, reason="system call numbers of this machine are not known here")
def test_a_ring_that_is_refused_later(table):
    script = """
    from pathlib import Path
    engram.drop_cache(list(Path(directory).glob("*.safetensors")))
    gather = engram.FileGather(directory, 0)
    explicit = engram.FileGather(directory, 0, io="uring")
    before = gather.stats()["io"]["runs"]
    pid = os.fork()
    if pid == 0:  # A child has no ring yet.
        refuse("io_uring_setup", 1)
        try:
            explicit.gather(ids)
            refusal = None
        except OSError as refused:
            refusal = refused.errno
        report(before=before, served=served(gather), refusal=refusal,
               fallbacks=gather.stats()["io"]["fallbacks"])
        os._exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    seen = child(script, table.directory, before=GATHER)
    assert seen["before"] == "mmap+uring"
    assert seen["served"]
    assert seen["refusal"] == errno.EPERM
    assert "io_uring refused later" in seen["fallbacks"][0]


@pytest.mark.case("I05")
@pytest.mark.skipif(not SYSCALLS, reason="system call numbers of this machine are not known here")
def test_a_mapping_that_is_refused(table):
    script = """
    refuse("mmap", 19, argument=3, mask=0xf, value=1)
    gather = engram.FileGather(directory, 0)
    try:
        engram.FileGather(directory, 0, io="mmap")
        refusal = None
    except OSError as refused:
        refusal = [refused.errno, str(refused)]
    report(served=served(gather), io=gather.stats()["io"], refusal=refusal)
    """
    seen = child(script, table.directory, before=GATHER)
    assert seen["served"]
    assert "mmap refused on " in seen["io"]["fallbacks"][0]
    assert "No such device (os error 19)" in seen["io"]["fallbacks"][0]
    assert seen["stderr"].count("mmap refused") == 1, "one warning"
    assert seen["refusal"][0] == errno.ENODEV


@pytest.mark.case("I40")
@pytest.mark.skipif(not SYSCALLS, reason="system call numbers of this machine are not known here")
def test_direct_io_that_is_refused(table):
    script = """
    refuse("openat", 22, argument=2, mask=os.O_DIRECT, value=os.O_DIRECT)
    gather = engram.FileGather(directory, 0, io="direct")
    report(served=served(gather), io=gather.stats()["io"], verified=gather.verify(50).ways)
    """
    seen = child(script, table.directory, before=GATHER)
    assert seen["served"]
    assert seen["io"]["direct_alignment"] is None
    assert "direct" not in seen["io"]["runs"]
    assert "direct I/O refused on " in seen["io"]["fallbacks"][0]
    assert seen["verified"][1] == "pread"


@pytest.mark.case("I40")
def test_direct_io_is_what_the_descriptors_say(table):
    script = """
    import fcntl
    gather = engram.FileGather(directory, 0, io=sys.argv[2])
    direct = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            inside = os.readlink(f"/proc/self/fd/{number}").startswith(directory)
            direct += inside and bool(fcntl.fcntl(int(number), fcntl.F_GETFL) & os.O_DIRECT)
        except OSError:
            continue
    report(direct=direct, files=len(gather.files), io=gather.stats()["io"])
    """
    seen = child(script, table.directory, "direct", before=GATHER)
    if seen["io"]["direct_alignment"] is None:
        assert seen["direct"] == 0
        assert "direct" not in seen["io"]["runs"]
    else:
        assert seen["direct"] == seen["files"]
        assert seen["io"]["runs"].endswith("-direct")
    assert child(script, table.directory, "auto", before=GATHER)["direct"] == 0


def memory_group():
    """A new memory control group below this process's own, and the names of its files."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, names = Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "cgroup.procs")
        elif not controllers:
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "cgroup.procs")
        else:
            continue
        made = root / group.lstrip("/") / f"engram-test-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        if (made / names[0]).exists():
            return made, *names
        made.rmdir()
    pytest.skip("no memory control group can be made here")


@pytest.mark.case("I11")
@pytest.mark.parametrize("advice", ["random", "normal"])
def test_a_control_group_smaller_than_the_table(tmp_path, advice):
    script = """
    directory, group, advice = sys.argv[1:]
    open(group, "w").write(str(os.getpid()))
    info = synth.load(directory)
    gather = engram.FileGather(directory, 0, advice=advice)
    random = np.random.default_rng(0)
    correct = []
    for _ in range(30):
        ids = random.integers(0, gather.num_rows, 4096)
        correct.append(right(info, ids, gather.gather(ids)))
    warmed = []
    for most in (None, 1 << 30):
        engram.drop_cache(gather.files)
        warmed.append([gather.prewarm(max_bytes=most), gather.residency().share * gather.nbytes])
    report(correct=all(correct), warmed=warmed, size=gather.nbytes)
    """
    info = synth.write(tmp_path / "c", "qwen", dtype="fp8", rows=1_000_000)
    group, limit, processes = memory_group()
    try:
        (group / limit).write_text(str(112 << 20))
        seen = child(script, info.directory, group / processes, advice)
    finally:
        group.rmdir()
    assert seen["size"] > 120 << 20
    assert seen["correct"], "every row, with either advice"
    for read, resident in seen["warmed"]:
        assert 80 << 20 < read < 112 << 20, "about what the group may hold, whatever was asked for"
        assert resident > 0.98 * read, "and it stayed"


MOUNTS = """
directory, scratch, io = sys.argv[1:]
from pathlib import Path
own_mounts()
scratch = Path(scratch)
for name in ("over", "upper", "work", "bound"):
    (scratch / name).mkdir(exist_ok=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("io", IO_MODES)
def test_read_only_mounts(table, tmp_path, io):
    script = """
    mount(Path(directory), scratch / "bound", flags=MS_BIND)
    mount(Path(directory), scratch / "bound", flags=MS_BIND | MS_REMOUNT | MS_RDONLY)
    info = synth.load(directory)
    gather = engram.FileGather(scratch / "bound", 0, io=io)
    ids = np.arange(0, gather.num_rows, 7)
    served = right(info, ids, gather.gather(ids)) and gather.verify(100).ok
    engram.drop_cache(gather.files)
    report(served=served and right(info, ids, gather.gather(ids)))
    """
    assert child(script, table.directory, tmp_path, io, before=MOUNTS)["served"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("io", IO_MODES)
def test_overlay_filesystems(table, tmp_path, io):
    script = """
    try:
        mount(Path("overlay"), scratch / "over", "overlay",
              data=f"lowerdir={directory},upperdir={scratch}/upper,workdir={scratch}/work")
    except OSError as error:
        report(skip=str(error))
        sys.exit()
    info = synth.load(directory)
    gather = engram.FileGather(scratch / "over", 0, io=io)
    ids = np.arange(0, gather.num_rows, 7)
    # Copied up, the file lies elsewhere; what is open goes on as it was.
    os.utime(gather.files[0])
    report(served=right(info, ids, gather.gather(ids)), io=gather.stats()["io"])
    """
    seen = child(script, table.directory, tmp_path, io, before=MOUNTS)
    if "skip" in seen:
        pytest.skip(f"no overlay here: {seen['skip']}")
    assert seen["served"]
    assert seen["io"]["filesystems"] == ["overlayfs"]


def test_a_signal_every_millisecond(table):
    script = """
    import signal
    heard = []
    signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    correct = []
    for io in ("auto", "mmap", "pread", "uring", "direct"):
        gather = engram.FileGather(directory, 0, io=io)
        for _ in range(4):
            engram.drop_cache(gather.files)
            correct.append(right(info, ids, gather.gather(ids)))
    signal.setitimer(signal.ITIMER_REAL, 0)
    report(correct=all(correct), heard=len(heard))
    """
    seen = child(script, table.directory, before=GATHER)
    assert seen["correct"]
    assert seen["heard"] > 20


@pytest.mark.case("I36")
def test_one_mapping_per_file_however_many_tensors(tmp_path):
    names = [f"model.embed_{index}.weight" for index in range(500)]
    path = safetensors(
        tmp_path / "model.safetensors", *(tensor(name, "U8", (40, 16)) for name in names)
    )
    script = """
    path, name = sys.argv[1:]
    gather = engram.FileGather(path, name)
    gather.gather(np.arange(40))
    report(count=len(mappings(path)))
    """
    assert child(script, path, names[250])["count"] == 1
