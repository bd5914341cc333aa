"""What a check of the doctor says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "warning", "problem"]

_ORDER: tuple[Verdict, ...] = ("ok", "warning", "problem")
"""From well to grave."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's.

    Attributes:
        name: What was looked at; the same on every machine.
        verdict: `"ok"`; `"warning"`: works, and costs something; `"problem"`: does not work.
        found: What is there.
        advice: What to do, where there is something to do.
        data: The numbers behind `found`, for machines.
    """

    name: str
    verdict: Verdict
    found: str
    advice: str | None = None
    data: dict[str, Any] = field(default_factory=lambda: {})

    def as_json(self) -> dict[str, Any]:
        """JSON values; every key is part of the command's interface."""
        return {
            "name": self.name,
            "verdict": self.verdict,
            "found": self.found,
            "advice": self.advice,
            "data": self.data,
        }


def worst(findings: list[Finding]) -> Verdict:
    """The gravest of the verdicts; `"ok"` for none."""
    return _ORDER[max((_ORDER.index(finding.verdict) for finding in findings), default=0)]
