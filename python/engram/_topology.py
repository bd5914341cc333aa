"""What settings need to know of a server's topology."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any, cast

__all__ = ["ParallelSizes"]


@dataclasses.dataclass(frozen=True)
class ParallelSizes:
    """The three numbers that matter here of anything that describes a topology."""

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_elastic_ep: bool = False

    @classmethod
    def of(cls, parallel_config: object) -> ParallelSizes:
        if parallel_config is None:
            return cls()
        names = [field.name for field in dataclasses.fields(cls)]
        if isinstance(parallel_config, Mapping):
            given = cast("Mapping[str, Any]", parallel_config)
            found = {name: given[name] for name in names if name in given}
        else:
            config = cast("Any", parallel_config)
            found = {name: getattr(config, name) for name in names if hasattr(config, name)}
        if not found:
            raise TypeError(
                f"a parallel configuration has {', '.join(names)}; "
                f"{type(cast('Any', parallel_config)).__name__} has none of them"
            )
        for name in ("tensor_parallel_size", "data_parallel_size"):
            if name in found:
                found[name] = _positive(name, found[name])
        found["enable_elastic_ep"] = bool(found.get("enable_elastic_ep", False))
        return cls(**found)


def _positive(name: str, value: object) -> int:
    try:
        number = 0 if isinstance(value, bool) else operator.index(cast("Any", value))
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return number
