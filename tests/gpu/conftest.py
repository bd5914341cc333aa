"""Everything in this folder needs a CUDA device that answers."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("CUDA does not answer")
