"""A fresh process that serves text under a memory limit; `budgeted.py` starts it with a task."""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.control_group import Group

CHECKED = 512
"""Rows of each batch that are compared with what they should be."""
DEPTH = 128
RATE_BATCHES = 6
RATE_ROWS = 16_384
FEW = 16 << 20
"""What any contender may use beside the table's share: rings, slots, tables of pages."""


def serve(task: dict) -> dict:
    """Prefill in chunks, then decode steps, by one contender."""
    group = Group(Path(task["group"][0]), task["group"][1])
    # First of all, so that everything this process uses counts.
    group.join()
    import numpy as np

    import text_trace
    from engram import synth
    from engram.cli.page_cache import bytes_read
    from support.bare import distinct

    info = synth.load(task["checkpoint"])
    table = info.tables[0]
    trace = text_trace.TextTrace(*(np.load(path) for path in task["text"]), "", {})
    row_ids = text_trace.RowIds(trace, info.config)
    heads = row_ids.heads
    out = np.full((task["chunk"] * heads, table.row_bytes), 1, np.uint8)
    prefill, window, steps = task["prefill"], task["window"], task["steps"]
    decoded = row_ids.folded(prefill, prefill + task["requests"] * steps)
    decoded = decoded.reshape(task["requests"], steps, heads)
    # The limit leaves the table its share, and everything else what it uses already.
    itself = group.not_to_be_evicted()
    group.set_limit(itself + task["memory"] + FEW)

    contender = Contender(task, info)
    generator = np.random.default_rng(3)
    counted = {"checked": 0, "wrong": 0, "cpu": 0.0, "read": 0, "rows": 0}

    def timed(ids: np.ndarray, *, counts: bool) -> float:
        ids = ids.reshape(-1)
        part = out[: len(ids)]
        if contender.is_bare:
            ids = distinct(ids)
        read, cpu = bytes_read(), time.process_time()
        seconds = contender.gather(ids, part)
        cpu, read = time.process_time() - cpu, bytes_read() - read
        if counts:
            counted["cpu"] += cpu
            counted["read"] += read
            counted["rows"] += len(part)
        if not contender.is_bare:
            some = generator.integers(0, len(ids), min(CHECKED, len(ids)))
            right = (part[some] == table.expected(ids[some])["weight"]).all(axis=-1)
            counted["checked"] += len(some)
            counted["wrong"] += int(np.count_nonzero(~right))
        return seconds

    chunks = [(at, min(at + task["chunk"], prefill)) for at in range(0, prefill, task["chunk"])]
    for first, last in chunks[:-window] if contender.keeps_rows else chunks[-3 * window : -window]:
        if not contender.is_bare:
            timed(row_ids.folded(first, last), counts=False)
    before = contender.stats()
    seconds = []
    for number, chunk in enumerate(chunks[-window:]):
        if number % max(1, window // RATE_BATCHES) == 0:
            contender.try_device(distinct(generator.integers(0, table.rows, RATE_ROWS)))
        seconds.append(timed(row_ids.folded(*chunk), counts=True))
    after = contender.stats()
    prefilled = dict(counted)
    step_seconds = [timed(decoded[:, step], counts=False) for step in range(steps)]
    ended = contender.stats()
    told = {
        "seconds": seconds,
        "tokens": sum(last - first for first, last in chunks[-window:]),
        "rows": prefilled["rows"],
        "cpu_seconds": prefilled["cpu"],
        "bytes_read": prefilled["read"],
        "direct_reads_per_second": contender.device_rate,
        "step_seconds": step_seconds[steps // 2 :],
        "limit": itself + task["memory"] + FEW,
        "itself": itself,
        "used": group.used(),
        "page_cache": group.page_cache(),
        "stats": contender.difference(before, after),
        "step_stats": contender.difference(after, ended),
        "cache": ended.get("cache"),
        "rows_checked": counted["checked"],
        "rows_wrong": counted["wrong"],
    }
    contender.close()
    return told


class Contender:
    """One way to serve, opened."""

    def __init__(self, task: dict, info) -> None:
        import engram

        self.is_bare = task["how"] == "bare"
        self.keeps_rows = task["how"] == "cache"
        options = {
            "cache": {"cache_bytes": task["memory"]},
            "auto": {},
            "mmap": {"io": "mmap"},
            "direct": {"io": "direct"},
            "bare": {"io": "direct"},
        }[task["how"]]
        self._gather = engram.FileGather(info.directory, **options)
        self._direct = None
        self._tried = (0, 0.0)
        if task["bare"]:
            self._direct = engram.FileGather(info.directory, io="direct")

    def gather(self, ids, out) -> float:
        """Seconds that rows take."""
        if self.is_bare:
            return self._bare(ids)
        begin = time.perf_counter()
        self._gather.gather(ids, out=out)
        return time.perf_counter() - begin

    def _bare(self, ids) -> float:
        from engram import _engram

        assert self._direct is not None
        return _engram.bench_uring(self._direct._native, ids, True, DEPTH)

    def try_device(self, ids) -> None:
        """Reads rows with bare direct reads, where there are such loops, and notes the time."""
        if self._direct is not None:
            rows, seconds = self._tried
            self._tried = (rows + len(ids), seconds + self._bare(ids))

    @property
    def device_rate(self) -> float | None:
        """Rows per second that such reads brought; None without any."""
        rows, seconds = self._tried
        return rows / seconds if rows else None

    def stats(self) -> dict:
        return self._gather.stats()

    @staticmethod
    def difference(before: dict, after: dict) -> dict:
        """What was counted in between."""
        told = {
            key: after[key] - before[key]
            for key in ("reads", "bytes_read", "rows_resident", "unique_rows_fetched")
        }
        if after.get("cache"):
            kept = ("hits", "misses", "insertions", "evictions", "admission_refusals", "waited")
            told["cache"] = {key: after["cache"][key] - before["cache"][key] for key in kept}
        return told

    def close(self) -> None:
        for opened in (self._gather, self._direct):
            if opened is not None:
                opened.close()


if __name__ == "__main__":
    print(json.dumps(serve(json.loads(sys.argv[1]))))
