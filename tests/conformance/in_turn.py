"""Tries several strategies in one run: each opens a session of its own in the same processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plugins.broken_strategies import BROKEN

from isotrain.core.plugins.host import plugin_host
from isotrain.core.running.session import Session
from isotrain.testing.series import next_session
from isotrain.testing.strategy import TRIALS

Chosen = tuple[str, dict[str, Any]]
"""A strategy's name and options."""

SOUND: dict[str, Chosen] = {
    "data-parallel": ("data-parallel", {}),
    "local-sgd": ("local-sgd", {}),
    "local-sgd, every step": ("local-sgd", {"every": 1}),
    "gossip": ("gossip", {}),
    "compressed, topk": ("compressed", {"method": "topk"}),
    "compressed, powersgd": ("compressed", {"method": "powersgd", "native": False}),
    "compressed, bf16": ("compressed", {"method": "bf16", "native": False}),
    "hierarchical": ("hierarchical", {}),
    "elastic-averaging": ("elastic-averaging", {}),
    "sharded": ("sharded", {"bucket_megabytes": 0.002}),
    "sharded, stage 2": ("sharded", {"stage": 2, "bucket_megabytes": 0.002}),
    "sharded, stage 3": ("sharded", {"stage": 3, "bucket_megabytes": 0.002}),
    "sharded, hybrid": ("sharded", {"hybrid": True, "host_size": 1, "bucket_megabytes": 0.002}),
}
STRATEGIES: dict[str, Chosen] = {
    **SOUND,
    **{strategy.name: (strategy.name, {}) for strategy in BROKEN},
}


def try_all(session: Session, names: Sequence[str], trials: Sequence[int]) -> dict[str, Any]:
    """Every trial that a strategy has to take, of every strategy; a run's work.

    Returns:
        What a trial brought back, under `<name>: <trial>`; what it raised, as `error`.
    """
    host = plugin_host()
    adapter, found = host.backend(session.plan.backend), {}
    for number in trials:
        trial = TRIALS[number]
        for place, name in enumerate(names):
            tried = host.strategy(*STRATEGIES[name])
            if all(inapplicable(tried) for inapplicable in trial.checks.values()):
                continue
            spec = trial.spec(*STRATEGIES[name], adapter)
            with next_session(session, f"{number}-{place}", spec) as session:
                try:
                    found[f"{name}: {number}"] = trial.work(session)
                except Exception as error:  # on every process alike
                    found[f"{name}: {number}"] = {"error": repr(error)}
    return found
