"""Sizes as people write them: bytes, `2GiB`, or a share of memory."""

from __future__ import annotations

import operator
import re
import sys
from typing import Any

from engram import _engram
from engram._errors import placed

_BINARY = ("KiB", "MiB", "GiB", "TiB", "PiB")
_UNITS = {
    "": 1,
    "B": 1,
    **{name.upper(): 1024**power for power, name in enumerate(_BINARY, start=1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", start=1)},
}
_NUMBER = r"\s*([0-9]+(?:\.[0-9]+)?)\s*"
_SIZE = re.compile(_NUMBER + r"([A-Za-z]*)\s*")
_SHARE = re.compile(_NUMBER + r"%\s*")
_DIGITS = 300
_SHOWN = 60


def parse_size(text: str) -> int:
    """Bytes in a size such as `6GiB`, `1.5 GB`, `200MiB` or `4096`.

    Raises:
        ValueError: Not a size, which says what one looks like; or more than can be addressed.
    """
    size = _bytes(text)
    if size is None:
        raise ValueError(
            f"{_short(text)} is not a size; write bytes, or for example 6GiB, 1.5GB, 200MiB"
        )
    if size > sys.maxsize:
        raise ValueError(f"{_short(text)} is more than the {sys.maxsize} bytes that can be counted")
    return size


def _bytes(text: str) -> int | None:
    """Bytes in a size, however many; None where it is none."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        return None
    number = match[1]
    # Python reads no whole number of thousands of digits, and none so long is a size.
    if number.isdecimal() and len(number) <= _DIGITS:
        return int(number) * unit
    return _whole(float(number) * unit)


def _whole(number: float) -> int:
    return int(number) if number < sys.maxsize else sys.maxsize + 1


def _short(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."


def budget(name: str, value: Any) -> int:
    """Bytes of a memory budget: an integer, a size, or a share of memory such as `25%`.

    A share is of the machine's memory, or of its control group's limit where that is lower.

    Raises:
        ValueError: Anything else; `name` says which argument it was.
    """
    shown = f"{name}={_short(value) if isinstance(value, str) else repr(value)}"
    wanted = f'{shown} must be a number of bytes, a size such as "2GiB" or a share of memory '
    wanted += 'such as "25%"'
    if isinstance(value, str):
        share = _SHARE.fullmatch(value)
        number = _whole(_memory() * float(share[1]) / 100) if share else _bytes(value)
    else:
        try:
            number = None if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = None
    if number is None:
        raise placed(ValueError(wanted))
    if number < 0:
        raise placed(ValueError(f"{shown} is negative; 0 is none"))
    if number > sys.maxsize:
        raise placed(
            ValueError(
                f"{shown} is more than the {_memory()} bytes of memory that this process may use"
            )
        )
    return number


def optional_budget(name: str, value: Any) -> int | None:
    """As `budget`, of at least one byte; None stays None.

    Raises:
        ValueError: Anything else; `name` says which argument it was.
    """
    if value is None:
        return None
    number = budget(name, value)
    if number == 0:
        raise placed(ValueError(f"{name}={value!r} must be at least 1 byte; None is no limit"))
    return number


def _memory() -> int:
    return _engram.memory_bytes()[1]
