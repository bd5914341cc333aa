"""What an operator should know, said once per process through `logging`."""

from __future__ import annotations

import logging

_LOGGER = logging.getLogger("engram")
_said: set[str] = set()


def notify(text: str) -> None:
    """Logs a warning, unless this process has logged the same before."""
    if text not in _said:
        _said.add(text)
        _LOGGER.warning("%s", text)
