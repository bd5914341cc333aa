"""`engram inspect`: which tables a checkpoint holds, and how much of them is in memory."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import engram

from .errors import Failed, reported
from .parameters import CheckpointPath  # noqa: TC001 - typer reads the annotations
from .text import format_bytes, output, percent, plural

if TYPE_CHECKING:
    from rich.console import Console

JSON_VERSION = 1
_FILES_NAMED = 4


@dataclass(frozen=True)
class Inspected:
    """A table and what the page cache holds of it.

    Attributes:
        info: The table.
        resident: Share of its pages in memory, from 0 to 1; None for plain tensors, which may be
            too many to open one by one, and where the kernel does not say.
    """

    info: engram.TableInfo
    resident: float | None

    def as_json(self) -> dict[str, Any]:
        """JSON values; every key is part of the command's interface."""
        info = self.info
        return {
            "name": info.name,
            "family": info.family,
            "layer": info.layer,
            "rows": info.rows,
            "encoding": info.encoding,
            "row_bytes": info.row_bytes,
            "bytes": info.bytes,
            "pieces": _piece_count(info),
            "planes": [
                {
                    "name": plane.name,
                    "dtype": plane.stored_dtype,
                    "row_bytes": plane.row_bytes,
                    "pieces": len(plane.pieces),
                }
                for plane in info.planes
            ],
            "files": list(info.files),
            "resident": self.resident,
        }


def inspect(
    path: CheckpointPath,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="List every two-dimensional tensor too.")
    ] = False,
) -> None:
    """Show the tables of a checkpoint: family, stored form, size, files, share in memory.

    Reads headers only.
    """
    with reported():
        tables = inspect_path(path, plain=plain)
        if as_json:
            document = {
                "version": JSON_VERSION,
                "path": os.fspath(path),
                "tables": [table.as_json() for table in tables],
            }
            print(json.dumps(document, indent=2))
        if not tables:
            hint = "" if plain else "; --plain lists every two-dimensional tensor"
            raise Failed(f"no n-gram or per-layer embedding table in {path}{hint}")
        if not as_json:
            show(tables, output())


def inspect_path(path: Path, *, plain: bool = False) -> list[Inspected]:
    """The tables at `path`; n-gram and per-layer tables are opened to ask what is in memory."""
    inspected: list[Inspected] = []
    for info in engram.tables(path, plain=plain):
        if info.family == "plain":
            inspected.append(Inspected(info, None))
            continue
        with engram.FileGather(path, info.name) as gather:
            inspected.append(Inspected(info, resident_share(gather)))
    return inspected


def resident_share(gather: engram.FileGather) -> float | None:
    """Share of a table's pages in memory, from 0 to 1; None where the kernel does not say."""
    return gather.residency().share


def show(tables: list[Inspected], console: Console) -> None:
    """Prints one paragraph per table: names are long, so there are no columns to cut them to."""
    for position, table in enumerate(tables):
        info = table.info
        if position:
            console.print()
        console.print(info.name, style="bold")
        layer = "" if info.layer is None else f", decoder layer {info.layer}"
        parts = ", ".join(
            f"{plane.name} {plane.stored_dtype} {plane.row_bytes} bytes" for plane in info.planes
        )
        resident = "not asked" if info.family == "plain" else percent(table.resident)
        lines = {
            "family": f"{info.family}{layer}",
            "rows": f"{info.rows:,}",
            "stored as": f"{info.encoding}, {plural(info.row_bytes, 'byte')} per row ({parts})",
            "size": f"{format_bytes(info.bytes)} in {plural(_piece_count(info), 'piece')}, "
            f"{plural(len(info.files), 'file')}",
            "files": _file_names(info),
            "in memory": resident,
        }
        for label, value in lines.items():
            console.print(f"  {label:<10} {value}")


def _piece_count(info: engram.TableInfo) -> int:
    return sum(len(plane.pieces) for plane in info.planes)


def _file_names(info: engram.TableInfo) -> str:
    names = [Path(file).name for file in info.files]
    if len(names) <= _FILES_NAMED:
        return ", ".join(names)
    return f"{', '.join(names[:_FILES_NAMED])} and {len(names) - _FILES_NAMED} more"
