"""What opening and gathering cost a process: reads, memory, mappings, descriptors, imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import engram
from checkpoint_support import (
    QWEN,
    check_error,
    checkpoint,
    entries,
    raises,
    raw,
    read_rows,
    safetensors,
    shards,
    tensor,
)
from engram import CheckpointError

linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")


def run(code, *arguments, check=True):
    """Runs `code` in a process of its own; returns what it prints, a JSON document."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 or not check, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A sparse file with one table of 1 GiB, its last row written."""
    path = tmp_path_factory.mktemp("large") / "t.safetensors"
    rows = (1 << 30) // 256
    entry = {"dtype": "U8", "shape": [rows, 256], "data_offsets": [0, 1 << 30]}
    text = json.dumps({f"{QWEN}.weight": {**entry, "dtype": "BF16", "shape": [rows, 128]}}).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + (1 << 30))
        file.seek(-256, os.SEEK_END)
        file.write(bytes(range(256)))
    return path


@linux
@pytest.mark.case("I31")
@pytest.mark.case("I32")
def test_opening_reads_headers_and_maps_without_copying(large):
    found = run(
        """
        import json, re, sys
        import numpy as np
        import engram

        def measure():
            io = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
            status = open("/proc/self/status").read()
            def kib(name):
                return int(re.search(name + r":\\s+(\\d+) kB", status)[1]) * 1024
            return [int(io["read_bytes"]), int(io["rchar"]), kib("VmRSS"), kib("RssAnon")]

        engram.tables(sys.argv[1])
        before = measure()
        gather = engram.FileGather(sys.argv[1])
        opened = measure()
        row = gather.gather([gather.num_rows - 1])
        gathered = measure()
        assert bytes(row.view(np.uint8).reshape(-1)) == bytes(range(256))
        print(json.dumps([[b - a for a, b in zip(before, x)] for x in (opened, gathered)]))
        """,
        large,
    )
    for read_bytes, characters, resident, anonymous in found:
        assert read_bytes < 1 << 20
        assert characters < 1 << 20
        assert resident < 4 << 20
        assert anonymous < 4 << 20


@linux
@pytest.mark.case("M06")
@pytest.mark.case("I36")
@pytest.mark.parametrize("io", ["auto", "mmap"])
def test_files_are_mapped_once_and_read_only(tmp_path, io):
    pieces = shards([3] * 500, 8)
    others = [tensor(f"other.{number}", "F32", (2, 2)) for number in range(20)]
    files = {"a.safetensors": [*pieces[::2], *others], "b.safetensors": pieces[1::2]}
    directory = checkpoint(tmp_path / "c", files)
    before = {name: (directory / name).read_bytes() for name in files}
    found = run(
        """
        import json, sys
        import numpy as np
        import engram
        gather = engram.FileGather(sys.argv[1], io=sys.argv[2])
        gather.prewarm()
        gather.gather(np.arange(1500))
        lines = [line for line in open("/proc/self/maps") if ".safetensors" in line]
        maps = [(line.split()[1], line.split()[-1].split("/")[-1]) for line in lines]
        gather.close()
        left = [line for line in open("/proc/self/maps") if ".safetensors" in line]
        print(json.dumps([maps, left]))
        """,
        directory,
        io,
    )
    maps, left = found
    assert sorted(name for _, name in maps) == sorted(files)
    for permissions, _ in maps:
        assert permissions in ("r--s", "r--p")
    assert left == []
    assert before == {name: (directory / name).read_bytes() for name in files}


@linux
@pytest.mark.parametrize("io", ["pread", "uring", "direct"])
def test_readers_that_do_not_map_do_not(tmp_path, io):
    path = safetensors(tmp_path / "t.safetensors", tensor("t", "U8", (50, 8)))
    try:
        gather = engram.FileGather(path, "t", io=io)
    except OSError as error:
        pytest.skip(str(error))
    with gather, Path("/proc/self/maps").open() as maps:
        gather.gather([1, 2])
        assert str(path) not in maps.read()


MANY = """
import json, resource, sys
import numpy as np
import engram
limit, io = int(sys.argv[2]), sys.argv[3]
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
try:
    gather = engram.FileGather(sys.argv[1], io=io)
    rows = gather.gather(np.arange(gather.num_rows)).view(np.uint8)
    print(json.dumps(["good", bytes(rows.reshape(-1)).hex()]))
except OSError as error:
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    again = engram.FileGather(sys.argv[1], io=io)
    rows = again.gather(np.arange(again.num_rows)).view(np.uint8)
    place = [error.errno, error.filename, str(error), error.path, error.table]
    print(json.dumps(["refused", bytes(rows.reshape(-1)).hex(), *place]))
"""


@pytest.fixture(scope="module")
def twelve_files(tmp_path_factory):
    pieces = shards([1] * (12 * 128), 4)
    files = {f"{number:02}.safetensors": pieces[number::12] for number in range(12)}
    return checkpoint(tmp_path_factory.mktemp("many") / "c", files)


@pytest.mark.case("I35")
@pytest.mark.parametrize("io", ["auto", "mmap", "pread", "direct"])
def test_one_descriptor_per_file_and_one_more_for_direct_reads(twelve_files, io):
    expected = b"".join(piece.data for piece in shards([1] * (12 * 128), 4)).hex()
    assert run(MANY, twelve_files, 32 if io != "direct" else 44, io) == ["good", expected]


@pytest.mark.case("I35")
def test_too_few_descriptors_are_named_with_the_limit(twelve_files):
    expected = b"".join(piece.data for piece in shards([1] * (12 * 128), 4)).hex()
    outcome, rows, errno, filename, text, path, table = run(MANY, twelve_files, 10, "pread")
    assert (outcome, rows, errno) == ("refused", expected, 24)
    assert filename == path
    assert filename.startswith(str(twelve_files))
    assert "10 files" in text
    assert "ulimit -n" in text
    assert table == QWEN


@linux
@pytest.mark.case("I07")
def test_less_address_space_than_the_file_has_bytes(large):
    found = run(
        """
        import json, resource, sys
        import numpy as np
        import engram
        engram.FileGather(sys.argv[1]).close()
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (600 << 20),) * 2)
        gather = engram.FileGather(sys.argv[1])
        row = gather.gather([gather.num_rows - 1])
        assert bytes(row.view(np.uint8).reshape(-1)) == bytes(range(256))
        fallbacks = gather.stats()["io"]["fallbacks"]
        try:
            engram.FileGather(sys.argv[1], io="mmap")
        except OSError as error:
            refusal = [error.errno, error.filename, str(error)]
        print(json.dumps([fallbacks, refusal]))
        """,
        large,
    )
    fallbacks, (errno, filename, text) = found
    assert "mmap" in fallbacks[0]
    assert "max_map_count" in fallbacks[0]
    assert (errno, filename) == (12, str(large))
    assert "pread" in text


@pytest.mark.case("K01")
def test_importing_needs_no_native_library_and_no_heavy_package():
    found = run(
        """
        import json, os, sys
        import engram
        heavy = ["torch", "pydantic", "typer", "rich", "transformers", "safetensors", "click"]
        loaded = [name for name in heavy if name in sys.modules]
        cli = [name for name in sys.modules if name.startswith("engram.cli")]
        names = []
        if os.path.exists("/proc/self/maps"):
            names = [line.split()[-1] for line in open("/proc/self/maps")]
        native = [name for name in names if "liburing" in name or "libaio" in name]
        print(json.dumps([loaded, cli, native]))
        """
    )
    assert found == [[], [], []]


def test_gathering_with_numpy_imports_no_torch(plain):
    assert run(
        """
        import json, sys
        import engram
        with engram.FileGather(sys.argv[1], "embed.weight") as gather:
            rows = gather.gather([1, 2])
            gather.gather([1, 2], out=engram.HostBuffer(56))
            engram.TableSet([gather]).gather({"embed.weight": [3]})
        print(json.dumps(["torch" in sys.modules, list(rows.shape)]))
        """,
        plain,
    ) == [False, [2, 7]]


def test_gathering_works_without_torch_installed(plain):
    assert run(
        """
        import json, sys
        sys.modules["torch"] = None
        import engram
        with engram.FileGather(sys.argv[1], "embed.weight") as gather:
            print(json.dumps(gather.gather([[1, 2]]).shape))
        """,
        plain,
    ) == [1, 2, 7]


@pytest.mark.case("M20")
def test_opening_starts_no_process(plain):
    found = run(
        """
        import json, os, sys
        import engram
        gather = engram.FileGather(sys.argv[1], "embed.weight")
        gather.gather([1])
        pid = os.getpid()
        children = open(f"/proc/{pid}/task/{pid}/children").read().split()
        print(json.dumps(children))
        """,
        plain,
    )
    assert found == []


@pytest.mark.case("I02")
def test_a_file_replaced_or_removed_is_served_as_it_was_opened(tmp_path, io):
    path = safetensors(tmp_path / "t.safetensors", tensor("t", "U8", (3000, 100), seed=1))
    expected = read_rows(path, "t", np.arange(3000))
    other = safetensors(tmp_path / "new.safetensors", tensor("t", "U8", (3000, 100), seed=2))
    replacement = read_rows(other, "t", np.arange(3000))
    try:
        gather = engram.FileGather(path, "t", io=io)
    except OSError as error:
        pytest.skip(str(error))
    with gather:
        other.replace(path)
        assert np.array_equal(gather.gather(np.arange(3000)), expected)
        with engram.FileGather(path, "t", io=io) as fresh:
            assert np.array_equal(fresh.gather(np.arange(3000)), replacement)
            path.unlink()
            assert np.array_equal(fresh.gather([7, 2999]), replacement[[7, 2999]])
        assert np.array_equal(gather.gather([7, 2999]), expected[[7, 2999]])
    with pytest.raises(FileNotFoundError):
        engram.FileGather(path, "t", io=io)


def test_checkpoints_never_change(tmp_path, io):
    path = safetensors(tmp_path / "t.safetensors", tensor("t", "U8", (3000, 100)))
    os.utime(path, ns=(10**18, 10**18))
    path.chmod(0o444)
    before = (path.read_bytes(), path.stat().st_size, path.stat().st_mtime_ns)
    try:
        gather = engram.FileGather(path, "t", io=io)
    except OSError as error:
        pytest.skip(str(error))
    with gather:
        gather.prewarm()
        gather.gather(np.arange(3000))
        engram.drop_cache(gather.files)
        gather.gather(np.arange(3000))
    assert before == (path.read_bytes(), path.stat().st_size, path.stat().st_mtime_ns)


@pytest.mark.case("F11")
def test_a_lying_header_costs_no_memory(tmp_path):
    path = safetensors(tmp_path / "t.safetensors", tensor("t", "U8", (4, 4)))
    content = path.read_bytes()
    path.write_bytes((len(content) * 1000).to_bytes(8, "little") + content[8:])
    grown = run(
        """
        import json, resource, sys
        import engram
        try:
            engram.tables("/nonexistent")
        except FileNotFoundError:
            pass
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            engram.tables(sys.argv[1])
        except engram.CheckpointError:
            print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
        """,
        path,
    )
    assert grown < 1024, "kibibytes"


def test_a_hundred_files_open_in_little_memory(tmp_path):
    names = [f"model.layers.{number}.mlp.down_proj.weight" for number in range(40)]
    files = {}
    pieces = shards([2] * 128, 4)
    for number in range(131):
        own = [tensor(f"{number}.{name}", "BF16", (2, 2), seed=0) for name in names]
        files[f"{number:03}.safetensors"] = [*own, *pieces[number : number + 1]]
    directory = checkpoint(tmp_path / "c", files)
    grown = run(
        """
        import json, resource, sys
        import engram
        engram.FileGather(sys.argv[2], "t").close()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        gather = engram.FileGather(sys.argv[1])
        print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
        """,
        directory,
        safetensors(tmp_path / "t.safetensors", tensor("t", "U8", (4, 4))),
    )
    assert grown < 4096, "kibibytes"
    assert len(entries(*files["000.safetensors"])) == 41


def test_errors_of_a_file_that_changed_after_it_was_listed(tmp_path):
    path = safetensors(tmp_path / "t.safetensors", tensor("t", "U8", (4, 4)))
    with engram.FileGather(path, "t") as gather:
        expected = raw(gather.gather([3]))
        path.write_bytes(path.read_bytes() + b"more")
        with raises(CheckpointError, "4 bytes", path=path) as caught:
            engram.FileGather(path, "t")
        check_error(caught.value, CheckpointError)
        assert np.array_equal(raw(gather.gather([3])), expected)
