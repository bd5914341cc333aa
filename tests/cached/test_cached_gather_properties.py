"""Any checkpoint, any ids, through a tiny cache."""

from test_gather_properties import *
