"""Writes synthetic checkpoints: every byte for real, in order, in large blocks."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .directory import SynthInfo, filling
from .plan import plan

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from .layout import Layout, PlannedFile
    from .plan import SynthTable

# Small enough for the block and its temporaries to stay in a core's cache between being computed
# and being copied to the kernel.
_BLOCK_BYTES = 1 << 20
_THREADS = 2


def write(
    directory: str | os.PathLike[str],
    family: str = "qwen",
    *,
    rows: int | None = None,
    size: int | None = None,
    dtype: str | None = None,
    layers: int | Sequence[int] | None = None,
    parts: int | None = None,
    files: int | None = None,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    layout: Layout | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> SynthInfo:
    """Writes a faithful synthetic checkpoint: real names, configuration, layout and bytes.

    Row counts follow the family's hash rule, so they come out near what was asked for, and equal
    what a reader derives from `config.json`. Every byte is the function that `engram.synth.pattern`
    documents; `SynthTable.expected` computes it for any row.

    Args:
        directory: Where to write; must be empty or not exist.
        family: `"qwen"`, `"deepseek"`, `"longcat"` or `"gemma"`.
        rows: Rows per table, about. Default: the family's, a few hundred megabytes in all.
        size: Bytes of all tables together, about, instead of `rows`.
        dtype: `"bf16"`, `"fp8"`, `"nvfp4"`, `"nvfp4-draft"`, `"nvfp4-packed"` (qwen), `"fp8"`,
            `"mxfp4"` (deepseek), `"bf16"` (longcat, gemma); the first is the default.
        layers: Zero-based decoder layers that get a table each (qwen, deepseek), or how many.
        parts: Numbered pieces that each table is cut into (qwen).
        files: Number of safetensors files; one file comes without an index.
        seed: Seed of the bytes and of the shuffled layout.
        config: Values for fields of the (text) configuration, such as `{"heads_per_ngram": 2}`. The
            field that fixes the row count may be given instead of `rows`.
        layout: Naming and placement, where the published ones are not wanted.
        overwrite: Replace an earlier synthetic checkpoint. Other files are never removed.
        progress: Called with bytes written so far and in all, from the writing threads, one at a
            time.

    Returns:
        Directory, configuration, tables and files.

    Raises:
        ValueError: Arguments that contradict each other or the family's rules.
        FileExistsError: The directory is not empty.
        OSError: Not enough space, or what the kernel refused. Nothing is left behind.
    """
    planned = plan(
        family,
        rows=rows,
        size=size,
        dtype=dtype,
        layers=layers,
        parts=parts,
        files=files,
        seed=seed,
        config=config,
        layout=layout,
    )
    target = Path(directory)
    counter = _Counter(planned.nbytes, progress)
    with filling(target, planned, overwrite=overwrite):
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="engram-synth")
        try:
            tasks = [
                pool.submit(_write_file, target, file, planned.tables, counter)
                for file in planned.files
            ]
            wait(tasks, return_when=FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            # On success every task is done; otherwise the rest end at their next block.
            counter.stop.set()
            pool.shutdown(cancel_futures=True)
    return SynthInfo(target, planned)


class _Stopped(Exception):
    """Another file failed, or the caller was interrupted."""


class _Counter:
    """Bytes written by all threads together."""

    def __init__(self, total: int, callback: Callable[[int, int], None] | None) -> None:
        self.stop = threading.Event()
        self._total = total
        self._done = 0
        self._callback = callback
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        if self.stop.is_set():
            raise _Stopped
        with self._lock:
            self._done += count
            if self._callback is not None:
                self._callback(self._done, self._total)


def _write_file(
    directory: Path, file: PlannedFile, tables: Sequence[SynthTable], counter: _Counter
) -> None:
    with (directory / file.name).open("xb", buffering=0) as target:
        for block in _blocks(file, tables):
            view = memoryview(block)
            while view:
                written = target.write(view)
                view = view[written:]
            counter.add(len(block))


def _blocks(file: PlannedFile, tables: Sequence[SynthTable]) -> Iterator[bytes | memoryview]:
    yield file.header
    for tensor in file.tensors:
        if isinstance(tensor.content, bytes):
            yield tensor.content
            continue
        pattern = tables[tensor.content.table].plane(tensor.content.plane).pattern
        step = max(1, _BLOCK_BYTES // pattern.row_bytes)
        first = tensor.content.first_row
        end = first + tensor.shape[0]
        for row in range(first, end, step):
            yield pattern.rows(np.arange(row, min(row + step, end))).reshape(-1).data
