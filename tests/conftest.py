from __future__ import annotations

import pytest
from hypothesis import settings

from checkpoint_support import DEEPSEEK, IO_MODES, safetensors, tensor

# Machines that test are often busy; time limits are pytest's business.
settings.register_profile("engram", deadline=None)
settings.load_profile("engram")


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """A file whose tensor `embed.weight` is F32 [100, 7] and starts at an odd offset."""
    path = tmp_path_factory.mktemp("plain") / "model.safetensors"
    before = tensor("before", "U8", (3,))
    return safetensors(path, before, tensor("embed.weight", "F32", (100, 7)), residue=2)


@pytest.fixture(scope="session")
def two_planes(tmp_path_factory):
    """A file with one table of FP8 [100, 64] and its E8M0 scales [100, 2]."""
    path = tmp_path_factory.mktemp("two_planes") / "model.safetensors"
    weight = tensor(f"{DEEPSEEK}.weight", "F8_E4M3", (100, 64))
    between = tensor("between", "U8", (5,))
    scale = tensor(f"{DEEPSEEK}.scale", "F8_E8M0", (100, 2))
    return safetensors(path, weight, between, scale)


@pytest.fixture(params=IO_MODES)
def io(request):
    return request.param
