"""A check's result as terminal text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from isotrain.analysis.check.findings import CheckResult, Finding
from isotrain.analysis.check.rule import Severity
from isotrain.core.reporting.tables import facts, paragraph


def result(found: CheckResult) -> str:
    """The findings, most severe first, and their counts at the end."""
    blocks = [
        _block(list(same), len(found.targets))
        for _, same in groupby(found.findings, key=lambda finding: finding.code)
    ]
    return "\n".join([*blocks, paragraph(_summary(found))])


def _block(same: Sequence[Finding], targets: int) -> str:
    """The findings of one code: its cases, then reason and fix."""
    first = same[0]
    rows = [row for found in same for row in _rows(found, targets)]
    rows += [("why", first.reason), ("fix", first.fix)]
    return facts(f"{first.code} {first.severity}: {first.title}", rows)


def _rows(found: Finding, targets: int) -> Iterator[tuple[str, str]]:
    name = found.field
    for line in found.case.splitlines():
        yield name, line
        name = ""
    where = ", ".join(found.targets)
    yield "on", f"all: {where}" if 1 < targets == len(found.targets) else where


def _summary(result: CheckResult) -> str:
    counts = [
        f"{number} {severity}{'' if number == 1 else 's'}"
        for severity in Severity
        if (number := len(result.with_severity(severity)))
    ]
    parts = [
        f"{result.spec} on {', '.join(result.targets)}: {', '.join(counts) or 'nothing found'}"
    ]
    if result.silenced:
        parts.append(f"silenced: {', '.join(result.silenced)}")
    if not result.measured:
        parts.append("data and model were not looked at (--no-measure)")
    return "; ".join(parts)
