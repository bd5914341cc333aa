from __future__ import annotations

import pytest
from faulty_filesystem import FaultyFilesystem, why_not

from engram import synth

ROWS = 20_000


@pytest.fixture(scope="session")
def table(tmp_path_factory):
    """A checkpoint of one table of 160-byte rows in two files, and another table beside it."""
    directory = tmp_path_factory.mktemp("faults") / "checkpoint"
    return synth.write(
        directory, "qwen", dtype="fp8", rows=ROWS, layers=2, layout=synth.Layout(table_files=2)
    )


@pytest.fixture
def fresh(tmp_path):
    """As `table`, for tests that damage it."""
    return synth.write(
        tmp_path / "checkpoint",
        "qwen",
        dtype="fp8",
        rows=ROWS,
        layers=2,
        layout=synth.Layout(table_files=2),
    )


def mounted(source, mountpoint):
    if reason := why_not():
        pytest.skip(reason)
    try:
        return FaultyFilesystem(source, mountpoint)
    except OSError as error:
        pytest.skip(f"no FUSE here: {error}")


@pytest.fixture
def disk(table, tmp_path):
    """The checkpoint on a filesystem that fails as told."""
    with mounted(table.directory, tmp_path / "mounted") as filesystem:
        yield filesystem


@pytest.fixture
def small_disk(tmp_path):
    """A checkpoint with one table of some hundred rows on such a filesystem."""
    synth.write(tmp_path / "small", "qwen", dtype="fp8", rows=1000)
    with mounted(tmp_path / "small", tmp_path / "mounted") as filesystem:
        yield filesystem
