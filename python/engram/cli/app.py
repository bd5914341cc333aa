"""The command tree."""

from __future__ import annotations

from typing import Annotated

import typer

from .bench import bench
from .demo import demo
from .doctor import doctor
from .inspect import inspect
from .prewarm import prewarm
from .synth import synth
from .verify import verify

app = typer.Typer(
    help="Rows of n-gram embedding tables, read in place from safetensors checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(inspect)
app.command()(synth)
app.command()(demo)
app.command()(bench)
app.command()(doctor)
app.command()(verify)
app.command()(prewarm)


def _show_version(value: bool) -> None:  # noqa: FBT001 - called by typer with the flag's value
    if value:
        import engram

        print(f"engram {engram.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Rows of n-gram embedding tables, read in place from safetensors checkpoints."""
