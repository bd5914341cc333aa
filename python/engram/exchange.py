"""Rows from the ranks that own them to the ranks whose tokens need them, over distributed.

A step of [`ShardedLookup`][engram.exchange.ShardedLookup]:

```
ids of my tokens --gather over data--> ids of all replicas, padded with -1 to equal slots
                                            | each owner reads its rows, the rest stay zero bytes
my rows <--sum over tensor-- my slot <--exchange and sum over data-- [replica, slot, row bytes]
```

Every row has one owner, so each sum has one term that is not zero, and adding bytes as integers
gives the owner's bytes: equal, bit for bit, to the unsharded look-up. Whole rows travel, scales
included, so no rank ever applies a scale of a row that it does not own.

Every rank of the groups must call on every step, also with no tokens: a rank that stays away is
what the others would wait for. A rank whose ids or reads fail still takes part and says so, and all
ranks raise together, in step, ready for the next one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import numpy as np
import torch
import torch.distributed as dist

from engram._errors import completes, placed
from engram.collective import Collective, carried

if TYPE_CHECKING:
    from collections.abc import Callable

    from engram.parallel import Groups, Shard

__all__ = ["ReadOncePerNode", "ShardedLookup"]

distributed: Any = dist

_REFUSED = -1
"""Sent in place of a number of ids by a rank whose ids cannot be looked up."""


class ShardedLookup(Collective):
    """Looks up rows of a table whose shards lie on several ranks. Not for use by two threads.

    Args:
        shard: This rank's part; its rank and world size are those of `groups`.
        lookup: Gives the rows of this part: a 1-D int64 tensor of ids that all lie in it, to a
            uint8 tensor `[ids, row_bytes]` on the same device.
        row_bytes: Bytes of a row, all planes together.
        groups: Who shares the table. All ranks of `groups.tensor` hold the same ids.
        lookup_ids: Whether `lookup` takes ids that count from the part's first row (`"local"`), as
            storage that holds only this part does, or the table's ids (`"global"`), as files do.
        slot_ids: Most ids of a replica in any step. Given, replicas pad to it, and one collective
            fewer is needed; None exchanges the numbers first. Ignored without `groups.data`.
        timeout: Seconds to wait for other ranks in each collective of a step on CPU tensors; None
            waits as long as the group does.
        check: Whether CUDA ids and the ranks' reports are looked at on the host, which costs a
            stream synchronisation per step. Without it, ids outside the table give rows of zeros,
            and a rank's failed read raises on that rank only. CPU tensors are always checked.

    Raises:
        ValueError: `shard` is not the one that belongs at this place of `groups`.
    """

    @completes
    def __init__(
        self,
        shard: Shard,
        lookup: Callable[[Any], Any],
        row_bytes: int,
        groups: Groups,
        *,
        lookup_ids: Literal["local", "global"] = "local",
        slot_ids: int | None = None,
        timeout: float | None = 300.0,
        check: bool = True,
    ) -> None:
        super().__init__(
            f"the exchange of shard {shard.rank} of {shard.world_size}",
            row_bytes,
            timeout,
            (groups.data, groups.tensor),
        )
        if (shard.rank, shard.world_size) != (groups.rank, groups.size):
            raise ValueError(
                f"shard {shard.rank} of {shard.world_size} does not belong at place {groups.rank} "
                f"of {groups.size} ranks that share the table"
            )
        if lookup_ids not in ("local", "global"):
            raise ValueError(f"lookup_ids must be 'local' or 'global', got {lookup_ids!r}")
        self.shard = shard
        self._lookup = lookup
        self._groups = groups
        self._local = lookup_ids == "local"
        self._slot_ids = slot_ids
        self._check = check

    @completes
    def __call__(self, ids: Any) -> Any:
        """Rows of the ids of this rank's tokens.

        Args:
            ids: Global ids of any integer dtype and shape, NumPy or torch; -1 marks padding.

        Returns:
            uint8 `[*ids.shape, row_bytes]` of the same kind and device; zeros where padded.

        Raises:
            IndexError: An id is outside the table. Other replicas raise RuntimeError.
            TypeError: `ids` are not integers. Other replicas raise RuntimeError.
            ValueError: More ids than `slot_ids`. Other replicas raise RuntimeError.
            TimeoutError: Other ranks did not come in time; names them where known.
            RuntimeError: A rank died or failed to read its rows (it raises that failure itself).
        """
        self.begin_step()
        try:
            mine = self._accepted(ids)
        except Exception as error:
            self._refuse(error, ids.device if isinstance(ids, torch.Tensor) else "cpu")
            raise
        rows = self._exchange_rows(self._gather_ids(mine, None))
        rows = rows[: mine.numel()].reshape(*ids.shape, self.row_bytes)
        return rows if isinstance(ids, torch.Tensor) else rows.numpy()

    @completes
    def refuse(self, error: Exception, device: Any = "cpu") -> NoReturn:
        """Takes part in a step whose ids were refused before they came here, and raises `error`.

        Args:
            error: What is wrong with this rank's ids.
            device: Where other ranks have theirs.

        Raises:
            Exception: `error`, once the other replicas have heard of it; or as a call does.
        """
        self.begin_step()
        self._refuse(error, device)
        raise error

    def _refuse(self, error: Exception, device: Any) -> None:
        """Tells the other replicas, which are on their way into the exchange, that there are none.

        Ranks of this replica were given the same ids, so all refuse them.
        """
        if self._groups.data is not None:
            none = torch.empty(0, dtype=torch.int64, device=device)
            self._exchange_rows(self._gather_ids(none, error))

    def _accepted(self, ids: Any) -> Any:
        """`ids` as a flat int64 tensor, refused if any cannot be looked up."""
        flat = _flat_ids(ids)
        if flat.device.type == "cpu" or self._check:
            outside = (flat < -1) | (flat >= self.shard.num_rows)
            if bool(outside.any()):
                position = int(outside.nonzero()[0, 0])
                raise _outside(int(flat[position]), position, self.shard.num_rows)
        limit = self._slot_ids
        if self._groups.data is not None and limit is not None and flat.numel() > limit:
            raise ValueError(f"{flat.numel()} ids do not fit slots of slot_ids={limit}")
        return flat

    def _gather_ids(self, mine: Any, refusal: Exception | None) -> Any:
        """The ids of every replica, `[replicas, slot]`, padded with -1."""
        if self._groups.data is None:
            return mine.reshape(1, -1)
        count = _REFUSED if refusal else mine.numel()
        if self._slot_ids is None:
            header = torch.full((1,), count, dtype=torch.int64, device=mine.device)
            counts = self._gather(header, "gathering numbers of ids")
            slot = max(self._counts(counts, refusal))
            packed = torch.full((slot,), -1, dtype=torch.int64, device=mine.device)
            packed[: mine.numel()] = mine
            return self._gather(packed, "gathering ids")
        packed = torch.full((1 + self._slot_ids,), -1, dtype=torch.int64, device=mine.device)
        packed[0] = count
        packed[1 : 1 + mine.numel()] = mine
        gathered = self._gather(packed, "gathering ids")
        if gathered.device.type == "cpu" or self._check:
            self._counts(gathered[:, :1], refusal)
        return gathered[:, 1:]

    def _counts(self, gathered: Any, refusal: Exception | None) -> list[int]:
        """Numbers of ids per replica, once no replica has refused its own."""
        if refusal is not None:
            raise refusal
        counts: list[int] = gathered.flatten().tolist()
        refused = [replica for replica, count in enumerate(counts) if count == _REFUSED]
        if refused:
            raise RuntimeError(
                f"step {self.steps} of {self.what}: the ids of replica "
                f"{', '.join(map(str, refused))} were refused there; its own error says why"
            )
        return counts

    def _exchange_rows(self, slots: Any) -> Any:
        """Rows of this replica's slot, `[slot, row_bytes]`, from the ids of all replicas."""
        replicas, slot = slots.shape
        width = slot * self.row_bytes
        # One byte per rank after the rows reports a failed read to everybody.
        buffer = torch.zeros(
            (replicas, width + self.shard.world_size), dtype=torch.uint8, device=slots.device
        )
        failure: Exception | None = None
        try:
            self._read(slots, buffer[:, :width].unflatten(1, (slot, self.row_bytes)))
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure = error
            buffer.zero_()
            buffer[:, width + self.shard.rank] = 1
        group = self._groups.data
        if group is not None:
            sent = carried(buffer, group)
            received = torch.empty_like(sent)

            def exchange() -> Any:
                return distributed.all_to_all_single(received, sent, group=group, async_op=True)

            self.run("exchanging rows", group, exchange, on_host=sent.device.type == "cpu")
            buffer = received.sum(0, dtype=torch.uint8)
        else:
            buffer = buffer.reshape(-1)
        if self._groups.tensor is not None:
            group = self._groups.tensor
            summed = carried(buffer, group)

            def reduce() -> Any:
                return distributed.all_reduce(summed, group=group, async_op=True)

            self.run("summing rows", group, reduce, on_host=summed.device.type == "cpu")
            buffer = summed
        buffer = buffer.to(slots.device)
        if failure is not None:
            raise failure
        if buffer.device.type == "cpu" or self._check:
            reports: list[int] = cast("Any", buffer[width:]).tolist()
            failed = [str(rank) for rank, report in enumerate(reports) if report]
            if failed:
                raise RuntimeError(
                    f"step {self.steps} of {self.what}: shard {', '.join(failed)} could not read "
                    "its rows; its own error says why"
                )
        return buffer[:width].reshape(slot, self.row_bytes)

    def _read(self, slots: Any, rows: Any) -> None:
        """Puts the rows that this rank owns in their places of `rows`, which is all zeros."""
        if self.shard.num_local_rows == 0:
            return
        owned = self.shard.owns(slots)
        if slots.device.type == "cpu":
            self._read_owned(slots, owned, rows)
        else:
            self._read_all(slots, owned, rows)

    def _read_owned(self, slots: Any, owned: Any, rows: Any) -> None:
        """Reads the owned rows alone."""
        wanted = slots[owned]
        if wanted.numel():
            rows[owned] = self._looked_up(wanted)
        self.rows_read += wanted.numel()

    def _read_all(self, slots: Any, owned: Any, rows: Any) -> None:
        """Reads a row for every id: the part's first row, wiped, for those that are not owned.

        Every shape is then known to the host, so a device is never waited for.
        """
        wanted = slots.masked_fill(~owned, self.shard.first_row).reshape(-1)
        if wanted.numel():
            found = self._looked_up(wanted).reshape(rows.shape)
            rows.copy_(found.masked_fill(~owned.unsqueeze(-1), 0))
        self.rows_read += wanted.numel()

    def _looked_up(self, wanted: Any) -> Any:
        ids = wanted - self.shard.first_row if self._local else wanted
        return _checked_rows(self._lookup(ids), ids.numel(), self.row_bytes)

    def _gather(self, mine: Any, doing: str) -> Any:
        group = self._groups.data
        sent = carried(mine, group)
        gathered = torch.empty((group.size(), *sent.shape), dtype=sent.dtype, device=sent.device)

        def gather() -> Any:
            return distributed.all_gather(
                list(gathered.unbind(0)), sent, group=group, async_op=True
            )

        self.run(doing, group, gather, on_host=sent.device.type == "cpu")
        return gathered.to(mine.device)


class ReadOncePerNode(Collective):
    """One rank of a node reads, and hands the rows to the others. Not for use by two threads.

    For tables in files that all tensor-parallel ranks would read for the same tokens. Ranks on
    other machines have their own reader; nothing crosses nodes.

    Args:
        lookup: Gives rows: a 1-D int64 tensor of ids to a uint8 tensor `[ids, row_bytes]`. Called
            on the node's first rank only.
        row_bytes: Bytes of a row, all planes together.
        groups: `groups.node` are the ranks that share the reader; all hold the same ids.
        timeout: Seconds to wait for the reader or the others; None waits as long as the group.
    """

    @completes
    def __init__(
        self,
        lookup: Callable[[Any], Any],
        row_bytes: int,
        groups: Groups,
        *,
        timeout: float | None = 300.0,
    ) -> None:
        super().__init__("the hand-over of rows within a node", row_bytes, timeout, (groups.node,))
        self._lookup = lookup
        self._group = groups.node
        self.is_reader = self._group is None or self._group.rank() == 0

    @completes
    def __call__(self, ids: Any) -> Any:
        """Rows of `ids`, which are the same on all ranks of the node.

        Args:
            ids: Global ids of any integer dtype and shape, NumPy or torch. What ids are valid is
                the lookup's business.

        Returns:
            uint8 `[*ids.shape, row_bytes]` of the same kind and device.

        Raises:
            TypeError: `ids` are not integers.
            TimeoutError: The reader, or another rank, did not come in time.
            RuntimeError: A rank died, or the reader failed (which raises that failure itself).
        """
        self.begin_step()
        flat = _flat_ids(ids)
        width = flat.numel() * self.row_bytes
        # The byte after the rows is 1 where they were read, 2 where that failed.
        buffer = torch.zeros(width + 1, dtype=torch.uint8, device=flat.device)
        failure: Exception | None = None
        if self.is_reader:
            try:
                if flat.numel():
                    found = _checked_rows(self._lookup(flat), flat.numel(), self.row_bytes)
                    buffer[:width] = found.reshape(-1)
                self.rows_read += flat.numel()
                buffer[width] = 1
            except Exception as error:  # whatever it is, the other ranks must hear of it
                failure = error
                buffer[width] = 2
        if self._group is not None:
            source = distributed.get_global_rank(self._group, 0)
            handed = carried(buffer, self._group)

            def broadcast() -> Any:
                return distributed.broadcast(handed, source, group=self._group, async_op=True)

            on_host = handed.device.type == "cpu"
            self.run("handing over rows", self._group, broadcast, on_host=on_host)
            buffer = handed.to(flat.device)
        if failure is not None:
            raise failure
        if int(buffer[width]) != 1:
            raise RuntimeError(
                f"step {self.steps} of {self.what}: the reader could not read the rows; its own "
                "error says why"
            )
        rows = buffer[:width].reshape(*ids.shape, self.row_bytes)
        return rows if isinstance(ids, torch.Tensor) else rows.numpy()


def _flat_ids(ids: Any) -> Any:
    """Ids of any integer dtype as a flat int64 tensor."""
    if not isinstance(ids, torch.Tensor | np.ndarray):
        raise TypeError(f"ids must be a NumPy array or a torch tensor, not {type(ids).__name__}")
    tensor: Any = cast("Any", ids)
    name = str(tensor.dtype).removeprefix("torch.")
    if not re.fullmatch(r"u?int(8|16|32|64)", name):
        raise TypeError(f"ids must be integers, not {name}")
    if not isinstance(ids, torch.Tensor):
        # torch warns about memory that it may not write to.
        array = np.ascontiguousarray(tensor) if tensor.flags.writeable else tensor.copy()
        tensor = torch.as_tensor(array)
    if name == "uint64":
        # The upper half must not come out negative: -1 means padding.
        signed = tensor.contiguous().view(torch.int64)
        tensor = signed.masked_fill(signed < 0, torch.iinfo(torch.int64).max)
    return tensor.reshape(-1).to(torch.int64)


def _checked_rows(rows: Any, count: int, row_bytes: int) -> Any:
    if not isinstance(rows, torch.Tensor):
        rows = torch.as_tensor(np.array(rows, order="C"))
    name = str(rows.dtype).removeprefix("torch.")
    if name != "uint8" or tuple(rows.shape) != (count, row_bytes):
        raise ValueError(
            f"lookup must return uint8 rows of shape ({count}, {row_bytes}), got {name} of shape "
            f"{tuple(rows.shape)}"
        )
    return rows


def _outside(row: int, position: int, num_rows: int) -> IndexError:
    return placed(
        IndexError(
            f"row id {row} at position {position} is outside a table of {num_rows} rows "
            f"(valid ids: 0 to {num_rows - 1}; -1 marks padding)"
        ),
        row=row,
        position=position,
    )
