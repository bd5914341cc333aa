"""`engram verify`: whether a checkpoint's files are whole, agree, and read the same in two ways."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

import engram
from engram import _engram

from .checkpoint import chosen_tables, is_wrong_path
from .errors import describe, reported
from .parameters import CheckpointPath  # noqa: TC001 - typer reads the annotations
from .progress import progress
from .text import format_bytes, output, plural

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

SCHEMA_VERSION = 1
"""Of the JSON document. Keys may be added to it; whatever else changes raises the number."""

SAMPLE = 4096


@dataclass(frozen=True)
class Flaw:
    """Something wrong.

    Attributes:
        kind: `"missing"`, `"short"`, `"unreadable"`, `"malformed"` or `"index"` for files and their
            headers, `"coverage"` for tables with pieces that do not fit together, or a kind of
            `engram.Problem`.
        path: The file.
        expected: Bytes it should have, None where that is not known.
        found: Bytes it has.
        message: The whole sentence.
        row: A row's id, where it is about one row.
        offset: Where in the file, where it is about one place.
    """

    kind: str
    path: str
    expected: int | None
    found: int | None
    message: str
    row: int | None = None
    offset: int | None = None

    def as_json(self) -> dict[str, Any]:
        """JSON values; every key is part of the command's interface."""
        return {
            "kind": self.kind,
            "path": self.path,
            "expected_bytes": self.expected,
            "found_bytes": self.found,
            "row": self.row,
            "offset": self.offset,
            "message": self.message,
        }


@dataclass
class Result:
    """What was looked at and what is wrong.

    Attributes:
        files: Files, missing ones included.
        file_bytes: Bytes of those that are there.
        tensors: Tensors in their headers.
        index: The index, where there is one.
        tables: Per table its name, rows, rows read, and the two ways.
        flaws: What is wrong.
        more: Flaws beyond those.
        ignored: Second copies of tensors, which are never read.
    """

    files: int = 0
    file_bytes: int = 0
    tensors: int = 0
    index: str | None = None
    tables: list[dict[str, Any]] = field(default_factory=lambda: [])
    flaws: list[Flaw] = field(default_factory=lambda: [])
    more: int = 0
    ignored: list[tuple[str, str]] = field(default_factory=lambda: [])

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.flaws


def verify(
    path: CheckpointPath,
    *,
    table: Annotated[
        str | None, typer.Option(help="Rows of one table, by name or place in layer order.")
    ] = None,
    sample: Annotated[
        int, typer.Option(min=0, help="Rows per table to read twice, spread evenly over it.")
    ] = SAMPLE,
    every: Annotated[bool, typer.Option("--all", help="Read every row twice.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Which rows of each part.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Hold a checkpoint's files against their headers, their index and one another.

    Every file that is missing, short or no safetensors file is listed, with the bytes it should
    have and has. Then rows are read in two independent ways, as they are served and another.
    Status 0: nothing is wrong; 1: something is; 2: there is nothing at PATH to look at.
    """
    with reported(2):
        result = examine(path, table, None if every else sample, seed)
        if as_json:
            print(json.dumps(_document(path, result), indent=2))
        else:
            show(result, output())
        if not result.ok:
            raise typer.Exit(1)


def examine(path: Path, table: str | None, rows: int | None, seed: int = 0) -> Result:
    """Looks at everything; stops before rows are read where files are damaged.

    Args:
        path: The checkpoint.
        table: One table, None for all.
        rows: Rows of each to read twice, None for all.
        seed: Which rows.

    Raises:
        Failed: There is no such table.
        OSError: There is nothing at `path`.
    """
    result = Result()
    try:
        found = _engram.survey(os.fspath(path))
    except (OSError, engram.CheckpointError) as error:
        result.flaws.append(_of_error(error, path, "index"))
        return result
    result.files, result.file_bytes = found["files"], found["bytes"]
    result.tensors, result.index = found["tensors"], found["index"]
    result.flaws = [Flaw(*flaw) for flaw in found["flaws"]]
    result.more = found["more"]
    if result.flaws:
        return result
    try:
        tables = chosen_tables(path, table)
    except (OSError, engram.CheckpointError) as error:
        result.flaws.append(_of_error(error, path, "coverage"))
        return result
    for info in tables:
        try:
            _rows(path, info, rows, seed, result)
        except (OSError, engram.CheckpointError) as error:
            result.flaws.append(_of_error(error, path, "unreadable"))
    return result


def _of_error(error: OSError | engram.CheckpointError, path: Path, kind: str) -> Flaw:
    if is_wrong_path(error, path):
        raise error
    message = describe(error) if isinstance(error, OSError) else str(error)
    return Flaw(kind, getattr(error, "path", None) or os.fspath(path), None, None, message)


def _rows(path: Path, info: engram.TableInfo, rows: int | None, seed: int, result: Result) -> None:
    with (
        engram.FileGather(path, info.name) as gather,
        progress("reading rows twice", of_bytes=False) as report,
    ):
        found = gather.verify(rows, seed=seed, progress=report)
    result.tables.append(
        {
            "name": info.name,
            "rows": info.rows,
            "bytes": info.bytes,
            "rows_read": found.rows,
            "ways": list(found.ways),
        }
    )
    result.flaws += [
        Flaw(each.kind, each.path, None, None, each.message, each.row, each.offset)
        for each in found.problems
    ]
    result.more += found.more
    result.ignored += [copy for copy in found.shadowed if copy not in result.ignored]


def show(result: Result, console: Console) -> None:
    """Prints what was looked at, then everything that is wrong."""
    if result.files:
        agree = "" if result.flaws and not result.tables else ": they agree"
        against = "headers and lengths" if result.index is None else "headers, lengths and index"
        console.print(
            f"{plural(result.files, 'file')}, {format_bytes(result.file_bytes)}, "
            f"{plural(result.tensors, 'tensor')}; {against}{agree}"
        )
    for table in result.tables:
        console.print(
            f"{table['name']}: {plural(table['rows'], 'row')}, {table['rows_read']:,} of them read "
            f"as {table['ways'][0]} and as {table['ways'][1]}"
        )
    for tensor, file in result.ignored:
        console.print(f"ignored: a second copy of {tensor} in {file}")
    for flaw in result.flaws:
        console.print(f"{flaw.kind:<10} {flaw.path}", style="bold red")
        if flaw.expected is not None or flaw.found is not None or flaw.kind == "missing":
            expected = "unknown" if flaw.expected is None else f"{flaw.expected:,}"
            found = "none" if flaw.found is None else f"{flaw.found:,}"
            console.print(f"{'':<10} expected bytes: {expected}, found: {found}")
        console.print(f"{'':<10} {flaw.message}")
    if result.more:
        console.print(f"and {plural(result.more, 'more problem')} of the kind")
    if result.ok:
        console.print("nothing is wrong")
    else:
        console.print(f"{plural(len(result.flaws) + result.more, 'problem')} found")


def _document(path: Path, result: Result) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "engram": engram.__version__,
        "path": os.fspath(path),
        "ok": result.ok,
        "files": result.files,
        "file_bytes": result.file_bytes,
        "tensors": result.tensors,
        "index": result.index,
        "tables": result.tables,
        "problems": [flaw.as_json() for flaw in result.flaws],
        "more_problems": result.more,
        "ignored": [{"tensor": tensor, "file": file} for tensor, file in result.ignored],
    }
