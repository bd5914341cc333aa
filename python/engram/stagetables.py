"""Tables and their hashes, paired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from engram._errors import placed
from engram.gather import FileGather
from engram.hashing.base import NgramHash
from engram.table_set import TableSet

__all__ = ["StageTable", "stage_tables"]


@dataclass(frozen=True)
class StageTable:
    """One table of a stage.

    Attributes:
        name: The caller's name for it.
        gather: Its rows.
        hasher: Its row ids.
    """

    name: str
    gather: FileGather
    hasher: NgramHash


def stage_tables(tables: Any, hashers: Any) -> tuple[StageTable, ...]:
    """Pairs every table with its hash.

    Raises:
        TypeError: Neither tables nor hashes, or a mapping of one beside a sequence of the other.
        ValueError: Numbers or names differ, a hash belongs to another table, or hashes cannot share
            a step.
    """
    gathers = _by_name(tables)
    if isinstance(hashers, NgramHash):
        paired = [hashers]
    elif isinstance(hashers, Mapping):
        by_name = cast("Mapping[str, NgramHash]", hashers)
        if set(by_name) != set(gathers):
            raise placed(ValueError(f"tables {list(gathers)}, but hashers {list(by_name)}"))
        paired = [by_name[name] for name in gathers]
    elif isinstance(hashers, Sequence) and not isinstance(hashers, str):
        paired = list(cast("Sequence[NgramHash]", hashers))
    else:
        raise placed(
            TypeError(f"hashers are engram.hasher(...) objects, not {type(hashers).__name__}")
        )
    if not gathers or len(paired) != len(gathers):
        raise placed(ValueError(f"{len(gathers)} tables, but {len(paired)} hashers"))
    made = tuple(
        StageTable(name, gather, hasher)
        for (name, gather), hasher in zip(gathers.items(), paired, strict=True)
    )
    for table in made:
        _require_pair(table)
    first = made[0]
    for table in made[1:]:
        for field in ("context_len", "dead_id"):
            one, other = getattr(first.hasher, field), getattr(table.hasher, field)
            if one != other:
                raise placed(
                    ValueError(
                        f"the hashes of one stage agree in {field}: {first.name!r} has {one}, "
                        f"{table.name!r} has {other}"
                    )
                )
    return made


def _by_name(tables: Any) -> dict[str, FileGather]:
    if isinstance(tables, FileGather):
        return {tables.info.name: tables}
    if isinstance(tables, TableSet):
        return tables.gathers
    if isinstance(tables, Mapping):
        gathers = dict(cast("Mapping[str, Any]", tables))
    elif isinstance(tables, Sequence) and not isinstance(tables, str):
        several = list(cast("Sequence[Any]", tables))
        gathers: dict[str, Any] = {
            getattr(getattr(one, "info", None), "name", ""): one for one in several
        }
        if len(gathers) != len(several):
            raise placed(
                ValueError("two tables of one name: pass a mapping with names of your own")
            )
    else:
        gathers = {"": tables}
    for gather in gathers.values():
        if not isinstance(gather, FileGather):
            raise placed(
                TypeError(
                    f"tables are FileGather objects or a TableSet, not {type(gather).__name__}"
                )
            )
    return gathers


def _require_pair(table: StageTable) -> None:
    if not isinstance(table.hasher, NgramHash):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise placed(
            TypeError(f"hashers are engram.hasher(...) objects, not {type(table.hasher).__name__}")
        )
    rows = table.gather.num_rows
    if rows not in (table.hasher.num_rows, table.hasher.padded_rows):
        raise placed(
            ValueError(
                f"the hash addresses {table.hasher.num_rows} rows ({table.hasher.padded_rows} "
                f"padded), but table {table.name!r} has {rows}: they belong to different tables"
            ),
            table=table.name,
        )
