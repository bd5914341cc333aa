"""From an exception to a sentence on stderr and an exit status."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Generator


class Failed(Exception):
    """A command cannot go on; its message is for the user."""


@contextmanager
def reported(status: int = 1) -> Generator[None]:
    """Turns the failures a user can cause into a message and an exit status.

    Anything else is a defect of this program and keeps its traceback.

    Args:
        status: Of a command that cannot do what it was asked for. Commands whose status is a
            verdict keep 1 for a bad one.
    """
    try:
        yield
    except KeyboardInterrupt:
        _say("interrupted")
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # Nobody reads what this prints any more, which is no failure worth a message.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except OSError as error:
        _say(describe(error))
        raise typer.Exit(status) from None
    except (Failed, ValueError, ImportError, MemoryError) as error:
        _say(str(error) or type(error).__name__)
        raise typer.Exit(status) from None


def describe(error: OSError) -> str:
    """The kernel's words and the file they are about."""
    if error.strerror is None:
        return str(error)
    if error.filename is None or str(error.filename) in error.strerror:
        return error.strerror
    return f"{error.strerror}: {os.fsdecode(error.filename)}"


def _say(message: str) -> None:
    print(f"engram: {message}", file=sys.stderr)
