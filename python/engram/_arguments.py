"""Arguments as callers write them, checked and in the form the native half takes."""

from __future__ import annotations

import errno
import operator
import os
import sys
from typing import Any

from engram._errors import placed


def path_text(path: Any) -> str:
    """A path as text that `os.fsencode` turns back into the same bytes.

    Raises:
        TypeError: Not a path.
        FileNotFoundError: It is empty, which Python's own `Path` takes for the working directory.
        ValueError: It contains a NUL byte, which no file name can.
    """
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise placed(
            TypeError(f"a path is a str, bytes or os.PathLike, not {type(path).__name__}")
        ) from None
    if not text:
        raise placed(FileNotFoundError(errno.ENOENT, "the path is empty", text), path=text)
    if "\0" in text:
        raise placed(ValueError(f"the path {text!r} contains a NUL byte"))
    return text


def _integer(value: Any) -> int | None:
    """An integer of any kind, True and False aside; None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def whole_number(name: str, value: Any, *, least: int = 1) -> int:
    """An integer of at least `least` that the native half can hold.

    Raises:
        ValueError: Anything else; `name` says which argument it was.
    """
    number = _integer(value)
    if number is None:
        raise placed(ValueError(f"{name}={value!r} must be an integer"))
    if not least <= number <= sys.maxsize:
        raise placed(ValueError(f"{name}={number} must be from {least} to {sys.maxsize}"))
    return number


def optional_number(name: str, value: Any) -> int | None:
    """As `whole_number`; None stays None."""
    return None if value is None else whole_number(name, value)


def table_argument(table: Any) -> str | int | None:
    """Which table is meant: its name, its place in layer order, or None for the only one.

    Raises:
        TypeError: Something else.
        ValueError: A negative place.
    """
    if table is None or isinstance(table, str):
        return table
    place = _integer(table)
    if place is None:
        raise placed(TypeError(f"table must be a name, an int or None, not {type(table).__name__}"))
    if place < 0:
        raise placed(ValueError(f"table={place}: places in layer order count from 0"))
    # No checkpoint has so many tables: as a name, the native half repeats it and lists the choices.
    return place if place <= sys.maxsize else str(place)


def mode_argument(name: str, value: Any) -> str:
    """A mode's name; the native half knows which there are.

    Raises:
        TypeError: No string; `name` says which argument it was.
    """
    if not isinstance(value, str):
        raise placed(TypeError(f'{name}={value!r} must be a name such as "auto"'))
    return value


def pad_argument(pad_id: Any) -> int | None:
    """The id that stands for a row of zeros, if any; as strict as ids are.

    Raises:
        TypeError: No integer; True and False are none.
    """
    if pad_id is None or type(pad_id) is int:
        return pad_id
    number = _integer(pad_id)
    if number is None:
        raise placed(TypeError(f"pad_id={pad_id!r} must be an integer or None"))
    return number


def out_of_range(table: str | None, pad_id: Any, timeout: Any) -> ValueError:
    """The error for a number of a gather that the native half cannot hold."""
    return placed(
        ValueError(
            f"pad_id={pad_id!r} or timeout={timeout!r} is out of range: a pad_id has 64 bits"
        ),
        table=table,
    )
