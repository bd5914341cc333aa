"""Outputs, through a tiny cache."""

from test_gather_out import *
