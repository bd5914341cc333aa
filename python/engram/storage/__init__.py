"""The places a table can live, behind one look-up.

| configuration | placement | rows are | a look-up |
|---|---|---|---|
| `cpu_offload=False` | `device` | on the device | selects there |
| `cpu_offload` (default) | `pinned` | in private host memory, registered with CUDA | device: a kernel reads host memory; host: a copy |
| `dp_shared_memory` | `shared` | in host memory that all replicas of a machine share | as `pinned` |
| `disk_offload` | `file` | in the checkpoint's files | gathers on the host |

The same rows, dtypes and errors come from each:

```python
with engram.open_storage({"disk_offload": True}, "checkpoint/") as table:
    rows = table.lookup(ids)
```
"""  # noqa: E501

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, Literal

from engram._errors import complete, completes, placed
from engram.config import EngramConfig
from engram.model_config import detect_platform
from engram.parallel import Shard
from engram.storage.base import Progress, Storage
from engram.storage.dummy import AbsentStorage, DummyStorage
from engram.storage.file import FileStorage
from engram.storage.hosted import HostDeviceStorage, PinnedStorage
from engram.storage.pipeline import absence
from engram.storage.source import described, opened
from engram.storage.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engram.storage.numa import Numa
    from engram.storage.source import Source

__all__ = ["LoadFormat", "Progress", "Storage", "Topology", "open_storage"]

LoadFormat = Literal["auto", "dummy"]

_logger = logging.getLogger(__name__)


@completes
def open_storage(
    config: EngramConfig | Mapping[str, Any] | str,
    table: Any,
    *,
    parallel: Any = None,
    device: Any = None,
    load_format: LoadFormat = "auto",
    numa: Numa = "auto",
    progress: Progress | None = None,
) -> Storage:
    """Puts a table where the configuration says, and returns what looks its rows up.

    `dp_shared_memory=None` is resolved, in place, and the topology verified; whoever has a model's
    configuration calls `EngramConfig.verify_model_config` first.

    Args:
        config: An `EngramConfig`, a mapping of its settings, or a JSON string.
        table: What to serve: a checkpoint's path; a path and a table's name or place in layer
            order, as a pair; a `FileGather` (which stays the caller's to close); or a `ViewLoader`.
            Rows are then loaded at once. A `TableInfo` announces a table whose rows come later,
            through `load`; nothing is allocated before. With `load_format="dummy"` also a model's
            configuration, or a directory with nothing but a `config.json`.
        parallel: This rank's place: a `Topology`, `Groups`, vLLM's `ParallelConfig`, or any object
            or mapping that `Topology.of` understands; None for a single process.
            `read_once_per_node=True` in it has one rank of a machine read a table in files and hand
            the rows to the other tensor-parallel ranks there.
        device: The torch device that looks rows up; None for the current CUDA device where there
            is one, else the host.
        load_format: `"dummy"` serves zeros without reading a row or allocating the table.
        numa: The memory node of tables in host memory: a number, `"auto"` for that of the device
            or of this process's CPUs, None to leave it to the kernel. Best effort.
        progress: Called with what is being done, bytes done and bytes in all; None draws a bar for
            tables of a gibibyte and more, if the error stream is a terminal.

    Returns:
        The storage. On a pipeline stage without the table's layer it holds nothing.

    Raises:
        ValueError: Settings contradict each other, the topology or the platform; there is no such
            table; the table's layer is on a pipeline stage without token ids.
        TypeError: An argument is of no kind listed here.
        MemoryError: There is not enough memory; nothing was allocated, and the message holds the
            numbers.
        RuntimeError: `dp_shared_memory=True` cannot be met; CUDA refused the memory; or another
            replica died or failed while a shared table was set up.
        TimeoutError: Another replica did not come.
        OSError: A file cannot be opened or read.
        CheckpointError: The files contradict themselves or what was announced.
    """
    settings = EngramConfig.of(config)
    topology = Topology.of(parallel)
    settings.resolve_dp_shared_memory(topology)
    settings.verify_parallel_config(topology)
    if load_format not in ("auto", "dummy"):
        raise placed(ValueError(f'load_format must be "auto" or "dummy", got {load_format!r}'))
    platform = detect_platform()
    placement = settings.placement
    if placement == "file" and platform == "rocm":
        raise placed(
            ValueError(
                "disk_offload=True is not supported on platform 'rocm'; use cpu_offload=True with "
                "disk_offload=False"
            )
        )
    if topology.read_once_per_node and placement != "file":
        raise placed(
            ValueError(
                f"read_once_per_node=True is for tables in files, but the settings put the table "
                f"in {placement} memory; set disk_offload=True or drop it"
            )
        )
    source = described(table) if load_format == "dummy" else opened(table)
    with contextlib.ExitStack() as files:
        if source.gather is not None and source.owned:
            files.callback(source.gather.close)
        why = absence(source, topology)
        if why is not None:
            return AbsentStorage(source.info, why)
        if load_format == "dummy":
            return DummyStorage(source.info, placement)
        try:
            storage = _make(settings, source, topology, device, numa, platform)
        except Exception as error:
            complete(error, table=source.info.name)
            raise
        if source.gather is not None:
            with contextlib.ExitStack() as undo:
                undo.callback(storage.close)
                storage.load(source.gather, progress)
                undo.pop_all()
            if source.owned and isinstance(storage, FileStorage):
                # The files are what it serves from.
                storage.own()
                files.pop_all()
        return storage


def _make(
    settings: EngramConfig,
    source: Source,
    topology: Topology,
    device: Any,
    numa: Numa,
    platform: str,
) -> Storage:
    """The storage for a table, without its rows."""
    info = source.info
    placement = settings.placement
    on = _device(device, platform)
    if placement == "file":
        return FileStorage(
            info,
            device=on,
            read_once_per_node=topology.read_once_per_node,
            groups=topology.groups,
            timeout=topology.timeout,
        )
    world_size = settings.get_parallel_size(topology)
    across = world_size > topology.tensor_parallel_size
    shard = Shard.of(info, _shard_rank(topology, across=across), world_size)
    if placement == "shared" and across:
        # Every replica holds rows of its own already, so there is no second copy to do without.
        _logger.info("table %r: dp_shared_memory has nothing to share", info.name)
        placement = "pinned"
    huge_pages = settings.use_thp or platform == "rocm"
    storage: Storage
    if placement == "device" and on is None:
        storage = HostDeviceStorage(info, shard, numa=numa, ranks_here=topology.ranks_here)
    elif placement == "device":
        from engram.storage.device import DeviceStorage

        storage = DeviceStorage(info, shard, device=on)
    elif placement == "pinned":
        storage = PinnedStorage(
            info,
            shard,
            device=on,
            numa=numa,
            huge_pages=huge_pages,
            ranks_here=topology.ranks_here,
        )
    else:
        from engram.storage.shared import SharedStorage

        storage = SharedStorage(
            info,
            shard,
            topology=topology,
            required=settings.dp_shared_memory_required,
            device=on,
            numa=numa,
            huge_pages=huge_pages,
        )
    groups = topology.groups
    if world_size > 1 and groups is not None:
        from engram.storage.exchanged import Exchange

        used = groups if across else groups.within_replica()
        storage._share_rows(Exchange(storage, used, topology.timeout))  # pyright: ignore[reportPrivateUsage]
    return storage


def _shard_rank(topology: Topology, *, across: bool) -> int:
    """This rank's place among those that share a table, as `Groups.rank` counts them."""
    if not across:
        return topology.tensor_parallel_rank
    if topology.data_parallel_rank is None:
        raise placed(
            ValueError(
                "embedding_across_dp=True needs data_parallel_rank: the topology does not say "
                "which replica this is"
            )
        )
    return (
        topology.data_parallel_rank * topology.tensor_parallel_size + topology.tensor_parallel_rank
    )


def _device(device: Any, platform: str) -> Any:
    """The torch device that looks rows up; None for the host, without importing torch."""
    if device is None:
        if platform == "cpu":
            return None
        import torch

        cuda: Any = torch.cuda
        return torch.device("cuda", cuda.current_device()) if cuda.is_available() else None
    if str(device) == "cpu":
        return None
    import torch

    cuda = torch.cuda
    wanted: Any = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if wanted.type == "cpu":
        return None
    if wanted.type == "cuda":
        if not cuda.is_available():
            raise placed(RuntimeError(f"device={device!r}: torch finds no CUDA device here"))
        if wanted.index is None:
            return torch.device("cuda", cuda.current_device())
    return wanted
