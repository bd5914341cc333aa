"""Tickets, through a tiny cache."""

from test_ticket import *
