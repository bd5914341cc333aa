"""Hashing and gathering in one call, through a tiny cache."""

from test_gather_tokens import (
    checkpoint,
    test_dead_tokens_are_zeros_without_a_read,
    test_long_steps,
    test_no_tokens_give_no_rows,
    test_refusals_of_either_half_reach_the_caller,
    test_rows_are_those_of_the_ids,
    test_rows_come_as_stored,
)

__all__ = [
    "checkpoint",
    "test_dead_tokens_are_zeros_without_a_read",
    "test_long_steps",
    "test_no_tokens_give_no_rows",
    "test_refusals_of_either_half_reach_the_caller",
    "test_rows_are_those_of_the_ids",
    "test_rows_come_as_stored",
]
