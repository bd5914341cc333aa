"""Draws what the benchmark of memory budgets found; needs matplotlib."""

from pathlib import Path
from typing import Any

from engram.cli.plot import require_matplotlib

from .simulated import LRU, OPTIMUM, OURS, Rates

_KNOWN = (OPTIMUM.name, LRU.name, "S3-FIFO", OURS.name)


def draw(path: Path, title: str, rates: list[Rates], measured: dict[str, dict]) -> None:
    """Hit rates by size of the cache; tokens per second and a step's time by contender."""
    figure: Any = require_matplotlib()(figsize=(15 if measured else 7, 5.2), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, 3 if measured else 1, squeeze=False)[0]
    for entry in rates:
        known = entry.policy.name in _KNOWN
        panels[0].plot(
            [nbytes / 2**20 for nbytes in entry.by_bytes],
            list(entry.by_bytes.values()),
            marker="o" if known else ".",
            linewidth=2 if known else 0.8,
            label=entry.policy.name,
        )
    panels[0].set_xscale("log", base=2)
    panels[0].set(title="simulated", xlabel="MiB", ylabel="% of distinct rows that hit")
    panels[0].grid(visible=True, alpha=0.25)
    panels[0].legend(fontsize="x-small")
    if measured:
        names = list(measured)
        speeds = [measured[name]["tokens_per_second"] / 1000 for name in names]
        panels[1].barh(names, speeds)
        panels[1].set(title="prefill", xlabel="thousand tokens per second")
        steps = [[1e3 * measured[name]["decode"][key] for name in names] for key in ("p50", "p99")]
        places = range(len(names))
        for shift, label, values in ((-0.2, "p50", steps[0]), (0.2, "p99", steps[1])):
            panels[2].barh([place + shift for place in places], values, height=0.4, label=label)
        panels[2].set_yticks(list(places), names)
        panels[2].set(title="decode", xlabel="milliseconds per step", xscale="log")
        panels[2].legend(fontsize="x-small")
        for panel in panels[1:]:
            panel.invert_yaxis()
            panel.grid(visible=True, axis="x", alpha=0.25)
    figure.savefig(path, dpi=120, format="png")
