from __future__ import annotations

import pytest
from process_group import Processes


@pytest.fixture(scope="session")
def processes(tmp_path_factory):
    """Four processes for all tests of this folder."""
    pool = Processes(4, tmp_path_factory.mktemp("group"))
    yield pool
    pool.close()
