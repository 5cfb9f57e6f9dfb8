"""Results of a check, with conversions to JSON, to text, and to a table for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from isotrain.analysis.check.codes import RULES, is_silenced
from isotrain.analysis.check.rule import Rule, Severity
from isotrain.analysis.check.subject import Hit
from isotrain.core.errors import first_of
from isotrain.core.json_format import FORMAT, json_page
from isotrain.core.reporting.html import html_table
from isotrain.core.reporting.tables import facts, paragraph

_SHOWN_LAYERS = 5


@dataclass(frozen=True)
class Finding:
    """One finding of a check.

    Attributes:
        code: Stable code of the rule, such as `ISO101`.
        severity: Severity, `error`, `warning` or `note`.
        field: Spec field, or `backend` or `replicas`.
        title: The problem in one line.
        detail: Numbers and names of this case.
        layers: Layers it is about, each `name (class)`; empty if it is not about layers.
        targets: Targets it applies to, each `NAME[:COLLECTIVE]@REPLICAS`.
        reason: Consequences of the problem.
        fix: Advice on what to do.
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
        """Detail and the first layers in one line."""
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
    """All results of a check; iterates over its findings, most severe first.

    Attributes:
        spec: Spec name.
        targets: Requested targets, each `NAME[:COLLECTIVE]@REPLICAS`.
        measured: Whether the data was loaded and the model built.
        findings: Findings, most severe first, then by code.
        silenced: Number of silenced findings, by code.
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
        return tuple(finding for finding in self.findings if finding.severity == severity)

    def to_dict(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        return {
            "format": FORMAT,
            "spec": self.spec,
            "targets": list(self.targets),
            "measured": self.measured,
            "counts": {str(severity): len(self.with_severity(severity)) for severity in Severity},
            "silenced": dict(self.silenced),
            "findings": [finding.to_dict() for finding in self.findings],
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


def _row(finding: Finding) -> tuple[str, ...]:
    what = f"{finding.title}: {finding.case}"
    where = ", ".join(finding.targets)
    return (finding.code, finding.severity, finding.field, what, where, finding.reason, finding.fix)


def merge_hits(hits: Iterable[Hit], targets: Sequence[str]) -> list[Finding]:
    """Merges hits that differ only in their targets, which are listed in the order of `targets`."""
    groups: dict[tuple[Any, ...], set[str]] = {}
    for hit in hits:
        key = (hit.code, hit.field, hit.detail, hit.layers)
        groups.setdefault(key, set()).update(hit.targets)
    findings = [
        _finding(RULES[code], field, detail, layers, [t for t in targets if t in where])
        for (code, field, detail, layers), where in groups.items()
    ]
    order = list(Severity)
    return sorted(findings, key=lambda each: (order.index(each.severity), each.code))


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
    """Splits findings into those kept, and the number of silenced ones by code."""
    codes = tuple(silenced)
    kept: list[Finding] = []
    counts: dict[str, int] = {}
    for finding in findings:
        if is_silenced(finding.code, codes):
            counts[finding.code] = counts.get(finding.code, 0) + 1
        else:
            kept.append(finding)
    return tuple(kept), dict(sorted(counts.items()))


def result_text(checked: CheckResult) -> str:
    """The findings, most severe first, and their counts at the end."""
    blocks = [
        _block(list(same), len(checked.targets))
        for _, same in groupby(checked.findings, key=lambda finding: finding.code)
    ]
    return "\n".join([*blocks, paragraph(_summary(checked))])


def _block(same: Sequence[Finding], targets: int) -> str:
    """The findings of one code: its cases, then reason and fix."""
    first = same[0]
    rows = [row for finding in same for row in _case_rows(finding, targets)]
    rows += [("why", first.reason), ("fix", first.fix)]
    return facts(f"{first.code} {first.severity}: {first.title}", rows)


def _case_rows(finding: Finding, targets: int) -> Iterator[tuple[str, str]]:
    for index, line in enumerate(finding.case.splitlines()):
        yield "" if index else finding.field, line
    where = ", ".join(finding.targets)
    yield "on", f"all: {where}" if 1 < targets == len(finding.targets) else where


def _summary(checked: CheckResult) -> str:
    counts = [
        f"{number} {severity}{'' if number == 1 else 's'}"
        for severity in Severity
        if (number := len(checked.with_severity(severity)))
    ]
    parts = [
        f"{checked.spec} on {', '.join(checked.targets)}: {', '.join(counts) or 'nothing found'}"
    ]
    if checked.silenced:
        parts.append(f"silenced: {', '.join(checked.silenced)}")
    if not checked.measured:
        parts.append("data and model were not looked at (--no-measure)")
    return "; ".join(parts)
