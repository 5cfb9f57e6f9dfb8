"""How do I search hyperparameters with Optuna, which ends trials that do badly?

`on_event` reports each epoch to the trial, and returns "stop" where Optuna would prune it: the run ends well.

    python examples/by_need/optuna_search.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import isotrain


def model(width: int = 16) -> Any:
    """A small regression model of 8 features."""
    import keras

    hidden = keras.layers.Dense(width, activation="tanh")
    return keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(1)])


def data() -> isotrain.DataSet:
    """Points and their distances from the origin; the last ones are validated on."""
    points = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
    distances = np.linalg.norm(points, axis=1, keepdims=True)
    return isotrain.DataSet((points[:64], distances[:64]), (points[64:], distances[64:]))


spec = isotrain.TrainingSpec(
    name="optuna-search",
    model=model,
    data=data,
    loss="mean_squared_error",
    optimizer={"name": "sgd", "lr": 0.0625},
    global_batch_size=32,
    epochs=3,
)


def search(spec: isotrain.TrainingSpec, trials: int, **options: Any) -> Any:
    """Runs a study of a seeded sampler, and returns it."""
    import optuna

    def objective(trial: optuna.Trial) -> float:
        rate = trial.suggest_float("lr", 0.001, 0.25, log=True)
        width = trial.suggest_categorical("width", [8, 16, 32])

        def on_event(event: Mapping[str, Any]) -> str | None:
            if event["event"] != "epoch":
                return None
            trial.report(event["metrics"]["validation_loss"], event["epoch"])
            return "stop" if trial.should_prune() else None

        chosen = spec.replace(optimizer={"name": "sgd", "lr": rate}, model_args={"width": width})
        result = isotrain.run(chosen, on_event=on_event, **options)
        if result.stopped_early:
            raise optuna.TrialPruned
        return result.metrics["validation_loss"]

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, n_trials=trials)
    return study


if __name__ == "__main__":
    print(search(spec, 8, backend="torch-ddp", replicas=2).best_trial)
