from __future__ import annotations

import checkpoints
import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Checkpoints by variant and options, each written once."""
    made = {}

    def get(variant="qwen-fp8", **options):
        key = (variant, *sorted((name, str(value)) for name, value in options.items()))
        if key not in made:
            directory = tmp_path_factory.mktemp("checkpoint") / variant
            made[key] = checkpoints.make(directory, variant, **options)
        return made[key]

    return get


@pytest.fixture(scope="session")
def large(tmp_path_factory):
    """A table of 65 MiB."""
    rows = 65 * 2**20 // 320
    return checkpoints.make(tmp_path_factory.mktemp("large") / "c", "qwen-bf16", rows=rows)
