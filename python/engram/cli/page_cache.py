"""Keeps the page cache in the state that a measurement wants."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import engram

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

_TOLERATED = 0.002
"""Share of a table's pages that calls since the last drop may have made resident. Dropping looks at
every page of every file, which takes longer than a small batch and would be most of a run."""


class PageCache:
    """The page cache of one table's files.

    Args:
        gather: The table.
        release: Lets go of pages that other mappings in this process hold; such pages stay.

    Attributes:
        left_bytes: Most bytes that were still resident after any drop, by the kernel's answer.
        drops: How often the cache was dropped.
    """

    def __init__(self, gather: engram.FileGather, release: Callable[[], object]) -> None:
        self._files = gather.files
        self._pages = gather.residency().pages
        self._release = release
        self._fresh = True
        self._read = 0
        self.left_bytes = 0
        self.drops = 0

    def drop(self) -> None:
        """Drops every page."""
        self._release()
        self.left_bytes = max(self.left_bytes, engram.drop_cache(self._files))
        self.drops += 1
        self._read = 0
        self._fresh = False

    def cold(self, ids: NDArray[np.int64]) -> None:
        """Makes sure that hardly any row of a batch about to be read is resident."""
        if self._fresh or self._read > self._pages * _TOLERATED:
            self.drop()
        # Two pages for a row is more than most rows touch.
        self._read += 2 * ids.size

    def partly_resident(
        self,
        ids: NDArray[np.int64],
        share: float,
        read: Callable[[NDArray[np.int64]], object],
        generator: np.random.Generator,
    ) -> None:
        """Makes a random share of the rows of a batch resident, and no other.

        Args:
            ids: The batch.
            share: From 0 to 1.
            read: Brings rows into the page cache without engram's knowledge.
            generator: Chooses.
        """
        self.cold(ids)
        flat = ids.reshape(-1)
        read(generator.permutation(flat)[: round(share * flat.size)])


def bytes_read() -> int:
    """Bytes this process has made devices read; 0 where the system does not count them."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return 0
    fields = dict(line.split(": ") for line in text.splitlines())
    return int(fields.get("read_bytes", 0))
