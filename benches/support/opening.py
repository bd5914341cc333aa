"""Opening a checkpoint of 131 files: `FileGather` beside `safe_open` and the list of its keys.

`safe_open` is asked for torch tensors, as servers do, and for numpy arrays, which is quicker.

Each process opens once in every way, in an order that rotates from process to process, after all
imports and with the headers in the page cache; then again and again. Memory is what a process that
opens only engram grows by.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import engram
from engram.cli.text import format_bytes, format_seconds

from . import options
from .report import Report, markdown

PROCESSES = 9
REPEATS = 12
MOST_MEMORY = 4 << 20
CHILD = Path(__file__).with_name("open_once.py")


def section(chosen: argparse.Namespace, report: Report) -> None:
    """Measures in fresh processes and reports."""
    info = options.released_layout(chosen)
    with engram.FileGather(info.directory) as gather:
        held = list(gather.files)
        pieces = len(gather.planes[0].pieces)
    print(f"\n## Opening {pieces} pieces in {len(info.files)} files\n")
    processes, repeats = (2, 1) if chosen.quick else (PROCESSES, REPEATS)
    task = {
        "checkpoint": str(info.directory),
        "all": [str(path) for path in info.files],
        "held": held,
        "repeats": repeats,
    }
    first: dict[str, list[float]] = {}
    again: dict[str, list[float]] = {}
    for turn in range(processes):
        told = _in_fresh_process({**task, "turn": turn})
        for name, seconds in told.items():
            first.setdefault(name, []).append(seconds[0])
            again.setdefault(name, []).extend(seconds[1:])
    grown = [_in_fresh_process({**task, "memory": True}) for _ in range(2 if chosen.quick else 3)]
    labels = {
        "engram": "FileGather(checkpoint)",
        "described": "FileGather(checkpoint).info",
        "torch": f"safe_open for torch + keys(), all {len(info.files)} files",
        "all": f"safe_open for numpy + keys(), all {len(info.files)} files",
        "held": f"safe_open for numpy + keys(), the {len(held)} files with rows",
    }
    lines = [
        [
            labels[name],
            *(format_seconds(statistics.median(times[name])) for times in (first, again)),
        ]
        for name in labels
        if name in first
    ]
    print(markdown(["median time", "first in a process", "again"], lines))
    resident = statistics.median(told["resident"] for told in grown)
    anonymous = statistics.median(told["anonymous"] for told in grown)
    print(f"\n- memory: {format_bytes(resident)}, of it {format_bytes(anonymous)} anonymous")
    opened = statistics.median(first["engram"])
    for name in ("torch", "all"):
        if name not in first:
            continue
        report.figure(
            f"first opening: engram / {labels[name]}",
            opened / statistics.median(first[name]),
            at_most=1.0,
        )
    report.figure("memory of opening", resident / 2**20, at_most=MOST_MEMORY / 2**20, unit=" MiB")
    report.extra["opening"] = {
        "pieces": pieces,
        "files": len(info.files),
        "files_with_rows": len(held),
        "seconds_first": first,
        "seconds_again": again,
        "memory": grown,
    }


def _in_fresh_process(task: dict) -> dict:
    told = subprocess.run(
        [sys.executable, str(CHILD), json.dumps(task)], capture_output=True, text=True, check=False
    )
    if told.returncode:
        sys.exit(told.stderr)
    return json.loads(told.stdout)
