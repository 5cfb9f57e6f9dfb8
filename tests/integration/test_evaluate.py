"""Evaluation of finished runs, and metrics of whole sets: equal to NumPy on the gathered predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.in_process import command
from integration.session_specs import samples, spec

import isotrain
from isotrain.core.errors import RunFailedError, SpecError
from isotrain.core.results.result import RunResult

pytestmark = pytest.mark.usefixtures("reference")


def data() -> isotrain.DataSet:
    inputs, targets = samples()
    return isotrain.DataSet((inputs, targets), (inputs[:7], targets[:7]))


def largest_error(targets: np.ndarray, predictions: np.ndarray) -> float:
    return float(np.abs(targets - predictions).max())


def ranks(targets: np.ndarray, predictions: np.ndarray) -> dict[str, Any]:
    return {"first": targets[0], "order": predictions[:2].argsort(axis=0)[:, 0]}


def text(targets: np.ndarray, predictions: np.ndarray) -> str:
    return "good"


OVER_ALL = {"largest": largest_error, "ranks": ranks}


def trained(folder: Path, backend: str = "reference", **fields: Any) -> RunResult:
    return isotrain.run(
        spec(data=data, precision="float64", metrics_over_all=OVER_ALL, **fields),
        backend=backend,
        replicas=2,
        output=folder / "run",
        on_event=lambda event: None,
    )


@pytest.mark.parametrize(
    "backend",
    [
        "reference",
        *(
            pytest.param(name, marks=pytest.mark.features)
            for name in ("torch-ddp", "tf-multiworker")
        ),
    ],
)
def test_metrics_see_all_samples_in_order(tmp_path: Path, backend: str) -> None:
    result = trained(
        tmp_path, backend, early_stopping={"metric": "validation_largest", "mode": "min"}
    )
    inputs, targets = (part[:7] for part in samples())
    predictions = isotrain.predict(result, inputs)
    order = predictions[:2].argsort(axis=0)[:, 0]
    expected = {
        "loss": np.mean((targets - predictions) ** 2),
        "largest": largest_error(targets, predictions),
        "ranks/first/0": targets[0, 0],
        "ranks/order/0": order[0],
        "ranks/order/1": order[1],
    }
    told = {name.removeprefix("validation_"): value for name, value in result.metrics.items()}
    assert told == {name: pytest.approx(value, rel=1e-9) for name, value in expected.items()}
    for replicas in (1, 2):
        assert isotrain.evaluate(result, replicas=replicas) == pytest.approx(told, rel=1e-9)


@pytest.mark.features
def test_metrics_over_all_get_targets_without_sample_weights(tmp_path: Path) -> None:
    result = trained(tmp_path, "torch-ddp")
    inputs, targets = (part[:7] for part in samples())
    weighted = isotrain.DataSet((inputs, targets, np.arange(7.0)))
    plain = isotrain.evaluate(result, (inputs, targets))
    assert isotrain.evaluate(result, weighted)["largest"] == plain["largest"]


def test_other_data_and_metrics(tmp_path: Path) -> None:
    result = trained(tmp_path)
    inputs, targets = samples()
    found = isotrain.evaluate(
        result,
        (inputs, targets),
        metrics=["mean_absolute_error"],
        metrics_over_all={"worst": largest_error},
        replicas=2,
    )
    errors = np.abs(targets - isotrain.predict(result, inputs))
    assert set(found) == {"loss", "mean_absolute_error", "worst"}
    assert found["mean_absolute_error"] == pytest.approx(errors.mean(), rel=1e-9)
    assert found["worst"] == pytest.approx(errors.max(), rel=1e-9)


def test_what_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="metrics_over_all: 'text': expected a number"):
        isotrain.evaluate(trained(tmp_path), metrics_over_all={"text": text})


def test_data_that_cannot_be_found_are_asked_for(tmp_path: Path) -> None:
    result = isotrain.run(
        spec(data=data()),
        backend="reference",
        output=tmp_path / "run",
        on_event=lambda event: None,
    )
    with pytest.raises(SpecError, match="the data cannot be found again"):
        isotrain.evaluate(result)


@pytest.mark.features
def test_metric_classes_serve_as_they_are(tmp_path: Path) -> None:
    """Of torchmetrics, those that tell predictions from targets."""
    pytest.importorskip("torchmetrics")
    result = trained(tmp_path, "torch-ddp")
    inputs, targets = samples()
    over_all = {"keras": "keras.metrics:R2Score", "torch": "torchmetrics.regression:R2Score"}
    found = isotrain.evaluate(result, (inputs, targets), metrics_over_all=over_all, replicas=2)
    errors = targets - isotrain.predict(result, inputs)
    expected = 1 - np.sum(errors**2) / np.sum((targets - targets.mean()) ** 2)
    assert found["keras"] == pytest.approx(expected, abs=1e-5)
    assert found["torch"] == pytest.approx(expected, abs=1e-5)


PROGRAM = """\
import numpy as np
import isotrain
from integration.session_specs import samples

def data():
    inputs, targets = samples()
    return isotrain.DataSet((inputs, targets), (inputs[:7], targets[:7]))
"""


def test_the_command_prints_metrics(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PROGRAM)
    result = isotrain.run(
        spec(data=f"{tmp_path}/mine.py:data", plugins=["isotrain.testing.reference"]),
        backend="reference",
        output=tmp_path / "run",
        on_event=lambda event: None,
    )
    arguments = ("evaluate", "run", "--metric", "mean_absolute_error", "--replicas", "2")
    done = command(*arguments, "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout)["metrics"]
    assert metrics["loss"] == pytest.approx(result.metrics["validation_loss"], rel=1e-6)
    done = command(*arguments, "--data", "mine.py:data", folder=tmp_path)
    assert done.stdout.split()[::2] == ["loss", "mean_absolute_error"]
