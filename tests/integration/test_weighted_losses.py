"""A loss that does not count all targets alike is the mean of the whole global batch, however it is split."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.testing.series import launched_in_turn

pytestmark = pytest.mark.slow

WEIGHTS = [0.25, 2.0, 1.0, 0.5]


def network() -> Any:
    import torch

    return torch.nn.Linear(6, 4)


def samples() -> isotrain.DataSet:
    """Classes of which many are 1: all of some slices."""
    draw = np.random.default_rng(0)
    classes = np.where(draw.random(26) < 0.6, 1, draw.integers(4, size=26))
    pair = draw.standard_normal((26, 6)), classes
    return isotrain.DataSet(train=pair, validation=pair)


def ignoring() -> Any:
    import torch

    return {"torch": torch.nn.CrossEntropyLoss(ignore_index=1)}


def both() -> Any:
    import torch

    weight = torch.tensor(WEIGHTS, dtype=torch.float64)
    return {"torch": torch.nn.CrossEntropyLoss(weight=weight, ignore_index=1)}


def weighing() -> Any:
    import torch

    weight = torch.tensor(WEIGHTS, dtype=torch.float64)
    return {"torch": torch.nn.CrossEntropyLoss(weight=weight)}


CROSS_ENTROPY = {"name": "sparse_categorical_crossentropy", "from_logits": True}
NAMED = {**CROSS_ENTROPY, "ignore_class": 1}


def masked() -> Any:
    """What is masked counts neither in the loss nor in how much there is; what is added counts by samples."""
    import keras

    inputs = keras.Input((5,))
    embedded = keras.layers.Embedding(9, 6, mask_zero=True)(inputs)
    added = keras.regularizers.L2(0.125)
    hidden = keras.layers.Dense(4, activation="tanh", activity_regularizer=added)(embedded)
    return keras.Model(inputs, keras.layers.Dense(4)(hidden))


def plain() -> Any:
    import keras

    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])


def sentences() -> isotrain.DataSet:
    """Of lengths from 0 to 5, the rest of them 0."""
    draw = np.random.default_rng(1)
    words = draw.integers(1, 9, size=(26, 5))
    words[np.arange(5) >= draw.integers(6, size=26)[:, None]] = 0
    words[8:11] = 0
    pair = words, draw.integers(4, size=(26, 5))
    return isotrain.DataSet(train=pair, validation=pair)


LOSSES = {"ignoring": ignoring, "weighing": weighing, "both": both, "named": lambda: NAMED}
"""Of native models."""
PORTABLE: dict[str, dict[str, Any]] = {
    "masked": {"model": masked, "data": sentences, "loss": CROSS_ENTROPY},
    "masked, ignoring": {"model": masked, "data": sentences, "loss": NAMED},
    "portable, ignoring": {"model": plain, "loss": NAMED},
}
CASES = (*PORTABLE, *LOSSES)
WHOLE = ("torch-ddp", 1)
RUNS: dict[tuple[str, int], list[tuple[str, int]]] = {
    WHOLE: [*((name, 1) for name in CASES), *((name, 2) for name in LOSSES)],
    ("torch-ddp", 2): [("masked, ignoring", 1), *((name, 2) for name in LOSSES)],
    ("torch-ddp", 3): [*((name, 2) for name in PORTABLE), *((name, 1) for name in LOSSES)],
    ("horovod-torch", 2): [("both", 2)],
    ("horovod-tf", 2): [("masked, ignoring", 2)],
}
"""What the processes of each run train in turn: cases, and into how many slices a replica's share is cut.

Masked losses of other backends are compared in `test_sample_weights.py`.
"""


def spec(name: str, accumulate: int) -> dict[str, Any]:
    return {
        "model": {"torch": network},
        "data": samples,
        "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
        "global_batch": 8,
        "epochs": 2,
        "accumulate": accumulate,
        "precision": "float64",
        "threads": 1,
        **(PORTABLE[name] if name in PORTABLE else {"loss": LOSSES[name]()}),
    }


def trained(session: isotrain.Session, name: str) -> list[float]:
    """The losses of all steps and of the evaluation, the weights, and the losses of two local steps."""
    batches = list(session.batches())
    losses = [float(session.step(batch)) for batch in batches]
    weights = [float(np.abs(w).sum()) for w in session.read_state(("trainable",)).values()]
    evaluated = session.evaluate()["loss"]
    local = [float(session.group.local_step(batch, 0.0)) for batch in (batches[0], batches[-1])]
    return [*losses, evaluated, *weights, *local]


@functools.cache
def results(backend: str, replicas: int) -> dict[str, list[float]]:
    """By case and slices: what every process of a run says alike."""
    specs = {f"{name}, {count}": spec(name, count) for name, count in RUNS[backend, replicas]}
    first, *others = launched_in_turn(specs, trained, backend, replicas)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("name", CASES)
def test_any_split_gives_the_same(name: str) -> None:
    whole = results(*WHOLE)[f"{name}, 1"]
    assert np.isfinite(whole).all()
    splits = [(run, count) for run in RUNS for each, count in RUNS[run] if each == name][1:]
    assert splits
    for run, count in splits:
        split = results(*run)[f"{name}, {count}"]
        np.testing.assert_allclose(split, whole, rtol=1e-12, err_msg=f"{run}, {count} slices")


@pytest.mark.parametrize("backend", ["torch-ddp", "tf-mirrored"])
def test_the_plan_says_what_local_steps_do_not_honour(backend: str) -> None:
    spec = {
        "model": masked,
        "data": sentences,
        "loss": CROSS_ENTROPY,
        "optimizer": {"name": "sgd", "lr": 0.125},
        "global_batch": 8,
        "epochs": 1,
        "threads": 1,
        "strategy": "local-sgd",
    }
    remarks = isotrain.measured_plan(spec, backend=backend, replicas=2).remarks
    assert any("In local steps" in remark for remark in remarks)
