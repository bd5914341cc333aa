"""Writes what the documentation says of the command line from the commands themselves."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

MARK = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts the commands where a page has the mark; called by mkdocs."""
    return markdown.replace(MARK, commands()) if MARK in markdown else markdown


def commands() -> str:
    """Every command as Markdown: how to call it, what it does, its arguments and options."""
    import typer.main

    from engram.cli.app import app

    group: Any = typer.main.get_command(app)
    return "\n".join(
        line for name in sorted(group.commands) for line in described(name, group.commands[name])
    )


def described(name: str, command: Any) -> Iterator[str]:
    """One command."""
    context = command.context_class(command, info_name=f"engram {name}")
    yield f"## engram {name}\n"
    yield f"```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```\n"
    yield f"{plain(command.help)}\n"
    lines = list(parameters(command, context))
    if lines:
        yield "| | default | |\n|---|---|---|"
        yield from lines
        yield ""


def parameters(command: Any, context: Any) -> Iterator[str]:
    """A line of the table for each argument and option."""
    for parameter in command.params:
        if parameter.name == "help" or getattr(parameter, "hidden", False):
            continue
        names = ", ".join(f"`{option}`" for option in parameter.opts)
        if parameter.param_type_name == "argument":
            names = f"`{parameter.name.upper()}`"
        default = parameter.get_default(context, call=False)
        shown = "" if default in (None, False, ()) else f"`{getattr(default, 'value', default)}`"
        text = plain(getattr(parameter, "help", None)).replace("|", "\\|")
        yield f"| {names} | {shown} | {text} |"


def plain(text: str | None) -> str:
    """Help as one paragraph each, without the codes that only a terminal understands."""
    return re.sub(r"\[/?[a-z ]+\]", "", (text or "").replace("\b", "")).strip()
