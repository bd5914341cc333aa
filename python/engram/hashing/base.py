"""What the hashes of all families share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, overload

import numpy as np

from engram._errors import placed
from engram.hashing._arrays import ids_out, integers, like

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from numpy.typing import NDArray

    from engram import _engram
    from engram.hashing._arrays import Integers
    from engram.hashing.device import DeviceHash

__all__ = ["DeviceRule", "NgramHash", "OutOfVocab", "wraps"]

OutOfVocab = Literal["raise", "wrap"]

_Out = TypeVar("_Out", bound="torch.Tensor | NDArray[np.int64]")


@dataclass(frozen=True)
class DeviceRule:
    """A family's rule as [`DeviceHash`][engram.hashing.DeviceHash] applies it.

    Attributes:
        fill: Symbol outside a segment.
        multipliers: For each head, what the current symbol and the ones before are multiplied with;
            as many as its n-gram is long.
        xor: Whether products are joined by XOR rather than summed.
        last: Token that the tokens after it do not see past, nor see.
        blank: Token that sees and shows nothing.
        dead: A blank token whose ids are replaced by `dead_id`.
        negatives_blank: Whether negative tokens are blank.
        ignored: Tokens that count as token 0.
        token_map: Symbol of each token; None where a token is its own. Tokens outside are dead.
        negatives_unmapped: Whether negative tokens are their own symbols despite the map.
    """

    fill: int
    multipliers: tuple[tuple[int, ...], ...]
    xor: bool
    last: int | None = None
    blank: int | None = None
    dead: int | None = None
    negatives_blank: bool = False
    ignored: tuple[int, ...] = ()
    token_map: NDArray[np.int32] | None = None
    negatives_unmapped: bool = False


def wraps(out_of_vocab: str) -> bool:
    """Whether tokens outside the vocabulary are to wrap.

    Raises:
        ValueError: Neither of the two choices.
    """
    if out_of_vocab not in ("raise", "wrap"):
        raise placed(ValueError(f'out_of_vocab is {out_of_vocab!r}: choose "raise" or "wrap"'))
    return out_of_vocab == "wrap"


class NgramHash:
    """The hash of one table: token ids to row ids.

    Made by [`engram.hasher`][engram.hashing.hasher], or as
    [`QwenHash`][engram.hashing.QwenHash], [`DeepSeekHash`][engram.hashing.DeepSeekHash] or
    [`LongCatHash`][engram.hashing.LongCatHash]. Immutable, and safe to use from any thread.

    Attributes:
        family: `"qwen"`, `"deepseek"` or `"longcat"`.
        layer: Zero-based decoder layer of the table; None where it is unknown or there is none.
        row_dim: Values per row; None where the configuration does not say.
        heads: Ids per token.
        head_sizes: Rows of each head, in column order.
        head_offsets: First row of each head.
        num_rows: Rows that ids can address.
        padded_rows: Rows of the stored table; the last ones may never be addressed.
        context_len: Tokens before the current one that an n-gram may see.
        filler: Token to put in a context where nothing precedes.
        vocab_size: Tokens `0..vocab_size - 1` are valid.
        out_of_vocab: `"raise"` or `"wrap"`.
        dead_id: Written for tokens that carry no n-gram and for padding; None for filler ids.
    """

    family: ClassVar[str]

    def __init__(
        self,
        native: _engram.NgramHash,
        rebuild: Callable[[], NgramHash],
        *,
        layer: int | None,
        row_dim: int | None,
        out_of_vocab: OutOfVocab,
        dead_id: int | None,
    ) -> None:
        self._native = native
        self._rebuild = rebuild
        self.layer = layer
        self.row_dim = row_dim
        self.out_of_vocab: OutOfVocab = out_of_vocab
        self.dead_id = dead_id
        self.heads = native.heads
        self.head_sizes = tuple(native.head_sizes)
        self.head_offsets = tuple(native.head_offsets)
        self.num_rows = native.num_rows
        self.padded_rows = native.padded_rows
        self.context_len = native.context_len
        self.filler = native.filler
        self.vocab_size = native.vocab_size

    @overload
    def ids(
        self,
        tokens: torch.Tensor,
        query_start_loc: Any = None,
        context: Any = None,
        out: None = None,
    ) -> torch.Tensor: ...
    @overload
    def ids(
        self,
        tokens: NDArray[np.integer[Any]] | Sequence[int],
        query_start_loc: Any = None,
        context: Any = None,
        out: None = None,
    ) -> NDArray[np.int64]: ...
    @overload
    def ids(
        self, tokens: Any, query_start_loc: Any = None, context: Any = None, *, out: _Out
    ) -> _Out: ...
    @overload
    def ids(self, tokens: Any, query_start_loc: Any, context: Any, out: _Out) -> _Out: ...
    def ids(
        self, tokens: Any, query_start_loc: Any = None, context: Any = None, out: Any = None
    ) -> Any:
        """Row ids of one step.

        Args:
            tokens: Integers `[T]`, the requests' tokens one after another; or `[B, S]`, a batch of
                `B` requests of `S` tokens each. A numpy array, CPU torch tensor or list, of any
                integer dtype; int32 and int64 are read in place.
            query_start_loc: Integers `[R + 1]`: request `r` owns
                `tokens[query_start_loc[r]:query_start_loc[r + 1]]`, possibly none. Tokens from
                `query_start_loc[R]` on are padding: their values are ignored, and they get
                `dead_id`, or the ids of an n-gram of nothing. None: all tokens are one request's.
            context: Integers `[R, context_len]`: the tokens before each request's first token of
                this step, oldest first, `filler` where nothing precedes; `[context_len]` will do
                for a single request. Rows of requests without tokens are ignored. None: every
                request starts here.
            out: Where to write: int64 `[*tokens.shape, heads]`, C-contiguous, a numpy array or CPU
                torch tensor. After an exception its contents are unspecified.

        Returns:
            Ids in `0..num_rows - 1`, int64 `[*tokens.shape, heads]`, heads of the shortest n-grams
            first: `out` where given, else a torch tensor for torch tokens and a numpy array for
            others.

        Raises:
            TypeError: An argument holds no integers, or lives on a device.
            ValueError: Shapes do not fit together; `query_start_loc` does not start at 0, decreases
                or ends past the tokens; a token or context entry is outside the vocabulary while
                `out_of_vocab` is `"raise"` (`position` is the token's place in the flat tokens).
        """
        flat, starts, history = self._step(tokens, query_start_loc, context)
        shape = (*flat.shape, self.heads)
        ids = np.empty(shape, np.int64) if out is None else ids_out(out, shape)
        self._native.ids(flat, starts, history, ids)
        return like(tokens, ids) if out is None else out

    def _step(
        self, tokens: Any, query_start_loc: Any, context: Any
    ) -> tuple[Integers, Integers | None, Integers | None]:
        """Tokens, starts and context as the native half takes them."""
        flat = integers(tokens, "tokens")
        starts = self._starts(flat, query_start_loc)
        return flat, starts, None if context is None else self._context(context, starts)

    def _starts(self, tokens: NDArray[Any], query_start_loc: Any) -> Integers | None:
        if tokens.ndim == 2 and query_start_loc is None:
            batch, length = tokens.shape
            return np.arange(batch + 1, dtype=np.int64) * length
        if tokens.ndim != 1:
            with_starts = "" if query_start_loc is None else " with query_start_loc"
            raise placed(
                ValueError(
                    f"tokens: shape is {tokens.shape}; pass [T]{with_starts}"
                    + ("" if with_starts else ", or [B, S] for a batch of equally long requests")
                )
            )
        if query_start_loc is None:
            return None
        starts = integers(query_start_loc, "query_start_loc")
        if starts.ndim != 1:
            raise placed(ValueError(f"query_start_loc: shape is {starts.shape}; pass [R + 1]"))
        return starts

    def _context(self, context: Any, starts: NDArray[Any] | None) -> Integers:
        history = integers(context, "context")
        if history.ndim == 1 and (starts is None or starts.size == 2):
            history = history[np.newaxis]
        if history.ndim != 2:
            raise placed(
                ValueError(
                    f"context: shape is {history.shape}; pass [R, context_len], here [R, "
                    f"{self.context_len}]"
                )
            )
        return history

    def to_device(self, device: torch.device | str | int) -> DeviceHash:
        """The same hash for tokens that never leave `device`; needs torch."""
        from engram.hashing.device import DeviceHash

        return DeviceHash(self).to(device)

    def device_rule(self) -> DeviceRule:
        """The family's rule in the form that the device implementation applies."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Callable[[], NgramHash], tuple[()]]:
        return self._rebuild, ()

    def __repr__(self) -> str:
        place = "" if self.layer is None else f"layer={self.layer}, "
        return f"{type(self).__name__}({place}heads={self.heads}, num_rows={self.num_rows})"
