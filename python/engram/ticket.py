"""Rows that arrive while the caller does something else."""

# Tickets are made of the tables' native halves.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from engram import _engram
from engram._arguments import pad_argument
from engram._arrays import empty, int64_ids, is_torch
from engram._dtypes import torch_dtype
from engram._errors import complete, placed
from engram._notices import failed
from engram.rows import Rows
from engram.table import PLANE_ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engram.gather import FileGather
    from engram.table import PlaneInfo

__all__ = ["Ticket"]


class Ticket:
    """Rows on their way, from `FileGather.submit` or `TableSet.submit`.

    Rows arrive in memory of engram's own. They reach `out` inside `wait`, on the thread that waits;
    after a cancel, an error or a wait that timed out nothing has been written to it. `out` must not
    be resized or freed before that, and stays exported until the ticket has ended. Dropping a
    ticket cancels it. All methods may be called from any thread.
    """

    __slots__ = ("__weakref__", "_native", "_shape", "_shared")

    def __init__(self, native: _engram.Ticket, shape: _Shape) -> None:
        """Not called by users: see `FileGather.submit`."""
        self._native = native
        self._shape = shape
        self._shared: Any = None

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the rows.

        Args:
            timeout: Seconds to wait at most; None until the ticket has ended. Running out ends the
                wait, not the ticket, which can be waited for again.

        Returns:
            What `gather` would have returned for the same arguments; the same objects every time.

        Raises:
            TimeoutError: The timeout passed, or the ticket's deadline did before its rows came.
            concurrent.futures.CancelledError: The ticket was cancelled.
            Exception: What `gather` would have raised, to every waiter.
        """
        try:
            memory = self._native.wait(timeout)
        except Exception as error:
            complete(error, table=self._shape.only)
            failed(error)
            raise
        if memory is None:
            return self._shape.given
        if self._shared is None:
            # Two threads may both get here; their rows are views of the same memory.
            self._shared = self._shape.rows(memory)
        return self._shared

    def done(self) -> bool:
        """Whether `wait` would return or raise at once.

        Raises:
            ValueError: The ticket is from before a fork: in this process nobody works on it.
        """
        return self._native.done()

    def cancel(self) -> bool:
        """Ends the ticket without rows, at once; reads under way are abandoned.

        Returns:
            False if it had ended already.
        """
        cancelled = self._native.cancel()
        if cancelled:
            self._shape.given = None
        return cancelled

    def __repr__(self) -> str:
        try:
            state = "done" if self.done() else "in flight"
        except ValueError:
            state = "of another process"
        return f"<engram.Ticket for {self._shape}: {state}>"


class _Shape:
    """What a ticket's rows become."""

    def __init__(
        self, tables: Sequence[tuple[str | int, FileGather, tuple[int, ...], bool]], *, named: bool
    ) -> None:
        self.tables = tables
        self.named = named
        self.given: Any = None

    @property
    def only(self) -> str | None:
        """The name of the table, where there is but one."""
        return _label(*self.tables[0][:2]) if len(self.tables) == 1 else None

    def rows(self, memory: _engram.HostBuffer) -> Any:
        """Views of the planes in `memory`, which lie one after another, aligned."""
        offset = 0
        made: dict[str | int, Any] = {}
        for name, gather, shape, torch_like in self.tables:
            count = int(np.prod(shape, dtype=np.int64))
            planes: dict[str, Any] = {}
            for plane in gather.planes:
                offset = -(-offset // PLANE_ALIGNMENT) * PLANE_ALIGNMENT
                planes[plane.name] = _view(memory, offset, plane, shape, torch_like=torch_like)
                offset += count * plane.row_bytes
            made[name] = Rows(**planes) if len(planes) > 1 else next(iter(planes.values()))
        return made if self.named else next(iter(made.values()))

    def __str__(self) -> str:
        return ", ".join(f"{shape} ids of {name!r}" for name, _, shape, _ in self.tables)


def _label(key: str | int, gather: FileGather) -> str:
    """A table's name in messages: the caller's, unless that is a place."""
    return key if isinstance(key, str) else gather.info.name


def _view(
    memory: _engram.HostBuffer,
    offset: int,
    plane: PlaneInfo,
    shape: tuple[int, ...],
    *,
    torch_like: bool,
) -> Any:
    nbytes = int(np.prod(shape, dtype=np.int64)) * plane.row_bytes
    if nbytes == 0:
        return empty(plane, shape, torch_like=torch_like)
    rows = (*shape, *plane.row_shape)
    if torch_like:
        import torch

        part = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset)
        return part.view(torch_dtype(plane.stored_dtype)).reshape(rows)
    return (
        np.frombuffer(memoryview(memory), np.uint8, nbytes, offset).view(plane.dtype).reshape(rows)
    )


def submit(
    wanted: Sequence[tuple[str | int, FileGather, Any, Any]],
    *,
    pad_id: int | None,
    deadline: float | None,
    named: bool,
) -> Ticket:
    """Puts one gather over several tables in line.

    Args:
        wanted: Name or place, table, ids and output (None for new memory) of each.
        pad_id: As for `FileGather.gather`.
        deadline: Seconds from now.
        named: Whether `Ticket.wait` returns a dictionary by name or place.
    """
    pad_id = pad_argument(pad_id)
    requests: list[Any] = []
    tables: list[tuple[str | int, FileGather, tuple[int, ...], bool]] = []
    given: dict[str | int, Any] = {}
    for name, gather, ids, out in wanted:
        flat, shape = int64_ids(ids, gather.info)
        targets = None
        if out is not None:
            given[name] = out
            try:
                targets = gather._targets(out, shape, flat.size)
            except Exception as error:
                complete(error, table=_label(name, gather))
                raise
        requests.append((gather._native, flat, targets, pad_id))
        tables.append((name, gather, shape, is_torch(ids)))
    if given and len(given) < len(tables):
        missing = [name for name, *_ in tables if name not in given]
        raise placed(
            ValueError(f"out for {list(given)} but not for {missing}: give all of a ticket or none")
        )
    result = _Shape(tables, named=named)
    if given:
        result.given = given if named else next(iter(given.values()))
    table = result.only
    try:
        native = _engram.submit(requests, deadline)
    except OverflowError:
        raise placed(
            ValueError(f"pad_id={pad_id!r} is out of range: a pad_id has 64 bits"), table=table
        ) from None
    except Exception as error:
        complete(error, table=table)
        raise
    return Ticket(native, result)
