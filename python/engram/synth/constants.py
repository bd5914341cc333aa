"""Hash constants that a checkpoint stores or implies: multipliers, prime head sizes, offsets.

Two families hash token windows into prime-sized heads. Qwen4-Exp draws its multipliers from
splitmix64 and keeps handing out consecutive primes from one PLE layer to the next; DeepSeek's
Engram draws them from numpy's default generator and never reuses a prime. LongCat needs sizes only.
These are the few derivations a writer of checkpoints needs, in plain integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MASK64 = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
LAYER_PRIME = 10007
_INT64_MAX = (1 << 63) - 1

_SMALL_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
_WITNESSES_HOLD_BELOW = 3_317_044_064_679_887_385_961_981


def splitmix64(value: int) -> int:
    """One step of splitmix64: adds the golden gamma, then mixes; arithmetic modulo 2**64."""
    value = (value + GOLDEN_GAMMA) & MASK64
    value = ((value ^ (value >> 30)) * MIX_1) & MASK64
    value = ((value ^ (value >> 27)) * MIX_2) & MASK64
    return value ^ (value >> 31)


def is_prime(number: int) -> bool:
    """Deterministic Miller-Rabin; the witnesses are proven for every number below 3.3e24."""
    if number >= _WITNESSES_HOLD_BELOW:
        raise ValueError(f"{number} is too large for the proven witnesses")
    if number < 2:
        return False
    for prime in _SMALL_PRIMES:
        if number % prime == 0:
            return number == prime
    shift = ((number - 1) & (1 - number)).bit_length() - 1
    odd = (number - 1) >> shift
    for witness in _SMALL_PRIMES:
        power = pow(witness, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(shift - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def primes_from(start: int) -> Iterator[int]:
    """Every prime not below `start`, ascending, without end."""
    candidate = max(start, 2)
    while True:
        if is_prime(candidate):
            yield candidate
        candidate += 1


@dataclass(frozen=True)
class HashConstants:
    """What one table's hash needs: column order is (n-gram order, head).

    Attributes:
        multipliers: One odd integer per position of the token window.
        sizes: Rows addressed by each head, a prime.
        offsets: Exclusive prefix sums of `sizes`: the first row of each head.
    """

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """First row of each head."""
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    @property
    def total(self) -> int:
        """Rows that some id can address."""
        return sum(self.sizes)


def qwen_constants(
    *,
    tables: int,
    vocab_size: int,
    ngram_size: int,
    heads_per_ngram: int,
    vocab_size_base: int,
    seed: int,
) -> list[HashConstants]:
    """Constants of every PLE layer of a Qwen4-Exp model, in the order of its sorted layer ids.

    Args:
        tables: Number of PLE layers.
        vocab_size: `vocab_size` of the text config; bounds the multipliers.
        ngram_size: Longest n-gram.
        heads_per_ngram: Heads for each order from 2 to `ngram_size`.
        vocab_size_base: `ngram_vocab_size_base`; the first head takes the first prime not below it.
        seed: `seed` of the text config (1234 where it has none).
    """
    half = max(1, _INT64_MAX // max(vocab_size, 1) // 2)
    heads = (ngram_size - 1) * heads_per_ngram
    primes = primes_from(vocab_size_base)
    constants: list[HashConstants] = []
    for table in range(tables):
        base_seed = seed + LAYER_PRIME * table
        multipliers = tuple(
            2 * (splitmix64((base_seed + GOLDEN_GAMMA * (position + 1)) & MASK64) % half) + 1
            for position in range(ngram_size)
        )
        constants.append(HashConstants(multipliers, tuple(next(primes) for _ in range(heads))))
    return constants


def deepseek_constants(
    *,
    layer_ids: Sequence[int],
    compressed_vocab_size: int,
    max_ngram_size: int,
    heads: int,
    vocab_size: int,
) -> list[HashConstants]:
    """Constants of every Engram layer of a DeepSeek-V4.1 model, in the order of `layer_ids`.

    Args:
        layer_ids: `engram_layer_ids`, zero-based; each seeds its own generator.
        compressed_vocab_size: `engram_compressed_vocab_size`; bounds the multipliers.
        max_ngram_size: `engram_max_ngram_size`.
        heads: `engram_n_heads`, heads for each order from 2 to `max_ngram_size`.
        vocab_size: `engram_vocab_size`, where the search for primes starts.
    """
    bound = max(1, _INT64_MAX // compressed_vocab_size // 2)
    # Each order restarts at vocab_size but skips primes already handed out, which comes to the
    # same as one ascending run.
    primes = primes_from(vocab_size)
    constants: list[HashConstants] = []
    for layer in layer_ids:
        generator = np.random.default_rng(LAYER_PRIME * layer)
        drawn = generator.integers(0, bound, size=max_ngram_size, dtype=np.int64)
        multipliers = tuple(2 * int(value) + 1 for value in drawn)
        sizes = tuple(next(primes) for _ in range((max_ngram_size - 1) * heads))
        constants.append(HashConstants(multipliers, sizes))
    return constants


def longcat_sizes(*, ngram_vocab_size: int, max_ngram_size: int, splits: int) -> tuple[int, ...]:
    """Rows of each LongCat embedder: `ngram_vocab_size` + 1, + 3, + 5 ...

    Args:
        ngram_vocab_size: `ngram_vocab_size_ratio` times `vocab_size`.
        max_ngram_size: `emb_neighbor_num`.
        splits: `emb_split_num`, embedders for each order from 2 to `max_ngram_size`.
    """
    count = (max_ngram_size - 1) * splits
    return tuple(ngram_vocab_size + 2 * index + 1 for index in range(count))
