"""Numbers as people read and write them, and the consoles they are printed on."""

from __future__ import annotations

import re

from rich.console import Console

_WIDTH = 120
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_UNITS = {
    "": 1,
    "B": 1,
    **{name.upper(): 1024**power for power, name in enumerate(_BINARY) if power},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", start=1)},
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Bytes in a size such as `6GiB`, `1.5 GB`, `200MiB` or `4096`.

    Raises:
        ValueError: Not a size; says what one looks like.
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write bytes, or for example 6GiB, 1.5GB, 200MiB")
    return int(float(match[1]) * unit)


def format_bytes(count: float) -> str:
    """`count` bytes in the largest binary unit that leaves a number of at least one."""
    power = 0
    while abs(count) >= 1024 and power < len(_BINARY) - 1:
        count /= 1024
        power += 1
    return f"{count:.0f} B" if power == 0 else f"{count:.1f} {_BINARY[power]}"


def format_seconds(seconds: float) -> str:
    """A duration in the unit that suits it."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds:.2f} s"


def percent(share: float | None) -> str:
    """A share from 0 to 1, or that it is not known."""
    return "unknown" if share is None else f"{share:.1%}"


def plural(count: int, noun: str) -> str:
    """`1 file`, `2 files`, `1,234 files`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def output(*, quiet: bool = False) -> Console:
    """Standard output; without colours in a file or a pipe, and never cut to a narrow terminal.

    Args:
        quiet: Prints nothing: what is wanted there is not for people.
    """
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True, quiet=quiet)
    console.width = max(console.width, _WIDTH)
    return console


def status() -> Console:
    """Standard error, for progress; silent where nobody watches."""
    return Console(stderr=True, highlight=False)
