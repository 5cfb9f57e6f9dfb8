"""A study of Optuna over runs: its best trial is the plain program with the parameters of the trial."""

from __future__ import annotations

import functools
from pathlib import Path

import optuna
import pytest
from examples.by_need.harness import Plain, cells, check_weights, load

import isotrain

EXAMPLE = "optuna_search"


def plain(start: Plain, rate: float) -> None:
    """torch's SGD."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=rate)
    for inputs, targets in start.batches:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(start.model(inputs, training=True), targets).backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_the_best_trial_is_the_plain_program(
    backend: str, replicas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    example = load(EXAMPLE)
    spec = example.spec.replace(precision="float64", threads=1)
    study = example.search(spec, 4, backend=backend, replicas=replicas)
    best = study.best_trial
    assert best.value == min(trial.value for trial in study.trials if trial.value is not None)
    assert [*best.intermediate_values] == [0, 1, 2]
    rate, chosen = best.params["lr"], {"width": best.params["width"]}
    result = isotrain.run(
        spec.replace(optimizer={"name": "sgd", "lr": rate}, model_args=chosen),
        backend=backend,
        replicas=replicas,
        on_event=lambda event: None,
    )
    assert best.value == result.metrics["validation_loss"]
    twin = functools.partial(plain, rate=rate)
    check_weights(result.weights, EXAMPLE, twin, model_args=chosen)
