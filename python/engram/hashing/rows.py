"""From tokens to rows in one call."""

# The hash and the table are joined below their public faces.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engram import _engram
from engram._arrays import is_torch
from engram._errors import placed
from engram._notices import failed

if TYPE_CHECKING:
    from engram.gather import FileGather
    from engram.hashing.base import NgramHash

__all__ = ["gather_tokens"]


def gather_tokens(
    hasher: NgramHash,
    gather: FileGather,
    tokens: Any,
    query_start_loc: Any = None,
    context: Any = None,
    *,
    out: Any = None,
) -> Any:
    """Rows of one step's tokens: hash and gather in one native call, without ids in between.

    Args:
        hasher: The hash of the table.
        gather: The table, opened. Rows of the hash's `dead_id` are zeros and are not read.
        tokens: Integers `[T]` or `[B, S]`, as for
            [`NgramHash.ids`][engram.hashing.NgramHash.ids].
        query_start_loc: Integers `[R + 1]`.
        context: Integers `[R, context_len]`.
        out: Where rows go, as for `FileGather.gather` with ids of shape `[*tokens.shape, heads]`.
            After an exception its contents are unspecified.

    Returns:
        `out` where given. Else rows as stored, `[*tokens.shape, heads, *row_shape]`: a torch tensor
        for torch tokens, a numpy array for others, `Rows` for a table of several planes.

    Raises:
        ValueError: The table's rows are not those of the hash; or as `NgramHash.ids` and
            `FileGather.gather` do.
        Exception: As those do.
    """
    if gather.num_rows not in (hasher.num_rows, hasher.padded_rows):
        raise placed(
            ValueError(
                f"the hash addresses {hasher.num_rows} rows ({hasher.padded_rows} padded), but "
                f"table {gather.info.name!r} has {gather.num_rows}: they belong to different tables"
            ),
            table=gather.info.name,
        )
    flat, starts, history = hasher._step(tokens, query_start_loc, context)
    shape = (*flat.shape, hasher.heads)
    if out is None:
        out = gather._allocate(shape, torch_like=is_torch(tokens))
    targets = gather._targets(out, shape, flat.size * hasher.heads)
    try:
        _engram.gather_tokens(
            hasher._native, gather._native, flat, starts, history, targets, hasher.dead_id
        )
    except OSError as error:
        failed(error)
        raise
    return out
