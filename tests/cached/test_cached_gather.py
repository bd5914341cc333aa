"""Single gathers, through a tiny cache."""

from test_gather import *
