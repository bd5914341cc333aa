"""One copy of a shard for all replicas of a machine."""

from __future__ import annotations

import errno
import warnings
from typing import TYPE_CHECKING, Any

from engram._notices import notify
from engram.parallel import host_name
from engram.storage import preflight
from engram.storage.base import Progress, no_bytes
from engram.storage.hosted import PinnedStorage, fill, stage_progress
from engram.storage.numa import Numa, choose_node
from engram.storage.segment import Segment

if TYPE_CHECKING:
    from engram.parallel import Shard
    from engram.storage.rendezvous import Rendezvous
    from engram.storage.topology import Topology
    from engram.table import TableInfo

__all__ = ["SharedStorage"]


class SharedStorage(PinnedStorage):
    """Rows in memory that the data-parallel replicas of a machine share.

    Replica 0 makes the memory and loads it; the others map it and wait. Where that cannot be,
    every replica gets a table of its own, unless the user insists on sharing.

    Device-fabric handles, where a driver has them, would be another kind of `Segment`: created and
    offered by one replica, attached by the others.

    Args:
        info: The table.
        shard: The part that this rank and its counterparts in other replicas hold.
        topology: This rank's place.
        required: Whether the user asked for sharing, so that its absence is an error.
        device: As for `HostedStorage`.
        numa: As for `open_storage`.
    """

    placement = "shared"

    def __init__(
        self,
        info: TableInfo,
        shard: Shard | None = None,
        *,
        topology: Topology,
        required: bool,
        device: Any = None,
        numa: Numa = "auto",
        huge_pages: bool = False,
    ) -> None:
        self._topology = topology
        self._required = required
        super().__init__(
            info,
            shard,
            device=device,
            numa=numa,
            huge_pages=huge_pages,
            ranks_here=topology.ranks_here,
        )

    def _preflight(self) -> None:
        """Leaves it to the replica that makes the memory, which speaks for all."""

    def _load(self, views: Any, progress: Progress | None) -> None:
        segment, reason = self._agree(progress)
        if segment is None:
            self._fall_back(reason)
            super()._load(views, progress)
            return
        try:
            if self._leads:
                self._fill(segment, views, progress)
            else:
                segment.wait_ready(self._topology.timeout)
        finally:
            segment.close_file()
        self._hold(segment.buffer, progress)

    @property
    def _leads(self) -> bool:
        return self._topology.data_parallel_rank == 0

    def _fill(self, segment: Segment, views: Any, progress: Progress | None) -> None:
        def report(stage: str, done: int, total: int) -> None:
            segment.report(done)
            if progress is not None:
                progress(stage, done, total)

        try:
            fill(segment.buffer, views, self.info, self.shard, report)
        except BaseException as error:
            segment.set_failed(f"{type(error).__name__}: {error}")
            raise
        segment.set_ready()

    def _agree(self, progress: Progress | None) -> tuple[Segment | None, str]:
        """The memory that all replicas have mapped; or None and why they have not.

        Every replica comes to the same conclusion.
        """
        from engram.storage.rendezvous import Rendezvous, store_of

        topology = self._topology
        rank = topology.data_parallel_rank
        if rank is None:
            return None, "the topology does not say which replica this is (data_parallel_rank)"
        store = store_of(topology)
        if store is None:
            return None, (
                "the replicas cannot reach one another: no torch.distributed process group spans "
                "them, and the topology has no store"
            )
        meeting = Rendezvous(
            store,
            f"shared table {self.info.name}, stage {topology.pipeline_parallel_rank}, shard "
            f"{topology.tensor_parallel_rank}",
            rank,
            topology.data_parallel_size,
            topology.timeout,
        )
        notes = meeting.meet(
            {
                "host": topology.host or host_name(),
                "rows": [self.shard.first_row, self.shard.stop_row, self.num_rows],
                "planes": [[plane.name, plane.row_bytes] for plane in self.planes],
                "node": choose_node(self._numa, self._device),
            }
        )
        reason = _apart(notes, self.info.name)
        if reason is not None:
            return None, reason
        return self._map(meeting, notes, progress)

    def _map(
        self, meeting: Rendezvous, notes: list[dict[str, Any]], progress: Progress | None
    ) -> tuple[Segment | None, str]:
        segment = None
        problem = None
        if self._leads:
            nodes = sorted({note["node"] for note in notes if note["node"] is not None})
            shards = self._topology.shards_here
            needs = preflight.Needs(self.info.name, self.placement, self._local_bytes, shards)
            report = stage_progress(progress, "reserving shared memory")
            try:
                segment = Segment.create(needs, nodes, report)
            except (OSError, MemoryError) as error:
                problem = _text(error)
            meeting.post("offer", {"problem": problem} if segment is None else segment.offer)
        else:
            offer = meeting.read("offer", 0)
            problem = offer.get("problem")
            if problem is None:
                try:
                    segment = Segment.attach(offer, self._local_bytes)
                except (OSError, ValueError) as error:
                    problem = _text(error)
        try:
            problems = meeting.exchange("joined", problem)
        except BaseException:
            if segment is not None:
                segment.close_file()
            raise
        found = [
            f"replica {replica}: {text}"
            for replica, text in enumerate(problems)
            if text is not None
        ]
        if not found:
            return segment, ""
        if segment is not None:
            segment.close_file()
        return None, found[0]

    def _fall_back(self, reason: str) -> None:
        if self._required:
            raise RuntimeError(
                f"dp_shared_memory=True cannot be met for table {self.info.name!r}: {reason}"
            )
        self.fallbacks.append(f"shared memory: {reason}")
        notify(f"table {self.info.name!r} is not shared between replicas: {reason}", self.info.name)
        warnings.warn(
            f"table {self.info.name!r} is not shared between replicas, each holds its own copy: "
            f"{reason}",
            UserWarning,
            stacklevel=2,
        )
        self.placement = "pinned"
        self._needs = self._needs._replace(placement="pinned")
        preflight.require_host_memory(self._needs)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes held: `shared`, or `pinned` where sharing was not possible."""
        held = 0 if self._buffer is None else self._buffer.capacity
        return {**no_bytes(), self.placement: held}


def _apart(notes: list[dict[str, Any]], table: str) -> str | None:
    """Why these replicas cannot share memory; None if they can.

    Raises:
        RuntimeError: They open different tables.
    """
    first = notes[0]
    for replica, note in enumerate(notes):
        if (note["rows"], note["planes"]) != (first["rows"], first["planes"]):
            raise RuntimeError(
                f"replica {replica} opens rows {note['rows']} of planes {note['planes']} as table "
                f"{table!r}, replica 0 rows {first['rows']} of planes {first['planes']}: they do "
                "not serve the same checkpoint"
            )
    hosts = list(dict.fromkeys(note["host"] for note in notes))
    if len(hosts) > 1:
        return f"the replicas run on {len(hosts)} machines ({', '.join(hosts[:3])})"
    if len({note["processes"] for note in notes}) > 1:
        return (
            "the replicas do not see one another's processes (containers with PID namespaces of "
            "their own); run them in one container, or with a shared PID namespace"
        )
    if len({note["user"] for note in notes}) > 1:
        return "the replicas run as different users"
    return None


def _text(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return f"there is no {error.filename}"
    if isinstance(error, OSError) and error.strerror:
        where = "" if error.errno == errno.ENOSPC else f" ({error.filename})"
        return f"{error.strerror}{where}"
    return str(error)
