"""Numbers as people read and write them, and the consoles they are printed on."""

from __future__ import annotations

from rich.console import Console

from engram._sizes import parse_size as parse_size

_WIDTH = 120
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


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


def output() -> Console:
    """Standard output; without colours in a file or a pipe, and never cut to a narrow terminal."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    console.width = max(console.width, _WIDTH)
    return console


def status() -> Console:
    """Standard error, for progress; silent where nobody watches."""
    return Console(stderr=True, highlight=False)
