"""Which pipeline stage has a table: the first, which alone knows the tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engram._errors import placed

if TYPE_CHECKING:
    from engram.storage.source import Source
    from engram.storage.topology import Topology

__all__ = ["absence"]


def absence(source: Source, topology: Topology) -> str | None:
    """Why this pipeline stage has no use for a table; None if it has.

    Raises:
        ValueError: The table's layer is on a stage that has no token ids, or which layers this
            stage has is not known.
    """
    size, rank = topology.pipeline_parallel_size, topology.pipeline_parallel_rank
    if size == 1:
        return None
    layer = source.info.layer
    stage = f"pipeline stage {rank} of {size}"
    if layer is None:
        # Looked up with the token embeddings, before the first layer.
        if rank == 0:
            return None
        return f"table {source.info.name!r} belongs to the first pipeline stage; this is {stage}"
    first, stop = _layers(source, topology)
    if not first <= layer < stop:
        return (
            f"table {source.info.name!r} belongs to decoder layer {layer}; {stage} holds layers "
            f"{first} to {stop - 1}"
        )
    if rank > 0:
        raise placed(
            ValueError(
                f"pipeline_parallel_size={size}: decoder layer {layer} with table "
                f"{source.info.name!r} is on {stage}, which has no token ids to look rows up by; "
                "move the layer to stage 0 or use pipeline_parallel_size=1"
            ),
            table=source.info.name,
        )
    return None


def _layers(source: Source, topology: Topology) -> tuple[int, int]:
    if topology.pipeline_layers is not None:
        return topology.pipeline_layers
    size, rank = topology.pipeline_parallel_size, topology.pipeline_parallel_rank
    count = source.num_layers
    if count is None:
        raise placed(
            ValueError(
                f"pipeline_parallel_size={size}: which decoder layers stage {rank} holds is not "
                "known; give the topology pipeline_layers=(first, stop)"
            ),
            table=source.info.name,
        )
    # As vLLM cuts them: what does not divide goes to the last stages but one, from the back.
    lengths = [count // size] * size
    for extra in range(count % size):
        lengths[-(extra + 2)] += 1
    return sum(lengths[:rank]), sum(lengths[: rank + 1])
