"""A model's `config.json`, asked field by field; refusals name the field."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from engram._arguments import path_text
from engram._engram import CheckpointError
from engram._errors import placed
from engram._files import CONFIG_BYTES, parse_json, read_small

__all__ = ["ConfigLike", "Fields", "read_config"]

ConfigLike = Mapping[str, Any] | str | Path | object
"""A parsed `config.json`, a transformers configuration, or the path of either kind's directory."""


def read_config(source: ConfigLike) -> tuple[Fields, Path | None]:
    """The configuration's fields, and the checkpoint's directory if `source` is a path.

    Args:
        source: A mapping, an object with `to_dict()`, a checkpoint directory, or a file in one
            (`config.json`, a safetensors file, an index).

    Raises:
        FileNotFoundError: There is nothing at the path, or no `config.json` in the directory.
        CheckpointError: It is not JSON, or no object.
        TypeError: `source` is none of these.
    """
    if isinstance(source, Mapping):
        return Fields(cast("Mapping[str, Any]", source)), None
    if not isinstance(source, str | bytes | os.PathLike):
        to_dict = getattr(source, "to_dict", None)
        if to_dict is None:
            raise placed(
                TypeError(
                    f"a {type(source).__name__} is no configuration: pass a checkpoint's path, the "
                    "parsed config.json, or a transformers configuration"
                )
            )
        return Fields(to_dict()), None
    path = Path(path_text(cast("object", source)))
    is_config = path.suffix == ".json" and not path.name.endswith(".index.json")
    if not path.is_dir() and not is_config:
        # The directory's configuration is that of a file in it, and of no name that is wrong.
        path.stat()
        path = path.parent
    file = path if is_config and not path.is_dir() else path / "config.json"
    parsed: object = parse_json(read_small(file, CONFIG_BYTES), file, "it is not JSON")
    if not isinstance(parsed, dict):
        raise placed(CheckpointError(f"{file} holds no JSON object"), path=str(file))
    return Fields(cast("dict[str, Any]", parsed)), file.parent


class Fields:
    """Fields of the text model: those of `text_config` where there is one, else the root's."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        nested = root.get("text_config")
        self.root = root
        self.nested = isinstance(nested, Mapping)
        self.text = cast("Mapping[str, Any]", nested) if self.nested else root

    def get(self, name: str) -> Any:
        """The text model's value; None where absent or null."""
        return self.text.get(name)

    def name(self, field: str) -> str:
        """The field as the reader of `config.json` finds it."""
        return f"text_config.{field}" if self.nested else field

    def integer(self, field: str, default: int | None = None, *, least: int = 0) -> int:
        """An integer of at least `least`; `default` where absent or null.

        Raises:
            ValueError: Absent without a default, no integer, or below `least`.
        """
        value = self.get(field)
        if value is None:
            if default is None:
                raise placed(ValueError(f"{self.name(field)} is missing from the configuration"))
            return default
        return self._checked(self.name(field), value, least)

    def of_either(self, field: str) -> int | None:
        """An integer that the text model or the whole model has; None where neither does.

        Raises:
            ValueError: No integer, or negative.
        """
        if self.get(field) is not None:
            return self.integer(field)
        value = self.root.get(field)
        return None if value is None else self._checked(field, value, 0)

    def token(self, field: str) -> int:
        """A token id; element 0 where the field is a list.

        Raises:
            ValueError: Absent, an empty list, or no token id.
        """
        value = self.get(field)
        if isinstance(value, Sequence) and not isinstance(value, str):
            values = cast("Sequence[object]", value)
            if not values:
                raise placed(ValueError(f"{self.name(field)} is an empty list"))
            return self._checked(f"{self.name(field)}[0]", values[0], 0)
        return self.integer(field)

    def integers(self, field: str, *, least: int = 0) -> list[int]:
        """A list of integers; empty where absent or null.

        Raises:
            ValueError: No list, or an element is no integer of at least `least`.
        """
        value = self.get(field)
        if value is None:
            return []
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise placed(ValueError(f"{self.name(field)} is {value!r}, not a list"))
        values = cast("Sequence[object]", value)
        name = self.name(field)
        return [self._checked(f"{name}[{at}]", item, least) for at, item in enumerate(values)]

    @staticmethod
    def _checked(name: str, value: object, least: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise placed(ValueError(f"{name} is {value!r}, not an integer"))
        if value < least:
            raise placed(ValueError(f"{name} is {value}, below {least}"))
        if value >= 2**63:
            raise placed(ValueError(f"{name} is {value}, which does not fit 64 bits"))
        return value


def divided(fields: Fields, dimension: str, heads: int, heads_field: str) -> int | None:
    """Values per row: the embedding dimension over its heads; None where the field is absent.

    Raises:
        ValueError: The heads do not divide it.
    """
    if fields.get(dimension) is None:
        return None
    width = fields.integer(dimension, least=1)
    if width % heads != 0:
        raise placed(
            ValueError(
                f"{fields.name(dimension)} is {width}, which is no multiple of {heads} heads "
                f"({heads_field})"
            )
        )
    return width // heads
