"""What a check found, as records that print, travel as JSON and show themselves in a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from isotrain.analysis.check.codes import RULES, is_silenced
from isotrain.analysis.check.rule import Rule, Severity
from isotrain.analysis.check.subject import Hit
from isotrain.core.errors import first_of
from isotrain.core.json_format import FORMAT, json_page
from isotrain.core.reporting.html import html_table

_SHOWN_LAYERS = 5


@dataclass(frozen=True)
class Finding:
    """One thing that a check found.

    Attributes:
        code: Stable, such as `ISO101`.
        severity: `error`, `warning` or `note`.
        field: Of the spec, or `backend` or `replicas`.
        title: What was found, in one line.
        detail: The numbers and names of this case.
        layers: Of the model, where it is about some, as `name (class)`.
        targets: Those it holds for, as `NAME[:COLLECTIVE]@REPLICAS`.
        reason: What follows from it.
        fix: What to do.
    """

    code: str
    severity: Severity
    field: str
    title: str
    detail: str
    layers: tuple[str, ...]
    targets: tuple[str, ...]
    reason: str
    fix: str

    @property
    def case(self) -> str:
        """Detail and layers in one line; of many layers, the first."""
        if not self.layers:
            return self.detail
        return f"{self.detail}: {first_of(self.layers, _SHOWN_LAYERS)}"

    def to_dict(self) -> dict[str, Any]:
        """The finding as plain JSON values."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }


@dataclass(frozen=True)
class CheckResult:
    """Everything a check found; iterates over its findings, the most severe first.

    Attributes:
        spec: The spec's name.
        targets: What was asked about, as `NAME[:COLLECTIVE]@REPLICAS`.
        measured: Whether the data was loaded and the model built.
        findings: The most severe first, then by code.
        silenced: Findings left out on request, by code.
    """

    spec: str
    targets: tuple[str, ...]
    measured: bool
    findings: tuple[Finding, ...]
    silenced: Mapping[str, int]

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def with_severity(self, severity: Severity) -> tuple[Finding, ...]:
        """The findings of one severity."""
        return tuple(found for found in self.findings if found.severity == severity)

    def to_dict(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        return {
            "format": FORMAT,
            "spec": self.spec,
            "targets": list(self.targets),
            "measured": self.measured,
            "counts": {str(severity): len(self.with_severity(severity)) for severity in Severity},
            "silenced": dict(self.silenced),
            "findings": [found.to_dict() for found in self.findings],
        }

    def to_json(self) -> str:
        """The result as JSON text."""
        return json_page(self.to_dict())

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        if not self.findings:
            return f"<p>{html.escape(self.spec)}: nothing found</p>"
        columns = ("code", "severity", "field", "what", "targets", "why", "what to do")
        return html_table(columns, map(_row, self.findings))


def _row(found: Finding) -> tuple[str, ...]:
    what = f"{found.title}: {found.case}"
    where = ", ".join(found.targets)
    return (found.code, found.severity, found.field, what, where, found.reason, found.fix)


def merge_hits(hits: Iterable[Hit], targets: Sequence[str]) -> list[Finding]:
    """Makes findings of hits: equal ones become one that holds for all of their targets.

    Args:
        hits: In any order.
        targets: Every target, in the order in which they are named.
    """
    groups: dict[tuple[Any, ...], set[str]] = {}
    for hit in hits:
        key = (hit.code, hit.field, hit.detail, hit.layers)
        groups.setdefault(key, set()).update(hit.targets)
    found = [
        _finding(RULES[code], field, detail, layers, [t for t in targets if t in where])
        for (code, field, detail, layers), where in groups.items()
    ]
    order = list(Severity)
    return sorted(found, key=lambda each: (order.index(each.severity), each.code))


def _finding(
    rule: Rule, field: str, detail: str, layers: tuple[str, ...], targets: Sequence[str]
) -> Finding:
    return Finding(
        code=rule.code,
        severity=rule.severity,
        field=field,
        title=rule.title,
        detail=detail,
        layers=layers,
        targets=tuple(targets),
        reason=rule.reason,
        fix=rule.fix,
    )


def split_silenced(
    findings: Iterable[Finding], silenced: Iterable[str]
) -> tuple[tuple[Finding, ...], dict[str, int]]:
    """Splits findings into those that stay, and how many were silenced by code."""
    codes = tuple(silenced)
    kept: list[Finding] = []
    counts: dict[str, int] = {}
    for found in findings:
        if is_silenced(found.code, codes):
            counts[found.code] = counts.get(found.code, 0) + 1
        else:
            kept.append(found)
    return tuple(kept), dict(sorted(counts.items()))
