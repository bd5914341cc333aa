"""Progress bars on stderr: what is done, how fast, and how long it will take."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from .text import status

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rich.progress import ProgressColumn

    Report = Callable[[int, int], None]


@contextmanager
def progress(label: str, *, of_bytes: bool) -> Generator[Report]:
    """Draws a bar while the block runs; nothing where nobody watches.

    Args:
        label: Stands before the bar.
        of_bytes: Whether bytes are counted, rather than rows.

    Yields:
        To be called with what is done and what there is to do.
    """
    console = status()
    counted: tuple[ProgressColumn, ...] = (
        (DownloadColumn(binary_units=True), TransferSpeedColumn())
        if of_bytes
        else (MofNCompleteColumn(),)
    )
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *counted,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bars:
        task = bars.add_task(label, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
