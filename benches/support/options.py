"""Command lines of the benchmarks, and the checkpoints they read."""

import argparse
import os
import sys
import time
from pathlib import Path

from engram import synth
from engram.cli.text import format_bytes, parse_size

CHECKOUT = Path(__file__).resolve().parents[2]
ROWS = (16, 48, 256, 768, 4096, 32768)
QUICK_ROWS = (16, 4096)
LEAST = ((1024, 60), (8192, 80), (None, 16))
"""Calls of each method at least, for batches of up to so many rows: a device is never the same from
one call to the next."""


def parser(description: str, *, seconds: float) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--dir",
        type=Path,
        default=os.environ.get("ENGRAM_BENCH_DIR") or CHECKOUT / "benches" / "cache",
        help="where checkpoints are made once and found again (default: $ENGRAM_BENCH_DIR, or "
        "benches/cache in the checkout); the disk it is on is what cold rows are read from",
    )
    made.add_argument("--size", default="6GiB", help="size of the table (default: %(default)s)")
    made.add_argument(
        "--checkpoint", type=Path, help="read this synthetic Qwen checkpoint, made by engram synth"
    )
    made.add_argument(
        "--rows", type=_numbers, default=None, help="rows per call, such as 16,256,4096"
    )
    made.add_argument(
        "--ids",
        choices=("both", "uniform", "text"),
        default="both",
        help="where row ids come from (default: %(default)s, text only if it can be had)",
    )
    made.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        help="about how long to measure each size (default: %(default)s)",
    )
    made.add_argument(
        "--quick", action="store_true", help="a few calls of each, to see that it runs"
    )
    made.add_argument(
        "--strict", action="store_true", help="exit with status 1 when a figure is missed"
    )
    made.add_argument("--json", type=Path, help="results as JSON (default: benches/results/)")
    made.add_argument("--plot", type=Path, help="results as PNG (default: benches/results/)")
    return made


def parsed(made: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Options with what follows from each other filled in."""
    options = made.parse_args(arguments)
    if options.quick:
        options.seconds = min(options.seconds, 0.02)
    options.rows = options.rows or (QUICK_ROWS if options.quick else ROWS)
    return options


def least_calls(options: argparse.Namespace, rows: int) -> int:
    """How often each method that reads from a device runs at least."""
    if options.quick:
        return 2
    return next(calls for most, calls in LEAST if most is None or rows <= most)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(part) for part in text.split(",")}))


def checkpoint(options: argparse.Namespace) -> synth.SynthInfo:
    """The checkpoint that rows are read from: Qwen's FP8 table as one piece in one file.

    One piece, because `np.take` can only read one array. Made on first use.
    """
    if options.checkpoint is not None:
        info = synth.load(options.checkpoint)
        if info.family != "qwen" or len(info.tables) != 1 or info.marked is not None:
            sys.exit(f"{options.checkpoint}: need a full Qwen checkpoint with one table")
        if len(info.tables[0].planes) != 1 or len(info.tables[0].planes[0].pieces) != 1:
            sys.exit(f"{options.checkpoint}: need the table as one piece (engram synth --parts 1)")
        return info
    size = parse_size(options.size)
    arguments = {"family": "qwen", "size": size, "dtype": "fp8", "parts": 1, "files": 1}
    return _made_once(options.dir / f"qwen-fp8-{format_bytes(size).replace(' ', '')}", arguments)


def released_layout(options: argparse.Namespace) -> synth.SynthInfo:
    """The released geometry, 128 pieces in 131 files, as headers and holes: enough to open it."""
    directory = options.dir / "qwen-fp8-131-files"
    planned = synth.load(directory) if _is_complete(directory) else None
    if planned is not None and len(planned.files) == 131:
        return planned
    return synth.write_sparse(directory, "qwen", dtype="fp8", overwrite=True)


def _made_once(directory: Path, arguments: dict) -> synth.SynthInfo:
    planned = synth.plan(**arguments)
    if _is_complete(directory):
        info = synth.load(directory)
        if info.plan == planned and all(
            path.stat().st_size == file.nbytes
            for path, file in zip(info.files, planned.files, strict=True)
        ):
            return info
    print(f"writing {format_bytes(planned.nbytes)} to {directory}", file=sys.stderr)
    started = time.perf_counter()
    info = synth.write(directory, **arguments, overwrite=True)
    speed = info.nbytes / (time.perf_counter() - started)
    print(f"written at {format_bytes(speed)}/s", file=sys.stderr)
    return info


def _is_complete(directory: Path) -> bool:
    try:
        synth.load(directory)
    except (OSError, ValueError):
        return False
    return True
