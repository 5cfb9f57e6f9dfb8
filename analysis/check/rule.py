"""A rule of `isotrain check`, and the severity of its findings."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """Severity of a finding, most severe first."""

    ERROR = "error"
    """The run does not start, or does not get past its first step."""
    WARNING = "warning"
    """Results will differ between the targets, or the run is probably not what was meant."""
    NOTE = "note"
    """Worth knowing; it makes no difference between the targets, or only what was asked for."""


@dataclass(frozen=True)
class Rule:
    """A rule of the check, identified by its code.

    Attributes:
        code: Code, `ISO` and three digits; the first digit is the group.
        severity: Severity of its findings.
        title: The problem in one line.
        reason: Consequences in isotrain.
        fix: Advice on what to do.
    """

    code: str
    severity: Severity
    title: str
    reason: str
    fix: str

    @property
    def group(self) -> str:
        """The prefix of the code that identifies its group, such as `ISO1`."""
        return self.code[:4]
