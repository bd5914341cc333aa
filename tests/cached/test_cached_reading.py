"""The first and last rows of tables and files, through a tiny cache."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "faults"))

from test_reading import (
    test_a_table_that_ends_with_its_file,
    test_first_and_last_rows_wherever_table_and_file_end,
)

__all__ = [
    "test_a_table_that_ends_with_its_file",
    "test_first_and_last_rows_wherever_table_and_file_end",
]
