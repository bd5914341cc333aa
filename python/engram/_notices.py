"""What an operator should know, through `logging`: the logger is `engram`.

Every record carries `event` and the fields of that event as attributes, so that a formatter can
write them as they are:

    open      INFO     table, path, family, rows, row_bytes, files, io, fallbacks
    fallback  WARNING  table (None where it is not about one), fallback; each text once per process
    fault     WARNING  table, rows_reread: pages could not be read, their rows were read again
    fault     INFO     table, path, row, offset, errno: a read failed, and the caller was told
    trim      DEBUG    table, bytes_trimmed: page tables given back, at most one record a second

What happens while rows move is noted there in one byte, looked at when the call is over and the
interpreter is held again: no signal handler and no working thread ever logs.
"""

from __future__ import annotations

import logging
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from engram._engram import Reader
    from engram.table import TableInfo

_LOGGER = logging.getLogger("engram")
_TRIM_PERIOD = 1.0

_said: set[str] = set()


@dataclass
class _Logged:
    """How far the log has come with one reader."""

    rows_reread: int = 0
    bytes_trimmed: int = 0
    trimmed_at: float = float("-inf")


_logged: weakref.WeakKeyDictionary[Reader, _Logged] = weakref.WeakKeyDictionary()


def notify(text: str, table: str | None = None) -> None:
    """Logs a fallback as a warning, unless this process has logged the same before."""
    if text not in _said:
        _said.add(text)
        fields = {"event": "fallback", "table": table, "fallback": text}
        _LOGGER.warning("%s", text, extra=fields)


def opened(describe: Callable[[], TableInfo], path: str, native: Reader) -> None:
    """Logs that a table was opened, and what it fell back from; it is described for a log only."""
    fallbacks = native.fallbacks()
    if _LOGGER.isEnabledFor(logging.INFO):
        info = describe()
        io = native.runs
        fields = {
            "event": "open",
            "table": info.name,
            "path": path,
            "family": info.family,
            "rows": info.rows,
            "row_bytes": info.row_bytes,
            "files": len(info.files),
            "io": io,
            "fallbacks": fallbacks,
        }
        _LOGGER.info(
            "opened table %r at %s: %d rows of %d bytes in %d files, read through %s",
            info.name,
            path,
            info.rows,
            info.row_bytes,
            len(info.files),
            io,
            extra=fields,
        )
    for fallback in fallbacks:
        notify(fallback, describe().name)


def happened(
    reader: Reader, table: str, fallbacks: list[str], rows_reread: int, bytes_trimmed: int
) -> None:
    """Logs what has happened in a reader since the last time; called by the native half.

    Args:
        reader: The open table.
        table: Its name.
        fallbacks: All it fell back from so far.
        rows_reread: Rows read again so far, because pages they were copied from were lost.
        bytes_trimmed: Bytes of page tables given back so far.
    """
    logged = _logged.setdefault(reader, _Logged())
    for fallback in fallbacks:
        notify(fallback, table)
    # The counters of a table that was opened again begin anew.
    reread = _growth(logged.rows_reread, rows_reread)
    logged.rows_reread = rows_reread
    if reread:
        _LOGGER.warning(
            "pages of table %r could not be read; %d rows were read again from the file",
            table,
            reread,
            extra={"event": "fault", "table": table, "rows_reread": reread},
        )
    trimmed = _growth(logged.bytes_trimmed, bytes_trimmed)
    now = time.monotonic()
    if trimmed and _LOGGER.isEnabledFor(logging.DEBUG) and now - logged.trimmed_at >= _TRIM_PERIOD:
        logged.trimmed_at = now
        logged.bytes_trimmed = bytes_trimmed
        _LOGGER.debug(
            "gave back page tables for %d bytes of table %r",
            trimmed,
            table,
            extra={"event": "trim", "table": table, "bytes_trimmed": trimmed},
        )


def _growth(before: int, now: int) -> int:
    return now - before if now >= before else now


def failed(error: BaseException) -> None:
    """Logs a read that the kernel refused; the caller gets the exception all the same."""
    if not isinstance(error, OSError) or error.errno is None:
        return
    fields: dict[str, Any] = {
        name: getattr(error, name, None) for name in ("table", "path", "row", "offset")
    }
    _LOGGER.info("%s", error, extra={"event": "fault", "errno": error.errno, **fields})
