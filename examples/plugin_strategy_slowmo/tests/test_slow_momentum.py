"""The strategy keeps the promises, on the backend named by ISOTRAIN_TEST_BACKEND (torch-ddp if unset).

The package must be installed where the tests run: isotrain finds it by its entry point.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

import isotrain
from isotrain.testing.pytest_suite import strategy_suite

BACKEND = os.environ.get("ISOTRAIN_TEST_BACKEND", "torch-ddp")
RATE, MOMENTUM = 0.125, 0.5

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the run's processes cannot import it

TestKit = strategy_suite("slow-momentum", options={"every": 3}, backends=[BACKEND])


def model() -> Any:
    import keras

    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])


def data() -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(0).normal(size=(16, 3))
    return inputs, np.sin(inputs[:, :1])


def spec(**options: Any) -> dict[str, Any]:
    return {
        "model": model,
        "data": data,
        "shuffle": False,
        "loss": "mean_squared_error",
        "precision": "float64",
        "optimizer": {"name": "sgd", "lr": RATE},
        "global_batch_size": 4,
        "epochs": 2,
        "strategy": {"name": "slow-momentum", "options": options},
    }


def kernels(session: isotrain.Session) -> list[np.ndarray]:
    """Before the first step, and after each; the run's work."""
    found = [*session.read_state(("trainable",)).values()]
    for batch in session.batches():
        session.step(batch)
        found += session.read_state(("trainable",)).values()
    return found


def test_every_step_with_slow_momentum_is_momentum(tmp_path: Path) -> None:
    """One plain local step, averaged, is a step of gradient descent; so its momentum is momentum."""
    given = {"backend": BACKEND, "replicas": 2, "on_event": lambda event: None}
    slow = spec(every=1, momentum=MOMENTUM)
    found, _ = isotrain.launch(kernels, slow, output=tmp_path / "run", **given)
    inputs, targets = data()
    kernel, velocity = found[0], np.zeros((3, 1))
    for step, after in enumerate(found[1:]):
        rows = slice(4 * step % 16, 4 * step % 16 + 4)
        gradient = inputs[rows].T @ (inputs[rows] @ kernel - targets[rows]) / 2
        velocity = MOMENTUM * velocity - RATE * gradient
        kernel = kernel + velocity
        np.testing.assert_allclose(after, kernel, rtol=1e-12, atol=1e-12, err_msg=f"step {step}")


@pytest.mark.parametrize("options", [{"every": 0}, {"momentum": 1.0}, {"rate": 0.0}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(isotrain.IsotrainError, match="slow-momentum"):
        isotrain.plan(spec(**options), backend=BACKEND, replicas=2)
