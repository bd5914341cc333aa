"""A server's step: rows of its tokens in fixed device buffers, which captured graphs read.

    stage = engram.Stage(tables, hashers, max_tokens=8192, device="cuda")
    graph_reads = stage.rows(0)  # [8192, heads, columns], at an address that never changes
    for step in steps:
        stage.prepare(step.tokens, step.query_start_loc, step.context)
        graph.replay()

`prepare` computes the row ids on the host, gathers the rows of all tables in one round of reads
into a pinned slot, and starts one copy per table. Slots take turns, so that a gather runs while the
copy before it is under way; a slot is filled again only after its copy.
"""

# Stages join hashes and tables below their public faces.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engram._arrays import is_torch
from engram._errors import placed
from engram._locks import ForkedLock
from engram.copier import copier_for, wait_for
from engram.graphwait import waits_for
from engram.late import LateStep
from engram.lookahead import Lookahead
from engram.slots import FixedBuffer, Slot
from engram.stagetables import stage_tables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from engram.copier import Copier
    from engram.gather import FileGather
    from engram.graphwait import GraphWaits
    from engram.hashing.base import NgramHash
    from engram.table_set import TableSet

__all__ = ["Stage"]


class Stage:
    """Fixed device buffers with the rows of the current step.

    One thread prepares at a time; others wait. What `rows` returns may be read from any stream that
    waits for the one `prepare` was called on.

    Args:
        tables: A `TableSet`, one `FileGather`, or several as a sequence or a mapping by name. They
            stay the caller's to close, after the stage.
        hashers: The hash of each table: one, a sequence in the same order, or a mapping by the same
            names.
        max_tokens: Largest step, padding left out.
        device: Where the fixed buffers are: a CUDA device, or `"cpu"`.
        slots: Host buffers that take turns, at least 2.
        pin: Whether slots are pinned. None: where the device is CUDA, with a warning if the driver
            refuses.
        patience: Seconds after which waiting for the device is an error rather than a hang.
        copier: Replaces how bytes move; for tests.

    Raises:
        TypeError: `tables` or `hashers` are something else.
        ValueError: A hash belongs to another table, hashes differ in how far they look back or in
            `dead_id`, a number is too small, or the device is of another kind.
        RuntimeError: `pin=True` cannot be had, or the device is CUDA and there is no driver.
    """

    def __init__(
        self,
        tables: TableSet | FileGather | Sequence[FileGather] | Mapping[str, FileGather],
        hashers: NgramHash | Sequence[NgramHash] | Mapping[str, NgramHash],
        *,
        max_tokens: int,
        device: torch.device | str | int,
        slots: int = 2,
        pin: bool | None = None,
        patience: float = 60.0,
        copier: Copier | None = None,
    ) -> None:
        _require_at_least("max_tokens", max_tokens, 1)
        _require_at_least("slots", slots, 2)
        self._tables = stage_tables(tables, hashers)
        self._max_tokens = max_tokens
        self._device = _resolved(device)
        self._patience = patience
        self._copier = copier_for(self._device) if copier is None else copier
        self._pin = pin
        self._lock = ForkedLock()
        self._buffers = [FixedBuffer(table, max_tokens, self._device) for table in self._tables]
        self._slots = [
            Slot(place, self._tables, self._buffers, self._copier, max_tokens, pin=pin)
            for place in range(slots)
        ]
        self._turn = 0
        self._step = -1
        self._tokens = 0
        self._given = 0
        """Tokens of the step, padding included; 0 after a failed step."""
        self._reach = 0
        """Rows behind this many tokens are zeros on the device."""
        self._late: list[LateStep] = []
        self._inbox = _Inbox(self._copier, self._device, pin=pin)
        self._lookahead = Lookahead(self._tables, slots)
        self._counts = {"steps": 0, "failed": 0, "prefetch_hits": 0, "prefetch_misses": 0}
        self._closed = False

    def prepare(
        self,
        tokens: Any,
        query_start_loc: Any = None,
        context: Any = None,
        *,
        step: int | None = None,
    ) -> int:
        """Brings the rows of one step into the fixed buffers.

        Returns when the copies have been started; work that the caller's stream is given afterwards
        sees them done. On CUDA tokens, starts and context may live on the device: they are copied
        to the host with one synchronisation.

        Args:
            tokens: Integers `[T]` or `[B, S]`, as for
                [`NgramHash.ids`][engram.hashing.NgramHash.ids].
            query_start_loc: Integers `[R + 1]`. Tokens past the last start are padding: their rows
                are zeros, and they do not count towards `max_tokens`.
            context: Integers `[R, context_len]`.
            step: Number of the step, which a prefetch must carry to be used. None: one more than
                the last.

        Returns:
            How many tokens own rows now: `rows(...)[:n]`. All rows behind them are zeros.

        Raises:
            RuntimeError: The current stream is being captured into a graph, or a fixed buffer's
                memory was replaced; nothing was changed.
            TimeoutError: The device did not finish the copy before last within `patience`.
            ValueError: More tokens than `max_tokens`; a token outside the vocabulary; or closed.
            Exception: As `FileGather.gather` does. After an exception of a step that was begun the
                fixed buffers hold zeros, not the step before, and the next step works.
        """
        with self._lock:
            self._require_usable("prepare")
            number = self._step + 1 if step is None else step
            slot = self._slots[self._turn]
            filled = False
            try:
                fetched = self._inbox.fetch(tokens, query_start_loc, context, self._patience)
                arguments = self._on_host(*fetched)
                slot.wait(self._patience)
                filled = True
                count = self._fill(slot, number, arguments)
                slot.upload(count, self._reach)
            except BaseException:
                self._counts["failed"] += 1
                self._discard(slot, filled=filled)
                raise
            finally:
                self._step = number
                self._lookahead.forget(before=number + 1)
            self._turn = (self._turn + 1) % len(self._slots)
            self._tokens = self._reach = count
            self._given = int(arguments[0].size)
            self._counts["steps"] += 1
            return count

    def prefetch(
        self,
        tokens: Any,
        query_start_loc: Any = None,
        context: Any = None,
        *,
        step: int | None = None,
        deadline: float | None = None,
    ) -> bool:
        """Starts gathering the rows of a step to come, and returns at once.

        The rows are used by the `prepare` of that step if it asks for the very same row ids;
        otherwise they are dropped and `prepare` gathers as usual.

        Args:
            tokens: As for `prepare`, on the host.
            query_start_loc: As for `prepare`, on the host.
            context: As for `prepare`, on the host.
            step: Number of the step to come. None: one more than the last that was prepared.
            deadline: As for `FileGather.submit`.

        Returns:
            False if nothing was started because the current stream is being captured.

        Raises:
            TypeError: An argument lives on a device.
            ValueError: As `prepare`.
        """
        with self._lock:
            if self._copier.capturing():
                return False
            self._require_usable("prefetch")
            number = self._step + 1 if step is None else step
            arguments = self._on_host(tokens, query_start_loc, context)
            self._lookahead.start(number, arguments, self._max_tokens, deadline)
            return True

    def late(self, tokens: int | None = None, *, driver: GraphWaits | None = None) -> LateStep:
        """For a graph that is launched before its rows are there, and waits for them on the device.

        One for each captured graph. `LateStep.waits` says whether the device can: that takes a CUDA
        driver of 12.0 or later and the package `cuda-bindings`. Where it cannot, the graph is
        launched as soon as the rows are there, by the same calls.

        Args:
            tokens: Tokens that the graph has room for; None for `max_tokens`. Rows behind them in
                the fixed buffers are left as they are.
            driver: Replaces how graphs wait; for tests.

        Raises:
            RuntimeError: The current stream is being captured into a graph.
            TypeError: `tokens` is no integer.
            ValueError: `tokens` is less than 1 or more than `max_tokens`; or closed.
        """
        tokens = self._max_tokens if tokens is None else tokens
        _require_at_least("tokens", tokens, 1)
        if tokens > self._max_tokens:
            raise placed(ValueError(f"tokens is {tokens}; at most {self._max_tokens} (max_tokens)"))
        with self._lock:
            self._require_usable("late")
            made = LateStep(self, tokens, waits_for(self._device) if driver is None else driver)
            self._late.append(made)
        return made

    def rows(self, table: str | int = 0) -> Any:
        """The fixed buffer of a table: what a forward, captured or not, reads.

        Args:
            table: A table's name, or its place among the stage's tables.

        Returns:
            A tensor `[max_tokens, heads, *row_shape]` of stored values, or `Rows` of such tensors
            for a table of several planes; always the same one. Zeros before the first step and
            behind the last token of the current one.

        Raises:
            KeyError: The stage has no such table.
        """
        return self._buffers[self._place(table)].rows

    def release(self) -> None:
        """Notes that what the current stream has been given so far is the last to read the rows.

        The next step's copies then wait for that alone instead of for all work of the stream.
        """
        self._copier.read()

    def join(self) -> None:
        """Makes the current stream wait for the copies; for streams `prepare` was not called on."""
        self._copier.join()

    def stats(self) -> dict[str, Any]:
        """Steps, failures and prefetches so far; how bytes move and whether slots are pinned."""
        return {
            **self._counts,
            "copier": self._copier.name,
            "pinned": all(slot.memory.is_pinned for slot in self._slots),
            "slots": len(self._slots),
            "host_bytes": sum(slot.memory.nbytes for slot in self._slots)
            + sum(late.host_bytes for late in self._late),
            "device_bytes": sum(buffer.nbytes for buffer in self._buffers),
        }

    @property
    def max_tokens(self) -> int:
        """Largest step."""
        return self._max_tokens

    @property
    def tokens(self) -> int:
        """Tokens whose rows the fixed buffers hold; 0 after a failed step."""
        return self._tokens

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables, in order."""
        return tuple(table.name for table in self._tables)

    def gather_of(self, table: str | int = 0) -> FileGather:
        """The table itself, for its encoding and constants."""
        return self._tables[self._place(table)].gather

    def hasher_of(self, table: str | int = 0) -> NgramHash:
        """The hash of a table."""
        return self._tables[self._place(table)].hasher

    def close(self) -> None:
        """Drops prefetches and waits for copies under way; later calls raise ValueError.

        Graphs that wait for rows go on, on rows of zeros, and are not to be replayed again.
        """
        with self._lock:
            self._closed = True
            for late in self._late:
                late.close()
            self._lookahead.forget()
            for slot in self._slots:
                slot.wait(self._patience)

    def __enter__(self) -> Stage:
        """Returns the stage itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes."""
        self.close()

    def __repr__(self) -> str:
        return (
            f"<engram.Stage of {list(self.tables)} on {self._device}: {self._max_tokens} tokens, "
            f"{len(self._slots)} slots>"
        )

    def _place(self, table: str | int) -> int:
        if isinstance(table, str) and table in self.tables:
            return self.tables.index(table)
        if isinstance(table, int) and 0 <= table < len(self._tables):
            return table
        raise KeyError(f"no table {table!r} in this stage; it has {list(self.tables)}")

    def _require_usable(self, what: str) -> None:
        if self._closed:
            raise placed(ValueError("this Stage is closed; make a new one"))
        if self._copier.capturing():
            raise RuntimeError(
                f"Stage.{what} was called while a CUDA graph is being captured: it works on the "
                "host, which a replay does not repeat. Capture only the forward, which reads "
                "stage.rows(...), and call prepare before every replay"
            )
        # A gather ahead asks nothing of the device.
        if what != "prefetch" and any(late.waits and late.pending for late in self._late):
            raise RuntimeError(
                f"Stage.{what} was called while a graph waits for its rows: call LateStep.fill or "
                "LateStep.finish first"
            )
        for buffer in self._buffers:
            buffer.require_in_place()

    def _require_step(self, tokens: int) -> None:
        """Refuses a forward that reads more than the step; graphs are as long as they are."""
        if tokens > self._max_tokens:
            raise placed(
                ValueError(f"{tokens} tokens, but the stage holds {self._max_tokens} at most")
            )
        if tokens <= self._given or self._copier.capturing():
            return
        if not any(late.pending or late._launching for late in self._late):
            raise placed(
                ValueError(
                    f"{tokens} tokens, but the step in the stage has {self._given}: call prepare "
                    "with these tokens first (the step before may have failed)"
                )
            )

    def _launched_late(self, tokens: int) -> None:
        """A graph was launched that fetches the rows of `tokens` tokens."""
        self._copier.reread()
        with self._lock:
            self._reach = max(self._reach, tokens)

    def _filled_late(self, count: int, given: int, *, failed: bool) -> None:
        with self._lock:
            self._tokens, self._given = count, given
            self._step += 1
            self._counts["failed" if failed else "steps"] += 1

    def _lose_late(self) -> None:
        """A graph will bring zeros. Without the lock, as its holder may wait for the late step."""
        self._tokens = self._given = 0

    def _on_host(self, tokens: Any, starts: Any, context: Any) -> tuple[Any, Any, Any]:
        return self._tables[0].hasher._step(tokens, starts, context)

    def _fill(self, slot: Slot, number: int, arguments: tuple[Any, Any, Any]) -> int:
        """Rows of a step into a slot, from its prefetch where that is for the same ids."""
        if number in self._lookahead:
            count = self._lookahead.take(number, arguments, slot.planes, self._patience)
            self._counts["prefetch_misses" if count is None else "prefetch_hits"] += 1
            if count is not None:
                return count
        return slot.native.run(*arguments)

    def _discard(self, slot: Slot, *, filled: bool) -> None:
        """Leaves zeros where a failed step's rows, or the step before's, would be taken for it."""
        before, self._tokens, self._given, self._reach = self._reach, 0, 0, 0
        if filled:
            slot.clear()
        slot.upload(0, max(before, self._max_tokens if filled else 0))


class _Inbox:
    """Pinned memory that tokens on a device are copied to."""

    def __init__(self, copier: Copier, device: torch.device, *, pin: bool | None) -> None:
        self._copier = copier
        self._device = device
        self._pin = pin
        self._memory: torch.Tensor | None = None

    def fetch(self, tokens: Any, starts: Any, context: Any, seconds: float) -> tuple[Any, Any, Any]:
        """The arguments on the host: one synchronisation for all that are on a device."""
        arguments = (tokens, starts, context)
        away = [value for value in arguments if is_torch(value) and value.device.type != "cpu"]
        if not away:
            return arguments
        for value in away:
            if value.dtype not in (torch.int32, torch.int64):
                raise placed(TypeError(f"tokens on a device are int32 or int64, not {value.dtype}"))
        needed = sum(-(-value.numel() * value.element_size() // 64) * 64 for value in away)
        if self._memory is None or self._memory.numel() < needed:
            size = max(2 * needed, 1 << 16)
            self._memory = torch.frombuffer(
                self._copier.host(size, pin=self._pin), dtype=torch.uint8
            )
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        landed: dict[int, Any] = {}
        offset = 0
        for value in away:
            nbytes = value.numel() * value.element_size()
            target = self._memory[offset : offset + nbytes].view(value.dtype).view(value.shape)
            copies.append((target, value))
            landed[id(value)] = target.numpy()
            offset += -(-nbytes // 64) * 64
        fence = self._copier.download(copies)
        wait_for(fence, seconds, "the work that tokens on the device come from")
        found = [landed.get(id(value), value) for value in arguments]
        return found[0], found[1], found[2]


def _resolved(device: torch.device | str | int) -> torch.device:
    resolved = torch.device(device)
    if resolved.type != "cuda":
        return resolved
    try:
        current = torch.cuda.current_device()
    except (RuntimeError, AssertionError) as error:
        raise placed(
            RuntimeError(
                f"device {device!r}: CUDA cannot be used in this process ({error}). A stage on "
                'device="cpu" needs none; `engram doctor` says what torch finds on this machine'
            )
        ) from error
    index = current if resolved.index is None else resolved.index  # pyright: ignore[reportUnnecessaryComparison]
    return torch.device("cuda", index)


def _require_at_least(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise placed(TypeError(f"{name} must be an integer, not {type(value).__name__}"))
    if value < least:
        raise placed(ValueError(f"{name} is {value}; at least {least} is needed"))
