"""Draws measurements as a PNG; needs matplotlib."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import Failed
from .measured import groups

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

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


def draw(path: Path, measurements: Sequence[Measurement], title: str) -> None:
    """Writes a PNG with one panel per state: time per call over rows per call, a line per method.

    Args:
        path: Where to write.
        measurements: What to draw.
        title: Stands over the panels.

    Raises:
        Failed: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    figure_class = require_matplotlib()
    panels = groups(measurements)
    columns = min(_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure: Any = figure_class(figsize=(5.5 * columns, 4.2 * lines + 0.8), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(lines, columns, squeeze=False)
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
    for spare in range(len(panels), lines * columns):
        axes[spare // columns][spare % columns].set_visible(False)
    figure.savefig(path, dpi=120, format="png")
