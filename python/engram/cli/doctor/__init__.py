"""`engram doctor`: what this machine and a checkpoint allow, and what to do about it."""

from .command import doctor

__all__ = ["doctor"]
