"""Command `isotrain conformance`; `isotrain.core.cli.app` declares its arguments."""

from __future__ import annotations

import argparse
import sys

from isotrain.core.cli.exit_codes import ExitCode
from isotrain.core.contracts.plan import split_backend
from isotrain.core.errors import IsotrainError, unknown_name
from isotrain.core.json_format import FORMAT, json_page
from isotrain.core.plugins.manager import plugin_manager
from isotrain.testing.scorecard import Scorecard


def conformance(options: argparse.Namespace) -> ExitCode:
    """Checks a backend or a strategy, and prints the scorecard."""
    if not options.json:
        print(f"checking {options.name} in real runs: a minute or so", file=sys.stderr)
    card = scorecard_of(options.name, options.backend, options.replicas)
    if options.json:
        print(json_page({"format": FORMAT, "scorecard": card.to_dict()}))
    else:
        from isotrain.testing import text

        sys.stdout.write(text.scorecard(card))
    return ExitCode.OK if card.passed else ExitCode.FINDINGS


def scorecard_of(name: str, backend: str | None, replicas: int) -> Scorecard:
    """Scorecard of the backend or strategy `name`; with a `backend`, of the strategy on it."""
    plugins = plugin_manager()
    if backend is None and split_backend(name)[0] in plugins.backends.names():
        from isotrain.testing.backend import check_backend

        return check_backend(name, replicas=replicas)
    if backend is None and name not in plugins.strategies.names():
        names = [*plugins.backends.names(), *plugins.strategies.names()]
        raise IsotrainError(unknown_name("backend or strategy", name, names))
    from isotrain.testing.strategy import check_strategy

    return check_strategy(name, backend=backend, replicas=replicas)
