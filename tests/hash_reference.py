"""The three hash rules, one token at a time, in Python's unbounded integers.

Nothing is shared with the library: primes by trial division, one look at the whole history for
every predecessor of every token. `history` is a request's tokens up to and including the current
one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def is_prime(n: int) -> bool:
    return n >= 2 and all(n % d for d in range(2, int(n**0.5) + 1))


def primes_from(start: int):
    n = max(start, 2)
    while True:
        if is_prime(n):
            yield n
        n += 1


def signed(value: int) -> int:
    """The 64-bit two's complement reading of `value`."""
    value &= MASK
    return value - 2**64 if value >= 2**63 else value


def prefix_sums(sizes: list[int]) -> list[int]:
    return [sum(sizes[:head]) for head in range(len(sizes))]


def splitmix64(x: int) -> int:
    x = (x + GAMMA) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@dataclass
class Qwen:
    vocab_size: int
    eos: int
    ngram_size: int = 3
    heads: int = 8
    base: int = 20_000_000
    divisor: int = 128
    seed: int = 1234
    ple_index: int = 0
    multipliers: list[int] = field(init=False)
    sizes: list[int] = field(init=False)
    offsets: list[int] = field(init=False)

    def __post_init__(self) -> None:
        half = max(1, (2**63 - 1) // max(self.vocab_size, 1) // 2)
        base_seed = self.seed + 10007 * self.ple_index
        self.multipliers = [
            2 * (splitmix64((base_seed + GAMMA * (j + 1)) & MASK) % half) + 1
            for j in range(self.ngram_size)
        ]
        count = (self.ngram_size - 1) * self.heads
        primes = primes_from(self.base)
        for _ in range(self.ple_index * count):
            next(primes)
        self.sizes = [next(primes) for _ in range(count)]
        self.offsets = prefix_sums(self.sizes)
        self.rows = sum(self.sizes)
        self.padded_rows = -(-self.rows // self.divisor) * self.divisor

    @property
    def filler(self) -> int:
        return self.eos

    def config(self) -> dict[str, object]:
        return {
            "vocab_size": self.vocab_size,
            "ngram_size": self.ngram_size,
            "heads_per_ngram": self.heads,
            "ngram_vocab_size_base": self.base,
            "make_ngram_vocab_size_divisible_by": self.divisor,
            "seed": self.seed,
            "eos_token_id": self.eos,
        }

    def ids(self, history: list[int]) -> list[int]:
        symbols, crossed = [history[-1]], False
        for j in range(1, self.ngram_size):
            known = j < len(history) and not crossed
            symbols.append(history[-1 - j] if known else self.eos)
            crossed = crossed or symbols[-1] == self.eos
        return xor_ids(symbols, self.multipliers, self.sizes, self.offsets, self.heads)


def xor_ids(
    symbols: list[int], multipliers: list[int], sizes: list[int], offsets: list[int], heads: int
) -> list[int]:
    ids = []
    for order in range(2, len(multipliers) + 1):
        mix = 0
        for j in range(order):
            mix ^= signed(symbols[j] * multipliers[j])
        for column in range((order - 2) * heads, (order - 1) * heads):
            ids.append(mix % sizes[column] + offsets[column])
    return ids


@dataclass
class DeepSeek:
    layers: list[int]
    layer: int
    token_map: list[int]
    ngram: int = 4
    heads: int = 8
    starts: int | list[int] = 16_000_000
    pad: int = 2
    image: int | None = None
    seed: int = 0
    demo: bool = False

    def __post_init__(self) -> None:
        self.compressed = max(self.token_map) + 1
        bound = max(1, (2**63 - 1) // self.compressed // 2)
        rng = np.random.default_rng(self.seed + 10007 * self.layer)
        draws = rng.integers(0, bound, size=self.ngram, dtype=np.int64)
        self.multipliers = [int(draw) * 2 + 1 for draw in draws]
        starts = self.starts if isinstance(self.starts, list) else [self.starts] * (self.ngram - 1)
        seen: set[int] = set()
        for layer in self.layers:
            sizes: list[int] = []
            for start in starts:
                current = start - 1
                for _ in range(self.heads):
                    current = next(p for p in primes_from(current + 1) if p not in seen)
                    seen.add(current)
                    sizes.append(current)
            if layer == self.layer:
                self.sizes = sizes
        self.offsets = prefix_sums(self.sizes)
        self.rows = sum(self.sizes)

    @property
    def filler(self) -> int:
        return self.pad

    def config(self) -> dict[str, object]:
        if self.demo:
            return {
                "layer_ids": self.layers,
                "max_ngram_size": self.ngram,
                "n_head_per_ngram": self.heads,
                "engram_vocab_size": self.starts,
                "pad_id": self.pad,
                "seed": self.seed,
            }
        return {
            "engram_layer_ids": self.layers,
            "engram_max_ngram_size": self.ngram,
            "engram_n_heads": self.heads,
            "engram_vocab_size": self.starts,
            "engram_pad_token_id": self.pad,
            "engram_compressed_vocab_size": self.compressed,
        }

    def _symbol(self, token: int) -> int | None:
        if token == self.image:
            return None
        if 0 <= token < len(self.token_map):
            return self.token_map[token]
        return token if self.demo and token < 0 else None

    def ids(self, history: list[int]) -> list[int]:
        symbols, blocked = [], False
        for j in range(self.ngram):
            symbol = self._symbol(history[-1 - j]) if j < len(history) else None
            blocked = blocked or symbol is None
            symbols.append(self.token_map[self.pad] if blocked else symbol)
        return xor_ids(symbols, self.multipliers, self.sizes, self.offsets, self.heads)

    def is_dead(self, token: int) -> bool:
        return self._symbol(token) is None


@dataclass
class LongCat:
    vocab_size: int
    eos: int
    ratio: float = 78
    ngram: int = 4
    splits: int = 4
    variant: str = "hf"
    ignored: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        m = int(self.ratio * self.vocab_size)
        count = (self.ngram - 1) * self.splits
        self.sizes = [m + 2 * i + 1 for i in range(count)]
        self.offsets = prefix_sums(self.sizes)
        self.rows = sum(self.sizes)

    @property
    def filler(self) -> int:
        return self.eos

    def config(self) -> dict[str, object]:
        return {
            "vocab_size": self.vocab_size,
            "eos_token_id": self.eos,
            "ngram_vocab_size_ratio": self.ratio,
            "emb_neighbor_num": self.ngram,
            "emb_split_num": self.splits,
            "oe_ignored_token_ids": self.ignored,
        }

    def ids(self, history: list[int]) -> list[int]:
        tokens = [0 if token in self.ignored else token for token in history]
        ids = []
        for i, size in enumerate(self.sizes):
            total = 0
            for d in range(min(i // self.splits + 2, len(tokens))):
                token = tokens[-1 - d]
                stops = token == self.eos or (self.variant == "vllm" and token < 0)
                if stops and (d > 0 or self.variant == "vllm"):
                    break
                total += token * (pow(self.vocab_size, d, size) if d else 1)
            ids.append(signed(total) % size + self.offsets[i])
        return ids


Rule = Qwen | DeepSeek | LongCat


def sequence_ids(rule: Rule, tokens: list[int], before: list[int] | None = None) -> list[list[int]]:
    """Ids of every token of a request, `before` preceding it."""
    history = [*(before or []), *tokens]
    start = len(history) - len(tokens)
    return [rule.ids(history[: end + 1]) for end in range(start, len(history))]


def batch_ids(
    rule: Rule, requests: list[list[int]], contexts: list[list[int]] | None = None
) -> list[list[int]]:
    """Ids of a step's tokens, request after request."""
    contexts = contexts or [[] for _ in requests]
    return [
        row
        for tokens, before in zip(requests, contexts, strict=True)
        for row in sequence_ids(rule, tokens, before)
    ]


def starts(requests: list[list[int]]) -> list[int]:
    """`query_start_loc` of a step."""
    return [0, *np.cumsum([len(tokens) for tokens in requests], dtype=int).tolist()]


def flat(requests: list[list[int]]) -> list[int]:
    return [token for tokens in requests for token in tokens]
