"""`engram synth`: write a synthetic checkpoint."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from engram import synth as library

from .errors import reported
from .parameters import given_path, given_size, wrong
from .text import format_bytes, output, plural, status

if TYPE_CHECKING:
    from engram.synth import SynthInfo


_MODEL_LAYERS = (1, 2, 0)
_SHOWN = 60


class FamilyName(StrEnum):
    """Families that can be written."""

    QWEN = "qwen"
    DEEPSEEK = "deepseek"
    LONGCAT = "longcat"
    GEMMA = "gemma"


def synth(
    directory: Annotated[
        Path,
        typer.Argument(parser=given_path, help="Where to write; must be empty or not exist."),
    ],
    *,
    family: Annotated[FamilyName, typer.Option(help="Model family.")] = FamilyName.QWEN,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Rows per table, about: the hash rule decides.")
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(
            parser=given_size, metavar="SIZE", help="Size of all tables instead of rows, e.g. 6GiB."
        ),
    ] = None,
    files: Annotated[int | None, typer.Option(min=1, help="Number of safetensors files.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="qwen: bf16, fp8, nvfp4, nvfp4-draft, nvfp4-packed; deepseek: fp8, mxfp4; "
            "others: bf16."
        ),
    ] = None,
    parts: Annotated[int | None, typer.Option(min=1, help="Pieces per table (qwen).")] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="How many tables, or zero-based decoder layers such as 1,14."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the bytes and of the layout.")] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier synthetic checkpoint.")
    ] = False,
    model: Annotated[
        bool,
        typer.Option(
            "--model", help="Write a whole tiny Qwen model, with tokenizer, through transformers."
        ),
    ] = False,
) -> None:
    """Write a checkpoint with a released layout, whose every byte can be checked.

    The bytes are a function of table, row and column that engram.synth.pattern documents.
    """
    with reported():
        chosen_layers = _parse_layers(layers)
        if model:
            refused = {"--rows": rows, "--size": size, "--files": files, "--dtype": dtype}
            given = [name for name, value in refused.items() if value is not None]
            if given or overwrite or family != FamilyName.QWEN:
                given += ["--overwrite"] * overwrite + ["--family"] * (family != FamilyName.QWEN)
                raise wrong(None, f"--model takes no {', '.join(given)}")
            _write_model(directory, chosen_layers, parts, seed)
            return
        arguments: dict[str, Any] = {
            "rows": rows,
            "size": size,
            "dtype": dtype,
            "layers": chosen_layers,
            "parts": parts,
            "files": files,
            "seed": seed,
        }
        try:
            library.plan(family.value, **arguments)
        except ValueError as error:
            raise wrong(None, str(error)) from None
        started = time.perf_counter()
        info = write_with_progress(directory, family.value, overwrite=overwrite, **arguments)
        seconds = time.perf_counter() - started
        console = output()
        for table in info.tables:
            pieces = sum(len(plane.pieces) for plane in table.planes)
            console.print(
                f"{table.name}: {plural(table.rows, 'row')} of {plural(table.row_bytes, 'byte')} "
                f"({table.encoding}) in {plural(pieces, 'piece')}"
            )
        console.print(
            f"wrote {format_bytes(info.nbytes)} in {plural(len(info.files), 'file')} to "
            f"{info.directory} at {format_bytes(info.nbytes / seconds)}/s"
        )


def write_with_progress(directory: Path, family: str, **arguments: Any) -> SynthInfo:
    """`engram.synth.write` with a progress bar on stderr.

    Args:
        directory: As for `write`.
        family: As for `write`.
        **arguments: Further arguments of `write`.
    """
    console = status()
    with Progress(
        TextColumn("writing"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("writing", total=None)
        return library.write(
            directory,
            family,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            **arguments,
        )


def _parse_layers(text: str | None) -> int | list[int] | None:
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.rstrip(",").split(",")]
    except ValueError:
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise wrong(
            "--layers", f"must be a number or numbers such as 1,14, not {shown!r}"
        ) from None
    return numbers[0] if len(numbers) == 1 and "," not in text else numbers


def _write_model(
    directory: Path, layers: int | list[int] | None, parts: int | None, seed: int
) -> None:
    if isinstance(layers, int):
        if not 1 <= layers <= len(_MODEL_LAYERS):
            raise wrong("--layers", f"the tiny model has tables in 1 to 3 layers, not in {layers}")
        layers = list(_MODEL_LAYERS[:layers])
    elif layers is not None and not set(layers) <= set(_MODEL_LAYERS):
        other = next(layer for layer in layers if layer not in _MODEL_LAYERS)
        raise wrong("--layers", f"the tiny model has tables in layers 0, 1 and 2, not in {other}")
    arguments = {"layers": layers, "parts": parts}
    given: dict[str, Any] = {name: value for name, value in arguments.items() if value is not None}
    path = library.write_model(directory, seed=seed, **given)
    output().print(
        f"wrote a tiny random Qwen4-Exp model to {path}; load it with "
        f"transformers.AutoModelForImageTextToText.from_pretrained({str(path)!r})"
    )
