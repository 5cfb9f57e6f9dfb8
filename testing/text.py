"""Scorecards and the lists of checks as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from isotrain.core.reporting.tables import facts, paragraph, table
from isotrain.testing.scorecard import Check, Outcome, Scorecard


def scorecard(card: Scorecard) -> str:
    """Every outcome, and below the table the whole reason of each failure."""
    counts = Counter(outcome.verdict for outcome in card.outcomes)
    where = "" if card.kind == "backend" else f" on {card.backend}"
    told = ", ".join(f"{counts[v]} {v}" for v in ("passed", "failed", "skipped"))
    parts = [
        paragraph(f"{card.kind} {card.name}{where}, {card.replicas} replicas: {told}"),
        table(("check", "outcome", ""), map(_row, card.outcomes)),
        *(
            facts(f"{name} failed", [("", line) for line in reason.splitlines()])
            for name, reason in card.failures.items()
        ),
    ]
    return "\n".join(parts)


def _row(outcome: Outcome) -> tuple[str, str, str]:
    explained = outcome.reason if outcome.verdict == "skipped" else outcome.meaning
    return outcome.check, outcome.verdict, explained or ""


def checks(listed: Iterable[Check]) -> str:
    """Checks with what they mean and the capabilities that they need."""
    rows = [(c.name, c.meaning, ", ".join(sorted(c.needs)) or "-") for c in listed]
    return table(("check", "what holds when it passes", "asked of backends with"), rows)
