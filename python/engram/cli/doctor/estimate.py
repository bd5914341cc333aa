"""What the measured rates mean for a model: time per decode step, tokens per second of a prompt.

Every row is taken to be read anew. Real text repeats itself: of a prompt of 4,096 tokens two in
five rows are repeats, and are read once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from engram.cli.text import format_seconds, plural

from .finding import Finding

if TYPE_CHECKING:
    from .rates import Rates, Warm

PROMPT_TOKENS = 4096
STEP = 0.020
"""Seconds of a decode step that its rows are held against: fifty tokens per second."""

_MUCH = 0.1
"""Share of such a step that is worth a warning."""


@dataclass(frozen=True)
class Cost:
    """What the rows of a model's steps cost.

    Attributes:
        decode_seconds: A decode step of one token.
        decode_64_seconds: A decode step of 64 sequences.
        prefill_tokens_per_second: Of a prompt of 4,096 tokens.
    """

    decode_seconds: float
    decode_64_seconds: float
    prefill_tokens_per_second: float


def cold(rates: Rates, reads_per_token: int) -> Cost:
    """With nothing in memory: every row is a read, one per plane."""
    prompt = rates.seconds(PROMPT_TOKENS * reads_per_token)
    return Cost(
        rates.seconds(reads_per_token),
        rates.seconds(64 * reads_per_token),
        PROMPT_TOKENS / prompt,
    )


def warm(rates: Warm, rows_per_token: int) -> Cost:
    """With everything in memory."""
    return Cost(
        rates.step_seconds,
        max(rates.step_seconds, 64 * rows_per_token * rates.row_seconds),
        1 / (rows_per_token * rates.row_seconds),
    )


def estimate(
    rows_per_token: int, reads_per_token: int, device: Rates | None, memory: Warm | None
) -> list[Finding]:
    """One finding for decode steps, one for prompts; none where nothing was measured.

    Args:
        rows_per_token: Over all tables of the checkpoint.
        reads_per_token: Rows times the planes of each.
        device: Measured rates of the device, None if they were not.
        memory: Measured rates of memory, None if they were not.
    """
    costs = {
        "cold": None if device is None else cold(device, reads_per_token),
        "warm": None if memory is None else warm(memory, rows_per_token),
    }
    known = {state: cost for state, cost in costs.items() if cost is not None}
    if not known:
        return []
    numbers = {
        "rows_per_token": rows_per_token,
        "reads_per_token": reads_per_token,
        **{state: asdict(cost) for state, cost in known.items()},
    }
    decode = ", ".join(
        f"{format_seconds(cost.decode_seconds)} {state} ({cost.decode_seconds / STEP:.1%} of 20 ms)"
        for state, cost in known.items()
    )
    many = ", ".join(
        f"{format_seconds(cost.decode_64_seconds)} {state}" for state, cost in known.items()
    )
    rows = plural(rows_per_token, "row")
    found = f"{rows} per token: one token {decode}; 64 tokens {many}"
    slow = costs["cold"] is not None and costs["cold"].decode_seconds > _MUCH * STEP
    advice = (
        "keep the rows in memory (`engram prewarm`), or fetch them before the step that needs them "
        "(`FileGather.submit`, `Stage.prepare`)"
    )
    prefill = ", ".join(
        f"{cost.prefill_tokens_per_second:,.0f} tokens/s {state}" for state, cost in known.items()
    )
    return [
        Finding(
            "decode step", "warning" if slow else "ok", found, advice if slow else None, numbers
        ),
        Finding("prefill", "ok", f"{prefill}, without repeats", None, numbers),
    ]
