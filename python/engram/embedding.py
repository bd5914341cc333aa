"""The module a model's own n-gram embedding is replaced with."""

# The module joins a hash and a table below their public faces.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import nn

from engram._errors import placed
from engram.quant import Dequantizer, EncodedTable
from engram.rows import Rows
from engram.storage.base import Storage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engram.hashing.base import NgramHash
    from engram.staging import Stage

__all__ = ["NgramEmbedding", "RowStorage"]

_Function = TypeVar("_Function", bound="Callable[..., Any]")

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_CONSTANTS = {
    "layer_multipliers": "multipliers",
    "ngram_heads_vocab_sizes": "head_sizes",
    "ngram_heads_offsets": "head_offsets",
}
"""Hash constants as checkpoints store them beside a table, and the hash's names for them."""

_TABLE = "ngram_embedding"


def _eager(function: _Function) -> _Function:
    """Keeps host work out of compiled graphs."""
    return cast("_Function", torch.compiler.disable(function))  # pyright: ignore[reportUnknownMemberType]


class RowStorage(EncodedTable, Protocol):
    """Wherever a table lives: a `FileGather`, or what `open_storage` returns."""

    @property
    def num_rows(self) -> int:
        """Rows in the table."""
        ...

    def gather(self, ids: Any, out: Any = None, *, pad_id: int | None = None) -> Any:
        """Stored rows of int64 ids `[*]`, as a tensor `[*, columns]` or planes of tensors."""
        ...


class NgramEmbedding(nn.Module):
    """Embeddings of n-grams, looked up in a table that is no part of the module.

    The module has neither parameters nor buffers: `state_dict`, `parameters`, `to` and dtype casts
    of the model around it leave the table alone. Its forward is that of transformers'
    `Qwen4ExpTextNGramEmbedding`, the model's cache included, so that chunks, padding, beams and
    rollbacks work as they do there.

    The table is bound once: `storage` or `stage` here, or one of `bind`, `bind_stage` and
    `bind_dummy` later.

    Args:
        hasher: The hash of the table, from `engram.hasher`.
        storage: Where the table lives: a `FileGather`, or what `open_storage` returns.
        dtype: Of the embeddings: bfloat16, float16 or float32. It is the module's own, and does not
            follow casts of the model.
        layer_idx: Zero-based decoder layer, by which the model's cache knows this module's context.
            None: the hash's.

    Raises:
        TypeError: `dtype` is none of the three.
        ValueError: The table's rows are not those of the hash, or it lacks a scale.
    """

    def __init__(
        self,
        hasher: NgramHash,
        storage: RowStorage | None = None,
        *,
        dtype: torch.dtype,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        if dtype not in _DTYPES:
            raise TypeError(f"dtype is {dtype}: embeddings are bfloat16, float16 or float32")
        self.hasher = hasher
        self.dtype = dtype
        self.layer_idx = hasher.layer if layer_idx is None else layer_idx
        self.context_len = hasher.context_len
        self._storage: RowStorage | None = None
        self._on_device = False
        self._stage: tuple[Stage, str | int] | None = None
        self._dequantizer: Dequantizer | None = None
        self._columns = 0
        self._bound: str | None = None
        if storage is not None:
            self.bind(storage)

    def bind(self, storage: RowStorage) -> None:
        """Serves rows from `storage`.

        Raises:
            RuntimeError: A table is bound already.
            ValueError: The table's rows are not those of the hash, or it lacks a scale.
        """
        self._require_unbound()
        if storage.num_rows not in (self.hasher.num_rows, self.hasher.padded_rows):
            raise placed(
                ValueError(
                    f"the hash addresses {self.hasher.num_rows} rows ({self.hasher.padded_rows} "
                    f"padded), but the table has {storage.num_rows}: they belong to different "
                    "tables"
                )
            )
        self._set_values(storage)
        self._storage = storage
        # Whatever is in files comes from the host: ids on the device would have to come back.
        self._on_device = isinstance(storage, Storage) and storage.placement != "file"
        self._bound = repr(storage)

    def bind_stage(self, stage: Stage, table: str | int = 0) -> None:
        """Serves the rows that `Stage.prepare` has put into the stage's fixed buffer.

        The forward then reads nothing but that buffer, and can be captured into a CUDA graph:
        tokens are taken to be those of the last `prepare`, in order, padding included, and the
        model's cache is left alone. A run that warms up for a capture needs a step as long, of
        padding if need be: `stage.prepare(tokens, [0])`.

        Raises:
            KeyError: The stage has no such table.
            RuntimeError: A table is bound already.
            ValueError: The table lacks a scale.
        """
        self._require_unbound()
        self._set_values(stage.gather_of(table))
        rows = stage.rows(table)
        weight = rows.weight if isinstance(rows, Rows) else rows
        if weight.device.type == "cuda":
            # Puts the look-up table of values on the device now, where no capture is under way.
            self._values(_first(rows, 1))
        self._stage = (stage, table)
        self._bound = repr(stage)

    def bind_dummy(self) -> None:
        """Serves zeros, without a table: for servers that measure memory before they load.

        Raises:
            RuntimeError: A table is bound already.
            ValueError: The hash does not know how long rows are.
        """
        self._require_unbound()
        if self.hasher.row_dim is None:
            raise placed(ValueError("the configuration does not say how many values a row has"))
        self._columns = self.hasher.row_dim
        self._bound = "zeros"

    @_eager
    def forward(self, input_ids: torch.Tensor, cache: Any = None) -> torch.Tensor:
        """Embeddings of tokens.

        Args:
            input_ids: Integers `[B, S]`, with the hash's `filler` where an attention mask hides a
                position.
            cache: The model's cache, which holds the tokens before these; None where nothing
                precedes.

        Returns:
            `[B, S, heads * row_dim]` of `dtype`, on the device of `input_ids`.

        Raises:
            RuntimeError: No table is bound.
            ValueError: A token is outside the vocabulary (`out_of_vocab` of the hash), or the step
                in the stage has fewer tokens, as after a step that failed. A capture, and what a
                late step launches, may run over more: rows behind the step are zeros.
        """
        if self._bound is None:
            raise RuntimeError(
                "this NgramEmbedding has no table: call bind(storage), bind_stage(stage) or "
                "bind_dummy() first"
            )
        if self._stage is not None:
            stage, table = self._stage
            count = input_ids.numel()
            stage._require_step(count)
            values = self._values(_first(stage.rows(table), count)).flatten(-2)
            return values.reshape(*input_ids.shape, values.shape[-1])
        context = self._context(input_ids, cache)
        if self._storage is None:
            shape = (*input_ids.shape, self.hasher.heads * self._columns)
            return torch.zeros(shape, dtype=self.dtype, device=input_ids.device)
        ids = self.hasher.ids(input_ids.cpu(), context=context.cpu().numpy())
        if self._on_device:
            ids = ids.to(input_ids.device)
        rows = self._storage.gather(ids, pad_id=self.hasher.dead_id)
        return self._values(_on(rows, input_ids.device)).flatten(-2)

    def _context(self, input_ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """The tokens before these, `[B, context_len]`; the cache then has those before the next."""
        length = self.context_len
        held = None if cache is None else cache.get_conv_state(self.layer_idx, state_idx=2)
        if held is None:
            before = input_ids.new_full((len(input_ids), length), self.hasher.filler)
        else:
            # A copy: the cache keeps the tokens at one address and writes the next ones there.
            before = held[:, -length:].to(input_ids.device, copy=True)
        if cache is not None and length > 0:
            ours = input_ids.long()
            if held is None and ours.shape[1] < length:
                # The cache itself would fill up with zeros, which is a token.
                ours = torch.cat([before.long(), ours], dim=1)[:, -length:]
            cache.update_conv_state(ours, self.layer_idx, state_idx=2, conv_kernel_size=length)
        return before

    def _set_values(self, table: EncodedTable) -> None:
        self._dequantizer = Dequantizer(table, self.dtype)
        self._columns = int(np.prod(table.logical_shape))

    def _values(self, rows: Any) -> Any:
        assert self._dequantizer is not None
        return self._dequantizer(rows)

    def _require_unbound(self) -> None:
        if self._bound is not None:
            raise RuntimeError(
                f"this NgramEmbedding serves {self._bound}; a second table is refused, since rows "
                "of the first may be in use. Make a new module"
            )

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,  # noqa: FBT001 - torch calls it so
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Compares stored hash constants; refuses weights of the table, which is not ours to load.

        torch collects `error_msgs` and raises them as one RuntimeError.
        """
        for name in [name for name in state_dict if name.startswith(prefix)]:
            leaf = name.removeprefix(prefix)
            attribute = _CONSTANTS.get(leaf)
            if attribute is not None and hasattr(self.hasher, attribute):
                stored = tuple(state_dict[name].tolist())
                derived = tuple(getattr(self.hasher, attribute))
                if stored != derived:
                    error_msgs.append(
                        f"{name} is {list(stored)}, but the hash has {list(derived)}: the weights "
                        "belong to another configuration"
                    )
            elif leaf.split(".")[0] == _TABLE:
                error_msgs.append(
                    f"{name}: the table is served from {self._bound or 'a storage to be bound'}; "
                    "loading it as a weight is refused. Leave it out of the state_dict"
                )
            elif strict:
                unexpected_keys.append(name)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        served = self._bound or "no table"
        return f"{self.hasher.heads} heads x {self._columns} values, {self.dtype}, from {served}"


def _first(rows: Any, count: int) -> Any:
    """The first rows of every plane."""
    if isinstance(rows, Rows):
        return Rows(**{name: rows[name][:count] for name in rows.keys()})  # noqa: SIM118 - no mapping
    return rows[:count]


def _on(rows: Any, device: torch.device) -> Any:
    if isinstance(rows, Rows):
        return Rows(**{name: rows[name].to(device) for name in rows.keys()})  # noqa: SIM118 - no mapping
    return rows.to(device)
