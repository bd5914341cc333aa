"""Draws measurements as a PNG; needs matplotlib."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from .errors import Failed
from .measured import groups
from .parameters import wrong

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .budgets import HitRate
    from .measured import Measurement

_COLUMNS = 3


def require_matplotlib() -> Any:
    """The figure class of matplotlib, without any window system.

    Raises:
        Failed: It is not installed; says which extra brings it.
    """
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ModuleNotFoundError as error:
        raise Failed(
            f'a plot needs {error.name}; install it with pip install "engram-gather[plot]"'
        ) from None


def require_writable(path: Path) -> None:
    """Finds out before anything is measured whether a plot can be drawn and written.

    Raises:
        typer.BadParameter: The name is not that of a PNG.
        Failed: There is no such directory, or a directory of that name; or matplotlib is missing.
    """
    if path.suffix.lower() != ".png":
        raise wrong("--plot", f"a PNG is drawn: {str(path)!r} does not end with .png")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise Failed(f"cannot write {path}: {folder} is no directory")
    if path.is_dir():
        raise Failed(f"cannot write {path}: it is a directory")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise Failed(f"cannot write {path}: permission denied")
    require_matplotlib()


def draw(
    path: Path,
    measurements: Sequence[Measurement],
    title: str,
    rates: Sequence[HitRate] = (),
) -> None:
    """Writes the `figure` of these measurements as a PNG.

    Args:
        path: Where to write.
        measurements: What to draw.
        title: Stands over the panels.
        rates: What caches of rows found.

    Raises:
        Failed: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    figure(measurements, title, rates).savefig(path, dpi=120, format="png")


def figure(measurements: Sequence[Measurement], title: str, rates: Sequence[HitRate] = ()) -> Any:
    """A figure with one panel per state, and one of hit rates if there are any.

    A state has the time per call over rows per call, a line per method; hit rates are over the
    budget of the cache, a point per budget.

    Args:
        measurements: What to draw.
        title: Stands over the panels.
        rates: What caches of rows found.

    Raises:
        Failed: matplotlib is not installed.
    """
    figure_class = require_matplotlib()
    panels = groups(measurements)
    count = len(panels) + bool(rates)
    columns = min(_COLUMNS, count)
    lines = -(-count // columns)
    drawn: Any = figure_class(figsize=(5.5 * columns, 4.2 * lines + 0.8), layout="constrained")
    drawn.suptitle(title)
    axes = drawn.subplots(lines, columns, squeeze=False)
    names = list(dict.fromkeys(measurement.method for measurement in measurements))
    for index, ((state, ids), group) in enumerate(panels.items()):
        axis = axes[index // columns][index % columns]
        for place, name in enumerate(names):
            points = sorted(
                (entry.rows, 1e6 * entry.median) for entry in group if entry.method == name
            )
            if points:
                axis.plot(
                    *zip(*points, strict=True),
                    marker="o",
                    color=f"C{place % 10}",
                    linestyle="-" if place < 10 else "--",
                    label=name,
                )
        axis.set(xscale="log", yscale="log", title=f"{state}, {ids} ids")
        axis.set(xlabel="rows per call", ylabel="microseconds per call")
        axis.grid(visible=True, which="both", alpha=0.25)
        axis.legend(fontsize="x-small")
    if rates:
        _draw_rates(axes[(count - 1) // columns][(count - 1) % columns], rates)
    for spare in range(count, lines * columns):
        axes[spare // columns][spare % columns].set_visible(False)
    return drawn


def _draw_rates(axis: Any, rates: Sequence[HitRate]) -> None:
    axis.plot(
        [rate.cache_bytes / 2**20 for rate in rates],
        [100 * rate.share for rate in rates],
        marker="o",
    )
    axis.set_xscale("log", base=2)
    axis.set(title="cache_bytes, made-up text", xlabel="budget in MiB", ylabel="% of rows that hit")
    axis.set_ylim(0, 100)
    axis.grid(visible=True, alpha=0.25)
