"""How do I search for a learning rate, and stop trials that do worse than earlier ones, as Optuna does?

A callback compares each evaluation with those of earlier trials. It decides alike on every process, since
metrics are the same number on all of them. A stopped run ends well, with a result.

    python examples/by_need/pruning.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import isotrain


class MedianPruner(isotrain.Callback):
    """Stops a trial whose validation loss is above the median of earlier trials at the same step."""

    def __init__(self, earlier: Sequence[Mapping[int, float]] = ()) -> None:
        self.earlier = earlier

    def on_evaluation(self, session: isotrain.Session, metrics: Mapping[str, float]) -> None:
        """Compares with earlier trials, once there are two that came this far."""
        step = session.steps_done
        losses = [trial[step] for trial in self.earlier if step in trial]
        if len(losses) >= 2 and metrics["validation_loss"] > np.median(losses):
            session.stop()


def model() -> Any:
    """A small regression model of 8 features."""
    import keras

    hidden = keras.layers.Dense(16, activation="tanh")
    return keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(1)])


def data() -> isotrain.DataSet:
    """Points and their distances from the origin; the last ones are validated on."""
    points = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
    distances = np.linalg.norm(points, axis=1, keepdims=True)
    return isotrain.DataSet((points[:64], distances[:64]), (points[64:], distances[64:]))


spec = isotrain.TrainingSpec(
    name="pruning",
    model=model,
    data=data,
    loss="mean_squared_error",
    optimizer={"name": "sgd", "lr": 0.0625},
    global_batch_size=32,
    epochs=3,
    evaluation={"every_steps": 2},
)
RATES = (0.0625, 0.03125, 0.0078125, 0.125)


def search(spec: isotrain.TrainingSpec, **options: Any) -> list[dict[int, float]]:
    """The validation losses of each trial, by the number of steps done."""
    trials: list[dict[int, float]] = []
    for rate in RATES:
        trial = spec.replace(
            optimizer={"name": "sgd", "lr": rate}, callbacks=[MedianPruner(tuple(trials))]
        )
        result = isotrain.run(trial, **options)
        trials.append(result.history.scalars["validation_loss"])
    return trials


if __name__ == "__main__":
    trials = search(spec, backend="torch-ddp", replicas=2)
    for rate, losses in zip(RATES, trials, strict=True):
        print(f"rate {rate}: loss {min(losses.values()):.4f} after {max(losses)} steps")
