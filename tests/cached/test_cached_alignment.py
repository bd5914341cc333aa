"""Rows that begin at any byte, through a tiny cache."""

from test_alignment import *
