"""What `FileGather.verify` looked at and found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with one of a table's files.

    Attributes:
        kind: `"overwritten"`: modified in place, rows may be new bytes; `"replaced"`: another file
            lies at its path, `"removed"`: none does, and in both cases the old one is still
            served; `"truncated"`: shorter than it was; `"rotted"`: a row reads
            differently in two ways; `"unreadable"`: a row, or what the file is, cannot be read.
        path: The file.
        row: The row's id where it is one row's, else None.
        offset: Byte offset in the file where it is one place, else None.
        message: The whole sentence.
    """

    kind: str
    path: str
    row: int | None
    offset: int | None
    message: str


@dataclass(frozen=True, slots=True)
class Verification:
    """What a verification looked at and found.

    Attributes:
        rows: Rows read twice.
        ways: The two ways they were read in: how they are served, and another.
        problems: What is wrong, files first; at most 100 are listed.
        more: Problems found beyond those.
        shadowed: Name and file of every second copy of a tensor that the index places elsewhere.
            They are never read, and no problem.
    """

    rows: int
    ways: tuple[str, str]
    problems: tuple[Problem, ...]
    more: int
    shadowed: tuple[tuple[str, str], ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @classmethod
    def from_native(cls, found: dict[str, Any]) -> Verification:
        """Builds it from the dictionary the native half gives."""
        return cls(
            rows=found["rows"],
            ways=found["ways"],
            problems=tuple(Problem(*problem) for problem in found["problems"]),
            more=found["more"],
            shadowed=tuple(found["shadowed"]),
        )

    def __str__(self) -> str:
        ways = " and ".join(self.ways)
        lines = [f"{self.rows} rows read as {ways}: {'ok' if self.ok else 'PROBLEMS'}"]
        lines += [f"  {problem.kind}: {problem.message}" for problem in self.problems]
        if self.more:
            lines.append(f"  and {self.more} more")
        lines += [
            f"  ignored: a second copy of {tensor} in {file}" for tensor, file in self.shadowed
        ]
        return "\n".join(lines)
