"""Rows stored in several planes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Stored rows of a table with several planes, in request order.

    Planes are read by attribute or by name (`rows.scale`, `rows["scale"]`). `Rows` does not unpack,
    so that planes can be added.

    Attributes:
        weight: `[*ids.shape, columns]` stored values.
        scale: `[*ids.shape, blocks]` scales of blocks of columns; None where there are none.
        bias: `[*ids.shape, groups]` biases of groups of columns; None where there are none.
    """

    weight: Any
    scale: Any = None
    bias: Any = None

    def __getitem__(self, name: str) -> Any:
        """The plane called `name`.

        Raises:
            KeyError: There is no such plane.
        """
        plane = getattr(self, name, None) if name in _NAMES else None
        if plane is None:
            raise KeyError(f"no plane {name!r}; these rows have {self.keys()}")
        return plane

    def __iter__(self) -> Any:
        """Refuses to unpack.

        Raises:
            TypeError: Always.
        """
        raise TypeError("Rows does not unpack: read planes by name, e.g. rows.weight, rows.scale")

    def keys(self) -> list[str]:
        """Names of the planes present."""
        return [name for name in _NAMES if getattr(self, name) is not None]


_NAMES = ("weight", "scale", "bias")
