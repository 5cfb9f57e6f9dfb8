"""Command `isotrain conformance`; `isotrain.core.cli.app` declares its arguments."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from isotrain.core.cli.exit_codes import ExitCode
from isotrain.core.contracts.plan import split_backend
from isotrain.core.errors import IsotrainError, unknown_name
from isotrain.core.json_format import FORMAT, json_page
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.quantities import counted
from isotrain.core.reporting.tables import facts, paragraph, table
from isotrain.testing.launching import DEVICE_VARIABLE
from isotrain.testing.scorecard import Check, Outcome, Scorecard


def conformance(options: argparse.Namespace) -> ExitCode:
    """Checks a backend or a strategy, and prints the scorecard."""
    if not options.json:
        print(f"checking {options.checked['name']} in real runs: a minute or so", file=sys.stderr)
    os.environ[DEVICE_VARIABLE] = options.device
    card = scorecard_of(**options.checked, backend=options.backend, replicas=options.replicas)
    if options.json:
        print(json_page({"format": FORMAT, "scorecard": card.to_dict()}))
    else:
        sys.stdout.write(scorecard_text(card))
    return ExitCode.OK if card.passed else ExitCode.FINDINGS


def scorecard_of(
    name: str, options: Mapping[str, Any], *, backend: str | None, replicas: int
) -> Scorecard:
    """Scorecard of the backend or strategy `name`; with a `backend`, of the strategy on it.

    Raises:
        IsotrainError: The name is unknown, or a backend gets options.
    """
    plugins = plugin_manager()
    if backend is None and split_backend(name)[0] in plugins.backends.names():
        if options:
            raise IsotrainError(
                f"conformance: options are for a strategy, and {name!r} is a backend; received"
                f" {', '.join(options)}."
            )
        from isotrain.testing.backend import check_backend

        return check_backend(name, replicas=replicas)
    if backend is None and name not in plugins.strategies.names():
        names = [*plugins.backends.names(), *plugins.strategies.names()]
        raise IsotrainError(unknown_name("backend or strategy", name, names))
    from isotrain.testing.strategy import check_strategy

    return check_strategy(name, backend=backend, replicas=replicas, options=options)


def scorecard_text(card: Scorecard) -> str:
    """Table of all outcomes, followed by the full reason of each failure."""
    counts = Counter(outcome.verdict for outcome in card.outcomes)
    where = "" if card.kind == "backend" else f" on {card.backend}"
    totals = ", ".join(f"{counts[v]} {v}" for v in ("passed", "failed", "skipped"))
    parts = [
        paragraph(f"{card.kind} {card.name}{where}, {counted(card.replicas, 'replica')}: {totals}"),
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


def checks_text(listed: Iterable[Check]) -> str:
    """Table of checks with their meaning and the capabilities that they need."""
    rows = [(c.name, c.meaning, ", ".join(sorted(c.needs)) or "-") for c in listed]
    return table(("check", "what holds when it passes", "asked of backends with"), rows)
