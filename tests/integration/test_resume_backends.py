"""Runs on real backends that are killed and go on, there or elsewhere."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.killing import Killer

import isotrain
from isotrain.core.running.result import read_history

pytestmark = pytest.mark.slow

BACKENDS = ["torch-ddp", "tf-mirrored", "tf-multiworker", "horovod-torch", "horovod-tf"]
EXACT = {"beta_1": 0.875, "beta_2": 0.96875, "epsilon": 2.0**-20}
"""Numbers that float32 holds: frameworks pass them through it."""


def data() -> isotrain.DataSet:
    """Four global batches, and one to evaluate on; all of one size, for which frameworks trace once."""
    inputs = np.random.default_rng(2).standard_normal((28, 4))
    labels = np.arange(28) % 3
    return isotrain.DataSet((inputs, labels), (inputs[:7], labels[:7]))


def model() -> Any:
    import keras
    from keras import layers

    hidden = layers.Dense(8, activation="tanh", name="hidden")
    return keras.Sequential([keras.Input((4,)), hidden, layers.Dense(3, name="head")])


def moody() -> Any:
    """A model with state besides its weights, and random numbers; both are a replica's own."""
    import keras
    from keras import layers

    parts = [layers.Dense(8, name="hidden"), layers.BatchNormalization(), layers.Dropout(0.25)]
    return keras.Sequential([keras.Input((4,)), *parts, layers.Dense(3, name="head")])


def spec(**changes: Any) -> dict[str, Any]:
    fields = {
        "model": model,
        "data": data,
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "metrics": ["accuracy"],
        "optimizer": {"name": "adam", "lr": 0.0625, **EXACT},
        "global_batch": 7,
        "steps": 9,
        "threads": 1,
        "checkpoint": {"every_steps": 2},
    }
    return fields | changes


def run(folder: Path, **options: Any) -> isotrain.RunResult:
    changes = options.pop("changes", {})
    return isotrain.run(
        spec(**changes), run_directory=folder, on_event=lambda event: None, **options
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_run_ends_as_one_that_was_not(tmp_path: Path, backend: str) -> None:
    changes: dict[str, Any] = {"model": moody}
    whole = run(tmp_path / "whole", backend=backend, replicas=2, changes=changes)
    flag = tmp_path / "kill"
    flag.touch()
    changes["transform"] = Killer(flag, 7)
    found = run(tmp_path / "killed", backend=backend, replicas=2, changes=changes, max_restarts=1)
    assert len(found.restarts) == 1
    assert found.history == whole.history
    assert found.metrics == whole.metrics
    for name, weight in whole.weights.items():
        assert np.array_equal(found.weights[name], weight), name


WAY = ("torch-ddp", "horovod-torch", "tf-mirrored", "tf-multiworker", "horovod-tf", "torch-ddp")
"""Each goes on from another, and another from it: within a framework and between them."""


def one_step(session: isotrain.Session) -> Any:
    """Trains on the next batch, and saves."""
    return steps(session, 1)


def steps(session: isotrain.Session, most: int = 1000) -> Any:
    for batch in itertools.islice(session.batches(), most):
        session.step(batch)
        if batch.is_last_of_epoch:
            session.end_epoch(batch.epoch, session.metrics())
    session.save()
    return session.read_state() if session.is_main else None


def test_every_backend_goes_on_from_another(tmp_path: Path) -> None:
    """One run, which changes backend and number of replicas at each step, in the middle of epochs too."""
    given = spec(precision="float64", steps=len(WAY))
    options = {"resume": "auto", "on_event": lambda event: None}
    whole = isotrain.launch(
        steps, given, backend="tf-mirrored", run_directory=tmp_path / "whole", **options
    )
    for number, backend in enumerate(WAY):
        found = isotrain.launch(
            one_step,
            given,
            backend=backend,
            replicas=1 + number % 3,
            run_directory=tmp_path / "parted",
            **options,
        )
    expected, history = read_history(tmp_path / "whole"), read_history(tmp_path / "parted")
    assert history.loss == pytest.approx(expected.loss, rel=0, abs=1e-12)
    assert history.epochs == [pytest.approx(epoch, abs=1e-12) for epoch in expected.epochs]
    for name, value in whole[0].items():
        np.testing.assert_allclose(found[0][name], value, rtol=0, atol=1e-12, err_msg=name)
