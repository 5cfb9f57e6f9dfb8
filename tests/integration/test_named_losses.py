"""Named losses of a portable model: their means in training and evaluation, and as monitored metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.core.errors import RunFailedError


def model() -> Any:
    import keras

    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])


def data() -> isotrain.DataSet:
    random = np.random.default_rng(0)
    inputs, targets = random.normal(size=(21, 4)), random.normal(size=(21, 3))
    return isotrain.DataSet((inputs, targets), (inputs[:9], targets[:9]))


def losses(model: Any, batch: Any) -> Any:
    errors = (model(batch[0]) - batch[1]) ** 2
    return {"first": errors[:, 0], "second": errors[:, 1]}


def other(model: Any, batch: Any) -> Any:
    return (model(batch[0])[:, 2] - batch[1][:, 2]) ** 2


def _spec(**fields: Any) -> isotrain.TrainingSpec:
    defaults: dict[str, Any] = {
        "model": model,
        "data": data,
        "objective": losses,
        "optimizer": {"name": "sgd", "lr": 0.125},
        "global_batch_size": 5,
        "epochs": 3,
        "precision": "float64",
        "threads": 1,
        "on_nan": "ignore",
    }
    return isotrain.TrainingSpec(**{**defaults, **fields})


@pytest.mark.parametrize("replicas", [1, 2])
def test_they_add_up_in_every_epoch(replicas: int, tmp_path: Path) -> None:
    checkpoint = {"keep_best": {"metric": "second", "mode": "min"}}
    stopping = {"metric": "validation_first", "mode": "min", "patience": 9}
    spec = _spec(checkpoint=checkpoint, early_stopping=stopping)
    result = isotrain.run(spec, backend="torch-ddp", replicas=replicas, output=tmp_path / "run")
    for epoch in result.history.epochs:
        for prefix in ("", "validation_"):
            total = epoch[f"{prefix}first"] + epoch[f"{prefix}second"]
            assert total == pytest.approx(epoch[f"{prefix}loss"], rel=1e-12)


def test_losses_of_updates_are_monitored(tmp_path: Path) -> None:
    updates = {"a": {"objective": losses}, "b": {"objective": other}}
    stopping = {"metric": "validation_a_first", "mode": "min", "patience": 9}
    schedule = {"name": "plateau", "metric": "validation_b_loss", "patience": 1}
    spec = _spec(objective=None, updates=updates, early_stopping=stopping, schedule=schedule)
    folder = tmp_path / "run"
    result = isotrain.run(spec, backend="torch-ddp", output=folder)
    assert {"validation_a_first", "validation_b_loss"} <= result.history.epochs[-1].keys()
    unmeasured = spec.replace(early_stopping={"metric": "a_loss"})  # a scalar of steps
    with pytest.raises(RunFailedError, match="unknown metric of an epoch 'a_loss'"):
        isotrain.run(unmeasured, backend="torch-ddp", output=tmp_path / "wrong")
