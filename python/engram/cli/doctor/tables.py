"""Checks of a checkpoint's tables: whether they open, how rows are read, what is in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engram.cli.errors import describe
from engram.cli.hashes import table_hasher
from engram.cli.text import format_bytes, percent, plural

from .finding import Finding

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import engram


def checkpoint(tables: Sequence[engram.TableInfo]) -> Finding:
    """What the checkpoint holds."""
    listed = "; ".join(
        f"{info.name}: {info.rows:,} rows of {plural(info.row_bytes, 'byte')} ({info.encoding})"
        for info in tables
    )
    total = sum(info.bytes for info in tables)
    data = {
        "tables": [
            {
                "name": info.name,
                "family": info.family,
                "rows": info.rows,
                "row_bytes": info.row_bytes,
                "bytes": info.bytes,
                "encoding": info.encoding,
            }
            for info in tables
        ],
        "bytes": total,
    }
    found = f"{plural(len(tables), 'table')}, {format_bytes(total)}: {listed}"
    return Finding("checkpoint", "ok", found, None, data)


def damaged(error: Exception) -> Finding:
    """A checkpoint whose tables do not open."""
    return Finding(
        "checkpoint",
        "problem",
        describe(error) if isinstance(error, OSError) else str(error),
        "`engram verify` lists everything that is wrong with its files",
        {"error": type(error).__name__},
    )


def io_mode(io: dict[str, Any]) -> Finding:
    """What `io="auto"` runs, and why.

    Args:
        io: `stats()["io"]` of a table opened with it.
    """
    runs = io["runs"]
    means = {
        "mmap+uring": "what is cached is copied from a mapping, the rest read through io_uring",
        "mmap+pread": "what is cached is copied from a mapping, the rest read by threads",
        "uring": "every row is read through io_uring; nothing is mapped",
        "pread": "every row is read by threads; nothing is mapped",
    }.get(runs, "")
    found = f"{runs}: {means}" if means else runs
    data = {"runs": runs, "fallbacks": io["fallbacks"], "filesystems": io["filesystems"]}
    if not io["fallbacks"]:
        return Finding("io=auto", "ok", found, None, data)
    return Finding("io=auto", "warning", found, "; ".join(io["fallbacks"]), data)


def residency(shares: Sequence[engram.Residency]) -> Finding:
    """How much of the tables is in memory now."""
    pages = sum(each.pages for each in shares)
    if any(each.resident is None for each in shares):
        return Finding(
            "in memory",
            "warning",
            "the kernel does not say",
            "it tells the owner of the files, and those who may write them; run this as one",
            {"pages": pages, "resident": None},
        )
    resident = sum(each.resident or 0 for each in shares)
    size = shares[0].page_bytes if shares else 4096
    share = resident / pages if pages else 1.0
    found = f"{percent(share)}, {format_bytes(resident * size)} of the page cache"
    data = {"pages": pages, "resident": resident, "page_bytes": size}
    return Finding("in memory", "ok", found, None, data)


@dataclass(frozen=True)
class Demand:
    """What a token asks of the tables.

    Attributes:
        rows: Rows per token, over all tables; None where neither a configuration nor the family
            says.
        reads: Rows times the planes of each, which lie apart.
        unknown: Why the rows are not known.
    """

    rows: int | None
    reads: int
    unknown: str | None = None


def demand(path: Path, tables: Sequence[engram.TableInfo], rows: int | None = None) -> Demand:
    """Rows per token of the tables, by their configuration.

    Args:
        path: The checkpoint.
        tables: Its tables.
        rows: Rows per token and table, where the user says.
    """
    total = reads = 0
    for info in tables:
        heads = rows
        if heads is None:
            try:
                hasher = table_hasher(path, info)
            except (OSError, ValueError, ImportError) as error:
                return Demand(None, 0, str(error))
            heads = 1 if hasher is None else hasher.heads
        total += heads
        reads += heads * len(info.planes)
    return Demand(total, reads)
