"""Arguments and options that several commands take, and what is wrong with those given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .text import parse_size


def wrong(option: str | None, message: str) -> typer.BadParameter:
    """The error for a wrong command line, which ends it with status 2.

    Args:
        option: Which option it is about; None where it is about several.
        message: What is wrong with its value.
    """
    hint = None if option is None else repr(option)
    return typer.BadParameter(message, param_hint=hint)


def given_path(text: str) -> Path:
    """A path; an empty one, such as that of a variable that is not set, is no path.

    Raises:
        typer.BadParameter: It is empty.
    """
    if not text:
        raise typer.BadParameter("the path is empty")
    return Path(text)


def given_size(text: str) -> int:
    """Bytes in a size as people write it.

    Raises:
        typer.BadParameter: It is none.
    """
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


CheckpointPath = Annotated[
    Path,
    typer.Argument(
        parser=given_path, help="A checkpoint directory, a .safetensors file or an index JSON."
    ),
]
"""The checkpoint that a command looks into."""
