# Triton is a language of its own, which a type checker of Python cannot follow.
# pyright: basic, reportArgumentType=false
"""Rows out of host memory by a device kernel: the table is read through its address, in place.

Host memory that is registered with CUDA has one address for both sides, so the kernel is given the
number. Each program copies some rows in the widest words that the addresses allow; rows of zeros
are written where the id says so.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["copy_rows"]

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_ROWS_PER_PROGRAM = 16


@triton.jit
def _copy_rows_kernel(
    table,
    ids,
    out,
    count,
    row_words,
    out_stride,
    rows: tl.constexpr,
    words: tl.constexpr,
):
    # The compiler looks annotations up, so only those of its own may stand here.
    position = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    inside = position < count
    row = tl.load(ids + position, mask=inside, other=-1)
    held = row >= 0
    source = table.to(tl.pointer_type(out.dtype.element_ty)) + row * row_words
    target = out + position * out_stride
    for first in range(0, row_words, words):
        column = first + tl.arange(0, words)
        in_row = column < row_words
        value = tl.load(
            source[:, None] + column[None, :], mask=held[:, None] & in_row[None, :], other=0
        )
        tl.store(target[:, None] + column[None, :], value, mask=inside[:, None] & in_row[None, :])


def copy_rows(address: int, row_bytes: int, ids: Any, out: Any) -> None:
    """Copies rows of host memory to a device.

    Args:
        address: Of row 0; registered with CUDA (or any host address, for Triton's interpreter).
        row_bytes: Bytes of a row; rows follow one another without gaps.
        ids: int64 `[ids]` on the device; -1 gives a row of zeros. Not checked.
        out: uint8 `[ids, row_bytes]` on the device; the last dimension without gaps.
    """
    count = ids.numel()
    if count == 0:
        return
    width = math.gcd(8, address, row_bytes, out.data_ptr(), out.stride(0) if count > 1 else 8)
    word = _WORDS[width]
    row_words = row_bytes // width
    words = min(64, triton.next_power_of_2(row_words))
    with _on(ids.device):
        _copy_rows_kernel[(triton.cdiv(count, _ROWS_PER_PROGRAM),)](
            address,
            ids,
            out.view(word),
            count,
            row_words,
            out.stride(0) // width if count > 1 else row_words,
            rows=_ROWS_PER_PROGRAM,
            words=words,
        )


def _on(device: Any) -> Any:
    """Triton launches on the current device, which need not be the one that the ids are on."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
