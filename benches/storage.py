"""One table in each place it can live: how long loading takes, what memory, how fast look-ups are.

Each place is opened in turn and stays open, the page cache holding the file; what a place takes is
what this process grew by, as the kernel counts it: anonymous memory, shared memory, and how much of
either is in huge pages. Then all look the same rows up in turn, on the host and, where there is a
CUDA device, on it. Every row is checked, outside of what is timed.

    python benches/storage.py [--size 512MiB] [--rows 16,256,4096] [--places pinned,file]
"""

import importlib
import sys
import time
import warnings
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import engram
from engram.cli.measured import Measurement
from engram.cli.text import format_bytes, format_seconds
from engram.cli.timing import Method, interleaved
from engram.storage import Storage
from support import ids, options
from support.report import Report, markdown

ROUNDS = 20_000
LEAST = 5
CONFIGURATIONS = {
    "device": {"cpu_offload": False},
    "pinned": {},
    "huge": {"use_thp": True},
    "shared": None,
    "file": {"disk_offload": True},
}


@dataclass
class Opened:
    """A place, and what opening it took."""

    storage: Storage
    seconds: float
    anonymous: int
    shared: int
    notes: list[str] = field(default_factory=list)


def main(arguments: list[str] | None = None) -> int:
    made = options.parser(__doc__, seconds=1.0)
    made.set_defaults(size="512MiB")
    made.add_argument(
        "--places",
        default=",".join(CONFIGURATIONS),
        type=lambda text: [part.strip() for part in text.split(",")],
        help="which, separated by commas (default: %(default)s); huge is pinned with huge pages",
    )
    chosen = options.parsed(made, arguments)
    unknown = set(chosen.places) - set(CONFIGURATIONS)
    if unknown:
        made.error(f"no place {min(unknown)!r}; there are {', '.join(CONFIGURATIONS)}")
    report = Report("storage", chosen)
    with suppress(ImportError):
        importlib.import_module("torch.distributed")  # Not to be counted as a table's memory.
    info = options.checkpoint(chosen)
    table = info.tables[0]
    with ExitStack() as stack:
        gather = stack.enter_context(engram.FileGather(info.directory))
        gather.prewarm()
        report.table(gather)
        report.residency("before", gather)
        opened = {}
        for place in chosen.places:
            try:
                opened[place] = open_place(place, info.directory)
            except (MemoryError, OSError) as error:
                report.note(f"no {place}: {str(error).splitlines()[0]}")
                continue
            stack.callback(opened[place].storage.close)
            if place == "file":
                opened[place].storage.source.prewarm()
        report.extra["places"] = costs(opened, report)
        for name, supply in ids.supplies(chosen, info, report).items():
            measurements = []
            for rows in chosen.rows:
                results = interleaved(
                    [
                        method
                        for place, entry in opened.items()
                        for method in methods(place, entry.storage)
                    ],
                    supply(rows),
                    lambda wanted: table.expected(wanted)["weight"],
                    seconds=chosen.seconds,
                    rounds=ROUNDS,
                    least=LEAST,
                )
                measurements += [
                    Measurement("warm", name, rows, method, result)
                    for method, result in results.items()
                ]
            report.add(measurements)
    return report.finish()


def open_place(place: str, path: Path) -> Opened:
    """Opens the table there and sees what the process grows by."""
    before = memory()
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        storage = open_shared(path) if place == "shared" else open_plainly(place, path)
    seconds = time.perf_counter() - began
    after = memory()
    return Opened(
        storage,
        seconds,
        after["RssAnon"] - before["RssAnon"],
        after["RssShmem"] - before["RssShmem"],
        [str(warning.message) for warning in caught],
    )


def open_plainly(place: str, path: Path) -> Storage:
    return engram.open_storage(CONFIGURATIONS[place], path)


def open_shared(path: Path) -> Storage:
    """Shares memory with nobody else: the same memory, without the other replicas."""
    import torch.distributed as dist

    from engram.storage import Topology
    from engram.storage.shared import SharedStorage

    topology = Topology(data_parallel_size=1, data_parallel_rank=0, store=dist.HashStore())
    with engram.FileGather(path) as gather:
        storage = SharedStorage(gather.info, topology=topology, required=True)
        storage.load(gather)
    return storage


def memory() -> dict[str, int]:
    """Memory of this process in use, by kind."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Rss"):
            name, value = line.split(":")
            found[name] = int(value.split()[0]) * 1024
    return found


def costs(opened: dict[str, Opened], report: Report) -> list[dict]:
    """Prints what each place took, and gives the same as JSON values."""
    lines, documents = [], []
    for place, entry in opened.items():
        stats = entry.storage.stats()
        nbytes = entry.storage.nbytes
        share = stats.get("huge_page_share")
        lines.append(
            [
                place,
                format_seconds(entry.seconds),
                format_bytes(max(0, entry.anonymous)),
                format_bytes(max(0, entry.shared)),
                format_bytes(sum(nbytes.values())),
                "" if share is None else f"{share:.0%}",
            ]
        )
        documents.append(
            {
                "place": place,
                "seconds": entry.seconds,
                "anonymous_bytes": entry.anonymous,
                "shared_bytes": entry.shared,
                "nbytes": nbytes,
                "huge_page_share": share,
            }
        )
        for note in entry.notes:
            report.note(f"{place}: {note}")
    print("\n## Opening, with the file in the page cache\n")
    headings = ["place", "seconds", "anonymous", "shared", "as reported", "huge pages"]
    print(markdown(headings, lines), flush=True)
    return documents


def methods(place: str, storage: Storage) -> list[Method]:
    """Look-ups with ids on the host, and with ids on the device where there is one."""
    found = [
        Method(
            place, lambda wanted, out: (wanted, out), lambda call: storage.lookup(call[0], call[1])
        )
    ]
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return found

    def prepare(wanted, out):
        there = torch.from_numpy(wanted).cuda()
        rows = torch.empty(out.shape, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        return there, rows, out

    def run(call) -> float:
        there, rows, out = call
        began = time.perf_counter()
        storage.lookup(there, rows)
        torch.cuda.synchronize()
        taken = time.perf_counter() - began
        out[...] = rows.cpu().numpy()
        return taken

    return [*found, Method(f"{place}, ids on the device", prepare, run, own_clock=True)]


if __name__ == "__main__":
    sys.exit(main())
