"""Text tables of scorecards and of lists of checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from isotrain.core.reporting.tables import facts, paragraph, table
from isotrain.testing.scorecard import Check, Outcome, Scorecard


def scorecard(card: Scorecard) -> str:
    """Table of all outcomes, followed by the full reason of each failure."""
    counts = Counter(outcome.verdict for outcome in card.outcomes)
    where = "" if card.kind == "backend" else f" on {card.backend}"
    totals = ", ".join(f"{counts[v]} {v}" for v in ("passed", "failed", "skipped"))
    parts = [
        paragraph(f"{card.kind} {card.name}{where}, {card.replicas} replicas: {totals}"),
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
    """Table of checks with their meaning and the capabilities that they need."""
    rows = [(c.name, c.meaning, ", ".join(sorted(c.needs)) or "-") for c in listed]
    return table(("check", "what holds when it passes", "asked of backends with"), rows)
