"""Tries several strategies in one run: as if each had opened the session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from plugins.broken_strategies import BROKEN

from isotrain.core.contracts.strategy import Strategy
from isotrain.core.running.session import Session
from isotrain.strategies.compressed import Compressed
from isotrain.strategies.data_parallel import DataParallel
from isotrain.strategies.elastic_averaging import ElasticAveraging
from isotrain.strategies.gossip import Gossip
from isotrain.strategies.hierarchical import Hierarchical
from isotrain.strategies.local_sgd import LocalSGD
from isotrain.testing.strategy import TRIALS

SOUND: dict[str, Callable[[], Strategy]] = {
    "data-parallel": DataParallel,
    "local-sgd": LocalSGD,
    "local-sgd, every step": functools.partial(LocalSGD, every=1),
    "gossip": Gossip,
    "compressed, topk": functools.partial(Compressed, "topk"),
    "compressed, powersgd": functools.partial(Compressed, "powersgd", native=False),
    "compressed, bf16": functools.partial(Compressed, "bf16", native=False),
    "hierarchical": Hierarchical,
    "elastic-averaging": ElasticAveraging,
}
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    **SOUND,
    **{strategy.name: strategy for strategy in BROKEN},
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
    strategy.planned(session.spec, session.plan)
    strategy.started(session.group)
    return TRIALS[trial].work(session)
