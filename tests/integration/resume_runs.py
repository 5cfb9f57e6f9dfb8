"""Small runs that are interrupted, and how the tests compare them with those that were not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from integration.random_kills import Killer, Moment

import isotrain
from isotrain.testing.reference.layers import Dense, Dropout
from isotrain.testing.reference.network import Network

STEPS = 17


def network() -> Network:
    return Network([Dense(4, 8, "tanh", name="hidden"), Dropout(0.25), Dense(8, 3, name="head")])


def data() -> isotrain.DataSet:
    inputs = np.random.default_rng(2).standard_normal((30, 4))
    labels = np.arange(30) % 3
    return isotrain.DataSet((inputs, labels), (inputs[:11], labels[:11]))


def spec(**changes: Any) -> dict[str, Any]:
    fields = {
        "model": {"numpy": network},
        "data": data,
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "metrics": ["accuracy"],
        "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
        "precision": "float64",
        "global_batch_size": 7,
        "steps": STEPS,
        "checkpoint": {"every_steps": 3},
    }
    return fields | changes


def run(folder: Path, replicas: int = 2, **options: Any) -> isotrain.RunResult:
    changes = options.pop("changes", {})
    given = {"backend": "reference", "on_event": lambda event: None, **options}
    return isotrain.run(spec(**changes), replicas=replicas, output=folder, **given)


def killed(folder: Path, moments: Sequence[Moment], **options: Any) -> isotrain.RunResult:
    """A run whose processes are killed at each moment in turn, and restarted."""
    killer = Killer.at(moments, folder.with_name(f"{folder.name}-kills"))
    changes = options.pop("changes", {}) | {"transform": killer}
    result = run(folder, max_restarts=len(moments), changes=changes, **options)
    assert len(result.restarts) == len(moments), sorted(killer.folder.iterdir())
    return result


def assert_same(found: isotrain.RunResult, expected: isotrain.RunResult) -> None:
    """Checks that weights, history, loss and metrics are equal to the bit."""
    for name, weight in expected.weights.items():
        assert np.array_equal(found.weights[name], weight), name
    assert found.history == expected.history
    assert found.final_loss == expected.final_loss
    assert found.metrics == expected.metrics


STRATEGIES: dict[str, dict[str, Any]] = {
    "data-parallel": {},
    "local-sgd": {"every": 4},
    "gossip": {},
    "compressed": {"method": "topk", "ratio": 0.25},
    "hierarchical": {},
    "parameter-server": {},
    "elastic-averaging": {"every": 2},
    "diloco": {"every": 4, "bits": 8, "fragments": 2, "overlap": 3},
    "sharded": {},
}


def chosen(name: str) -> dict[str, Any]:
    return {"name": name, "options": STRATEGIES[name]}


def plain() -> Network:
    return Network([Dense(4, 8, "tanh", name="hidden"), Dense(8, 3, name="head")])


class Slow:
    """Changes no sample, and takes ten milliseconds."""

    def __call__(self, inputs: Any, targets: Any, draws: Any) -> tuple[Any, Any]:
        time.sleep(0.01)
        return inputs, targets
