"""The bytes of a synthetic table: a pure function of seed, table, plane, row and column.

With splitmix64 as in `constants.splitmix64` and all arithmetic modulo 2**64::

    table_key = splitmix64(splitmix64(seed) + 16 * table + plane)
    row_key   = splitmix64(table_key + row)
    word[k]   = row_key * (splitmix64(k) | 1) & mask(dtype)
    byte[c]   = word[c // 8] >> (8 * (c % 8)) & 0xFF

`table` counts a checkpoint's tables from 0; `plane` is 0 for weight, 1 for scale, 2 for bias; `row`
is the id in the whole table, whatever tensor and file it is stored in. A row whose length is no
multiple of 8 ends inside its last word. One multiplication per 8 bytes makes this several times
faster than a disk, and every word depends on the whole row key, so a row that is wrong, shifted or
torn does not pass for another.

The mask clears the highest exponent bit of each element, which leaves every value of a float format
finite and below 2 in magnitude, as embeddings are: sums and products of rows stay comparable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .constants import GOLDEN_GAMMA, MASK64, MIX_1, MIX_2, splitmix64

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

PLANE_INDEX = {"weight": 0, "scale": 1, "bias": 2}
"""Plane number of each plane name."""

MASKS = {
    "BF16": 0xBFFF_BFFF_BFFF_BFFF,
    "F16": 0xBFFF_BFFF_BFFF_BFFF,
    "F32": 0xBFFF_FFFF_BFFF_FFFF,
    "F8_E4M3": 0xBFBF_BFBF_BFBF_BFBF,
    "F8_E8M0": 0x7F7F_7F7F_7F7F_7F7F,
}
"""Bits kept in each 8-byte word, by safetensors dtype; every bit for a dtype not listed."""


def _splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + np.uint64(GOLDEN_GAMMA)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(MIX_2)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True)
class Pattern:
    """Bytes of one plane of one table.

    Attributes:
        seed: Seed of the checkpoint.
        table: Index of the table in the checkpoint.
        plane: `"weight"`, `"scale"` or `"bias"`.
        dtype: Safetensors dtype of the plane's elements.
        row_bytes: Bytes per row.
    """

    seed: int
    table: int
    plane: str
    dtype: str
    row_bytes: int

    def rows(self, ids: ArrayLike) -> NDArray[np.uint8]:
        """Bytes of the rows `ids`.

        Args:
            ids: Row ids, integers of any shape.

        Returns:
            uint8 array of shape `[*ids.shape, row_bytes]`.
        """
        identifiers = np.asarray(ids)
        shape = (*identifiers.shape, self.row_bytes)
        key = splitmix64(
            (splitmix64(self.seed & MASK64) + 16 * self.table + PLANE_INDEX[self.plane]) & MASK64
        )
        row_keys = _splitmix64(identifiers.reshape(-1).astype(np.uint64) + np.uint64(key))
        word_count = -(-self.row_bytes // 8)
        columns = _splitmix64(np.arange(word_count, dtype=np.uint64)) | np.uint64(1)
        words = np.multiply.outer(row_keys, columns)
        mask = MASKS.get(self.dtype)
        if mask is not None:
            np.bitwise_and(words, np.uint64(mask), out=words)
        data = words.astype("<u8", copy=False).view(np.uint8)
        return np.ascontiguousarray(data[:, : self.row_bytes]).reshape(shape)
