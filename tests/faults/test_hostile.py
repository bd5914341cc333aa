"""A checkpoint that means harm: pipes, endless nesting, lengths that lie, links that lead out."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from children import child, right

import engram
from checkpoint_support import IO_MODES, raises
from engram import CheckpointError, EngramConfig
from engram.storage.preflight import Needs
from engram.storage.segment import Segment

READ = """
directory, what = sys.argv[1:]
ways = {
    "tables": lambda: engram.tables(directory),
    "gather": lambda: engram.FileGather(directory, 0),
    "hasher": lambda: engram.hasher(directory, 0),
    "storage": lambda: engram.open_storage(engram.EngramConfig(), (directory, 0)),
    "loader": lambda: engram.ViewLoader(directory),
}
try:
    ways[what]()
    report(error=None)
except Exception as error:
    report(error=type(error).__name__, text=str(error))
"""


def write_constant(directory, entry, data=b""):
    """A file beside the others that stores hash constants as `entry` says."""
    layer = engram.tables(directory)[0].layer
    name = f"model.language_model.layers.{layer}.ple.ple_embedding.layer_multipliers"
    text = json.dumps({name: entry}).encode()
    path = Path(directory) / "constants.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize("what", ["tables", "gather", "hasher", "storage", "loader"])
def test_a_pipe_in_place_of_the_configuration_holds_nobody_up(fresh, what):
    config = Path(fresh.directory) / "config.json"
    config.unlink()
    os.mkfifo(config)
    seen = child(READ, fresh.directory, what, timeout=30)
    assert seen["error"] == "CheckpointError", seen
    assert "config.json" in seen["text"]


@pytest.mark.parametrize("what", ["tables", "gather", "hasher", "storage"])
@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "{"])
def test_a_configuration_nested_beyond_reason(fresh, what, text):
    (Path(fresh.directory) / "config.json").write_text(text)
    assert child(READ, fresh.directory, what, timeout=30)["error"] == "CheckpointError"


@pytest.mark.parametrize("file", ["model.safetensors.index.json", "extra.safetensors"])
def test_a_pipe_among_the_files_holds_nobody_up(fresh, file):
    path = Path(fresh.directory) / file
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    for what in ("tables", "gather", "hasher"):
        error = child(READ, fresh.directory, what, timeout=30)["error"]
        # Who finds all in files that the index names has no need of one beside them.
        ignored = what == "hasher" and file == "extra.safetensors"
        assert error == (None if ignored else "CheckpointError"), what


def test_constants_of_a_length_that_lies_allocate_nothing(fresh):
    for index in Path(fresh.directory).glob("*.index.json"):
        index.unlink()
    write_constant(
        fresh.directory,
        {"dtype": "I64", "shape": [1 << 40], "data_offsets": [0, 1 << 43]},
        bytes(64),
    )
    script = """
    import resource
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
    try:
        engram.hasher(sys.argv[1], 0)
        report(error=None)
    except Exception as error:
        report(error=type(error).__name__, text=str(error))
    """
    seen = child(script, fresh.directory)
    assert seen["error"] == "CheckpointError", seen
    assert str(1 << 43) in seen["text"]


def test_constants_behind_a_link_that_leads_out(fresh, tmp_path):
    for index in Path(fresh.directory).glob("*.index.json"):
        index.unlink()
    path = write_constant(
        fresh.directory, {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}, bytes(8)
    )
    outside = tmp_path / "outside.safetensors"
    path.rename(outside)
    path.symlink_to(outside)
    with raises(CheckpointError, "outside the checkpoint's directory", path=path):
        engram.hasher(fresh.directory, 0)


def listing(directory):
    return {
        str(path.relative_to(directory)): (path.lstat().st_mode, path.lstat().st_size)
        + ((path.stat().st_mtime_ns,) if path.is_file() else ())
        for path in Path(directory).rglob("*")
    }


def test_nothing_is_written_beside_the_checkpoint_and_nothing_in_it_is_run(fresh, tmp_path):
    directory = Path(fresh.directory)
    ran = tmp_path / "ran"

    class Bomb:
        def __reduce__(self):
            return Path.touch, (ran,)

    for name in ("pytorch_model.bin", "model.pt", "constants.npy", "tokens.pkl"):
        (directory / name).write_bytes(pickle.dumps(Bomb()))
    for name in ("modeling_custom.py", "configuration_custom.py", "engram.py", "conftest.py"):
        (directory / name).write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\n")
    config = json.loads((directory / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_custom.Config"}
    (directory / "config.json").write_text(json.dumps(config))
    before = listing(directory)
    ids = np.arange(0, 15_000, 7)
    engram.tables(directory, plain=True)
    engram.hasher(directory, 0)
    for io in IO_MODES:
        with engram.FileGather(directory, 0, io=io) as gather:
            gather.prewarm()
            assert right(fresh, ids, gather.gather(ids))
            gather.prefetch(ids)
            assert gather.verify(100).ok
            gather.reopen()
            assert right(fresh, ids, gather.submit(ids).wait())
            engram.drop_cache(gather.files)
    for choice in ({}, {"cpu_offload": False}, {"disk_offload": True}):
        storage = engram.open_storage(EngramConfig(**choice), (directory, 0))
        assert right(fresh, ids, storage.lookup(ids))
        storage.close()
    assert listing(directory) == before
    assert not ran.exists()


@pytest.fixture
def segment():
    made = Segment.create(Needs("t", "shared", 8192, 1), [])
    made.set_ready()
    yield made
    made.close_file()


def test_only_a_private_file_is_taken_for_a_segment(segment, tmp_path):
    assert os.fstat(segment._fd).st_mode & 0o777 == 0o600
    Segment.attach(segment.offer, 8192).close_file()
    for lie in (
        {"pid": f"self/../../..{tmp_path}/x", "fd": 0},
        {"pid": os.getpid(), "fd": f"../../..{tmp_path}/x"},
        {"pid": True, "fd": 0},
    ):
        with pytest.raises(ValueError, match="no offer of a segment"):
            Segment.attach({**segment.offer, **lie}, 8192)
    os.fchmod(segment._fd, 0o644)
    with pytest.raises(ValueError, match="not a file of this user alone"):
        Segment.attach(segment.offer, 8192)
    os.fchmod(segment._fd, 0o600)
    reading, writing = os.pipe()
    try:
        with pytest.raises(ValueError, match="not a file of this user alone"):
            Segment.attach({**segment.offer, "fd": reading}, 8192)
    finally:
        os.close(reading)
        os.close(writing)


def test_shared_memory_that_is_cut_under_its_readers(tmp_path):
    """Anybody of the same user can reach the file; nobody who reads dies of it."""
    script = """
    from engram import _engram
    from engram.storage.preflight import Needs
    from engram.storage.segment import Segment
    rows = 50_000
    segment = Segment.create(Needs("t", "shared", rows * 160, 1), [])
    memory = np.frombuffer(segment.buffer, np.uint8)[: rows * 160].reshape(rows, 160)
    memory[:] = (np.arange(rows) % 251)[:, None]
    table = _engram.Hosted(segment.buffer, "t", rows, 0, rows, [(0, 160)])
    counts = {"right": 0, "refused": 0, "wrong": 0}
    stop = threading.Event()
    def work(seed):
        random = np.random.default_rng(seed)
        while not stop.is_set():
            ids = random.integers(0, rows, int(random.choice([1, 100, 5000])))
            out = np.empty((len(ids), 160), np.uint8)
            try:
                table.gather(ids, out, None)
                good = (out == (ids % 251)[:, None]).all()
                counts["right" if good else "wrong"] += 1
            except OSError as error:
                counts["refused" if error.errno == 5 and error.row is not None else "wrong"] += 1
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    for left in (40_000, 30_000, 7):
        os.ftruncate(segment._fd, left * 160 + 9)
        time.sleep(0.1)
    stop.set()
    for thread in threads:
        thread.join()
    out = np.empty((7, 160), np.uint8)
    table.gather(np.arange(7), out, None)
    report(**counts, left=bool((out == np.arange(7)[:, None]).all()))
    """
    seen = child(script, timeout=60)
    assert seen["wrong"] == 0
    assert seen["right"] > 0 < seen["refused"]
    assert seen["left"], "what is still there is served"


def test_a_table_without_columns_is_refused(tmp_path):
    text = json.dumps({"plain": {"dtype": "U8", "shape": [5, 0], "data_offsets": [0, 0]}}).encode()
    path = tmp_path / "empty.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with raises(ValueError, "rows are empty"):
        engram.FileGather(path, "plain")
