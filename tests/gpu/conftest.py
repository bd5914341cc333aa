"""Everything in this folder needs a CUDA device that answers, and is done in four minutes."""

from __future__ import annotations

import time

import pytest
import torch

LIMIT = 240.0
"""Seconds for the whole folder; `make test-gpu` also ends what hangs."""


@pytest.fixture(scope="session")
def begun():
    """When the first test of this folder began."""
    return time.monotonic()


@pytest.fixture(autouse=True)
def _needs_cuda(begun):
    if not torch.cuda.is_available():
        pytest.skip("CUDA does not answer")
    yield
    taken = time.monotonic() - begun
    if taken > LIMIT:
        pytest.fail(f"tests/gpu has taken {taken:.0f} s so far; {LIMIT:.0f} s are for all of it")
