"""Where row ids come from."""

import argparse
from collections.abc import Callable, Iterator

import numpy as np

import text_trace
from engram import synth

from .report import Report

QUICK_TOKENS = 20_000

Supply = Callable[[int], Iterator[np.ndarray]]
"""For a number of rows, an endless supply of batches of that many ids, int64."""


def supplies(
    options: argparse.Namespace, info: synth.SynthInfo, report: Report
) -> dict[str, Supply]:
    """The sources that were asked for and can be had, by name."""
    generator = np.random.default_rng(0)
    rows = info.tables[0].rows

    def uniform(count: int) -> Iterator[np.ndarray]:
        while True:
            yield generator.integers(0, rows, count)

    found: dict[str, Supply] = {}
    if options.ids in ("both", "uniform"):
        found["uniform"] = uniform
    if options.ids in ("both", "text"):
        try:
            trace = text_trace.load(
                options.dir, limit=QUICK_TOKENS if options.quick else None, say=report.note
            )
        except text_trace.Unavailable as error:
            if options.ids == "text":
                raise SystemExit(str(error)) from None
            report.note(f"no ids from text: {error}")
        else:
            report.say({"text": str(trace)})
            row_ids = text_trace.RowIds(trace, info.config)
            found["text"] = lambda count: row_ids.batches(count, generator)
    return found
