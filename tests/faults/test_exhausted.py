"""Threads, memory and descriptors that run out while engram works."""

from __future__ import annotations

import errno

import pytest
from children import SYSCALLS, child

from checkpoint_support import checkpoint, safetensors, shards, tensor

GATHER = """
directory = sys.argv[1]
info = synth.load(directory)
ids = np.arange(0, 19_000, 7)

def served(gather):
    return all(right(info, ids, gather.gather(ids)) for _ in range(2))
"""


@pytest.mark.skipif(not SYSCALLS, reason="system call numbers of this machine are not known here")
def test_no_thread_can_be_started_any_more(table):
    """Callers meet the refusal while others' jobs come and go; whoever is not refused is served."""
    script = """
    gather = engram.FileGather(directory, 0, io="direct")
    other = engram.FileGather(directory, 0, io="uring")
    few = np.arange(0, 19_000, 5000)
    counts = {"served": 0, "refused": 0, "others": 0, "stuck": 0}
    begin, stop = threading.Event(), threading.Event()

    def submit():
        begin.wait()
        while not stop.is_set():
            try:
                ticket = gather.submit(few)
                ticket.wait(5)
                counts["served"] += 1
            except TimeoutError:
                counts["stuck"] += 1
            except OSError as refused:
                known = "cannot start a reading thread" in str(refused)
                counts["refused" if known else "others"] += 1

    def prefetch():
        random = np.random.default_rng(0)
        begin.wait()
        while not stop.is_set():
            try:
                other.prefetch(random.integers(0, other.num_rows, 4))
            except OSError:
                pass

    submit_threads = [threading.Thread(target=submit, daemon=True) for _ in range(2)]
    threads = [threading.Thread(target=prefetch, daemon=True), *submit_threads]
    for thread in threads:
        thread.start()
    gather.submit(few).wait()
    for name in ("clone", "clone3"):
        refuse(name, 11)
    begin.set()  # With one reading thread for all of them.
    time.sleep(float(sys.argv[2]))
    stop.set()
    for thread in threads:
        thread.join(20)
    report(**counts, after=[right(info, [1, 2, 3], ticket.wait(5))
                            for ticket in [gather.submit([1, 2, 3]) for _ in range(5)]])
    """
    seen = child(script, table.directory, 2.5, before=GATHER)
    assert seen["served"] > 10
    assert (seen["stuck"], seen["others"]) == (0, 0)
    assert seen["after"] == [True] * 5


@pytest.mark.skipif(not SYSCALLS, reason="system call numbers of this machine are not known here")
@pytest.mark.parametrize("way", ["auto", "mmap", "pread"])
@pytest.mark.parametrize("cache_bytes", [0, 200_000])
def test_a_large_gather_without_helpers(table, way, cache_bytes):
    """The calling thread copies all rows itself where nobody can be called to help."""
    script = """
    for name in ("clone", "clone3"):
        refuse(name, 11)
    gather = engram.FileGather(directory, 0, io=sys.argv[2], cache_bytes=int(sys.argv[3]))
    many = np.arange(0, 19_000)
    report(right=[right(info, many, gather.gather(many)) for _ in range(3)])
    """
    seen = child(script, table.directory, way, cache_bytes, before=GATHER)
    assert seen["right"] == [True] * 3


WIDE = 4 << 20
"""Bytes of a row, so that the memory it is read into is more than what is left."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    path = tmp_path_factory.mktemp("wide") / "model.safetensors"
    return safetensors(path, tensor("wide.weight", "U8", (8, WIDE)))


@pytest.mark.parametrize(
    ("way", "runs", "words"),
    [
        ("auto", "mmap+uring", "of host memory"),
        ("uring", "uring", "of host memory"),
        ("direct", "uring-direct", "of host memory"),
        ("pread", "pread", "to read rows into"),
        pytest.param(
            "threads",
            "pread-direct",
            "to read rows into",
            marks=pytest.mark.skipif(not SYSCALLS, reason="system call numbers are not known"),
        ),
        ("cached", "cache+mmap+uring-direct", "to read rows into"),
    ],
)
def test_no_memory_to_read_into(wide, way, runs, words):
    """An address space with room for everything but the rows: refused, then served."""
    script = """
    import resource
    path, way = sys.argv[1:]
    if way == "threads":
        refuse("io_uring_setup", 1)
    io = {"threads": "direct", "cached": "auto"}.get(way, way)
    gather = engram.FileGather(path, "wide.weight", io=io,
                               cache_bytes="64MiB" if way == "cached" else 0)
    ids = [1, 4, 6]
    out = np.empty((3, gather.row_bytes), np.uint8)
    if way == "threads":
        gather.gather([0, 2, 3], out=out)  # Its threads wait for more.
    engram.drop_cache(path)
    stored = np.fromfile(path, np.uint8)[-8 * gather.row_bytes:].reshape(8, -1)[ids]
    engram.drop_cache(path)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 20), limits[1]))
    errors = []
    for _ in range(2):
        try:
            gather.gather(ids, out=out)
        except OSError as refused:
            errors.append([refused.errno, str(refused), refused.table])
    resource.setrlimit(resource.RLIMIT_AS, limits)
    gather.gather(ids, out=out)
    report(errors=errors, right=bool((out == stored).all()), runs=gather.stats()["io"]["runs"])
    """
    seen = child(script, wide, way)
    if seen["runs"] != runs:
        pytest.skip(f"reads run as {seen['runs']} here")
    assert [number for number, *_ in seen["errors"]] == [errno.ENOMEM] * 2
    for _, text, table in seen["errors"]:
        assert "cannot allocate" in text
        assert words in text
        assert table == "wide.weight"
    assert seen["right"], "the next call is served"


@pytest.mark.parametrize("way", ["direct", "budget"])
def test_descriptors_that_run_out_between_two_of_a_file(tmp_path, way):
    """Direct reads take a second descriptor per file: without one the page cache is used."""
    script = """
    import resource
    directory, way = sys.argv[1:]
    opened = lambda: max(map(int, os.listdir("/proc/self/fd")))
    if way == "direct":
        # Room for the files, the ring, and three more.
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened() + 6 + 1 + 3, 1 << 10))
        gather = engram.FileGather(directory, io="direct")
    else:
        gather = engram.FileGather(directory)
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened() + 3, 1 << 10))
        gather.resize("1MiB")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 10, 1 << 10))
    every = np.arange(gather.num_rows)
    stored = engram.FileGather(directory, io="pread").gather(every).view(np.uint8)
    engram.drop_cache(gather.files)
    same = [bool((gather.gather(every).view(np.uint8) == stored).all()) for _ in range(2)]
    report(same=same, files=len(gather.files),
           io=gather.stats()["io"])
    """
    contents = {
        f"model-{place + 1:05}-of-00006.safetensors": [piece]
        for place, piece in enumerate(shards([10] * 6, 32))
    }
    seen = child(script, checkpoint(tmp_path / "c", contents), way)
    assert seen["files"] == 6
    assert seen["same"] == [True, True]
    assert seen["io"]["direct_alignment"] is None
    assert "direct" not in seen["io"]["runs"]
    (said,) = [text for text in seen["io"]["fallbacks"] if "direct I/O refused" in text]
    assert "Too many open files" in said
    assert "ulimit -n" in said
