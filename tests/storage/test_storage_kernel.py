"""The device kernel that reads host memory, run by Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

PROGRAM = """
import sys
import numpy as np, torch
from engram.storage.kernel import copy_rows

rng = np.random.default_rng(0)
cases = 0
for row_bytes in (1, 8, 10, 90, 160, 264, 514):
    for rows, count in ((1, 1), (37, 33), (37, 0)):
        for shift in (0, 1, 2):
            memory = rng.integers(0, 256, rows * row_bytes + shift, dtype=np.uint8)
            table = memory[shift:].reshape(rows, row_bytes)
            ids = torch.from_numpy(rng.integers(-1, rows, count))
            expected = np.where((ids.numpy() >= 0)[:, None], table[ids.numpy()], 0)
            # Rows side by side with another plane, and alone.
            for width, start in ((row_bytes, 0), (row_bytes + 8, 8), (row_bytes + 3, 1)):
                out = torch.full((count, width), 0xAA, dtype=torch.uint8)
                part = out[:, start : start + row_bytes]
                copy_rows(table.ctypes.data, row_bytes, ids, part)
                where = (row_bytes, rows, count, shift, width)
                assert np.array_equal(part.numpy(), expected), where
                assert (out[:, :start] == 0xAA).all()
                assert (out[:, start + row_bytes :] == 0xAA).all()
                cases += 1
print(cases)
"""


LOOKUP = """
import sys
sys.path.insert(0, {here!r})
import numpy as np, torch
import engram
from checkpoints import check_rows, some_ids
from engram.storage.hosted import PinnedStorage

# As with a device: the memory counts as registered, and ids as lying on one.
engram.HostBuffer.is_pinned = property(lambda self: True)
info = engram.synth.load({path!r})
table = info.tables[0]
with engram.FileGather(info.directory, 0) as gather:
    storage = PinnedStorage(gather.info)
    storage.load(gather)
ids = torch.from_numpy(some_ids(table.rows, 40)).reshape(5, 8)
rows = storage._lookup_on_device(ids, None, None)
assert rows.weight.dtype == torch.float8_e4m3fn and rows.weight.shape == (5, 8, 256)
check_rows(rows, table, ids.numpy())
ids[2, 3] = -1
out = torch.full((5, 8, storage.row_bytes), 7, dtype=torch.uint8)
assert storage._lookup_on_device(ids, out, -1) is out
check_rows(engram.Rows(out[..., :256].numpy(), out[..., 256:].numpy()), table, ids.numpy())
for wrong, kind in (
    ((ids, None, None), IndexError),
    ((torch.tensor([table.rows]), None, None), IndexError),
    ((ids.float(), None, -1), TypeError),
    ((ids, out[..., :-1], -1), ValueError),
    ((ids, out.float(), -1), TypeError),
    ((ids, np.zeros(3), -1), TypeError),
):
    try:
        storage._lookup_on_device(*wrong)
    except kind as error:
        print(error)
    else:
        raise SystemExit(f"{{wrong}} was accepted")
"""


@pytest.fixture(scope="module")
def said(checkpoint):
    """What both programs print, run in one process: importing Triton takes seconds."""
    info = checkpoint("deepseek-fp8")
    lookup = LOOKUP.format(here=str(Path(__file__).parent), path=str(info.directory))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + lookup],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return info, done.stdout.splitlines()


def test_rows_of_every_width_and_alignment_are_copied(said):
    assert said[1][0] == str(7 * 3 * 3 * 3)


def test_a_look_up_on_a_device_reads_host_memory(said):
    info, lines = said
    assert "row id -1 at position 19" in lines[1]
    assert f"row id {info.tables[0].rows} at position 0" in lines[2]
    assert len(lines) == 7, "six wrong calls, each refused"


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engram.storage.kernel import _copy_rows_kernel

words = {"table": "i64", "ids": "*i64", "count": "i32", "row_words": "i32", "out_stride": "i32"}
sizes = {"rows": 16, "words": 32}
every = ((), ("count",), ("row_words", "out_stride"))
for element, specialised in (("u8", every), ("i16", every[:1]), ("i32", every[:1]), ("i64", every)):
    for ones in specialised:
        # Numbers that are 1 are known to the compiler.
        signature = {**words, "out": f"*{element}"}
        signature |= dict.fromkeys([*ones, *sizes], "constexpr")
        order = ("table", "ids", "out", "count", "row_words", "out_stride", "rows", "words")
        source = ASTSource(
            fn=_copy_rows_kernel,
            signature={name: signature[name] for name in order},
            constexprs={**sizes, **dict.fromkeys(ones, 1)},
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        assert "ld.global" in compiled.asm["ptx"]
print("compiled")
"""


def test_the_kernel_compiles_for_a_device_that_is_not_here(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        timeout=200,
    )
    if "ModuleNotFoundError" in done.stderr or "ImportError" in done.stderr:
        pytest.skip("this Triton cannot compile for a device that is not here")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "compiled"


def test_the_kernel_runs_on_the_device_of_the_ids(monkeypatch):
    import torch

    from engram.storage import kernel

    entered = []
    monkeypatch.setattr(torch.cuda, "device", entered.append)
    kernel._on(torch.device("cuda", 1))
    with kernel._on(torch.device("cpu")):
        pass
    assert entered == [torch.device("cuda", 1)]
