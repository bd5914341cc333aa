"""How rows are read: what it costs, in reads, pages, faults and context switches."""

from __future__ import annotations

import os

import numpy as np
import pytest
from children import child

import engram
from checkpoint_support import read_rows, safetensors, tensor
from engram import synth

OPEN = """
directory = sys.argv[1]
info = synth.load(directory)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A table of 60 MB in one file."""
    directory = tmp_path_factory.mktemp("large") / "checkpoint"
    layout = synth.Layout(table_files=1, naming="whole")
    return synth.write(directory, "qwen", dtype="fp8", rows=400_000, layout=layout)


@pytest.mark.case("I10")
@pytest.mark.case("I11")
@pytest.mark.parametrize(
    ("advice", "random"), [("auto", True), ("random", True), ("normal", False)]
)
def test_advice_is_on_the_mapping_where_there_is_one(large, advice, random):
    script = """
    gather = engram.FileGather(directory, advice=sys.argv[2])
    engram.drop_cache(gather.files)
    before = io_bytes()
    ids = np.random.default_rng(0).choice(gather.num_rows, 300, replace=False)
    correct = right(info, ids, gather.gather(ids))
    cost = io_bytes() - before
    flags = [each["VmFlags"].split() for each in mappings(gather.files[0])]
    report(correct=correct, cost=cost, random=["rr" in each for each in flags])
    """
    seen = child(script, large.directory, advice, before=OPEN)
    assert seen["correct"]
    assert seen["random"] == [random]
    # At most two pages a row, whatever the advice: rows not in memory are read, not faulted in.
    assert seen["cost"] <= 300 * 8192


@pytest.mark.case("I10")
@pytest.mark.parametrize("io", ["pread", "uring", "direct", "mmap"])
def test_reads_do_not_bring_in_their_neighbourhood(large, io):
    script = """
    gather = engram.FileGather(directory, io=sys.argv[2])
    engram.drop_cache(gather.files)
    before = io_bytes()
    ids = np.random.default_rng(1).choice(gather.num_rows, 300, replace=False)
    report(correct=right(info, ids, gather.gather(ids)), cost=io_bytes() - before)
    """
    seen = child(script, large.directory, io, before=OPEN)
    assert seen["correct"]
    assert seen["cost"] <= 300 * 8192


@pytest.mark.case("I13")
@pytest.mark.parametrize("io", ["auto", "mmap", "pread", "uring", "direct"])
def test_cold_rows_are_not_faulted_in_one_by_one(large, io):
    script = """
    import resource
    gather = engram.FileGather(directory, io=sys.argv[2])
    gather.gather(np.arange(10))
    engram.drop_cache(gather.files)
    ids = np.random.default_rng(2).choice(gather.num_rows, 1000, replace=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    rows = gather.gather(ids)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before
    report(correct=right(info, ids, rows), faults=faults, depth=gather.stats()["depth"])
    """
    seen = child(script, large.directory, io, before=OPEN)
    assert seen["correct"]
    if io == "mmap":
        # Advised of first; a page may still be on its way when the copy comes to it.
        assert seen["faults"] < 900
    else:
        assert seen["faults"] < 20
        assert seen["depth"] > 8


@pytest.mark.case("I14")
def test_the_number_of_threads_changes_nothing_but_time(large):
    ids = np.random.default_rng(3).integers(0, 300_000, 20_000)
    outcomes = []
    for threads in (1, 2, 32, None):
        with engram.FileGather(large.directory, threads=threads) as gather:
            engram.drop_cache(gather.files)
            outcomes.append(gather.gather(ids).view(np.uint8))
            outcomes.append(gather.gather(ids).view(np.uint8))
    assert all((rows == outcomes[0]).all() for rows in outcomes)
    for wrong in (0, -1, 1.5, "two", True):
        with pytest.raises(ValueError, match="threads="):
            engram.FileGather(large.directory, threads=wrong)


@pytest.mark.case("I18")
@pytest.mark.case("I19")
@pytest.mark.parametrize("start", [0, 37, 4059])
@pytest.mark.parametrize("tail", [0, 1, 123, 4095])
def test_first_and_last_rows_wherever_table_and_file_end(tmp_path, io, start, tail):
    # The data begins at `start` modulo a page, and the file ends `tail` bytes into one.
    rows, columns = 301, 160
    after = (tail - start - rows * columns) % 4096
    path = safetensors(
        tmp_path / "model.safetensors",
        tensor("table.weight", "U8", (rows, columns)),
        tensor("rest", "U8", (after,)),
        residue=(start - 8) % 4096,
    )
    assert path.stat().st_size % 4096 == tail
    ids = [0, 1, rows // 2, rows - 2, rows - 1]
    with engram.FileGather(path, "table.weight", io=io) as gather:
        engram.drop_cache(path)
        for _ in range(2):
            assert (gather.gather(ids).view(np.uint8) == read_rows(path, "table.weight", ids)).all()


@pytest.mark.case("I18")
@pytest.mark.parametrize("rows", [1, 2, 25, 26, 51])
def test_a_table_that_ends_with_its_file(tmp_path, io, rows):
    path = safetensors(tmp_path / "model.safetensors", tensor("table.weight", "U8", (rows, 160)))
    with engram.FileGather(path, "table.weight", io=io) as gather:
        engram.drop_cache(path)
        ids = np.arange(rows)[::-1]
        for _ in range(2):
            assert (gather.gather(ids).view(np.uint8) == read_rows(path, "table.weight", ids)).all()


@pytest.mark.case("I29")
def test_loading_the_rest_of_a_model_need_not_push_out_the_table(tmp_path, large):
    other = tmp_path / "rest.safetensors"
    safetensors(other, tensor("rest", "U8", (8 << 20,)))
    with engram.FileGather(large.directory) as gather:
        gather.prewarm()
        other.read_bytes()
        assert engram.drop_cache(other) == 0
        assert gather.residency().share == 1.0
        assert gather.stats()["major_faults"] == 0


def test_pages_that_went_away_cost_one_slow_batch(large):
    """Faults of the first are noticed; from then on beliefs are put to the kernel."""
    script = """
    import resource
    gather = engram.FileGather(directory, threads=1)
    engram.drop_cache(gather.files)
    half = gather.num_rows // 2
    random = np.random.default_rng(8)
    batches = [random.choice(half, 1500, replace=False) + half * part for part in (0, 1)]
    for ids in batches:
        gather.gather(ids)
    # Behind engram's back, which goes on believing that all of them are in memory.
    with open(gather.files[0], "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    faults = lambda: resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
    seen = []
    for ids in batches:
        before, stats = faults(), gather.stats()
        correct = right(info, ids, gather.gather(ids))
        after = gather.stats()
        seen.append({
            "correct": correct,
            "faults": faults() - before,
            **{name: after[name] - stats[name]
               for name in ("major_faults", "rows_fetched", "pages_probed")},
        })
    report(seen=seen)
    """
    first, second = child(script, large.directory, before=OPEN)["seen"]
    assert first["correct"]
    assert second["correct"]
    if first["faults"] < 100:
        pytest.skip("this filesystem keeps what it was told to drop")
    assert first["major_faults"] > 0
    assert second["faults"] < first["faults"] // 10
    assert second["major_faults"] == 0
    assert second["rows_fetched"] > 1000
    assert second["pages_probed"] > 1000


def test_faults_of_other_code_are_not_taken_for_faults_of_copies(large, tmp_path):
    """Not counted, and no reason to put what is believed to the kernel."""
    other = tmp_path / "other"
    other.write_bytes(os.urandom(4 << 20))
    script = """
    import mmap, resource
    gather = engram.FileGather(directory, threads=1)
    for path in gather.files:
        with open(path, "rb") as file:
            while file.read(1 << 20):
                pass
    gather.residency()
    random = np.random.default_rng(8)
    gather.gather(random.integers(0, gather.num_rows, 300))
    engram.drop_cache(extra)
    with open(extra, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapping.madvise(mmap.MADV_RANDOM)
    faults = lambda: resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
    before = faults()
    sum(mapping[::4096])
    others = faults() - before
    # The first touch of so many mapped pages takes as long as a wait for a device.
    ids = random.integers(0, gather.num_rows, 4000)
    correct = right(info, ids, gather.gather(ids))
    stats = gather.stats()
    report(correct=correct, others=others, major=stats["major_faults"],
           probed=stats["pages_probed"])
    """
    told = child(script, large.directory, before=f"{OPEN}extra = {str(other)!r}\n")
    assert told["correct"]
    if told["others"] < 100:
        pytest.skip("this filesystem keeps what it was told to drop")
    assert told["major"] == 0
    assert told["probed"] == 0


@pytest.mark.parametrize("advice", ["auto", "random", "normal"])
def test_prewarming_lifts_the_advice_for_its_time(large, advice):
    script = """
    gather = engram.FileGather(directory, advice=sys.argv[2])
    is_random = lambda: ["rr" in each["VmFlags"].split() for each in mappings(gather.files[0])]
    before, during = is_random(), []

    def progress(done, total):
        if done:
            during.append(is_random())

    gather.prewarm(progress=progress)
    after = is_random()

    def stop(done, total):
        if done:
            raise InterruptedError
    try:
        gather.prewarm(progress=stop)
    except InterruptedError:
        stopped = is_random()
    report(before=before, during=during, after=after, stopped=stopped)
    """
    seen = child(script, large.directory, advice, before=OPEN)
    expected = [advice != "normal"]
    assert seen["before"] == seen["after"] == seen["stopped"] == expected
    assert len(seen["during"]) > 3
    # One mapping to copy rows from, and one that the prewarm reads through.
    assert not any(any(each) for each in seen["during"])


@pytest.mark.case("I31")
def test_opening_reads_headers_only(tmp_path):
    script = """
    import resource
    path = sys.argv[1]
    engram.drop_cache(path)
    resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
    before = io_bytes(), resident()
    gathers = [engram.FileGather(path, "table.weight", io=io) for io in ("auto", "direct", "mmap")]
    report(read=io_bytes() - before[0], grown=resident() - before[1], size=gathers[0].nbytes)
    """
    header = '{"table.weight":{"dtype":"U8","shape":[8388608,128],"data_offsets":[0,1073741824]}}'
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + (1 << 30))
    seen = child(script, path)
    assert seen["size"] == 1 << 30
    assert seen["read"] < 1 << 20
    assert seen["grown"] < 8 << 20


@pytest.mark.case("I38")
def test_the_page_cache_is_used_by_default(large):
    script = """
    gather = engram.FileGather(directory)
    engram.drop_cache(gather.files)
    ids = np.random.default_rng(4).integers(0, gather.num_rows, 2000)
    read = []
    for _ in range(2):
        before = io_bytes()
        assert right(info, ids, gather.gather(ids))
        read.append(io_bytes() - before)
    report(read=read, direct=gather.stats()["io"]["direct_alignment"])
    """
    seen = child(script, large.directory, before=OPEN)
    assert seen["read"][0] > 1 << 20
    assert seen["read"][1] == 0
    assert seen["direct"] is None


@pytest.mark.case("I39")
def test_a_cap_on_mapped_bytes_changes_no_row(large):
    script = """
    def resident():
        return sum(int(each["Rss"].split()[0]) for each in mappings(gather.files[0])) << 10
    sizes = {}
    for cap in (None, 8 << 20):
        gather = engram.FileGather(directory, max_mapped_bytes=cap)
        for file in gather.files:
            open(file, "rb").read()
        correct, most = True, 0
        for seed in range(40):
            ids = np.random.default_rng(seed).integers(0, gather.num_rows, 500)
            correct = correct and right(info, ids, gather.gather(ids))
            most = max(most, resident())
        sizes[str(cap)] = [correct, most]
        gather.close()
    report(**sizes)
    """
    seen = child(script, large.directory, before=OPEN)
    (free, free_most), (capped, capped_most) = seen["None"], seen[str(8 << 20)]
    assert free
    assert capped
    assert capped_most < free_most
    assert capped_most < 40 << 20


@pytest.mark.case("I37")
@pytest.mark.parametrize("io", ["pread", "uring", "direct"])
def test_rows_and_their_scales_are_read_in_one_round(tmp_path, io):
    layout = synth.Layout(table_files=1, naming="whole")
    info = synth.write(tmp_path / "c", "deepseek", dtype="fp8", rows=4000, layout=layout)
    script = """
    gather = engram.FileGather(directory, 0, io=sys.argv[2])
    engram.drop_cache(gather.files)
    ids = np.concatenate([np.arange(1000, 1400), np.arange(1000, 1400)])
    rows = gather.gather(ids)
    correct = all(
        (np.asarray(rows[name]).view(np.uint8).reshape(expected.shape) == expected).all()
        for name, expected in synth.expected_rows(info, ids, 0).items()
    )
    sizes = [plane.row_bytes for plane in gather.planes]
    report(correct=bool(correct), reads=gather.stats()["reads"], sizes=sizes)
    """
    seen = child(script, info.directory, io, before=OPEN)
    assert seen["correct"]
    assert len(seen["sizes"]) == 2
    # Reads of 32 KiB at most, which may begin and end inside a page, per plane: not one per row.
    most = sum(-(-400 * size // (28 << 10)) + 1 for size in seen["sizes"])
    assert 0 < seen["reads"] <= most


@pytest.mark.case("R12")
@pytest.mark.parametrize("rows", [16, 96, 199])
def test_a_warm_decode_step_stays_on_its_thread(large, rows):
    script = """
    import resource
    gather = engram.FileGather(directory)
    gather.prewarm()
    tasks = len(os.listdir("/proc/self/task"))
    count = int(sys.argv[2])
    steps = np.random.default_rng(5).integers(0, gather.num_rows, (64, count))
    out = np.empty((count, gather.row_bytes), np.uint8)
    for step in steps:
        gather.gather(step, out)
    threads = len(os.listdir("/proc/self/task")) - tasks
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for turn in range(1000):
        gather.gather(steps[turn % 64], out)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    stats = gather.stats()
    report(switches=after - before, threads=threads, reads=stats["reads"],
           copy=stats["seconds"]["copy"]["p50"], call=stats["seconds"]["call"]["p50"])
    """
    seen = child(script, large.directory, rows, before=OPEN)
    assert seen["switches"] < 20, "given up by waiting, in a thousand steps"
    assert seen["threads"] == 0, "none was started"
    assert seen["reads"] == 0
    assert 0 < seen["copy"] <= seen["call"], "the overhead is reported apart"
