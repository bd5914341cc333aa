"""What the doctor says under limits that are really set, and of what it says nothing is left."""

from __future__ import annotations

import errno
import os

import pytest
from children import SYSCALLS, child
from test_limits import memory_group

from checkpoint_support import checkpoint, shards
from engram import synth

pytest.importorskip("typer")

DOCTOR = """
import resource, subprocess
from pathlib import Path

def doctor(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "engram", "doctor", "--json", "--quick", *map(str, arguments)],
        capture_output=True, text=True,
    )
    assert "Traceback" not in done.stderr, done.stderr
    document = json.loads(done.stdout)
    found = {finding["name"]: finding for finding in document["findings"]}
    return {"status": done.returncode, "verdict": document["verdict"], **found}
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
needs_syscalls = pytest.mark.skipif(
    not SYSCALLS, reason="system call numbers of this machine are not known here"
)


@needs_syscalls
@pytest.mark.case("I22")
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_a_container_without_rings(table, error):
    script = """
    directory, error = sys.argv[1:]
    refuse("io_uring_setup", int(error))
    report(**doctor(directory))
    """
    seen = child(script, table.directory, error, before=DOCTOR)
    rings, mode = seen["io_uring"], seen["io=auto"]
    assert (seen["status"], seen["verdict"]) == (0, "warning")
    assert rings["verdict"] == mode["verdict"] == "warning"
    assert os.strerror(error) in rings["found"]
    assert "a seccomp filter is set on this process" in rings["advice"]
    assert "io_uring_setup, io_uring_enter" in rings["advice"]
    assert mode["data"]["runs"] == "mmap+pread"
    assert "io_uring refused" in mode["advice"]


@needs_root
@needs_syscalls
def test_a_setting_that_forbids_rings(table, tmp_path):
    script = """
    own_mounts()
    setting = Path(sys.argv[1]) / "disabled"
    setting.write_text("2")
    try:
        mount(setting, Path("/proc/sys/kernel/io_uring_disabled"), flags=MS_BIND)
    except OSError as error:
        report(skip=str(error))
        sys.exit()
    refuse("io_uring_setup", 1)
    report(**doctor())
    """
    seen = child(script, tmp_path, before=DOCTOR)
    if "skip" in seen:
        pytest.skip(f"this kernel has no such setting: {seen['skip']}")
    assert "kernel.io_uring_disabled is 2" in seen["io_uring"]["advice"]
    assert seen["io_uring"]["data"] == {
        "errno": errno.EPERM,
        "io_uring_disabled": 2,
        "seccomp": 2,
    }


def test_limits_of_resources(tmp_path):
    script = """
    few, many = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (8192, 8192))
    limited = doctor(few)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    report(limited=limited, some=doctor(few), none=doctor(many))
    """
    made = [
        checkpoint(
            tmp_path / str(files),
            {
                f"model-{place + 1:05}-of-{files:05}.safetensors": [piece]
                for place, piece in enumerate(shards([10] * files, 32))
            },
        )
        for files in (2, 60)
    ]
    seen = child(script, *made, before=DOCTOR)
    assert seen["limited"]["locked memory"]["data"]["bytes"] == 8192
    assert seen["limited"]["open files"]["verdict"] == "ok"
    assert seen["some"]["status"] == 0
    assert seen["some"]["open files"]["verdict"] == "warning"
    assert seen["some"]["open files"]["data"]["soft"] == 40
    assert seen["none"]["status"] == 1
    assert seen["none"]["open files"]["verdict"] == "problem"
    assert "60 files" in seen["none"]["open files"]["found"]
    assert "ulimit -n" in seen["none"]["open files"]["advice"]
    assert "may hold 40 files open" in seen["none"]["checkpoint"]["found"]


@needs_root
def test_a_small_shared_memory(table):
    script = """
    own_mounts()
    mount(Path("tmpfs"), Path("/dev/shm"), "tmpfs", data="size=1m")
    report(alone=doctor(), beside=doctor(sys.argv[1]))
    """
    seen = child(script, table.directory, before=DOCTOR)
    for each in (seen["alone"], seen["beside"]):
        assert each["status"] == 0
        assert each["/dev/shm"]["verdict"] == "warning"
        assert each["/dev/shm"]["data"]["bytes"] == 1 << 20
        assert "--shm-size" in each["/dev/shm"]["advice"]
    assert "the tables take" in seen["beside"]["/dev/shm"]["found"]


@needs_root
def test_a_checkpoint_in_memory(table, tmp_path):
    script = """
    import shutil
    directory, scratch = map(Path, sys.argv[1:])
    own_mounts()
    mount(Path("tmpfs"), scratch, "tmpfs", data="size=64m")
    shutil.copytree(directory, scratch / "c")
    report(**doctor(scratch / "c"))
    """
    seen = child(script, table.directory, tmp_path, before=DOCTOR)
    assert seen["status"] == 0
    assert seen["filesystem"]["data"]["type"] == "tmpfs"
    assert seen["filesystem"]["verdict"] == "ok"
    assert "in memory" in seen["filesystem"]["found"]
    assert seen["device"]["found"] == "memory"
    assert seen["in memory"]["data"]["resident"] == seen["in memory"]["data"]["pages"]


def test_a_filesystem_of_a_program(disk):
    seen = child("report(**doctor(sys.argv[1]))", disk.path, before=DOCTOR)
    assert seen["filesystem"]["verdict"] == "warning"
    assert seen["filesystem"]["data"]["remote"]
    assert seen["filesystem"]["data"]["type"].startswith("fuse")
    assert seen["io=auto"]["verdict"] == "warning"
    assert "mmap" not in seen["io=auto"]["data"]["runs"]
    assert "not mapped" in seen["io=auto"]["advice"]


@pytest.mark.case("I11")
def test_a_control_group_smaller_than_the_table(tmp_path):
    script = """
    directory, group = sys.argv[1:]
    open(group, "w").write(str(os.getpid()))
    done = subprocess.run(
        [sys.executable, "-m", "engram", "prewarm", directory], capture_output=True, text=True
    )
    with engram.FileGather(directory) as gather:
        share = gather.residency().share
    report(doctor=doctor(directory), warmed=done.stdout, status=done.returncode, share=share)
    """
    info = synth.write_sparse(tmp_path / "c", "qwen", dtype="fp8")
    group, limit, processes = memory_group()
    try:
        (group / limit).write_text(str(256 << 20))
        seen = child(script, info.directory, group / processes, before=DOCTOR)
    finally:
        group.rmdir()
    memory = seen["doctor"]["memory"]
    assert memory["verdict"] == "warning"
    assert memory["data"]["limit"] == 256 << 20
    assert memory["data"]["available"] < 256 << 20
    assert "a control group's limit" in memory["found"]
    assert "more memory for the control group" in memory["advice"]
    assert seen["status"] == 0, "what fits is read, and what does not is said"
    assert "were left out: no more than" in seen["warmed"]
    assert 0 < seen["share"] * info.tables[0].nbytes < 256 << 20
