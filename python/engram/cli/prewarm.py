"""`engram prewarm`: tables into memory before somebody waits for their rows."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

import engram
from engram import _engram

from .checkpoint import chosen_tables
from .errors import Failed, reported
from .parameters import CheckpointPath, given_size
from .progress import progress
from .text import format_bytes, output, percent

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

SCHEMA_VERSION = 1
"""Of the JSON document. Keys may be added to it; whatever else changes raises the number."""


def prewarm(
    path: CheckpointPath,
    *,
    table: Annotated[
        str | None, typer.Option(help="One table, by name or place in layer order, not all.")
    ] = None,
    most: Annotated[
        int | None,
        typer.Option(
            "--max",
            parser=given_size,
            metavar="SIZE",
            help="Bytes to read at most, over all tables, such as 20GiB.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read tables into the page cache, in order and at the device's best rate.

    Stops where --max, the machine's memory or a control group's limit is reached: what would go
    beyond would drop what was read first. The pages stay when this ends, for every process.
    """
    with reported():
        tables = chosen_tables(path, table)
        limit, _ = _engram.memory_bytes()
        done = warm_tables(path, tables, most, limit, output(quiet=as_json))
        if as_json:
            document: dict[str, Any] = {
                "schema_version": SCHEMA_VERSION,
                "engram": engram.__version__,
                "path": os.fspath(path),
                "max_bytes": most,
                "memory_bytes": limit,
                "left_out_bytes": sum(each["bytes"] - each["bytes_read"] for each in done),
                "tables": done,
            }
            print(json.dumps(document, indent=2))


def warm_tables(
    path: Path,
    tables: list[engram.TableInfo],
    wanted: int | None,
    limit: int,
    console: Console,
) -> list[dict[str, Any]]:
    """Prewarms one table after the other, and says of each what became of it.

    Args:
        path: The checkpoint.
        tables: Its tables, those first that are wanted most.
        wanted: Bytes asked for, None for all.
        limit: Bytes that memory has room for; page cache counts as room.
        console: Where to say it.

    Returns:
        The same as JSON values; every key is part of the command's interface.

    Raises:
        Failed: There is no room at all.
        OSError: A read failed.
    """
    total = sum(info.bytes for info in tables)
    room = min(total, limit if wanted is None else min(wanted, limit))
    if room == 0 and total > 0 and wanted != 0:
        raise Failed("there is no memory to read rows into")
    left = room
    told: list[dict[str, Any]] = []
    for info in tables:
        share = min(left, info.bytes)
        with engram.FileGather(path, info.name) as gather:
            started = time.perf_counter()
            with progress(_short(info.name), of_bytes=True) as report:
                done = gather.prewarm(share, report) if share else 0
            seconds = time.perf_counter() - started
            resident = gather.residency().share
        left -= done
        rate = f" at {format_bytes(done / seconds)}/s" if done else ""
        console.print(
            f"{info.name}: {format_bytes(done)} of {format_bytes(info.bytes)} read in "
            f"{seconds:.1f} s{rate}; {percent(resident)} in memory"
        )
        told.append(
            {
                "name": info.name,
                "bytes": info.bytes,
                "bytes_read": done,
                "seconds": seconds,
                "resident_share": resident,
            }
        )
    missing = total - sum(each["bytes_read"] for each in told)
    if missing:
        why = (
            f"--max {format_bytes(wanted)}"
            if wanted is not None and wanted <= limit
            else f"no more than {format_bytes(limit)} of memory may be used"
        )
        console.print(f"{format_bytes(missing)} were left out: {why}")
    return told


def _short(name: str) -> str:
    """The end of a long name, where tables of one checkpoint differ."""
    return name if len(name) <= 32 else f"...{name[-29:]}"
