"""The same ids with torch, for tokens that never leave the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engram._errors import placed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engram.hashing.base import NgramHash

__all__ = ["DeviceHash"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class DeviceHash(torch.nn.Module):
    """A hash as torch operations: no synchronisation, and shapes that depend on shapes only.

    With inputs and `out` at fixed addresses, [`ids`][engram.hashing.DeviceHash.ids] can be captured
    in a CUDA graph; replays follow the inputs' contents. Made by `h.to_device(device)`.

    What a device cannot do without synchronising is refuse. `query_start_loc` is taken as it is: it
    has to start at 0, never decrease, and not exceed the number of tokens. Tokens outside the
    vocabulary get the ids of `out_of_vocab="wrap"`, which stay inside their head; where the hash
    was made to raise, they are noted in `out_of_vocab_seen`, and
    [`raise_if_seen`][engram.hashing.DeviceHash.raise_if_seen] reports them.

    Attributes:
        heads: Ids per token.
        context_len: Tokens before the current one that an n-gram may see.
        filler: Token to put in a context where nothing precedes.
        vocab_size: Tokens `0..vocab_size - 1` are valid.
        dead_id: Written for tokens that carry no n-gram and for padding; None for filler ids.
        out_of_vocab_seen: bool `[]`, on the device.
    """

    out_of_vocab_seen: torch.Tensor
    _multipliers: torch.Tensor
    _order_of_head: torch.Tensor
    _sizes: torch.Tensor
    _offsets: torch.Tensor
    _ignored: torch.Tensor
    _token_map: torch.Tensor

    def __init__(self, hash: NgramHash) -> None:
        """Copy the constants of `hash`; they move with the module."""
        super().__init__()
        self._rule = rule = hash.device_rule()
        self.heads = hash.heads
        self.context_len = hash.context_len
        self.filler = hash.filler
        self.vocab_size = hash.vocab_size
        self.dead_id = hash.dead_id
        self._notes = hash.out_of_vocab == "raise"
        window = hash.context_len + 1
        padded = [[*powers, *[0] * (window - len(powers))] for powers in rule.multipliers]
        # Heads that join by XOR share their multipliers; the last head has them all.
        self._constant("_multipliers", padded[-1] if rule.xor else list(zip(*padded, strict=True)))
        self._constant("_order_of_head", [len(powers) - 2 for powers in rule.multipliers])
        self._constant("_sizes", hash.head_sizes)
        self._constant("_offsets", hash.head_offsets)
        self._constant("_ignored", rule.ignored)
        self._constant("_token_map", () if rule.token_map is None else rule.token_map.tolist())
        seen = torch.zeros((), dtype=torch.bool)
        self.register_buffer("out_of_vocab_seen", seen, persistent=False)

    def _constant(self, name: str, values: Sequence[int] | Sequence[Sequence[int]]) -> None:
        self.register_buffer(name, torch.tensor(values, dtype=torch.int64), persistent=False)

    def ids(
        self,
        tokens: torch.Tensor,
        query_start_loc: torch.Tensor | None = None,
        context: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Row ids of one step; the arguments of [`NgramHash.ids`][engram.hashing.NgramHash.ids].

        Args:
            tokens: Integers `[T]` or `[B, S]`.
            query_start_loc: Integers `[R + 1]`.
            context: Integers `[R, context_len]`, or `[context_len]` for one request.
            out: int64 `[*tokens.shape, heads]`.

        Returns:
            int64 `[*tokens.shape, heads]`: `out` where given.

        Raises:
            TypeError: An argument holds no integers, or `out` no int64.
            ValueError: Shapes do not fit together.
        """
        shape = (*tokens.shape, self.heads)
        flat, starts = self._requests(tokens, query_start_loc)
        requests = starts.numel() - 1
        history = self._history(context, requests)
        if out is not None and (out.dtype != torch.int64 or tuple(out.shape) != shape):
            kind = TypeError if out.dtype != torch.int64 else ValueError
            raise placed(
                kind(
                    f"out: {out.dtype} of shape {tuple(out.shape)}; ids are int64 of shape {shape}"
                )
            )
        raw, owned = self._windows(flat, starts, history)
        symbols, dead = self._symbols(raw, owned)
        ids = torch.remainder(self._mixes(symbols), self._sizes) + self._offsets
        if self.dead_id is not None:
            ids = ids.masked_fill(dead[:, None], self.dead_id)
        ids = ids.view(shape)
        return ids if out is None else out.copy_(ids)

    forward = ids

    def raise_if_seen(self) -> None:
        """Refuse the steps since the last call, if any held a token outside the vocabulary.

        Synchronises with the device.

        Raises:
            ValueError: A token or context entry was outside the vocabulary.
        """
        seen = bool(self.out_of_vocab_seen)
        self.out_of_vocab_seen.zero_()
        if seen:
            raise placed(
                ValueError(
                    "a token or context entry was outside the vocabulary of "
                    f"{self.vocab_size}: its row ids are not the model's"
                )
            )

    def _requests(
        self, tokens: torch.Tensor, query_start_loc: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Flat int64 tokens, and int64 starts."""
        _check_integers(tokens, "tokens")
        if query_start_loc is not None:
            _check_integers(query_start_loc, "query_start_loc")
            if tokens.ndim != 1 or query_start_loc.ndim != 1 or query_start_loc.numel() == 0:
                raise placed(
                    ValueError(
                        f"tokens of shape {tuple(tokens.shape)} with query_start_loc of shape "
                        f"{tuple(query_start_loc.shape)}; pass [T] and [R + 1]"
                    )
                )
            return tokens.long(), query_start_loc.long()
        if tokens.ndim not in (1, 2):
            raise placed(ValueError(f"tokens: shape is {tuple(tokens.shape)}; pass [T] or [B, S]"))
        batch, length = tokens.shape if tokens.ndim == 2 else (1, tokens.numel())
        starts = torch.arange(batch + 1, device=tokens.device) * length
        return tokens.reshape(-1).long(), starts

    def _history(self, context: torch.Tensor | None, requests: int) -> torch.Tensor | None:
        if context is None:
            return None
        _check_integers(context, "context")
        if context.ndim == 1 and requests == 1:
            context = context[None]
        if tuple(context.shape) != (requests, self.context_len):
            raise placed(
                ValueError(
                    f"context: shape is {tuple(context.shape)}; {requests} requests of a hash that "
                    f"looks {self.context_len} back have {(requests, self.context_len)}"
                )
            )
        return context.long()

    def _windows(
        self, tokens: torch.Tensor, starts: torch.Tensor, history: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Raw tokens `[T, window]`, current one first, and which of the T belong to a request."""
        positions = torch.arange(tokens.numel(), device=tokens.device)
        distances = torch.arange(self.context_len + 1, device=tokens.device)
        owned = positions < starts[-1]
        if starts.numel() == 1 or tokens.numel() == 0:
            filler = tokens.new_full((tokens.numel(), distances.numel()), self.filler)
            return filler, owned
        request = torch.searchsorted(starts[1:], positions, right=True)
        request = request.clamp(max=starts.numel() - 2)
        # Where each predecessor lies in its request; negative: in the context.
        place = (positions - starts[request])[:, None] - distances
        inside = tokens[(positions[:, None] - distances).clamp(min=0)]
        if history is None:
            return torch.where(place >= 0, inside, self.filler), owned
        column = (place + self.context_len).clamp(0, self.context_len - 1)
        return torch.where(place >= 0, inside, history[request[:, None], column]), owned

    def _symbols(self, raw: torch.Tensor, owned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What n-grams see `[T, window]`, and which tokens are dead `[T]`."""
        rule = self._rule
        outside = (raw < 0) | (raw >= self.vocab_size)
        if self._notes:
            self.out_of_vocab_seen.logical_or_((outside & owned[:, None]).any())
        tokens = raw
        if rule.ignored:
            tokens = tokens.masked_fill((raw[..., None] == self._ignored).any(-1), 0)
        dead = torch.zeros_like(outside)
        if rule.dead is not None:
            dead = tokens == rule.dead
        values = tokens
        if rule.token_map is not None:
            dead = dead | (raw >= self.vocab_size if rule.negatives_unmapped else outside)
            values = self._token_map[tokens.clamp(0, self.vocab_size - 1)]
            values = torch.where(tokens < 0, tokens, values)
        barrier = dead
        if rule.blank is not None:
            barrier = barrier | (tokens == rule.blank)
        if rule.negatives_blank:
            barrier = barrier | (tokens < 0)
        hidden = barrier[:, 0] | ~owned
        if rule.last is not None:
            barrier = barrier | (tokens == rule.last)
        seen = [values[:, 0].masked_fill(hidden, rule.fill)]
        for distance in range(1, raw.shape[1]):
            hidden = hidden | barrier[:, distance]
            seen.append(values[:, distance].masked_fill(hidden, rule.fill))
        return torch.stack(seen, 1), dead[:, 0] | ~owned

    def _mixes(self, symbols: torch.Tensor) -> torch.Tensor:
        """What the heads reduce, `[T, heads]`; products and sums wrap at 64 bits."""
        if not self._rule.xor:
            return (symbols[:, :, None] * self._multipliers).sum(1)
        products = symbols * self._multipliers
        mixes = [products[:, 0] ^ products[:, 1]]
        for distance in range(2, products.shape[1]):
            mixes.append(mixes[-1] ^ products[:, distance])
        return torch.stack(mixes, 1)[:, self._order_of_head]


def _check_integers(tensor: torch.Tensor, name: str) -> None:
    if tensor.dtype not in _INTEGERS:
        raise placed(TypeError(f"{name}: integers are needed, not {tensor.dtype}"))
