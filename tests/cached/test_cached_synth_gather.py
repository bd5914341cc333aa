"""Every row of every layout, through a tiny cache."""

from test_synth_gather import test_every_row_of_every_layout

__all__ = ["test_every_row_of_every_layout"]
