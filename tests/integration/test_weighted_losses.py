"""A loss that does not count all targets alike is the mean of the whole global batch, however it is split."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.testing.consecutive_sessions import launched_in_turn

pytestmark = pytest.mark.features

WEIGHTS = [0.25, 2.0, 1.0, 0.5]


def network() -> Any:
    import torch

    return torch.nn.Linear(6, 4)


def differentiating() -> Any:
    """As `network`; what it adds to all classes alike changes no loss."""
    import torch

    class Differentiating(torch.nn.Linear):
        def forward(self, inputs: Any) -> Any:
            inputs = inputs.detach().requires_grad_()
            outputs = super().forward(inputs)
            (slopes,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
            return outputs + slopes.sum(1, keepdim=True)

    return Differentiating(6, 4)


def samples() -> isotrain.DataSet:
    """Classes of which many are 1: all of some slices."""
    draw = np.random.default_rng(0)
    classes = np.where(draw.random(26) < 0.6, 1, draw.integers(4, size=26))
    pair = draw.standard_normal((26, 6)), classes
    return isotrain.DataSet(train=pair, validation=pair)


def ignoring() -> Any:
    import torch

    return {"torch": torch.nn.CrossEntropyLoss(ignore_index=1)}


def padded() -> isotrain.DataSet:
    """As `samples`, with torch's own padding in the place of class 1."""
    pair = samples().train
    padding = pair[0], np.where(pair[1] == 1, -100, pair[1])
    return isotrain.DataSet(train=padding, validation=padding)


def by_default() -> Any:
    import torch

    return {"torch": torch.nn.CrossEntropyLoss()}


def by_function() -> Any:
    import torch

    function = torch.nn.functional.cross_entropy
    return {"torch": functools.partial(function, label_smoothing=0.0)}


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
    """Sentences of lengths from 0 to 5, padded with 0."""
    draw = np.random.default_rng(1)
    words = draw.integers(1, 9, size=(26, 5))
    words[np.arange(5) >= draw.integers(6, size=26)[:, None]] = 0
    words[8:11] = 0
    pair = words, draw.integers(4, size=(26, 5))
    return isotrain.DataSet(train=pair, validation=pair)


LOSSES = {"ignoring": ignoring, "weighing": weighing, "both": both, "named": lambda: NAMED}
"""Of native models."""
PADDED = {
    "padded": by_default,
    "padded, by a function": by_function,
    "padded, differentiating": by_default,
}
"""Of native models that ignore what torch ignores by default, where others ignore class 1."""
STRATEGIES: dict[str, Any] = {
    "padded, hierarchical": "hierarchical",
    "padded, sharded": {"name": "sharded", "options": {"stage": 3}},
}
PORTABLE: dict[str, dict[str, Any]] = {
    "masked": {"model": masked, "data": sentences, "loss": CROSS_ENTROPY},
    "masked, ignoring": {"model": masked, "data": sentences, "loss": NAMED},
    "portable, ignoring": {"model": plain, "loss": NAMED},
}
CASES = (*PORTABLE, *LOSSES, *PADDED)
WHOLE = ("torch-ddp", 1)
RUNS: dict[tuple[str, int], list[tuple[str, int]]] = {
    WHOLE: [*((name, 1) for name in CASES), *((name, 2) for name in (*LOSSES, *PADDED))],
    ("torch-ddp", 2): [
        ("masked, ignoring", 1),
        *((name, 2) for name in (*LOSSES, *PADDED)),
        ("padded", 1),
        ("padded, hierarchical", 1),
        ("padded, sharded", 1),
    ],
    ("torch-ddp", 3): [*((name, 2) for name in PORTABLE), *((name, 1) for name in LOSSES)],
    ("horovod-torch", 2): [("both", 2), ("padded", 1), ("padded", 2)],
    ("horovod-tf", 2): [("masked, ignoring", 2)],
}
"""What the processes of each run train in turn: cases, and into how many slices a replica's share is cut.

Masked losses of other backends are compared in `test_sample_weights.py`.
"""


def spec(name: str, gradient_accumulation_steps: int) -> dict[str, Any]:
    return {
        "model": {"torch": network},
        "data": samples,
        "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
        "global_batch_size": 8,
        "epochs": 2,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "precision": "float64",
        "threads": 1,
        **_own_fields(name),
    }


def _own_fields(name: str) -> dict[str, Any]:
    if name in PORTABLE:
        return PORTABLE[name]
    if name in STRATEGIES:
        return {**_own_fields("padded"), "strategy": STRATEGIES[name]}
    if name == "padded, differentiating":
        return {**_own_fields("padded"), "model": {"torch": differentiating}}
    return {"loss": PADDED[name](), "data": padded} if name in PADDED else {"loss": LOSSES[name]()}


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
    """By case and slices, what every process of a run returns alike."""
    specs = {f"{name}, {count}": spec(name, count) for name, count in RUNS[backend, replicas]}
    first, *others = launched_in_turn(specs, trained, backend, replicas)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("name", CASES)
def test_any_split_gives_the_same(name: str) -> None:
    whole = results(*WHOLE)[f"{name}, 1"]
    assert np.isfinite(whole).all()
    splits = [
        (run, each, count)
        for run in RUNS
        for each, count in RUNS[run]
        if each == name or (name == "padded" and each in STRATEGIES)
    ]
    assert len(splits) > 1
    for run, each, count in splits:
        split = results(*run)[f"{each}, {count}"]
        np.testing.assert_allclose(split, whole, rtol=1e-12, err_msg=f"{run}, {count} slices")


@pytest.mark.parametrize("name", PADDED)
def test_padding_is_left_out_as_any_class_is(name: str) -> None:
    whole = results(*WHOLE)
    np.testing.assert_allclose(whole[f"{name}, 1"], whole["ignoring, 1"], rtol=1e-12)


@pytest.mark.parametrize("backend", ["torch-ddp", "tf-mirrored"])
def test_the_plan_says_what_local_steps_do_not_honour(backend: str) -> None:
    spec = {
        "model": masked,
        "data": sentences,
        "loss": CROSS_ENTROPY,
        "optimizer": {"name": "sgd", "lr": 0.125},
        "global_batch_size": 8,
        "epochs": 1,
        "threads": 1,
        "strategy": "local-sgd",
    }
    notes = isotrain.measured_plan(spec, backend=backend, replicas=2).notes
    assert any("In local steps" in note for note in notes)
