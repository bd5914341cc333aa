"""Who owns which rows, and which ranks talk to each other.

A table is cut into one contiguous range of rows per rank, so that every row has exactly one owner
and any number of ranks serves the same files. `engram.exchange` moves rows between owners and the
ranks whose tokens need them.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import operator
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np

from engram._errors import completes

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Groups", "Shard", "new_groups"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True)
class Shard:
    """One rank's part of a table: rows `first_row` up to `stop_row`, without it.

    Global ids count rows of the table, local ids count from `first_row`. Ids of -1 mark padding and
    belong to no rank.

    Attributes:
        num_rows: Rows of the whole table.
        rank: Which of the parts this is.
        world_size: How many parts there are.
        starts: The first row of every part, ascending, and `num_rows` at the end.
    """

    num_rows: int
    rank: int
    world_size: int
    starts: tuple[int, ...]

    @classmethod
    @completes
    def of(
        cls,
        table: Any,
        rank: int,
        world_size: int,
        by: Literal["rows", "heads"] = "rows",
        *,
        head_offsets: Sequence[int] | None = None,
    ) -> Shard:
        """The part of a table that `rank` owns, of `world_size` parts as equal as can be.

        Parts differ by at most one row (`by="rows"`) or one head (`by="heads"`), and no rank
        count has to divide anything.

        Args:
            table: A number of rows, or anything with `num_rows` (or `rows`), such as a
                `FileGather`.
            rank: This rank's place in the group that shares the table, from 0.
            world_size: Ranks in that group: `EngramConfig.get_parallel_size`.
            by: What is kept whole. `"heads"` gives a rank all rows of some hash heads, so that the
                columns of an id matrix, too, have one owner each.
            head_offsets: For `by="heads"`, the id at which each head's rows start, ascending from
                0; by default the table's own `head_offsets`. The last head extends to the end of
                the table, padding rows included.

        Raises:
            TypeError: `table` has no number of rows.
            ValueError: A size is not a positive integer, `rank` is outside the group, the offsets
                are missing or do not ascend within the table, or there are more ranks than heads.
        """
        num_rows = _row_count(table)
        world_size = _count("world_size", world_size, 1)
        rank = _count("rank", rank, 0)
        if rank >= world_size:
            raise ValueError(f"rank {rank} is outside a group of {world_size} ranks")
        if by == "rows":
            starts = [part * num_rows // world_size for part in range(world_size + 1)]
        elif by == "heads":
            offsets = head_offsets
            if offsets is None:
                offsets = getattr(table, "head_offsets", None)
            starts = _head_starts(offsets, num_rows, world_size)
        else:
            raise ValueError(f"by must be 'rows' or 'heads', got {by!r}")
        return cls(num_rows, rank, world_size, tuple(starts))

    @property
    def first_row(self) -> int:
        """Global id of the part's first row."""
        return self.starts[self.rank]

    @property
    def stop_row(self) -> int:
        """Global id after the part's last row."""
        return self.starts[self.rank + 1]

    @property
    def num_local_rows(self) -> int:
        """Rows in the part; may be 0 where there are more ranks than rows."""
        return self.stop_row - self.first_row

    def owns(self, ids: Any) -> Any:
        """Which global ids lie in this part.

        Args:
            ids: An int64 NumPy array or torch tensor of any shape, or an int.

        Returns:
            Booleans of the same shape and kind.
        """
        return (ids >= self.first_row) & (ids < self.stop_row)

    def to_local(self, ids: Any) -> Any:
        """Local ids of the global ids that lie in this part, and -1 for all others.

        Args:
            ids: As for `owns`.
        """
        if _is_tensor(ids):
            return (ids - self.first_row).masked_fill(~self.owns(ids), -1)
        return np.where(self.owns(ids), ids - self.first_row, -1)[()]

    def to_global(self, local_ids: Any) -> Any:
        """Global ids of this part's local ids; -1 stays -1.

        Args:
            local_ids: As for `owns`.
        """
        if _is_tensor(local_ids):
            return (local_ids + self.first_row).masked_fill(local_ids < 0, -1)
        return np.where(local_ids < 0, -1, local_ids + self.first_row)[()]

    def owner(self, ids: Any) -> Any:
        """The rank that owns each global id; -1 for ids that no rank owns.

        Args:
            ids: As for `owns`.
        """
        if _is_tensor(ids):
            torch = sys.modules["torch"]
            starts = torch.tensor(self.starts, dtype=torch.int64, device=ids.device)
            found = torch.bucketize(ids, starts, right=True) - 1
            return found.masked_fill((ids < 0) | (ids >= self.num_rows), -1)
        found = cast("Any", np.searchsorted(np.asarray(self.starts), ids, side="right")) - 1
        return np.where((ids < 0) | (ids >= self.num_rows), -1, found)[()]


class Groups(NamedTuple):
    """The torch.distributed groups that share a table; None where a group would have one rank.

    The groups of a running server do: `Groups(tensor=..., data=...)`. Shards are numbered
    data-parallel rank first: `data_rank * tensor_size + tensor_rank`.
    """

    tensor: Any = None
    """Ranks that hold the same tokens."""
    data: Any = None
    """Ranks of equal tensor-parallel rank, one per data-parallel replica. Only for tables sharded
    across replicas (`embedding_across_dp`); None leaves each replica its own copy."""
    node: Any = None
    """The ranks of `tensor` that run on this machine."""

    def within_replica(self) -> Groups:
        """The same groups for a table that each data-parallel replica holds by itself."""
        return self._replace(data=None)

    @property
    def size(self) -> int:
        """Ranks that share the table, hence the `world_size` of its shards."""
        return _group_size(self.tensor) * _group_size(self.data)

    @property
    def rank(self) -> int:
        """This process's place among them."""
        return _group_rank(self.data) * _group_size(self.tensor) + _group_rank(self.tensor)


@completes
def new_groups(
    tensor_parallel_size: int,
    data_parallel_size: int = 1,
    *,
    ranks: Sequence[int] | None = None,
    host: str | None = None,
    timeout: float = 600.0,
    backend: str | None = None,
) -> Groups | None:
    """Makes the groups for a topology.

    As with `torch.distributed.new_group`, every rank of the default group must call it, with equal
    arguments, `host` excepted. Tensor-parallel ranks are neighbours: replica `d` holds ranks
    `d * tensor_parallel_size` up to the next multiple, counted within `ranks`.

    Args:
        tensor_parallel_size: Ranks per replica.
        data_parallel_size: Replicas.
        ranks: Global ranks that take part, e.g. those of one pipeline stage; None is all.
        host: Names the machine this process runs on; None asks the kernel. Containers on one
            machine count as one.
        timeout: Seconds after which torch gives up a collective of these groups.
        backend: torch.distributed backend; None is the default group's.

    Returns:
        This rank's groups; None on ranks that do not take part.

    Raises:
        ValueError: The sizes do not multiply to the number of ranks, naming all three numbers.
    """
    import torch.distributed as dist

    distributed: Any = dist
    tensor_size = _count("tensor_parallel_size", tensor_parallel_size, 1)
    data_size = _count("data_parallel_size", data_parallel_size, 1)
    world_size: int = distributed.get_world_size()
    members = list(range(world_size)) if ranks is None else list(ranks)
    if tensor_size * data_size != len(members):
        raise ValueError(
            f"tensor_parallel_size {tensor_size} times data_parallel_size {data_size} is "
            f"{tensor_size * data_size}, but {len(members)} ranks take part"
        )
    hosts: list[Any] = [None] * world_size
    distributed.all_gather_object(hosts, host or host_name())
    replicas = [
        members[first : first + tensor_size] for first in range(0, len(members), tensor_size)
    ]
    nodes = [
        [rank for rank in replica if hosts[rank] == there]
        for replica in replicas
        for there in dict.fromkeys(hosts[rank] for rank in replica)
    ]
    made: dict[tuple[int, ...], Any] = {}

    def mine(parts: list[list[int]]) -> Any:
        """Makes a group of every part, and gives the one that holds this rank."""
        found = None
        for part in parts:
            key = tuple(part)
            if len(part) > 1 and key not in made:
                made[key] = distributed.new_group(
                    part, timeout=datetime.timedelta(seconds=timeout), backend=backend
                )
            if distributed.get_rank() in part:
                found = made.get(key)
        return found

    groups = Groups(
        tensor=mine(replicas),
        data=mine([members[place::tensor_size] for place in range(tensor_size)]),
        node=mine(nodes),
    )
    return groups if distributed.get_rank() in members else None


def _row_count(table: Any) -> int:
    for candidate in (table, getattr(table, "num_rows", None), getattr(table, "rows", None)):
        if isinstance(candidate, int | np.integer) and not isinstance(candidate, bool):
            return _count("num_rows", candidate, 0)
    raise TypeError(
        f"a table is a number of rows or has num_rows; {type(table).__name__} is neither"
    )


def _count(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return number


def _head_starts(offsets: Sequence[int] | None, num_rows: int, world_size: int) -> list[int]:
    if offsets is None:
        raise ValueError(
            "by='heads' needs head_offsets, the id at which each head's rows start; "
            "or use by='rows'"
        )
    heads = [int(offset) for offset in offsets]
    ascending = all(low < high for low, high in itertools.pairwise([*heads, num_rows]))
    if not heads or heads[0] != 0 or not ascending:
        raise ValueError(
            f"head_offsets must ascend from 0 and stay below the table's {num_rows} rows, "
            f"got {heads}"
        )
    if world_size > len(heads):
        raise ValueError(
            f"{len(heads)} heads cannot be shared by {world_size} ranks: {world_size - len(heads)} "
            "would own nothing; use by='rows'"
        )
    return [heads[part * len(heads) // world_size] for part in range(world_size)] + [num_rows]


def _group_size(group: Any) -> int:
    return 1 if group is None else group.size()


def _group_rank(group: Any) -> int:
    return 0 if group is None else group.rank()


def host_name() -> str:
    """What this machine is called, the same for every container on it."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
