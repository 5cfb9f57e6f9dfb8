"""A study of Optuna over runs: the best trial has the loss of a run with its parameters."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from examples.by_need.harness import load

import isotrain


@pytest.mark.examples
def test_the_best_trial_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    example = load("optuna_search")
    spec = example.spec.replace(threads=1)
    study = example.search(spec, 4, backend="torch-ddp", replicas=2)
    best = study.best_trial
    chosen = spec.replace(
        optimizer={"name": "sgd", "lr": best.params["lr"]},
        model_args={"width": best.params["width"]},
    )
    result = isotrain.run(chosen, backend="torch-ddp", replicas=2, on_event=lambda event: None)
    assert best.value == result.metrics["validation_loss"]
    assert best.value == min(trial.value for trial in study.trials if trial.value is not None)
    assert [*best.intermediate_values] == [0, 1, 2]
