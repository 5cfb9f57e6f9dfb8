"""A rule of the check, and how much its findings matter."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How much a finding matters, most first."""

    ERROR = "error"
    """The run does not start, or does not get past its first step."""
    WARNING = "warning"
    """Results will differ between the targets, or the run is probably not what was meant."""
    NOTE = "note"
    """Worth knowing; it makes no difference between the targets, or only what was asked for."""


@dataclass(frozen=True)
class Rule:
    """What one code stands for.

    Attributes:
        code: `ISO` and three digits; the first is the group's.
        severity: Of its findings.
        title: What was found, in one line.
        reason: What follows from it in isotrain.
        fix: What to do.
    """

    code: str
    severity: Severity
    title: str
    reason: str
    fix: str

    @property
    def group(self) -> str:
        """The part of the code that its whole group shares."""
        return self.code[:4]
