"""Runs with worker processes: equal for any number of workers and replicas, on every backend."""

from __future__ import annotations

import functools
import random
import sys
from typing import Any

import cloudpickle
import numpy as np
import pytest
from conformance.backends import param

import isotrain
from isotrain.testing.consecutive_sessions import launched_in_turn

pytestmark = pytest.mark.features

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SAMPLES = 23


class Images:
    """Samples that are cropped by Python's generator and have noise of NumPy's."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        pixels = np.random.default_rng(index).standard_normal(8)
        start = random.randrange(4)
        crop = pixels[start : start + 4] + 0.01 * np.random.standard_normal(4)
        return crop, crop.sum(keepdims=True)


def images() -> isotrain.DataSet:
    return isotrain.DataSet(Images(), Images())


def columns() -> Any:
    inputs = np.random.default_rng(0).standard_normal((SAMPLES, 4))
    return inputs, inputs.sum(1, keepdims=True)


def noisy(inputs: Any, targets: Any, random: Any) -> Any:
    return inputs + 0.01 * random.normal(shape=(4,)), targets


def model() -> Any:
    import keras

    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


def spec(workers: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": model,
        "data": images,
        "loss": "mean_squared_error",
        "optimizer": {"name": "sgd", "lr": 0.0625},
        "global_batch_size": 8,
        "epochs": 2,
        "precision": "float64",
        "device": "cpu",
        "threads": 1,
        "loader": {"workers": workers},
        **fields,
    }


SPECS = {
    "in the training thread": spec(0),
    "one worker": spec(1),
    "four workers": spec(4, gradient_accumulation_steps=2),
    "transform": spec(2, data=columns, transform=noisy),
    "transform in the training thread": spec(0, data=columns, transform=noisy),
}


CELLS = {
    ("torch-ddp", 1): tuple(SPECS),
    ("torch-ddp", 2): tuple(SPECS),
    ("tf-mirrored", 3): tuple(SPECS),
    **dict.fromkeys(
        (("tf-multiworker", 2), ("horovod-torch", 2), ("horovod-tf", 2)),
        ("in the training thread", "one worker"),
    ),
}
"""Specs by backend and replicas: what else differs is the same for all backends of a framework."""


def numbers(session: isotrain.Session, name: str) -> dict[str, Any]:
    """Losses of all steps, the loss of validations, and predictions."""
    losses, validations = [], []
    for batch in session.batches():
        losses.append(float(session.step(batch)))
        if batch.is_last_of_epoch:
            validations.append(session.validate().get("validation_loss"))
    predicted = np.concatenate([*session.predict(Images())])
    return {"losses": losses, "validations": validations, "predicted": predicted.tolist()}


@functools.cache
def results(backend: str, replicas: int) -> dict[str, dict[str, Any]]:
    specs = {name: SPECS[name] for name in CELLS[backend, replicas]}
    return launched_in_turn(specs, numbers, backend, replicas)[0]


@pytest.mark.parametrize(("backend", "replicas"), [param(*each) for each in CELLS])
def test_workers_change_no_result(backend: str, replicas: int) -> None:
    found = results(backend, replicas)
    assert found["one worker"] == found["in the training thread"]
    assert all(found["one worker"]["validations"])
    if len(found) > 2:
        transformed = found["transform in the training thread"]
        assert found["transform"]["losses"] == transformed["losses"]
        accumulated = found["four workers"]
        assert accumulated["losses"] == pytest.approx(found["one worker"]["losses"], rel=1e-12)


@pytest.mark.parametrize(("backend", "replicas"), [param(*each) for each in list(CELLS)[1:]])
def test_replicas_change_no_result(backend: str, replicas: int) -> None:
    found, expected = results(backend, replicas), results("torch-ddp", 1)
    for name in found:
        for part, values in found[name].items():
            if None not in values:
                np.testing.assert_allclose(values, expected[name][part], 1e-10, err_msg=name)
