"""A table of which a chosen share of the pages is in memory."""

import os
import sys
import tempfile
from pathlib import Path

import numpy as np

import engram

from . import bare
from .kernel import PAGE, FilePages, drop_pages, make_resident

CLUSTER = 4
"""Pages that are resident or missing together: single ones would take four times as long to read,
and a batch of random rows meets hardly any two of a cluster."""


def linked(directory: Path) -> tempfile.TemporaryDirectory:
    """A new directory beside this one, with hard links of all its files."""
    made = tempfile.TemporaryDirectory(prefix=f"{directory.name}-", dir=directory.parent)
    for path in directory.iterdir():
        os.link(path, Path(made.name, path.name))
    return made


class PartlyResident:
    """Which pages of a table's file are in memory.

    Args:
        info: A synthetic checkpoint with one table, stored as one piece.

    Attributes:
        pages: Asks the kernel.
        rows: Rows of the table.
        told: Which pages were in memory when the share was set up, one bool each.
        dropped: How many were dropped since then, each time counted.
    """

    def __init__(self, info) -> None:
        piece = info.tables[0].planes[0].pieces[0]
        self._path = info.files[0]
        self.pages = FilePages(self._path)
        self.rows = piece.rows
        self._offset = piece.offset
        self._row_bytes = info.tables[0].row_bytes
        self._order = np.random.default_rng(1).permutation(-(-self.pages.count // CLUSTER))
        engram.drop_cache(self._path)
        self.told = self.pages.resident()
        self.dropped = 0

    def make(self, share: float) -> None:
        """Makes this share of the pages resident, and no other."""
        clusters = np.zeros(len(self._order), bool)
        clusters[self._order[: round(share * len(clusters))]] = True
        wanted = np.repeat(clusters, CLUSTER)[: self.pages.count]
        resident = self.pages.resident()
        drop_pages(self._path, np.flatnonzero(resident & ~wanted))
        make_resident(self._path, np.flatnonzero(wanted & ~resident))
        self.told = self.pages.resident()
        self.dropped = 0
        if (self.told != wanted).mean() > 0.01:
            sys.exit(f"cannot keep {share:.0%} of {self._path} in memory: is memory short?")

    def _spans(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First and last page of each row; a row of these tables touches two at most."""
        first = (self._offset + wanted * self._row_bytes) // PAGE
        return first, (self._offset + (wanted + 1) * self._row_bytes - 1) // PAGE

    def first_rows(self, pages: np.ndarray) -> np.ndarray:
        """The first row that begins in each page, of the pages that have one."""
        rows = -((self._offset - pages * PAGE) // self._row_bytes)
        return rows[(rows >= 0) & (rows < self.rows)]

    def are_resident(self, wanted: np.ndarray) -> np.ndarray:
        """Rows all of whose pages are in memory."""
        first, last = self._spans(wanted)
        return self.told[first] & self.told[last]

    def are_missing(self, wanted: np.ndarray) -> np.ndarray:
        """Rows of which no page is in memory."""
        first, last = self._spans(wanted)
        return ~(self.told[first] | self.told[last])

    def missing(self, wanted: np.ndarray) -> np.ndarray:
        """The distinct rows that have to be read, wholly or in part, in the order of request."""
        return bare.distinct(wanted[~self.are_resident(wanted)])

    def pages_read(self, wanted: np.ndarray) -> np.ndarray:
        """The pages that have to be read for these rows, sorted."""
        pages = np.unique(np.concatenate(self._spans(wanted)))
        return pages[~self.told[pages]]

    def drop(self, pages: np.ndarray) -> None:
        """Drops pages that were read, sorted; nobody may map them."""
        drop_pages(self._path, pages)
        self.dropped += len(pages)

    def changes(self) -> dict[str, float]:
        """Shares: of the pages that were to stay those gone, of the dropped ones those left."""
        now = self.pages.resident()
        return {
            "gone": (self.told & ~now).sum() / max(1, self.told.sum()),
            "left": (now & ~self.told).sum() / max(1, self.dropped),
        }
