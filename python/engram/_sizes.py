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


def parse_size(text: str) -> int:
    """Bytes in a size such as `6GiB`, `1.5 GB`, `200MiB` or `4096`.

    Raises:
        ValueError: Not a size; says what one looks like.
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write bytes, or for example 6GiB, 1.5GB, 200MiB")
    number = match[1]
    return int(number) * unit if number.isdecimal() else int(float(number) * unit)


def budget(name: str, value: Any) -> int:
    """Bytes of a memory budget: an integer, a size, or a share of memory such as `25%`.

    A share is of the machine's memory, or of its control group's limit where that is lower.

    Raises:
        ValueError: Anything else; `name` says which argument it was.
    """
    wanted = f'{name}={value!r} must be a number of bytes, a size such as "2GiB" or a share of '
    wanted += 'memory such as "25%"'
    if isinstance(value, str):
        share = _SHARE.fullmatch(value)
        try:
            number = int(_memory() * float(share[1]) / 100) if share else parse_size(value)
        except ValueError:
            raise placed(ValueError(wanted)) from None
    else:
        try:
            number = None if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = None
        if number is None:
            raise placed(ValueError(wanted))
    if number < 0:
        raise placed(ValueError(f"{name}={value!r} is negative; 0 is none"))
    if number > sys.maxsize:
        raise placed(
            ValueError(
                f"{name}={value!r} is more than the {_memory()} bytes of memory that this process "
                "may use"
            )
        )
    return number


def _memory() -> int:
    return _engram.memory_bytes()[1]
