"""Tries several strategies in one run: each has sessions of its own in the same processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plugins.broken_strategies import BROKEN

from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.session.session import Session
from isotrain.testing.strategy import STRATEGY_RUNS

Chosen = tuple[str, dict[str, Any]]
"""A strategy's name and options."""

SOUND: dict[str, Chosen] = {
    "data-parallel": ("data-parallel", {}),
    "local-sgd": ("local-sgd", {}),
    "local-sgd, every step": ("local-sgd", {"every": 1}),
    "gossip": ("gossip", {}),
    "compressed, topk": ("compressed", {"method": "topk"}),
    "compressed, powersgd": ("compressed", {"method": "powersgd", "native": False}),
    "compressed, fp16": ("compressed", {"method": "fp16", "native": False}),
    "compressed, bf16": ("compressed", {"method": "bf16", "native": False}),
    "hierarchical": ("hierarchical", {}),
    "elastic-averaging": ("elastic-averaging", {}),
    "diloco": ("diloco", {"every": 8}),
    "diloco, streaming": (
        "diloco",
        {"every": 8, "bits": 4, "fragments": 2, "overlap": 3},
    ),
    "sharded": ("sharded", {"bucket_megabytes": 0.002}),
    "sharded, stage 2": ("sharded", {"stage": 2, "bucket_megabytes": 0.002}),
    "sharded, stage 3": ("sharded", {"stage": 3, "bucket_megabytes": 0.002}),
    "sharded, hybrid": ("sharded", {"hybrid": True, "host_size": 1, "bucket_megabytes": 0.002}),
    "pipeline": ("pipeline", {}),
    "pipeline, 2-1-1": ("pipeline", {"stages": [2, 1, 1]}),
    "pipeline, 2bw": ("pipeline", {"schedule": "2bw"}),
    "pipeline, pipedream": ("pipeline", {"schedule": "pipedream"}),
    "tensor": ("tensor", {}),
}
STRATEGIES: dict[str, Chosen] = {
    **SOUND,
    **{strategy.name: (strategy.name, {}) for strategy in BROKEN},
}


def specs(names: Sequence[str], backend: str, trials: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Specs of every trial of every strategy, by `<trial>: <name>`."""
    host, found = plugin_manager(), {}
    adapter = host.backend(backend)
    for number in trials:
        for name in names:
            tried = host.strategy(*STRATEGIES[name])
            if STRATEGY_RUNS[number].is_made(tried, adapter):
                found[f"{number}: {name}"] = STRATEGY_RUNS[number].spec(*STRATEGIES[name], adapter)
    return found


def tried(session: Session, name: str) -> dict[str, Any]:
    """What one of them brings back; what it raises, on every process alike, as `error`."""
    try:
        return STRATEGY_RUNS[int(name.partition(":")[0])].work(session)
    except Exception as error:
        return {"error": repr(error)}
