"""The `engram` command: examine a machine and a checkpoint, measure, prewarm, demonstrate.

Exit status: 0 when all went well, 1 when something could not be done (said on stderr), 2 for a
wrong command line, 130 after Ctrl-C. `doctor` and `verify` give a verdict: 1 says that something is
wrong with what they looked at, 2 that there was nothing to look at. Nothing a user can do to a path
or a pipe shows a traceback.
"""

from __future__ import annotations

import errno
import io
import os
import sys

_EXTRA = frozenset({"typer", "rich"})


def main() -> None:
    """Runs the command line; the entry point of the `engram` script."""
    # File names need not be text, and the terminal need not know every letter.
    stdout: object = sys.stdout
    if isinstance(stdout, io.TextIOWrapper):
        stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            from .app import app
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in _EXTRA:
                raise
            print(
                f"engram: the command line needs {error.name}; install engram-gather[cli]",
                file=sys.stderr,
            )
            sys.exit(1)
        app(prog_name="engram")
    except KeyboardInterrupt:
        print("engram: interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        _flush()


def _flush() -> None:
    """Writes out what is buffered while a failure to do so can still be handled."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError as error:
        # A reader that went away is no failure worth a message, and one message is enough.
        leaving = sys.exception()
        failed_already = isinstance(leaving, SystemExit) and leaving.code
        if error.errno != errno.EPIPE and not failed_already:
            print(f"engram: cannot write to standard output: {error.strerror}", file=sys.stderr)
        # The interpreter flushes once more at exit and would report the same failure there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(failed_already or 1)
