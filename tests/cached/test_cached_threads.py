"""Many threads, through a tiny cache."""

from test_threads import *
