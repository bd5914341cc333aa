"""Which table is meant: opened where it has files, described where it has none."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from engram import _engram
from engram._engram import CheckpointError
from engram._errors import placed
from engram._files import CONFIG_BYTES, parse_json, read_small
from engram._views import configuration_text
from engram.gather import FileGather
from engram.table import Planes, TableInfo, tables
from engram.views import ViewLoader

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Source", "described", "opened"]


class Source(NamedTuple):
    """A table, and where its rows come from."""

    info: TableInfo
    gather: FileGather | None = None
    """The open files; None where only the description is known."""
    owned: bool = False
    """Whether whoever closes the storage closes the files."""
    directory: Path | None = None
    """Where `config.json` would be."""

    @property
    def num_layers(self) -> int | None:
        """Decoder layers of the model, by its configuration."""
        if self.directory is None:
            return None
        try:
            path = self.directory / "config.json"
            config: Any = parse_json(read_small(path, CONFIG_BYTES), path, "not JSON")
        except (OSError, CheckpointError):
            return None
        nested = (
            cast("dict[str, Any]", config).get("text_config", config) if _maps(config) else None
        )
        text = cast("dict[str, Any]", nested) if _maps(nested) else {}
        for key in ("num_hidden_layers", "num_layers"):
            if type(text.get(key)) is int:
                return text[key]
        return None


def _maps(value: Any) -> bool:
    return isinstance(value, dict)


def opened(table: Any) -> Source:
    """The table, its files opened if it has any.

    Args:
        table: As for `open_storage`.

    Raises:
        TypeError: It is nothing that has rows.
        Exception: As `FileGather` and `ViewLoader.bind` do.
    """
    if isinstance(table, TableInfo):
        return Source(table)
    if isinstance(table, FileGather):
        return Source(table.info, table, owned=False, directory=_directory(_path(table)))
    if isinstance(table, ViewLoader):
        gather = table.bind()
        return Source(gather.info, gather, owned=True)
    path, name = _path_and_name(table)
    if path is None:
        raise placed(
            TypeError(
                "table must be a checkpoint's path, a path and a table's name or place, a "
                f"FileGather, a ViewLoader or a TableInfo, not {type(table).__name__}"
            )
        )
    gather = FileGather(path, name)
    return Source(gather.info, gather, owned=True, directory=_directory(path))


def described(table: Any) -> Source:
    """The table as it would be, without its rows.

    Args:
        table: As for `open_storage` with `load_format="dummy"`: also a model's configuration, or a
            directory that holds nothing but that.

    Raises:
        ValueError: There is no such table, or the configuration does not describe it.
    """
    if isinstance(table, TableInfo):
        return Source(table)
    if isinstance(table, FileGather):
        return Source(table.info, directory=_directory(_path(table)))
    path, name = _path_and_name(table)
    if path is None:
        pair = cast("tuple[Any, Any]", table if isinstance(table, tuple) else (table, None))
        config, name = pair
        return Source(_choose(_configured(configuration_text(config)), name, "the configuration"))
    directory = _directory(path)
    try:
        found = tables(path)
    except FileNotFoundError:
        if not Path(path).is_dir() or not (directory / "config.json").is_file():
            raise
        found = _configured(configuration_text(directory))
    return Source(_choose(found, name, str(path)), directory=directory)


def _path_and_name(table: Any) -> tuple[str | None, str | int | None]:
    name = None
    if isinstance(table, tuple) and len(cast("tuple[Any, ...]", table)) == 2:
        table, name = cast("tuple[Any, Any]", table)
    if isinstance(table, str | os.PathLike):
        return os.fspath(cast("str", table)), name
    return None, name


def _path(gather: FileGather) -> str:
    """As it was opened: links into a cache are resolved in `gather.files`."""
    return gather._path  # pyright: ignore[reportPrivateUsage]


def _directory(path: str) -> Path:
    found = Path(path)
    return found if found.is_dir() else found.parent


def _configured(text: str) -> list[TableInfo]:
    """Tables by a configuration; they lie in no file."""
    found: list[TableInfo] = []
    for item in _engram.configured_tables(text):
        info = TableInfo.from_native(item)
        planes = Planes(dataclasses.replace(plane, pieces=()) for plane in info.planes)
        found.append(dataclasses.replace(info, planes=planes, files=()))
    return found


def _choose(found: Sequence[TableInfo], name: str | int | None, where: str) -> TableInfo:
    names = [info.name for info in found]
    if name is None and len(found) == 1:
        return found[0]
    if isinstance(name, int) and 0 <= name < len(found):
        return found[name]
    if isinstance(name, str) and name in names:
        return found[names.index(name)]
    if not found:
        raise placed(ValueError(f"{where} has no n-gram or per-layer table"))
    if name is None:
        raise placed(ValueError(f"{where} has {len(found)} tables: name one of {names}"))
    raise placed(ValueError(f"{where} has no table {name!r}: there are {names}"))
