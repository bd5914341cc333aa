"""Rows that begin at any byte, through a tiny cache.

Tables that begin at any byte are left to the tests without one: what a cache keeps depends on
where rows begin, which one table of rows at every byte of a page shows.
"""

from test_alignment import (
    test_one_table_whose_rows_begin_at_every_byte_of_a_page,  # noqa: F401
    test_rows_after_an_odd_tensor_are_not_aligned_to_their_elements,  # noqa: F401
    test_the_last_row_of_files_of_every_length,  # noqa: F401
)
