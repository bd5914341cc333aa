"""Several tables, through a tiny cache."""

from test_table_set import *
