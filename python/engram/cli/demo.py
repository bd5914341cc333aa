"""`engram demo`: the whole library in a minute, on a checkpoint made for the occasion."""

from __future__ import annotations

import importlib
import itertools
import tempfile
import time
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.table import Table

import engram
from engram import synth as library

from .errors import Failed, reported
from .inspect import inspect_path, resident_share, show
from .machine import file_system, kernel, load, memory, processor
from .parameters import given_path, given_size
from .synth import write_with_progress
from .text import format_bytes, format_seconds, output, percent, plural, status
from .timing import Method, Result, interleaved

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from numpy.typing import NDArray
    from rich.console import Console

    from engram.synth import SynthInfo, SynthTable

TOKENS = (1, 16, 256, 2048)
"""Tokens per batch: a decode step, a small batch of them, and two sizes of prefill."""

_ROUNDS = {1: 1500, 16: 750, 256: 200, 2048: 40}
_SECONDS_PER_SIZE = 4.0
_POOL_TOKENS = 1 << 17


def demo(
    *,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            parser=given_path,
            metavar="PATH",
            help="Where to make the checkpoint (default: a temporary directory).",
        ),
    ] = None,
    size: Annotated[
        int, typer.Option(parser=given_size, metavar="SIZE", help="Size of the table.")
    ] = "1GiB",  # pyright: ignore[reportArgumentType] - what the parser is given
    keep: Annotated[bool, typer.Option("--keep", help="Keep the checkpoint afterwards.")] = False,
) -> None:
    """Make a Qwen-shaped checkpoint, gather from it, check every row, compare with others.

    Batches are shaped as a model's are: 16 rows per token, one from the range of each hash head.
    The pages are in memory, as they are on a machine that has served for a while.
    """
    with reported():
        console = output()
        console.print(f"machine      {processor()}")
        total = memory()
        console.print(f"memory       {'unknown' if total is None else format_bytes(total)}")
        console.print(f"kernel       {kernel()}")
        console.print(f"load         {load()}")
        with _checkpoint(directory, size, console, keep=keep) as info:
            show(inspect_path(info.directory), console)
            console.print()
            wrong = compare(info, console)
        if wrong:
            raise Failed(f"{plural(wrong, 'gathered row')} had wrong bytes")


@contextmanager
def _checkpoint(
    directory: Path | None, nbytes: int, console: Console, *, keep: bool
) -> Generator[SynthInfo]:
    """A checkpoint for the demonstration, removed afterwards if it was made here and not kept."""
    arguments: dict[str, Any] = {
        "size": nbytes,
        "files": 3,
        # One piece after another in one file, so that numpy can take the table as one array.
        "layout": library.Layout(table_files=1, shuffled=False),
    }
    remains = directory is not None and directory.exists()
    target = directory or Path(tempfile.mkdtemp(prefix="engram-demo-"))
    console.print(f"file system  {file_system(target)}")
    info = _earlier(target, arguments)
    if info is not None:
        console.print(f"checkpoint   {format_bytes(info.nbytes)} found in {target}\n")
        yield info
        return
    started = time.perf_counter()
    try:
        info = write_with_progress(target, "qwen", **arguments)
        speed = info.nbytes / (time.perf_counter() - started)
        console.print(
            f"checkpoint   {format_bytes(info.nbytes)} written to {target} "
            f"at {format_bytes(speed)}/s\n"
        )
        yield info
    finally:
        if info is not None and not keep:
            info.remove()
        if not remains and target.exists() and not any(target.iterdir()):
            target.rmdir()


def _earlier(directory: Path, arguments: dict[str, Any]) -> SynthInfo | None:
    """The checkpoint that an earlier demonstration of the same size kept in `directory`."""
    try:
        info = library.load(directory)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return info if info.plan == library.plan("qwen", **arguments) else None


def compare(info: SynthInfo, console: Console) -> int:
    """Times and checks every method on every batch size; returns how many rows were wrong."""
    table = info.tables[0]
    wrong = checked = 0
    rows: list[tuple[int, dict[str, Result]]] = []
    with engram.FileGather(info.directory) as gather:
        before = resident_share(gather)
        gather.prewarm()
        methods, notes = _methods(gather, _single_array(info, table))
        for tokens in TOKENS:
            with status().status(f"gathering for {plural(tokens, 'token')}"):
                results = interleaved(
                    methods,
                    _batches(info, tokens),
                    lambda ids: table.expected(ids)["weight"],
                    seconds=_SECONDS_PER_SIZE,
                    rounds=_ROUNDS[tokens],
                )
            rows.append((tokens, results))
            wrong += sum(result.wrong for result in results.values())
            checked += sum(result.rows for result in results.values())
        after = resident_share(gather)
    _show_comparison(rows, console)
    for note in notes:
        console.print(note)
    console.print(f"in memory: {percent(before)} before, {percent(after)} after")
    console.print(f"checked: {plural(checked, 'gathered row')}, {wrong:,} wrong")
    return wrong


def _show_comparison(rows: list[tuple[int, dict[str, Result]]], console: Console) -> None:
    names = list(rows[0][1])
    table = Table(title="median time per call", title_justify="left", title_style="")
    for heading in ("tokens", "rows", *names, *(f"{name} / engram" for name in names[1:])):
        table.add_column(heading, justify="right", no_wrap=True)
    for tokens, results in rows:
        medians = [results[name].median for name in names]
        per_call = results[names[0]].rows // len(results[names[0]].seconds)
        table.add_row(
            f"{tokens:,}",
            f"{per_call:,}",
            *(format_seconds(median) for median in medians),
            *(f"{median / medians[0]:.2f}x" for median in medians[1:]),
        )
    console.print(table)


def _batches(info: SynthInfo, tokens: int) -> Iterator[NDArray[np.int64]]:
    """Row ids `[tokens, 16]`, one column per hash head, uniform within the range of the head."""
    sizes, offsets = _heads(info)
    generator = np.random.default_rng(0)
    pool = generator.integers(0, sizes, size=(_POOL_TOKENS, len(sizes)), dtype=np.int64) + offsets
    starts = range(0, _POOL_TOKENS - tokens + 1, tokens)
    return (pool[start : start + tokens] for start in itertools.cycle(starts))


def _heads(info: SynthInfo) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    stored = {
        tensor.name.rsplit(".", 1)[1]: tensor.content
        for file in info.plan.files
        for tensor in file.tensors
        if isinstance(tensor.content, bytes)
    }
    sizes, offsets = (
        np.frombuffer(stored[name], "<i8")
        for name in ("ngram_heads_vocab_sizes", "ngram_heads_offsets")
    )
    return sizes, offsets


def _single_array(info: SynthInfo, table: SynthTable) -> NDArray[np.uint8]:
    """The whole table as one mapped uint8 array `[rows, row_bytes]`, its pages touched once."""
    pieces = table.planes[0].pieces
    end = pieces[0].offset
    for piece in pieces:
        if (piece.file, piece.offset) != (pieces[0].file, end):
            raise Failed("the demonstration's pieces do not follow one another in one file")
        end += piece.rows * table.row_bytes
    mapped = np.memmap(
        info.directory / pieces[0].file,
        np.uint8,
        mode="r",
        offset=pieces[0].offset,
        shape=(table.rows, table.row_bytes),
    )
    view = mapped.view(np.ndarray)
    int(view.reshape(-1)[::4096].sum())
    return view


def _methods(gather: engram.FileGather, view: NDArray[np.uint8]) -> tuple[list[Method], list[str]]:
    methods = [
        Method(
            "engram",
            lambda ids, out: (ids, out),
            lambda call: gather.gather(call[0], out=call[1]),
        ),
        Method(
            "numpy",
            lambda ids, out: (ids, out),
            lambda call: np.take(view, call[0], axis=0, out=call[1], mode="clip"),
        ),
    ]
    notes = ["numpy is np.take(view, ids, axis=0, out=out, mode='clip') on a mapping of the file"]
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return methods, [*notes, "torch is not installed, so it is not compared"]
    with warnings.catch_warnings():
        # The mapping is read-only and torch cannot say so of a tensor; nothing here writes to it.
        warnings.filterwarnings("ignore", message=".*not writable.*")
        tensor: Any = torch.from_numpy(view)
    methods.append(
        Method(
            "torch",
            lambda ids, out: (
                torch.from_numpy(np.ascontiguousarray(ids)).view(-1),
                torch.from_numpy(out).view(-1, out.shape[-1]),
            ),
            lambda call: torch.index_select(tensor, 0, call[0], out=call[1]),
            lingers=True,
        )
    )
    notes.append(
        f"torch is torch.index_select(..., out=out) with {torch.get_num_threads()} threads"
    )
    return methods, notes
