"""Rows for a graph that was launched before them.

    late = stage.late(tokens=64)
    with torch.cuda.graph(graph):
        late.wait()  # the graph will wait here
        values = module(tokens)
    for step in steps:
        late.launch(graph.replay)
        late.fill(step.tokens, step.query_start_loc, step.context)
        late.finish()

A graph that waits holds up its device, so every launch is followed by rows or by zeros: also when a
gather fails, when nobody fills, when the stage is closed, and when the process ends.
"""

# A late step shares its stage's insides.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any

from engram._errors import placed
from engram._locks import ForkedLock
from engram._notices import notify
from engram.graphwait import READY, TAKEN
from engram.latewatch import Watch
from engram.slots import Slot

if TYPE_CHECKING:
    from collections.abc import Callable

    from engram.graphwait import GraphWaits, Word
    from engram.staging import Stage

__all__ = ["LateStep"]

_SPIN_SECONDS = 0.002


class LateStep:
    """One captured graph's way to rows that come after its launch; made by `Stage.late`.

    Where the device cannot wait, `launch` keeps the graph back until `fill` has brought the rows:
    the same calls work everywhere, in the same order, and errors come out of the same one. One
    launch at a time is without rows; it may be made while the graph still runs on those before.

    Between `launch` and `fill` whatever waits for the device (a synchronisation, memory allocated
    or freed on it, a kernel's first use) waits until `patience` is over and the step is given up.

    Rows are gathered into memory of their own, at once, and moved to what the graph reads when that
    is the host's: a gather that hangs and ends after its step was given up reaches no graph.

    Attributes:
        tokens: Tokens whose rows the graph fetches at every replay.
        patience: Seconds after which a launch without rows is given up; the stage's.
    """

    def __init__(self, stage: Stage, tokens: int, driver: GraphWaits) -> None:
        """Use `Stage.late`."""
        self.tokens = tokens
        self._stage = stage
        self._driver = driver
        self.patience = stage._patience
        self._reason = driver.refusal()
        self._gathered: Slot | None = None
        """What gathers write to. No graph reads it, so one that hangs does no harm."""
        self._slot: Slot | None = None
        """What the graph reads; changed with `_state` held, and only while the word is `TAKEN`."""
        self._word: Word | None = None
        if self._reason is None:
            self._reason = self._reserve()
        self._state = ForkedLock()
        self._filling = ForkedLock()
        self._captured = False
        self._launched: float | None = None
        """When the graph was launched that has no rows yet."""
        self._number = 0
        """Of the last launch."""
        self._launching = False  # Whether a launch that was kept back is being made now.
        self._held: Callable[[], Any] | None = None
        """The launch kept back, where the device cannot wait."""
        self._debts = 0
        """Steps given up while the word still belonged to the step before."""
        self._gathering: float | None = None
        self._reach = 0
        """Rows behind this many tokens are zeros in what the graph reads."""
        self._error: BaseException | None = None
        self._closed: str | None = None
        if self._reason is None:
            _watch.add(self)
        else:
            notify(f"graphs are launched after their rows are there, not before: {self._reason}")

    def _reserve(self) -> str | None:
        """Memory that the graph reads at every replay; why there is none, if so."""
        stage, copier = self._stage, self._stage._copier
        place = len(stage._slots)
        try:
            self._gathered, self._slot = (
                Slot(place, stage._tables, stage._buffers, copier, self.tokens, pin=pin)
                for pin in (False, True)
            )
            self._word = self._driver.word(copier.host(4, pin=True))
        except RuntimeError as error:
            self._gathered = self._slot = None
            return str(error)
        return None

    @property
    def waits(self) -> bool:
        """Whether the device waits. False: `fill` launches the graph, once its rows are there."""
        return self._reason is None

    @property
    def reason(self) -> str | None:
        """Why the device does not wait; None where it does."""
        return self._reason

    @property
    def host_bytes(self) -> int:
        """Memory for the graph's rows, pinned, and for those on their way there."""
        slots = (self._gathered, self._slot)
        return sum(slot.memory.nbytes for slot in slots if slot is not None)

    @property
    def pending(self) -> bool:
        """Whether a launch has no rows yet."""
        return self._launched is not None or self._held is not None

    def wait(self) -> None:
        """Captures the wait, the copy into the stage's fixed buffers, and what ends the turn.

        Call it once in the capture, before anything reads `Stage.rows`. Outside of a capture, such
        as in a run that warms kernels up, it does nothing.

        Raises:
            ValueError: Closed.
            RuntimeError: A fixed buffer's memory was replaced.
        """
        self._require_open()
        if self._word is None or self._slot is None or not self._stage._copier.capturing():
            return
        for buffer in self._stage._buffers:
            buffer.require_in_place()
        self._captured = True
        self._driver.wait(self._word)
        self._driver.copy(self._slot.copies_of(self.tokens))
        self._driver.reset(self._word)

    def launch(self, replay: Callable[[], Any]) -> None:
        """Launches the graph on the current stream, or keeps it back where the device cannot wait.

        Args:
            replay: Launches the graph that `wait` was captured in, such as `graph.replay`.

        Raises:
            Exception: What `finish` would have raised for the step before, or what `replay` raises.
                The graph then counts as not launched.
            RuntimeError: The launch before has no rows yet, or `wait` was never captured.
            ValueError: Closed.
        """
        with self._state:
            self._require_open()
            self._raise_pending()
            if self.waits and not self._captured:
                raise placed(
                    RuntimeError("no graph waits for this LateStep: call wait() in its capture")
                )
            if self.pending:
                raise placed(
                    RuntimeError(
                        "the launch before has no rows yet: call fill, or finish to do without"
                    )
                )
            if not self.waits:
                self._held = replay
                return
            self._number += 1
            self._launched = time.monotonic()
        try:
            replay()
        except Exception:
            with self._state:
                self._unlaunch()
            raise
        except BaseException:
            # Whether the graph is on its way is unknown. It must not wait for ever, and no later
            # one may take its turn.
            with self._state:
                self._end("a launch was interrupted")
            raise
        self._stage._launched_late(self.tokens)

    def fill(self, tokens: Any, query_start_loc: Any = None, context: Any = None) -> int:
        """Brings the rows of the launch, and lets its graph go on.

        Args:
            tokens: As for `Stage.prepare`, on the host.
            query_start_loc: As for `Stage.prepare`, on the host.
            context: As for `Stage.prepare`, on the host.

        Returns:
            How many tokens own rows; 0 if the step failed. What went wrong is raised by `finish`:
            the graph goes on, on rows of zeros.

        Raises:
            RuntimeError: There is no launch without rows.
            TimeoutError: The launch was given up after the stage's `patience`.
            ValueError: Closed.
            KeyboardInterrupt: At once; the graph goes on, on rows of zeros.
        """
        with self._filling:
            with self._state:
                self._require_open()
                if not self.pending:
                    self._raise_pending()
                    raise placed(
                        RuntimeError("fill without a launch: call launch(graph.replay) first")
                    )
                number = self._number
            if not self.waits:
                return self._fill_then_launch(tokens, query_start_loc, context)
            assert self._gathered is not None
            count, given, error = 0, 0, None
            try:
                self._require_host(tokens, query_start_loc, context)
                arguments = self._stage._on_host(tokens, query_start_loc, context)
                given = int(arguments[0].size)
                with self._state:
                    self._gathering = time.monotonic()
                count = self._gathered.native.run(*arguments)
                self._await_turn(number)
            except BaseException as caught:
                error = caught
            given_up = self._settle(number, count, error)
            if error is not None and not isinstance(error, Exception):
                raise error
            failed = given_up or error is not None
            if failed:
                count = given = 0
            self._stage._filled_late(count, given, failed=failed)
            return count

    def finish(self) -> None:
        """Raises what went wrong since the last call; the next step works.

        A launch that nobody filled is filled with zeros here, and is an error. This does not wait
        for the device.

        Raises:
            Exception: As `Stage.prepare` does.
            RuntimeError: `fill` was not called for a launch.
            TimeoutError: A step was given up after the stage's `patience`.
        """
        if not self._filling.acquire(timeout=self.patience):
            raise placed(TimeoutError(f"fill has not returned after {self.patience:g} s"))
        try:
            with self._state:
                if self._launched is not None:
                    self._give_up(_unfilled())
            if self._held is not None:
                self._fail(_unfilled())
                self._stage.prepare([])
                self._launch_held()
        finally:
            self._filling.release()
        with self._state:
            self._raise_pending()

    def run(
        self,
        replay: Callable[[], Any],
        tokens: Any,
        query_start_loc: Any = None,
        context: Any = None,
    ) -> int:
        """A whole step: `launch`, `fill` and `finish`.

        Returns:
            How many tokens own rows.

        Raises:
            Exception: As the three do.
        """
        self.launch(replay)
        count = self.fill(tokens, query_start_loc, context)
        self.finish()
        return count

    def close(self) -> None:
        """Lets graphs that wait go on, on rows of zeros; later calls raise ValueError.

        Destroy the graph, or never replay it again: its memory goes.
        """
        self.give_back(self.patience)

    def __repr__(self) -> str:
        how = "waits" if self.waits else f"launched after its rows: {self._reason}"
        return f"<engram.LateStep of {self.tokens} tokens, {how}>"

    def _fill_then_launch(self, tokens: Any, starts: Any, context: Any) -> int:
        count = 0
        try:
            self._require_host(tokens, starts, context)
            count = self._stage.prepare(tokens, starts, context)
            if count > self.tokens:
                self._stage.prepare([])
                text = f"a step of {count} tokens; at most {self.tokens} fit (max_tokens)"
                raise placed(ValueError(text))
        except Exception as error:
            count = 0
            self._fail(error)
        self._launch_held()
        return count

    def _launch_held(self) -> None:
        replay, self._held = self._held, None
        assert replay is not None
        self._launching = True
        try:
            replay()
        finally:
            self._launching = False

    def _require_host(self, *arguments: Any) -> None:
        for value in arguments:
            device = getattr(value, "device", None)
            if device is not None and getattr(device, "type", "cpu") != "cpu":
                text = (
                    f"tokens of a late step are on the host, not on {device}: fetching them would "
                    "wait for the graph that waits for their rows"
                )
                raise placed(TypeError(text))

    def _await_turn(self, number: int) -> None:
        """Waits until the graph before has fetched its rows, or the launch is given up."""
        begun = time.monotonic()
        pause = 0.0
        while True:
            with self._state:
                self._gathering = None
                if self._is_given_up(number) or self._free():
                    return
            passed = time.monotonic() - begun
            if passed > self.patience:
                raise placed(
                    TimeoutError(
                        f"the graph before has not fetched its rows after {self.patience:g} s: it "
                        "was not launched, or the device hangs"
                    )
                )
            if passed > _SPIN_SECONDS:
                pause = min(max(2 * pause, 2e-5), 1e-3)
                time.sleep(pause)

    # What follows is called with `_state` held.

    def _free(self) -> bool:
        """Whether the slot is the host's, and nothing is owed; pays what is owed if it can."""
        assert self._word is not None
        if self._word.get() != TAKEN:
            return False
        if not self._debts:
            return True
        self._debts -= 1
        self._hand_over(0)
        return False

    def _is_given_up(self, number: int) -> bool:
        return self._launched is None or self._number != number

    def _hand_over(self, count: int) -> None:
        """Lets the graph go on, on the first rows of the last gather and zeros behind them."""
        assert self._word is not None
        assert self._gathered is not None
        assert self._slot is not None
        before, self._reach = self._reach, max(count, self._reach)
        try:
            self._slot.take(self._gathered, count, before)
            self._reach = count
        except BaseException:
            self._slot.clear()
            raise
        finally:
            self._word.set(READY)

    def _give_up(self, error: Exception) -> None:
        """Fills the launch with zeros, now or when its turn comes."""
        assert self._word is not None
        self._stage._lose_late()
        self._launched = None
        self._fail(error)
        if self._debts or self._word.get() != TAKEN:
            self._debts += 1
        else:
            self._hand_over(0)

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            error.add_note("the graph of this step ran on rows of zeros; the next step works")
            self._error = error

    def _raise_pending(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _require_open(self) -> None:
        if self._closed is not None:
            raise placed(ValueError(f"this LateStep is closed ({self._closed}); capture again"))

    def _unlaunch(self) -> None:
        """Takes a launch back that did not happen, and what another thread has brought for it."""
        assert self._word is not None
        if self._launched is not None:
            self._launched = None
        elif self._debts:
            self._debts -= 1
        else:
            self._word.set(TAKEN)

    def _end(self, why: str) -> None:
        assert self._word is not None
        self._closed = self._closed or why
        if self._launched is not None:
            self._give_up(RuntimeError(why))

    # And what follows, without.

    def _settle(self, number: int, count: int, error: BaseException | None) -> bool:
        """Ends the fill of a launch; whether that had been given up meanwhile."""
        with self._state:
            self._gathering = None
            if self._is_given_up(number):
                return True
            if error is None:
                self._launched = None
                self._hand_over(count)
            elif isinstance(error, Exception):
                self._give_up(error)
            else:
                # Raised by `fill` itself, so not a second time.
                before = self._error
                self._give_up(RuntimeError("interrupted"))
                self._error = before
            return False

    def look(self, now: float) -> None:
        """What the watch does: pays what is owed, and gives up what has waited for too long."""
        with self._state:
            if self._debts:
                self._free()
            if self._launched is None:
                return
            since = max(self._launched, self._gathering or 0.0)
            if self._filling.locked() and self._gathering is None:
                # Waiting for its turn, which has a limit of its own.
                return
            if now - since > self.patience:
                gathering = self._gathering is not None
                what = "the gather did not end" if gathering else "fill was not called"
                self._give_up(
                    placed(TimeoutError(f"{what} within {self.patience:g} s of the launch"))
                )

    def give_back(self, seconds: float) -> None:
        """Closes, waiting for the device for at most so long."""
        with self._state:
            if self._closed is None:
                self._closed = "close was called"
            self._held = None
            if self._word is None or self not in _watch:
                return
            self._end(self._closed)
        limit = time.monotonic() + seconds
        while True:
            with self._state:
                if self._free():
                    break
            if time.monotonic() > limit:
                warnings.warn(
                    f"a graph has not fetched its rows after {seconds:g} s; its memory is kept",
                    stacklevel=3,
                )
                return
            time.sleep(1e-4)
        _watch.discard(self)


def _unfilled() -> RuntimeError:
    return placed(RuntimeError("a graph was launched, but fill was not called"))


_watch = Watch()
