"""Evaluation within epochs, at the start and on several named sets: recorded, and heeded by what monitors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.session_specs import launch, samples, spec

import isotrain
from isotrain.core.errors import DataError, RunFailedError
from isotrain.core.results.result import RunResult

pytestmark = pytest.mark.usefixtures("reference")

SHORTER = [7, 5]
"""Samples of the named sets, which no global batch divides."""


def with_sets() -> isotrain.DataSet:
    inputs, targets = samples()
    sets = {f"first{count}": (inputs[:count], targets[:count]) for count in SHORTER}
    return isotrain.DataSet((inputs, targets), (inputs[::2], targets[::2]), sets)


def named_alone() -> isotrain.DataSet:
    return isotrain.DataSet(samples(), validation_sets={"a": samples()})


def run(folder: Path, backend: str = "reference", replicas: int = 2, **fields: Any) -> RunResult:
    return isotrain.run(
        spec(**{"data": with_sets, "metrics": ["mean_absolute_error"], **fields}),
        backend=backend,
        replicas=replicas,
        output=folder / "run",
        on_event=lambda event: None,
    )


@pytest.mark.parametrize(
    "backend",
    [
        "reference",
        pytest.param("torch-ddp", marks=pytest.mark.slow),
        *(
            pytest.param(backend, marks=[pytest.mark.slow, pytest.mark.features])
            for backend in ("tf-mirrored", "tf-multiworker", "horovod-torch", "horovod-tf")
        ),
    ],
)
def test_sets_are_evaluated_every_few_steps(tmp_path: Path, backend: str) -> None:
    evaluation = {"every_steps": 2, "every_epochs": 2, "at_start": True}
    result = run(tmp_path, backend, evaluation=evaluation, precision="float64")
    prefixes = ["validation", "validation_first7", "validation_first5"]
    names = {f"{prefix}_{name}" for prefix in prefixes for name in ("loss", "mean_absolute_error")}
    scalars, epochs = result.history.scalars, result.history.epochs
    assert set(scalars) == names
    assert all(list(each) == [0, 2, 4, 6, 8, 9] for each in scalars.values())
    assert [names & set(epoch) for epoch in epochs] == [set(), names, names]
    for name in names:
        assert epochs[1][name] == scalars[name][6]
        assert epochs[2][name] == result.metrics[name] == scalars[name][9]
    start = with_sets().validation_sets

    def by_hand(session: isotrain.Session) -> list[Any]:
        losses = [session.evaluate(part)["loss"] for part in start.values()]
        return [*losses, session.validate(), session.can_evaluate]

    fields = {"data": with_sets, "metrics": ["mean_absolute_error"], "precision": "float64"}
    first7, first5, validated, can_evaluate = launch(
        by_hand, tmp_path / "one", 1, backend, **fields
    )
    assert can_evaluate
    assert validated == {name: pytest.approx(scalars[name][0], rel=1e-12) for name in names}
    assert [first7, first5] == [validated[f"validation_first{n}_loss"] for n in SHORTER]


@pytest.mark.slow
def test_the_best_of_any_evaluation_is_kept_and_stops(tmp_path: Path) -> None:
    monitored = {"metric": "validation_a_loss", "patience": 2, "min_delta": 1e9}
    checkpoint = {"keep_best": "validation_a_loss", "keep_last": 1}
    result = run(
        tmp_path,
        data=named_alone,
        evaluation={"every_steps": 1, "every_epochs": 0},
        early_stopping=monitored,
        checkpoint=checkpoint,
    )
    assert len(result.history.loss) == 3, "the first is the best, and two were no better"
    assert list(result.history.scalars["validation_a_loss"]) == [1, 2, 3]
    best = min((1, 2, 3), key=result.history.scalars["validation_a_loss"].__getitem__)
    assert (result.run_directory / "checkpoints" / f"step-{best:09}").is_dir()


def test_a_plateau_looks_at_evaluations_within_epochs(tmp_path: Path) -> None:
    """No evaluation after the first is so much better: each lowers the rate, also that of an epoch's end."""
    plateau = {"name": "plateau", "patience": 1, "factor": 0.5, "min_delta": 9.0}
    evaluation = {"every_steps": 2, "every_epochs": 0}
    rates = run(tmp_path, schedule=plateau, evaluation=evaluation).history.learning_rate
    assert rates == pytest.approx([rates[0] * 0.5**n for n in (0, 0, 0, 0, 1, 1, 2, 2, 3)])


def test_unknown_names_of_sets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RunFailedError, match=r"validation_first9_loss.*Did you mean .validation_first7_loss"
    ):
        run(tmp_path, replicas=1, early_stopping={"metric": "validation_first9_loss"})


def test_a_set_needs_a_name(tmp_path: Path) -> None:
    data = isotrain.DataSet(samples(), validation_sets={"": np.zeros((2, 3))})
    with pytest.raises(DataError, match="expected names that are text, received ''"):
        isotrain.open_session(spec(data=data), backend="reference")
