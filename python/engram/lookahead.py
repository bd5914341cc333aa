"""Rows gathered ahead of the step they are for, and only ever used by that step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engram._errors import placed
from engram.ticket import submit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from engram.stagetables import StageTable
    from engram.ticket import Ticket

__all__ = ["Lookahead"]

_Arguments = tuple[Any, Any, Any]
"""Tokens, query_start_loc and context, as hashes take them."""


@dataclass(frozen=True)
class _Ahead:
    ids: list[NDArray[np.int64]]
    ticket: Ticket


class Lookahead:
    """Tickets by number of the step that they are for.

    A step takes its ticket only if it asks for the same row ids, all of them: whatever a server
    assumed when it looked ahead (a draft accepted, a request still running), rows of other tokens
    are never served.
    """

    def __init__(self, tables: Sequence[StageTable], most: int) -> None:
        """Look ahead for `tables`, at most `most` steps at once."""
        self._tables = tables
        self._most = most
        self._ahead: dict[int, _Ahead] = {}

    def __contains__(self, number: object) -> bool:
        return number in self._ahead

    def start(
        self, number: int, arguments: _Arguments, max_tokens: int, deadline: float | None
    ) -> None:
        """Submits the gather of step `number`, in place of an earlier one of that number.

        Raises:
            ValueError: More tokens than `max_tokens`.
        """
        ids = self._ids(arguments)
        if len(ids[0]) > max_tokens:
            raise placed(
                ValueError(f"a step of {len(ids[0])} tokens; at most {max_tokens} fit (max_tokens)")
            )
        self._drop(number)
        while len(self._ahead) >= self._most:
            self._drop(next(iter(self._ahead)))
        wanted = [
            (table.name, table.gather, table_ids, None)
            for table, table_ids in zip(self._tables, ids, strict=True)
        ]
        pad_id = self._tables[0].hasher.dead_id
        ticket = submit(wanted, pad_id=pad_id, deadline=deadline, named=True)
        self._ahead[number] = _Ahead(ids, ticket)

    def take(
        self, number: int, arguments: _Arguments, planes: Sequence[Sequence[Any]], seconds: float
    ) -> int | None:
        """Moves the rows of step `number` into a slot, if they are those of `arguments`.

        Args:
            number: Number of the step.
            arguments: What the step asks for.
            planes: Per table and plane, bytes `[max_tokens, heads * row_bytes]`.
            seconds: How long to wait for rows that are still on their way.

        Returns:
            The number of tokens; None if the step has to gather by itself: it asks for other rows,
            or the ticket failed, which the step's own gather will report if it lasts.
        """
        ahead = self._ahead.pop(number)
        ids = self._ids(arguments)
        if not all(np.array_equal(*pair) for pair in zip(ids, ahead.ids, strict=True)):
            ahead.ticket.cancel()
            return None
        try:
            rows = ahead.ticket.wait(seconds)
        except Exception:
            ahead.ticket.cancel()
            return None
        count = len(ids[0])
        for table, slots in zip(self._tables, planes, strict=True):
            stored = rows[table.name]
            for plane, slot in zip(table.gather.planes, slots, strict=True):
                part = stored if len(slots) == 1 else stored[plane.name]
                slot[:count] = part.view(np.uint8).reshape(count, slot.shape[1])
        return count

    def forget(self, before: int | None = None) -> None:
        """Cancels what was started for steps below `before`, or for all."""
        for number in [number for number in self._ahead if before is None or number < before]:
            self._drop(number)

    def _drop(self, number: int) -> None:
        ahead = self._ahead.pop(number, None)
        if ahead is not None:
            ahead.ticket.cancel()

    def _ids(self, arguments: _Arguments) -> list[NDArray[np.int64]]:
        """Per table, ids `[tokens, heads]` of the tokens that belong to requests."""
        tokens, starts, context = arguments
        tokens = tokens.reshape(-1)
        if starts is not None and len(starts) > 0 and 0 <= int(starts[-1]) <= len(tokens):
            tokens = tokens[: int(starts[-1])]
        return [table.hasher.ids(tokens, starts, context) for table in self._tables]
