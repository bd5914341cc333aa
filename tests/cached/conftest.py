"""The tests of gathers once more, through a cache of thirteen rows that come and go."""

from __future__ import annotations

import re

import pytest

import engram


@pytest.fixture(autouse=True, scope="module")
def tiny_cache():
    """Gathers have the smallest budget there can be, unless they ask for another."""
    plain = engram.FileGather.__init__

    def initialise(self, *arguments, **options):
        try:
            plain(self, *arguments, **{"cache_bytes": 1, **options})
        except ValueError as error:
            least = re.search(r"the minimum is (\d+) bytes", str(error))
            if least is None:
                raise
            plain(self, *arguments, **{"cache_bytes": int(least[1]), **options})
            assert self.stats()["cache"]["capacity"] in (13, 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engram.FileGather, "__init__", initialise)
        yield
