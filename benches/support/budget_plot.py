"""Draws what the benchmark of memory budgets found; needs matplotlib."""

from pathlib import Path
from typing import Any

from engram.cli.plot import require_matplotlib

from .simulated import LRU, OPTIMUM, OURS, Rates

_KNOWN = (OPTIMUM.name, LRU.name, "S3-FIFO", OURS.name)


def draw(path: Path, title: str, rates: list[Rates], measured: dict[str, dict]) -> None:
    """Hit rates by size of the cache; tokens per second and a step's time by contender."""
    count = bool(rates) + 2 * bool(measured)
    figure: Any = require_matplotlib()(figsize=(1 + 5.5 * count, 5.2), layout="constrained")
    figure.suptitle(title)
    panels = list(figure.subplots(1, count, squeeze=False)[0])
    if rates:
        _draw_rates(panels.pop(0), rates)
    if measured:
        _draw_measured(panels, measured)
    figure.savefig(path, dpi=120, format="png")


def _draw_rates(panel: Any, rates: list[Rates]) -> None:
    for entry in rates:
        known = entry.policy.name in _KNOWN
        panel.plot(
            [nbytes / 2**20 for nbytes in entry.by_bytes],
            list(entry.by_bytes.values()),
            marker="o" if known else ".",
            linewidth=2 if known else 0.8,
            label=entry.policy.name,
        )
    panel.set_xscale("log", base=2)
    panel.set(title="simulated", xlabel="MiB", ylabel="% of distinct rows that hit")
    panel.grid(visible=True, alpha=0.25)
    panel.legend(fontsize="x-small")


def _draw_measured(panels: list[Any], measured: dict[str, dict]) -> None:
    names = list(measured)
    speeds = [measured[name]["tokens_per_second"] / 1000 for name in names]
    panels[0].barh(names, speeds)
    panels[0].set(title="prefill", xlabel="thousand tokens per second")
    places = range(len(names))
    for shift, label in ((-0.2, "p50"), (0.2, "p99")):
        times = [1e3 * measured[name]["decode"][label] for name in names]
        panels[1].barh([place + shift for place in places], times, height=0.4, label=label)
    panels[1].set_yticks(list(places), names)
    panels[1].set(title="decode", xlabel="milliseconds per step", xscale="log")
    panels[1].legend(fontsize="x-small")
    for panel in panels:
        panel.invert_yaxis()
        panel.grid(visible=True, axis="x", alpha=0.25)
