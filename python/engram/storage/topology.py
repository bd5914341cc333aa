"""Where this process stands among the ranks of a server."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from engram._errors import completes
from engram.parallel import Groups

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Topology"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """This rank's place, and how it reaches the others.

    Every attribute may be left out. `Topology.of` fills one from what a server has: vLLM's
    `ParallelConfig`, or any object or mapping with attributes of these names.

    Raises:
        ValueError: A size is not positive, or a rank is outside its size.
    """

    tensor_parallel_size: int = 1
    """Ranks of a replica, which share its tables out among them."""
    tensor_parallel_rank: int = 0
    """This rank among them."""
    data_parallel_size: int = 1
    """Replicas of the model."""
    data_parallel_rank: int | None = None
    """None where nobody said; then tables cannot be shared or sharded over replicas."""
    pipeline_parallel_size: int = 1
    """Stages that the model's layers are cut into."""
    pipeline_parallel_rank: int = 0
    """This rank's stage."""
    pipeline_layers: tuple[int, int] | None = None
    """The first decoder layer of this pipeline stage, and the one after its last."""
    enable_elastic_ep: bool = False
    """Whether replicas come and go (elastic expert parallelism); then none shares by default."""
    groups: Groups | None = None
    """torch.distributed groups, for look-ups of tables that are sharded over ranks."""
    read_once_per_node: bool = False
    """Whether one rank of a machine reads rows of tables in files (`disk_offload`) and hands them
    to the other tensor-parallel ranks there, `groups.node`; all then call for each look-up."""
    store: Any = None
    """A torch.distributed store that all replicas reach, for sharing memory between them; None
    takes the default process group's, where that spans the replicas."""
    local_tensor_ranks: int | None = None
    """Tensor-parallel ranks of a replica on this machine; None counts all of them."""
    local_replicas: int = 1
    """Replicas known to run on this machine."""
    host: str | None = None
    """Names this machine; None asks the kernel."""
    timeout: float = 300.0
    """Seconds to wait for other ranks while a shared table is being set up."""

    @completes
    def __post_init__(self) -> None:
        for kind in ("tensor", "data", "pipeline"):
            size = getattr(self, f"{kind}_parallel_size")
            rank = getattr(self, f"{kind}_parallel_rank")
            if size < 1:
                raise ValueError(f"{kind}_parallel_size must be at least 1, got {size}")
            if rank is not None and not 0 <= rank < size:
                raise ValueError(
                    f"{kind}_parallel_rank {rank} is outside {kind}_parallel_size {size}"
                )

    @classmethod
    @completes
    def of(cls, parallel: Any) -> Self:
        """This rank's place in whatever form a server describes it.

        Args:
            parallel: None for a single process, a `Topology`, `Groups`, or an object or mapping
                with attributes of the names above. vLLM's `rank` (counted over pipeline stages of
                tensor-parallel ranks), `data_parallel_size_local` and `local_world_size` are
                understood too.

        Raises:
            TypeError: It describes no topology.
            ValueError: Sizes and ranks contradict each other, or a rank is missing.
        """
        if parallel is None:
            return cls()
        if isinstance(parallel, cls):
            return parallel
        if isinstance(parallel, Groups):
            return cls._of_groups(parallel)
        given = _attributes(parallel)
        names = {field.name for field in dataclasses.fields(cls)}
        found = {name: value for name, value in given.items() if name in names}
        if not any(name.endswith("_parallel_size") for name in found):
            raise TypeError(
                f"a topology has tensor_parallel_size, data_parallel_size or "
                f"pipeline_parallel_size; {type(parallel).__name__} has none of them"
            )
        for name in list(found):
            if name.endswith(("_size", "_rank")) and found[name] is not None:
                found[name] = _integer(name, found[name])
        groups = found.get("groups")
        if groups is not None:
            placed = cls._of_groups(groups)
            found.setdefault("tensor_parallel_rank", placed.tensor_parallel_rank)
            if groups.data is not None:
                found.setdefault("data_parallel_rank", placed.data_parallel_rank)
        tensor_size = found.get("tensor_parallel_size", 1)
        pipeline_size = found.get("pipeline_parallel_size", 1)
        rank = given.get("rank")
        if rank is not None:
            rank = _integer("rank", rank)
            found.setdefault("tensor_parallel_rank", rank % tensor_size)
            found.setdefault("pipeline_parallel_rank", rank // tensor_size % pipeline_size)
        for kind, size in (("tensor", tensor_size), ("pipeline", pipeline_size)):
            if size > 1 and f"{kind}_parallel_rank" not in found:
                raise ValueError(
                    f"{kind}_parallel_size is {size}, but the topology does not say which of these "
                    f"ranks this is; give {kind}_parallel_rank or rank"
                )
        layers = found.get("pipeline_layers")
        if layers is not None:
            first, stop = layers
            found["pipeline_layers"] = (int(first), int(stop))
        replicas, here = given.get("data_parallel_size_local"), given.get("local_world_size")
        if replicas:
            found.setdefault("local_replicas", _integer("data_parallel_size_local", replicas))
        if here:
            here = _integer("local_world_size", here)
            found.setdefault("local_tensor_ranks", max(1, min(tensor_size, here)))
        found["enable_elastic_ep"] = bool(found.get("enable_elastic_ep", False))
        once = found.get("read_once_per_node", False)
        if not isinstance(once, bool):
            raise ValueError(f"read_once_per_node must be True or False, got {once!r}")
        return cls(**found)

    @classmethod
    def _of_groups(cls, groups: Groups) -> Self:
        def place(group: Any) -> tuple[int, int]:
            return (1, 0) if group is None else (group.size(), group.rank())

        tensor_size, tensor_rank = place(groups.tensor)
        data_size, data_rank = place(groups.data)
        node_size = None if groups.node is None else groups.node.size()
        return cls(
            tensor_parallel_size=tensor_size,
            tensor_parallel_rank=tensor_rank,
            data_parallel_size=data_size,
            data_parallel_rank=data_rank,
            groups=groups,
            local_tensor_ranks=node_size,
        )

    @property
    def shards_here(self) -> int:
        """Tensor-parallel ranks of a replica on this machine, as far as is known."""
        here = self.local_tensor_ranks
        return self.tensor_parallel_size if here is None else here

    @property
    def ranks_here(self) -> int:
        """Ranks on this machine that hold a part of a table, as far as is known."""
        return self.shards_here * self.local_replicas


def _attributes(parallel: Any) -> dict[str, Any]:
    if isinstance(parallel, Mapping):
        return dict(cast("Mapping[str, Any]", parallel))
    names = [field.name for field in dataclasses.fields(Topology)]
    names += ["rank", "data_parallel_size_local", "local_world_size"]
    return {name: getattr(parallel, name) for name in names if hasattr(parallel, name)}


def _integer(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    return number
