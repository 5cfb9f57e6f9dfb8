"""The best checkpoint by a metric, early stopping, and metrics that cannot be monitored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.resume_runs import data, run, spec

import isotrain
from isotrain.core.errors import IsotrainError, RunFailedError
from isotrain.core.session.training.evaluation import Evaluator

pytestmark = pytest.mark.usefixtures("reference")


def test_the_best_checkpoint_is_kept_and_training_ends_early(tmp_path: Path) -> None:
    """At a rate that is far too high the first evaluation stays the best."""
    policy = {"keep_last": 1, "keep_best": {"metric": "validation_loss", "restore": True}}
    changes = {
        "optimizer": {"name": "sgd", "lr": 64.0},
        "steps": None,
        "epochs": 9,
        "checkpoint": policy,
        "early_stopping": {"metric": "validation_loss", "patience": 2},
    }
    found = run(tmp_path / "run", changes=changes)
    losses = [epoch["validation_loss"] for epoch in found.history.epochs]
    best = losses.index(min(losses))
    assert len(losses) == best + 3 < 9
    kept = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert kept == [f"step-{(best + 1) * 5:09}", f"step-{len(losses) * 5:09}"]
    with isotrain.open_session(spec(**changes), backend="reference") as session:
        session.write_state(found.weights)
        assert session.evaluate()["loss"] == pytest.approx(min(losses), abs=1e-12)
    # It has stopped, and stays so.
    again = isotrain.resume(tmp_path / "run", spec=spec(**changes), on_event=lambda event: None)
    assert len(again.history.epochs) == len(losses)


def test_an_unknown_monitored_metric_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(IsotrainError, match="validation_accuracy"):
        run(tmp_path / "run", changes={"early_stopping": {"metric": "validation_acc"}})
    assert not list((tmp_path / "run").glob("steps.jsonl"))


def nothing(targets: Any, predictions: Any) -> Any:
    """A metric that somebody has not finished."""


def distance(targets: Any, predictions: Any) -> Any:
    return np.abs(predictions).mean(axis=1)


def test_a_custom_metric_without_numbers_is_refused_before_the_first_step(
    tmp_path: Path,
) -> None:
    with pytest.raises(RunFailedError, match="before its first step, in call 'try metrics'"):
        run(tmp_path / "run", changes={"metrics": [nothing]})


def test_trying_metrics_leaves_no_state() -> None:
    ends = []
    for tries in (False, True):
        with isotrain.open_session(spec(metrics=[distance]), backend="reference") as session:
            for batch in session.batches():
                if tries:
                    session.try_metrics(batch)
                session.step(batch)
            ends.append((session.metrics(), session.evaluate(), session.last_loss))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("validates", [True, False])
def test_metrics_are_tried_only_with_validation_data(
    validates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, tried = spec() if validates else spec(data=data().train), []
    monkeypatch.setattr(Evaluator, "try_metrics", lambda _, batch: tried.append(batch))
    with isotrain.open_session(given, backend="reference") as session:
        session.try_metrics(next(session.batches()))
    assert bool(tried) is validates


def test_another_monitored_metric_starts_over(tmp_path: Path) -> None:
    changes = {"steps": 10, "checkpoint": {"keep_best": "validation_loss"}}
    run(tmp_path / "run", changes=changes)
    changes = {"steps": 15, "checkpoint": {"keep_best": "validation_accuracy"}}
    told: list[Any] = []
    run(tmp_path / "run", resume="auto", changes=changes, on_event=told.append)
    saved = [event for event in told if event["event"] == "checkpoint"]
    assert saved[-1]["best"]  # the first value of a metric is its best so far
    with pytest.raises(RunFailedError, match="unknown metric of an epoch 'validation_auc'"):
        run(tmp_path / "run", resume="auto", changes={"early_stopping": "validation_auc"})
