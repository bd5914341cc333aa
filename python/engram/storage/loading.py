"""Rows on their way to where they will stay: from files in large reads, or from a loader's views.

Nothing here holds more than one view or one chunk at a time, so a table is never in memory twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from engram import _engram
from engram._arrays import UINT8, is_torch
from engram._engram import CheckpointError
from engram._errors import placed
from engram.gather import FileGather
from engram.views import ViewLoader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from engram.parallel import Shard
    from engram.table import PieceInfo, PlaneInfo, TableInfo

__all__ = ["Chunk", "bound_gather", "chunks_of_views", "named_views"]


class Chunk(NamedTuple):
    """Rows of one plane, in host memory that a loader owns."""

    plane: int
    first: int
    """Where the first of them belongs, counted from the shard's first row."""
    rows: NDArray[np.uint8]
    """`[rows, row_bytes]`."""


def named_views(views: Any) -> Iterator[tuple[str, Any]]:
    """Names and tensors of whatever `Storage.load` takes.

    Raises:
        TypeError: It is nothing of the kind.
    """
    if isinstance(views, ViewLoader):
        return views.items()
    if isinstance(views, Mapping):
        return iter(cast("Mapping[str, Any]", views).items())
    if isinstance(views, Iterable):
        return iter(cast("Iterable[tuple[str, Any]]", views))
    raise placed(
        TypeError(
            "views must be a mapping of names to tensors, pairs of both, a ViewLoader or a "
            f"FileGather, not {type(views).__name__}"
        )
    )


def bound_gather(views: Any, info: TableInfo) -> FileGather:
    """The files behind views, opened.

    Raises:
        Exception: As `ViewLoader.bind` does.
        CheckpointError: They are another table's.
    """
    if isinstance(views, FileGather):
        gather = views
    else:
        loader = views if isinstance(views, ViewLoader) else ViewLoader(info.rows)
        if loader is not views:
            wanted = plain(info.name)
            for name, tensor in named_views(views):
                if plain(name).startswith(f"{wanted}."):
                    loader.add(name, tensor)
        gather = loader.bind(_name_among(loader, info))
    require_same(gather.info, info)
    return gather


def _name_among(loader: ViewLoader, info: TableInfo) -> str:
    """What a table is called in a loader, which may hold several: names may lack a segment."""
    wanted = plain(info.name)
    found = {_engram.table_of(name) or "" for name, _ in loader.items()}
    return next((name for name in sorted(found) if plain(name) == wanted), info.name)


def require_same(found: TableInfo, info: TableInfo) -> None:
    """Refuses rows of another shape than those that were announced.

    Raises:
        CheckpointError: They differ.
    """

    def shape(table: TableInfo) -> tuple[Any, ...]:
        planes = [(plane.name, plane.stored_dtype, plane.row_bytes) for plane in table.planes]
        return table.rows, planes

    if shape(found) != shape(info):
        raise placed(
            CheckpointError(
                f"table {info.name!r} was opened as {_summary(info)}, but the rows to load are "
                f"{_summary(found)}"
            ),
            table=info.name,
        )


def _summary(info: TableInfo) -> str:
    planes = " + ".join(f"{plane.row_bytes} bytes {plane.stored_dtype}" for plane in info.planes)
    return f"{info.rows} rows of {planes}"


def chunks_of_views(views: Any, info: TableInfo, shard: Shard) -> Iterator[Chunk]:
    """The shard's rows out of tensors in host memory, one tensor at a time.

    Raises:
        CheckpointError: A piece has the wrong shape; or, at the end, pieces were missing.
        ValueError: A piece came twice.
        TypeError: A piece has another dtype.
    """
    places = _places(info)
    missing = set(places)
    for name, tensor in named_views(views):
        key = plain(name)
        place = places.get(key)
        if place is None:
            continue
        if key not in missing:
            raise placed(ValueError(f"tensor {name!r} came before"), table=info.name)
        missing.discard(key)
        plane, piece = place
        rows = _bytes_of(name, tensor, info.planes[plane], piece, info.name)
        first = max(piece.first_row, shard.first_row)
        stop = min(piece.first_row + piece.rows, shard.stop_row)
        if first < stop:
            part = rows[first - piece.first_row : stop - piece.first_row]
            yield Chunk(plane, first - shard.first_row, part)
    if missing:
        some = sorted(missing)[:3]
        raise placed(
            CheckpointError(
                f"{len(missing)} of {len(places)} pieces of table {info.name!r} were not handed "
                f"over, {', '.join(map(repr, some))}{' among them' * (len(missing) > 3)}"
            ),
            table=info.name,
        )


def plain(name: str) -> str:
    """A name without the segment that some loaders drop."""
    return name.replace("language_model.", "")


def _places(info: TableInfo) -> dict[str, tuple[int, PieceInfo]]:
    return {
        plain(piece.tensor): (place, piece)
        for place, plane in enumerate(info.planes)
        for piece in plane.pieces
    }


def _bytes_of(
    name: str, tensor: Any, plane: PlaneInfo, piece: PieceInfo, table: str
) -> NDArray[np.uint8]:
    """A tensor's rows as bytes, without a copy where its memory allows."""
    if is_torch(tensor):
        torch: Any = __import__("torch")
        tensor = tensor.detach().cpu().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        flat = tensor.reshape(-1)
        data = (flat if tensor.dtype == torch.uint8 else flat.view(torch.uint8)).numpy()
    else:
        array = np.ascontiguousarray(tensor)
        dtype = str(array.dtype)
        data = array.reshape(-1).view(UINT8)
    shape = tuple(tensor.shape)
    # Some runtimes view scales as bytes; their bytes are the same.
    if dtype not in (plane.dtype.name, "uint8"):
        raise placed(
            TypeError(f"tensor {name!r} is {dtype}, but the table stores {plane.dtype}"),
            table=table,
        )
    if len(shape) != 2 or shape[0] != piece.rows or data.size != piece.rows * plane.row_bytes:
        raise placed(
            CheckpointError(
                f"tensor {name!r} has shape {shape} of {dtype}, but the piece has {piece.rows} "
                f"rows of {plane.row_bytes} bytes"
            ),
            table=table,
        )
    return cast("NDArray[np.uint8]", data).reshape(piece.rows, plane.row_bytes)
