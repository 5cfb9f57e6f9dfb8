"""Objectives with a step on real backends: uneven batches on three replicas, named losses, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.core.errors import RunFailedError, UnsupportedError

SAMPLES, BATCH = 26, 8
"""The last batch has 2 samples: of three replicas, one has a placeholder."""


def model() -> Any:
    import torch

    layers = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)]
    return torch.nn.Sequential(*layers).double()


def data() -> isotrain.DataSet:
    inputs, targets = np.random.default_rng(0).normal(size=(2, SAMPLES, 6))
    return isotrain.DataSet((inputs, targets), (inputs[:9], targets[:9]))


def objective(model: Any, batch: Any, step: isotrain.StepContext) -> Any:
    """Several gathers, a mean over all replicas, a gradient penalty, and a weighted loss."""
    import torch

    first, second = (torch.nn.functional.normalize(model(each), dim=-1) for each in batch)
    all_second, index = step.all_gather(second)
    all_first, _ = step.all_gather(first[first[:, 0] > 0])  # another number of rows on each replica
    labels = index + torch.arange(len(first))
    contrast = torch.nn.functional.cross_entropy(first @ all_second.T, labels, reduction="none")
    slope = step.gradient(lambda x: model(x).square().sum(-1), batch[0])
    spread = (step.mean(first.mean(0)) ** 2).sum() + all_first.sum() * step.values["weight"]
    mask = (batch[0][:, 0] > 0).to(first)
    return {
        "contrast": contrast,
        "slope": (slope.norm(dim=-1) - 1) ** 2,
        "spread": spread,
        "masked": isotrain.weighted(contrast, mask),
    }


def _sum_of_squares(model: Any, batch: Any, step: isotrain.StepContext) -> Any:
    return (step.sum(model(batch[0]).sum(0)) ** 2).sum()


def _spec(**fields: Any) -> isotrain.TrainingSpec:
    defaults: dict[str, Any] = {
        "model": {"torch": model},
        "data": data,
        "objective": objective,
        "values": {"weight": {"name": "linear", "start": 0.0, "end": 1.0, "steps": 4}},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "global_batch_size": BATCH,
        "epochs": 2,
        "precision": "float64",
    }
    return isotrain.TrainingSpec(**{**defaults, **fields})


def test_three_replicas_equal_one(tmp_path: Path) -> None:
    one, three = (
        isotrain.run(_spec(), backend="torch-ddp", replicas=count, output=tmp_path / str(count))
        for count in (1, 3)
    )
    for name, weight in one.weights.items():
        np.testing.assert_allclose(three.weights[name], weight, rtol=0, atol=1e-12, err_msg=name)
    for alone, together in zip(one.history.epochs, three.history.epochs, strict=True):
        assert {"contrast", "slope", "spread", "masked", "validation_masked"} <= alone.keys()
        assert together == pytest.approx(alone, rel=1e-10)


def _hidden(model: Any, batch: Any, step: Any) -> Any:
    """A mean over all replicas, which a plan does not see."""
    losses = (model(batch[0]) ** 2).mean(-1)
    collective = getattr(step, "".join(("s", "um")))
    return losses + 0 * collective(losses)


@pytest.mark.parametrize(
    ("fields", "replicas", "message"),
    [
        ({"gradient_accumulation_steps": 2}, 1, "gradient_accumulation_steps"),
        ({"strategy": "local-sgd"}, 2, "each replica updates weights of its own"),
    ],
)
def test_collectives_of_a_part_of_the_batch_are_refused(
    fields: dict[str, Any], replicas: int, message: str, tmp_path: Path
) -> None:
    spec = _spec(objective=_sum_of_squares, values={}, **fields)
    with pytest.raises(UnsupportedError, match=message):
        isotrain.plan(spec, backend="torch-ddp", replicas=replicas)
    hidden = spec.replace(objective=_hidden)
    with pytest.raises(RunFailedError, match=message):
        isotrain.run(hidden, backend="torch-ddp", replicas=replicas, output=tmp_path / "run")


def _mean_of_rows(model: Any, batch: Any, step: isotrain.StepContext) -> Any:
    from keras import ops

    outputs = model(batch[0])
    return ops.mean(outputs**2, axis=-1) + ops.sum(step.mean(outputs)) * 0


@pytest.mark.features
@pytest.mark.parametrize("backend", ["tf-mirrored", "tf-multiworker"])
def test_the_shapes_of_an_uneven_mean_are_named(backend: str, tmp_path: Path) -> None:
    spec = _spec(model=_portable, objective=_mean_of_rows, values={}, data=_uneven, epochs=1)
    with pytest.raises(
        RunFailedError,
        match=r"SpecError[^?]*step\.mean[^?]*\[2, 6\] of replica 0, \[1, 6\] of replica 1\.",
    ):
        isotrain.run(spec, backend=backend, replicas=2, output=tmp_path / "run")


def _gathers_rows(model: Any, batch: Any, step: isotrain.StepContext) -> Any:
    from keras import ops

    step.all_gather(batch[0])
    return ops.mean(model(ops.sum(batch[0], axis=1)) ** 2, axis=-1)


def _step_on_widths(session: isotrain.Session) -> None:
    """Steps whose rows are as wide on the processes, and then are not."""
    for width in (2, 2 + 2 * session.rank):
        sequences = np.ones((2, width, 6))
        session.step(session.batch(sequences, sequences[:, 0]))


@pytest.mark.features
@pytest.mark.parametrize("backend", ["torch-ddp", "tf-multiworker"])
def test_the_shapes_of_rows_of_other_widths_are_named(backend: str, tmp_path: Path) -> None:
    spec = _spec(
        model=_portable, objective=_gathers_rows, values={}, data=None, epochs=None, steps=2
    )
    message = r"SpecError[^?]*step\.all_gather[^?]*\[2, 6\] of replica 0, \[4, 6\] of replica 1\."
    with pytest.raises(RunFailedError, match=message):
        isotrain.launch(_step_on_widths, spec, backend=backend, replicas=2, output=tmp_path / "run")


def _uneven() -> isotrain.DataSet:
    """Samples of one even batch and one of three samples."""
    inputs, targets = np.random.default_rng(0).normal(size=(2, BATCH + 3, 6))
    return isotrain.DataSet((inputs, targets))


def test_workers_get_no_step() -> None:
    with pytest.raises(UnsupportedError, match="gives it no step"):
        isotrain.plan(_spec(strategy="parameter-server"), backend="torch-ddp", replicas=2)


def _portable() -> Any:
    import keras

    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(6)])


def _named(model: Any, batch: Any) -> Any:
    from keras import ops

    return {"square": ops.mean((model(batch[0]) - batch[1]) ** 2, axis=-1)}


@pytest.mark.parametrize("capture", [True, False])
def test_named_losses_are_recorded_in_every_step(capture: bool, tmp_path: Path) -> None:
    spec = _spec(model=_portable, objective=_named, values={}, epochs=3, capture=capture)
    result = isotrain.run(spec, backend="torch-ddp", replicas=1, output=tmp_path / "run")
    for epoch in result.history.epochs:
        assert epoch["square"] == pytest.approx(epoch["loss"], rel=1e-12)
        assert epoch["validation_square"] == pytest.approx(epoch["validation_loss"], rel=1e-12)
