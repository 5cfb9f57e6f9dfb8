"""Values of objectives after a resume, and metrics over all predictions in a parameter-server run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isotrain


def model() -> Any:
    from torch import nn

    return nn.Linear(4, 3)


def data() -> isotrain.DataSet:
    random = np.random.default_rng(0)
    inputs, targets = random.normal(size=(21, 4)), random.normal(size=(21, 3))
    return isotrain.DataSet((inputs, targets), (inputs[:9], targets[:9]))


def objective(model: Any, batch: Any, step: isotrain.StepContext) -> Any:
    errors = (model(batch[0]) - batch[1]) ** 2
    return step.values["scheduled"] * errors[:, 0] + step.values["chosen"] * errors[:, 1]


def error_of_all(targets: Any, predictions: Any) -> float:
    return float(((targets - predictions) ** 2).mean())


def _spec(**fields: Any) -> isotrain.TrainingSpec:
    defaults: dict[str, Any] = {
        "model": {"torch": model},
        "data": data,
        "optimizer": {"name": "sgd", "lr": 0.125},
        "global_batch_size": 5,
        "epochs": 2,
        "precision": "float64",
        "threads": 1,
    }
    return isotrain.TrainingSpec(**{**defaults, **fields})


def train_and_save(session: isotrain.Session, folder: Path) -> dict[str, float]:
    for batch in session.batches():
        session.step(batch, values={"chosen": 0.25 + batch.step})
        if batch.step == 3:
            break
    session.save(folder)
    return session.evaluate()


def restore(session: isotrain.Session, folder: Path) -> dict[str, float]:
    session.restore(folder)
    return session.evaluate()


def test_an_evaluation_after_a_resume_has_the_values_of_the_last_step(tmp_path: Path) -> None:
    values = {"scheduled": {"name": "linear", "start": 0.0, "end": 1.0, "steps": 8}}
    spec = _spec(objective=objective, values=values)
    expected, restored = (
        isotrain.launch(
            functools.partial(work, folder=tmp_path / "checkpoint"),
            spec,
            backend="torch-ddp",
            replicas=1,
            output=tmp_path / work.__name__,
            on_event=lambda event: None,
        )
        for work in (train_and_save, restore)
    )
    assert restored == expected
    assert isotrain.evaluate(tmp_path / "checkpoint", spec=spec, replicas=1) == expected[0]


def weighted(model: Any, batch: Any, step: isotrain.StepContext) -> Any:
    return step.values["weight"] * (model(batch[0]) - batch[1]) ** 2


@pytest.mark.slow
def test_a_finished_run_is_evaluated_with_the_values_of_its_last_step(tmp_path: Path) -> None:
    """Also of a run that continued elsewhere, whose first step is not step 0."""
    values = {"weight": {"name": "linear", "start": 0.0, "end": 1.0, "steps": 8}}
    spec = _spec(
        objective=weighted, values=values, checkpoint={"every_steps": 3, "keep_last": None}
    )
    run = functools.partial(
        isotrain.run, spec, backend="torch-ddp", replicas=1, on_event=lambda event: None
    )
    whole = run(output=tmp_path / "whole")
    resumed = run(
        output=tmp_path / "resumed",
        resume=tmp_path / "whole" / "checkpoints" / "step-000000006",
    )
    for result in (whole, resumed):
        expected = result.metrics["validation_loss"]
        assert isotrain.evaluate(result) == {"loss": pytest.approx(expected, rel=1e-12)}
    errors = (isotrain.predict(whole, data()) - data().validation[1]) ** 2
    assert whole.metrics["validation_loss"] == pytest.approx(errors.mean(), rel=1e-12)


def test_metrics_over_all_of_a_coordinator(tmp_path: Path) -> None:
    spec = _spec(loss="mse", metrics_over_all={"error": error_of_all}, strategy="parameter-server")
    result = isotrain.run(spec, backend="torch-ddp", replicas=2, output=tmp_path / "run")
    metrics = result.history.epochs[-1]
    np.testing.assert_allclose(metrics["validation_error"], metrics["validation_loss"], rtol=1e-12)
