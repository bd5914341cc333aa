"""A fresh process that gathers under a memory limit, or measures its own memory.

`pressure.py` starts it with a task as JSON.
"""

import json
import sys
import time
from pathlib import Path

from control_group import Group

FILLING_ROWS = 4096
FILLING_BATCHES = 2000
FULL = 0.95
DEPTH = 128


def limited(task: dict) -> dict:
    """Batches of engram and of bare direct reads in turn, once the group is full."""
    group = Group(Path(task["group"][0]), task["group"][1])
    # First of all, so that everything this process uses counts.
    group.join()
    import numpy as np

    import engram
    from engram import _engram, synth

    info = synth.load(task["checkpoint"])
    table = info.tables[0]
    generator = np.random.default_rng(2)
    out = np.full((FILLING_ROWS, table.row_bytes), 1, np.uint8)
    with engram.FileGather(info.directory) as gather:
        for _ in range(FILLING_BATCHES):
            if group.used() >= FULL * task["limit"]:
                break
            gather.gather(generator.integers(0, table.rows, FILLING_ROWS), out=out)
        full = group.used() >= FULL * task["limit"]
        before = gather.stats()
        out = np.full((task["rows"], table.row_bytes), 1, np.uint8)
        ours: list[float] = []
        bare: list[float] = []
        wrong = 0
        direct = None
        if task["bare"]:
            direct = engram.FileGather(info.directory, io="direct")
            if direct.stats()["io"]["direct_alignment"] is None:
                direct = None
        for turn in range(task["batches"]):
            for who in (0, 1) if turn % 2 else (1, 0):
                ids = generator.integers(0, table.rows, task["rows"])
                if who == 0:
                    begin = time.perf_counter()
                    gather.gather(ids, out=out)
                    ours.append(time.perf_counter() - begin)
                    right = (out == table.expected(ids)["weight"]).all(axis=-1)
                    wrong += len(ids) - int(np.count_nonzero(right))
                elif direct is not None:
                    bare.append(_engram.bench_uring(direct._native, ids, True, DEPTH))
        stats = gather.stats()
    counted = ("rows_resident", "rows_fetched", "major_faults", "pages_probed", "bytes_read")
    return {
        "seconds": {"engram": ours} | ({"bare io_uring, direct": bare} if bare else {}),
        "full": full,
        "used": group.used(),
        "page_cache": group.page_cache(),
        "stats": {name: stats[name] - before[name] for name in counted},
        "rows_checked": len(ours) * task["rows"],
        "rows_wrong": wrong,
    }


def advice(task: dict) -> dict:
    """Rows that are wanted unequally often, more than the group has room for."""
    group = Group(Path(task["group"][0]), task["group"][1])
    group.join()
    import numpy as np

    import engram
    from engram import synth
    from engram.cli.page_cache import bytes_read

    info = synth.load(task["checkpoint"])
    table = info.tables[0]
    span = min(table.rows, task["span"] // table.row_bytes)
    often = span // 8
    generator = np.random.default_rng(4)
    out = np.full((task["rows"], table.row_bytes), 1, np.uint8)
    wrong = 0
    with engram.FileGather(info.directory, advice=task["advice"]) as gather:
        seconds = 0.0
        before, read = gather.stats(), bytes_read()
        for batch in range(2 * task["batches"]):
            if batch == task["batches"]:  # The group is full, and what is kept has settled.
                seconds, before, read = 0.0, gather.stats(), bytes_read()
            ids = generator.integers(often, span, task["rows"])
            hot = generator.random(task["rows"]) < 0.8
            ids[hot] = generator.integers(0, often, int(hot.sum()))
            begin = time.perf_counter()
            gather.gather(ids, out=out)
            seconds += time.perf_counter() - begin
        wrong = int((out != table.expected(ids)["weight"]).any(axis=-1).sum())
        stats = gather.stats()
    return {
        "seconds": seconds,
        "missing": (stats["rows_fetched"] - before["rows_fetched"]) / (task["batches"] * len(out)),
        "bytes_read": bytes_read() - read,
        "rows_checked": len(out),
        "rows_wrong": wrong,
    }


def memory(task: dict) -> dict:
    """What opening and gathering add to the memory of a process that keeps its own buffers."""
    import numpy as np
    from kernel import memory_of_process

    import engram
    from engram import synth

    info = synth.load(task["checkpoint"])
    table = info.tables[0]
    generator = np.random.default_rng(3)
    out = np.full((task["rows"], table.row_bytes), 1, np.uint8)
    batches = [generator.integers(0, table.rows, task["rows"]) for _ in range(task["batches"])]
    before = memory_of_process()["anonymous"]
    with engram.FileGather(info.directory) as gather:
        pages = gather.residency().pages
        for ids in batches:
            gather.gather(ids, out=out)
        grown = memory_of_process()["anonymous"] - before
    wrong = int((out != table.expected(batches[-1])["weight"]).any(axis=-1).sum())
    return {
        "pages": pages,
        "grown": grown,
        "batches": len(batches),
        "rows_checked": len(out),
        "rows_wrong": wrong,
    }


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    tasks = {"limit": limited, "advice": advice, "memory": memory}
    print(json.dumps(tasks[asked["what"]](asked)))
