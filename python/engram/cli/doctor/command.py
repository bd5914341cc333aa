"""The command: runs the checks and prints what they found."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import engram
from engram import _engram
from engram.cli.checkpoint import chosen_tables, is_wrong_path
from engram.cli.errors import describe, reported
from engram.cli.parameters import given_path
from engram.cli.text import output, status

from . import accelerator, facts, machine, rates, storage, tables
from .estimate import estimate
from .finding import Finding, worst

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

SCHEMA_VERSION = 1
"""Of the JSON document. Keys may be added to it; whatever else changes raises the number."""

_PROBE_SECONDS = 5.0
_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    path: Annotated[
        Path | None,
        typer.Argument(
            parser=given_path,
            help="A checkpoint directory, a .safetensors file or an index JSON; "
            "without one the machine alone is looked at.",
        ),
    ] = None,
    *,
    table: Annotated[
        str | None, typer.Option(help="One table, by name or place in layer order, not all.")
    ] = None,
    rows_per_token: Annotated[
        int | None,
        typer.Option(min=1, help="Rows per token and table, where no config.json says."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="How long to read rows at random.")
    ] = _PROBE_SECONDS,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out what takes seconds: rates, and torch.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this machine and this checkpoint allow, and what to do where it is not enough.

    Random rows are read past the page cache, and some 32,000 more rows into it, to be timed there.
    Status 0: all well, or with warnings; 1: a problem; 2: there is nothing at PATH to look at.
    """
    with reported(2):
        with status().status("asking the machine"):
            found = _examine(path, table, rows_per_token, seconds, quick=quick)
        verdict = worst(found)
        if as_json:
            document: dict[str, Any] = {
                "schema_version": SCHEMA_VERSION,
                "engram": engram.__version__,
                "path": None if path is None else os.fspath(path),
                "verdict": verdict,
                "findings": [finding.as_json() for finding in found],
            }
            print(json.dumps(document, indent=2))
        else:
            show(found, output())
        if verdict == "problem":
            raise typer.Exit(1)


def show(found: Sequence[Finding], console: Console) -> None:
    """Prints a line per finding, and below it what to do."""
    width = max(len(finding.name) for finding in found)
    for finding in found:
        console.print(f"{finding.verdict:<8}", style=_STYLES[finding.verdict], end="")
        console.print(f" {finding.name:<{width}}  {finding.found}")
        if finding.advice is not None:
            console.print(f"{'':<8} {'':<{width}}  -> {finding.advice}")


def _examine(
    path: Path | None, table: str | None, rows_per_token: int | None, seconds: float, *, quick: bool
) -> list[Finding]:
    of_torch = [] if quick else [accelerator.torch(accelerator.ask())]
    if path is None:
        return [*machine.checks(), *of_torch]
    try:
        infos = chosen_tables(path, table)
    except (OSError, engram.CheckpointError) as error:
        if is_wrong_path(error, path):
            raise
        return [*machine.checks(), *of_torch, tables.damaged(error)]
    files = sorted({file for info in infos for file in info.files})
    found = machine.checks(sum(info.bytes for info in infos), len(files))
    found += [*of_torch, tables.checkpoint(infos)]
    lying = _mounts(files)
    for mount in lying:
        found += [
            storage.filesystem(mount),
            storage.block_device(storage.device_of(mount), mount),
        ]
    try:
        found += _open_tables(path, infos)
        largest = max(infos, key=lambda info: info.bytes)
        in_memory = all(mount is not None and mount.is_memory for mount in lying)
        found += _rates(
            path,
            largest,
            tables.demand(path, infos, rows_per_token),
            0.0 if quick else seconds,
            in_memory=in_memory,
        )
    except (OSError, engram.CheckpointError) as error:
        found.append(tables.damaged(error))
    return found


def _mounts(files: Sequence[str]) -> list[storage.Mount | None]:
    mountinfo = facts.text(facts.PROC / "self/mountinfo") or ""
    return list(dict.fromkeys(storage.mount_of(Path(file), mountinfo) for file in files))


def _open_tables(path: Path, infos: Sequence[engram.TableInfo]) -> list[Finding]:
    modes: dict[str, Finding] = {}
    shares: list[engram.Residency] = []
    for info in infos:
        with engram.FileGather(path, info.name) as gather:
            finding = tables.io_mode(gather.stats()["io"])
            modes.setdefault(finding.found, finding)
            shares.append(gather.residency())
    return [*modes.values(), tables.residency(shares)]


def _rates(
    path: Path,
    info: engram.TableInfo,
    demand: tables.Demand,
    seconds: float,
    *,
    in_memory: bool,
) -> list[Finding]:
    try:
        direct = _engram.Reader(os.fspath(path), info.name, "direct", None, "auto", None, 0)
    except OSError as error:
        return [storage.direct_io(None, describe(error))]
    found = [storage.direct_io(direct.stats()["io"])]
    if seconds == 0.0 or info.rows == 0:
        return found
    device = rates.measure(direct, seconds)
    direct.close()
    found.append(rates.random_reads(device, in_memory=in_memory))
    if demand.rows is None:
        found.append(
            Finding(
                "decode step",
                "warning",
                f"rows per token are not known: {demand.unknown}",
                "pass --rows-per-token",
            )
        )
        return found
    with engram.FileGather(path, info.name) as gather:
        memory = rates.measure_warm(gather, demand.rows)
    return found + estimate(demand.rows, demand.reads, device, memory)
