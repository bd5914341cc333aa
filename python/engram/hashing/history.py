"""The tokens that requests have committed, for callers that keep no history of their own."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from engram._errors import placed
from engram.hashing._arrays import integers

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from numpy.typing import NDArray

    from engram.hashing.base import NgramHash

__all__ = ["TokenHistory"]


class TokenHistory:
    """Committed tokens per request, and the contexts they make.

    One entry per request, under any hashable name. Only what is committed counts: drafts are hashed
    from the context of the committed tokens and committed once accepted, so that a rejected tail
    needs no undoing. Not locked: use one history from one thread at a time.

        history = engram.TokenHistory(h)
        history.start("a", prompt)  # also to resume, or after a prefix-cache hit
        ids = h.ids(drafts, context=history.contexts(["a"]))
        history.commit("a", drafts[:accepted])
    """

    def __init__(self, hash: NgramHash) -> None:
        """Keep histories for `hash`, whose `context_len` and `filler` shape the contexts."""
        self.context_len = hash.context_len
        self.filler = hash.filler
        self._tokens: dict[Hashable, array[int]] = {}

    def start(self, request: Hashable, tokens: Any = ()) -> None:
        """Begin `request` anew with `tokens` before it, forgetting what was known under that name.

        Args:
            request: Name of the request, such as its id or slot.
            tokens: Integers `[n]` that are already computed: a cached prefix, or everything so far
                of a request that was preempted. Nothing for a new request.
        """
        self._tokens[request] = _flat(tokens)

    def commit(self, request: Hashable, tokens: Any) -> None:
        """Append `tokens`, integers `[n]`, to what `request` has computed.

        Raises:
            KeyError: The request was never started, or was dropped.
        """
        self._of(request).extend(_flat(tokens))

    def truncate(self, request: Hashable, length: int) -> None:
        """Keep only the first `length` committed tokens.

        Raises:
            KeyError: The request is unknown.
            ValueError: Fewer tokens than `length` are committed.
        """
        tokens = self._of(request)
        if not 0 <= length <= len(tokens):
            raise placed(
                ValueError(
                    f"length is {length}, but request {request!r} has {len(tokens)} committed "
                    "tokens"
                )
            )
        del tokens[length:]

    def drop(self, request: Hashable) -> None:
        """Forget `request`; nothing happens if it is unknown."""
        self._tokens.pop(request, None)

    def length(self, request: Hashable) -> int:
        """How many tokens `request` has committed."""
        return len(self._of(request))

    def contexts(
        self, requests: Iterable[Hashable], lengths: Sequence[int] | None = None
    ) -> NDArray[np.int64]:
        """The context of each request, in the order given.

        Args:
            requests: Names of started requests.
            lengths: For each request, how many of its committed tokens precede the step; all of
                them by default.

        Returns:
            int64 `[R, context_len]`, oldest first, `filler` where nothing precedes.

        Raises:
            KeyError: A request is unknown.
            ValueError: `lengths` has another length, or exceeds what a request has committed.
        """
        names = list(requests)
        if lengths is not None and len(lengths) != len(names):
            raise placed(ValueError(f"{len(lengths)} lengths for {len(names)} requests"))
        contexts = np.full((len(names), self.context_len), self.filler, np.int64)
        for row, name in enumerate(names):
            tokens = self._of(name)
            length = len(tokens) if lengths is None else lengths[row]
            if not 0 <= length <= len(tokens):
                raise placed(
                    ValueError(
                        f"lengths[{row}] is {length}, but request {name!r} has {len(tokens)} "
                        "committed tokens"
                    )
                )
            known = tokens[max(0, length - self.context_len) : length]
            if known:
                contexts[row, -len(known) :] = known
        return contexts

    def __contains__(self, request: object) -> bool:
        return request in self._tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def _of(self, request: Hashable) -> array[int]:
        try:
            return self._tokens[request]
        except KeyError:
            raise KeyError(f"request {request!r} was never started, or was dropped") from None


def _flat(tokens: Any) -> array[int]:
    values = integers(tokens if hasattr(tokens, "__len__") else list(tokens), "tokens")
    if values.ndim != 1:
        raise placed(
            ValueError(f"tokens: shape is {values.shape}; pass the tokens of one request, [n]")
        )
    if values.size and (int(values.min()) < -(2**31) or int(values.max()) >= 2**31):
        raise placed(ValueError("tokens: a token does not fit 32 bits"))
    return array("i", values.astype(np.int32).tobytes())
