"""Tries several strategies in one run: as if each had opened the session."""

from __future__ import annotations

from typing import Any

from plugins.broken_strategies import BROKEN

from isotrain.core.session import Session
from isotrain.core.strategy import Strategy
from isotrain.strategies.data_parallel import DataParallel
from isotrain.testing.strategy import TRIALS

STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy for strategy in (DataParallel, *BROKEN)
}


def try_all(session: Session, trial: int) -> dict[str, Any]:
    """A trial of every strategy that has to take it, in the same processes; a run's work."""
    start, found = session.read_state(), {}
    for name, strategy in STRATEGIES.items():
        tried = strategy()
        if all(inapplicable(tried) for inapplicable in TRIALS[trial].checks.values()):
            continue
        session.write_state(start)
        try:
            found[name] = _tried(session, tried, trial)
        except Exception as error:  # on every process alike
            found[name] = {"error": repr(error)}
    return found


def _tried(session: Session, strategy: Strategy, trial: int) -> dict[str, Any]:
    session._strategy = strategy
    session.seek(0)
    strategy.started(session.group)
    return TRIALS[trial].work(session)
