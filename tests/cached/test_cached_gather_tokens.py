"""Hashing and gathering in one call, through a tiny cache."""

from test_gather_tokens import *
