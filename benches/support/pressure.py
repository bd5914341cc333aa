"""Batches in a process that may use little memory, and the memory that engram itself uses."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import engram
from engram.cli.text import format_bytes, format_seconds

from . import control_group
from .report import Report, markdown

CHILD = Path(__file__).with_name("under_pressure.py")
SHARE = 10
LEAST_LIMIT = 192 << 20
"""Python and numpy alone need some tens of megabytes."""
ADVICE_SPAN = 384 << 20
"""Bytes of the table that are used, twice what the group has room for."""
MOST_P99 = 1.5
MOST_BESIDE_TABLE = 6 << 20


def limited_section(chosen, report: Report, info, with_bare: bool) -> None:
    """Batches under a limit of a tenth of the table, beside bare direct reads."""
    nbytes = sum(table.nbytes for table in info.tables)
    limit = max(nbytes // SHARE, LEAST_LIMIT)
    print(f"\n## Under a memory limit of {format_bytes(limit)}\n")
    if limit != nbytes // SHARE:
        report.note(f"a tenth of this table is too little to run in: {format_bytes(limit)} instead")
    batches = min(chosen.limited_batches, 20) if chosen.quick else chosen.limited_batches
    engram.drop_cache(info.files)
    try:
        with control_group.limited(limit, chosen.cgroup) as group:
            told = _run(
                {
                    "what": "limit",
                    "checkpoint": str(info.directory),
                    "group": [str(group.path), group.version],
                    "limit": limit,
                    "rows": chosen.limited_rows,
                    "batches": batches,
                    "bare": with_bare,
                }
            )
    except control_group.Refused as reason:
        report.note(f"nothing measured under a memory limit, no control group: {reason}")
        return
    lines = []
    for name, seconds in told["seconds"].items():
        cells = [statistics.median(seconds), _p99(seconds), max(seconds)]
        lines.append([name, f"{len(seconds):,}", *map(format_seconds, cells)])
    print(f"{chosen.limited_rows:,} rows per batch, uniform ids, in turn:\n")
    print(markdown(["method", "batches", "p50", "p99", "longest"], lines))
    print(
        f"\n- group: {format_bytes(told['used'])} used at the end, "
        f"{format_bytes(told['page_cache'])} of it page cache; full before the first batch: "
        f"{'yes' if told['full'] else 'no'}"
    )
    stats = told["stats"]
    print(
        f"- engram: {stats['rows_resident']:,} rows resident, {stats['rows_fetched']:,} fetched, "
        f"{stats['major_faults']:,} major faults, {stats['pages_probed']:,} pages probed"
    )
    ours = told["seconds"]["engram"]
    if with_bare and "bare io_uring, direct" in told["seconds"]:
        report.figure(
            f"{chosen.limited_rows:,} rows, {format_bytes(limit)}: p99 of engram / bare direct",
            _p99(ours) / _p99(told["seconds"]["bare io_uring, direct"]),
            at_most=MOST_P99,
        )
    _count(report, told)
    report.extra["limited"] = {"limit": limit, "rows": chosen.limited_rows, **told}


def advice_section(chosen, report: Report, info) -> None:
    """Either advice on the mapping where memory is short and some rows are wanted more often."""
    print(f"\n## Advice, under a memory limit of {format_bytes(LEAST_LIMIT)}\n")
    lines, told = [], {}
    for advice in ("random", "normal"):
        engram.drop_cache(info.files)
        try:
            with control_group.limited(LEAST_LIMIT, chosen.cgroup) as group:
                told[advice] = _run(
                    {
                        "what": "advice",
                        "checkpoint": str(info.directory),
                        "group": [str(group.path), group.version],
                        "advice": advice,
                        "span": ADVICE_SPAN,
                        "rows": 256,
                        "batches": 20 if chosen.quick else 4000,
                    }
                )
        except control_group.Refused as reason:
            report.note(f"advice was not compared, no control group: {reason}")
            return
        _count(report, told[advice])
        cells = told[advice]
        missing, read = f"{cells['missing']:.1%}", format_bytes(cells["bytes_read"])
        lines.append([advice, missing, read, format_seconds(cells["seconds"])])
    print(f"256 rows per batch, four fifths of them in an eighth of {format_bytes(ADVICE_SPAN)}:\n")
    print(markdown(["advice", "rows missing", "read from the device", "time"], lines))
    report.extra["advice"] = told


def memory_section(chosen, report: Report, info) -> None:
    """What a process grows by, beside the pages of the files."""
    print("\n## Memory beside the table\n")
    told = _run(
        {
            "what": "memory",
            "checkpoint": str(info.directory),
            "rows": max(chosen.rows),
            "batches": 3 if chosen.quick else 40,
        }
    )
    bits = told["pages"] // 8
    print(
        f"- grown by {format_bytes(told['grown'])} after {told['batches']} batches of "
        f"{max(chosen.rows):,} rows; one bit per page is {format_bytes(bits)}"
    )
    report.figure(
        "memory beside the table and a bit per page",
        (told["grown"] - bits) / 2**20,
        at_most=MOST_BESIDE_TABLE / 2**20,
        unit=" MiB",
    )
    _count(report, told)
    report.extra["memory"] = told


def _p99(seconds: list[float]) -> float:
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def _count(report: Report, told: dict) -> None:
    for key in ("rows_checked", "rows_wrong"):
        report.extra[key] = report.extra.get(key, 0) + told[key]


def _run(task: dict) -> dict:
    told = subprocess.run(
        [sys.executable, str(CHILD), json.dumps(task)], capture_output=True, text=True, check=False
    )
    if told.returncode:
        sys.exit(f"{CHILD.name} ended with status {told.returncode}: {told.stderr.strip()}")
    return json.loads(told.stdout)
