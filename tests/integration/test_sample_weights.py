"""Weights of samples and classes, losses and metrics of several outputs, schedules: as `fit`, to 1e-12."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.testing.consecutive_sessions import launched_in_turn

pytestmark = pytest.mark.features

DRAW = np.random.default_rng(2)
X = DRAW.standard_normal((27, 6))
CLASSES = DRAW.integers(3, size=27)
NUMBERS = DRAW.standard_normal((27, 1))
WEIGHTS = DRAW.integers(0, 5, size=27) / 2.0
OTHERS = DRAW.integers(0, 5, size=27) / 4.0
WORDS = np.where(np.arange(5) < DRAW.integers(1, 6, size=27)[:, None], 1, 0) * DRAW.integers(
    1, 9, size=(27, 5)
)
NEXT = DRAW.integers(3, size=(27, 5))
CROSS_ENTROPY = {"name": "sparse_categorical_crossentropy", "from_logits": True}
WHOLE = ("torch-ddp", 1, 1)
BACKENDS = [("torch-ddp", 2, 2), ("tf-mirrored", 2, 1)]
EVERY = [*BACKENDS, ("horovod-torch", 2, 1), ("tf-multiworker", 2, 2)]
"""Backend, replicas, and slices of each, which 9 samples and 3 leave uneven."""


def classifier() -> Any:
    import keras

    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])


def tagger() -> Any:
    import keras

    layers = [keras.layers.Embedding(9, 4, mask_zero=True), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((5,)), *layers])


def named() -> Any:
    return _two(lambda number, kind: {"number": number, "kind": kind})


def listed() -> Any:
    return _two(lambda number, kind: [number, kind])


def _two(outputs: Any) -> Any:
    import keras

    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(5, activation="tanh")(inputs)
    number = keras.layers.Dense(1, name="number")(hidden)
    kind = keras.layers.Dense(3, name="kind")(hidden)
    return keras.Model(inputs, outputs(number, kind))


def absolute(targets: Any, predictions: Any) -> Any:
    """One value per sample."""
    import keras

    return keras.ops.mean(keras.ops.abs(predictions - targets), axis=-1)


COMPARED: list[Any] = []
"""The predictions that `squared` was given."""


def squared(targets: Any, predictions: Any) -> Any:
    """One value per sample, of two axes each; remembers of which predictions."""
    import keras

    COMPARED.append(predictions)
    return keras.ops.mean(keras.ops.square(predictions - targets), axis=-1)


def halving(learning_rate: float) -> Any:
    """Rates that float32 has too, in which TensorFlow computes schedules."""
    import keras

    schedule = keras.optimizers.schedules.ExponentialDecay(learning_rate, 1, 0.5)
    return keras.optimizers.SGD(schedule, momentum=0.5)


UNEVEN = {"global_batch_size": 8}
"""The last global batch is smaller; TensorFlow traces it once more."""
ONE_HOT = np.eye(3)[CLASSES]
BOTH = {
    "loss": {"number": squared, "kind": CROSS_ENTROPY},
    "loss_weights": {"number": 0.5, "kind": 2.0},
    "metrics": {
        "number": ["mean_absolute_error", {"name": "mean_squared_error", "weighted": True}],
        "kind": "sparse_categorical_accuracy",
    },
}
WEIGHTED = {"name": "sparse_categorical_accuracy", "weighted": True}
CASES: dict[str, dict[str, Any]] = {
    "samples": {
        "data": (X, CLASSES, WEIGHTS),
        "metrics": [WEIGHTED],
        "validation_split": 0.3,
        **UNEVEN,
    },
    "divided by the weights": {
        "data": (X, CLASSES, WEIGHTS),
        "loss": {**CROSS_ENTROPY, "reduction": "mean_with_sample_weight"},
    },
    "a function": {"data": (X, ONE_HOT, WEIGHTS), "loss": absolute},
    "places with a mask": {
        "model": tagger,
        "data": (WORDS, NEXT, WEIGHTS[:, None] + NEXT),
        **UNEVEN,
    },
    "classes": {"data": (X, CLASSES), "class_weight": {0: 2.0, 2: 0.25}, "validation_split": 0.25},
    "one-hot": {
        "data": (X, ONE_HOT),
        "class_weight": {1: 3.0},
        "loss": {"name": "categorical_crossentropy", "from_logits": True},
    },
    "at a falling rate": {
        "data": (X, CLASSES),
        "metrics": [{"name": "sparse_top_k_categorical_accuracy", "k": 2}],
        "optimizer": {"custom": halving, "lr": 0.25},
        "scaling": {"rule": "linear", "base_batch_size": 16},
        **UNEVEN,
    },
    "outputs": {"model": named, "data": (X, {"number": NUMBERS, "kind": CLASSES}), **BOTH},
    "outputs in a list": {
        "model": listed,
        "data": (X, (NUMBERS, CLASSES), (WEIGHTS, OTHERS)),
        **BOTH,
    },
    "outputs with weights": {
        "model": named,
        "data": (
            X,
            {"number": NUMBERS, "kind": CLASSES},
            {"number": WEIGHTS, "kind": OTHERS},
        ),
        **BOTH,
        **UNEVEN,
    },
}


def spec_of(case: str) -> dict[str, Any]:
    return {
        "model": classifier,
        "loss": CROSS_ENTROPY,
        "optimizer": {"name": "sgd", "lr": 0.125},
        "global_batch_size": 9,
        "epochs": 2,
        "shuffle": False,
        "precision": "float64",
        "threads": 1,
        **CASES[case],
    }


def trained(session: isotrain.Session, case: str) -> dict[str, Any]:
    """The metrics of each epoch, weights, and what evaluation gives; beside it the same of Keras alone."""
    expected = by_keras(session.group.model, case) if session.replicas == 1 else {}
    COMPARED.clear()
    epochs = []
    for batch in session.batches():
        session.step(batch)
        if batch.is_last_of_epoch:
            epochs.append(session.metrics())
    weights = [float(np.abs(w).sum()) for w in session.read_state(("trainable",)).values()]
    validation = session.evaluate()["loss"] if session.can_evaluate else 0.0
    metrics = [value for epoch in epochs for value in in_one_order(epoch)]
    compared = [len(COMPARED), len(set(map(id, COMPARED)))]
    return {
        "found": [*metrics, *weights, validation],
        "expected": expected,
        "compared": compared,
    }


def in_one_order(metrics: dict[str, Any]) -> list[Any]:
    """Values by their names, in which weighted ones of Keras are not called so."""
    named = {name.replace("weighted_", ""): value for name, value in metrics.items()}
    return [named[name] for name in sorted(named)]


def by_keras(built: Any, case: str) -> list[float]:
    """`compile` and `fit` on one replica, from the same weights."""
    import keras

    from isotrain.plugin import keras_private

    given = spec_of(case)
    with keras_private.without_tensorflow():  # which takes as long to import as all else here
        model = keras.models.clone_model(built)
    model.set_weights(built.get_weights())
    loss = given["loss"]
    by_output = isinstance(loss, dict) and "number" in loss
    losses = {k: as_keras(v) for k, v in loss.items()} if by_output else as_keras(loss)
    model.compile(
        optimizer=halving(0.125) if case == "at a falling rate" else keras.optimizers.SGD(0.125),
        loss=losses,
        loss_weights=given.get("loss_weights"),
        metrics=_counting(given.get("metrics", []), weighted=False),
        weighted_metrics=_counting(given.get("metrics", []), weighted=True),
    )
    inputs, targets, *weights = given["data"]
    history = model.fit(
        inputs,
        list(targets) if isinstance(targets, tuple) else targets,
        sample_weight=_of_keras(weights[0]) if weights else None,
        class_weight=given.get("class_weight"),
        validation_split=given.get("validation_split", 0.0),
        batch_size=given["global_batch_size"],
        epochs=2,
        shuffle=False,
        verbose=0,
    ).history
    measured = {n: v for n, v in history.items() if n != "loss" and not n.startswith("val_")}
    metrics = [values[epoch] for epoch in range(2) for values in in_one_order(measured)]
    sums = [float(np.abs(keras.ops.convert_to_numpy(w)).sum()) for w in model.trainable_variables]
    return [*metrics, *sums, history.get("val_loss", [0.0])[-1]]


def _counting(metrics: Any, *, weighted: bool) -> Any:
    """The names of the metrics that count by weights, or do not."""
    if isinstance(metrics, dict):
        return {output: _counting(given, weighted=weighted) for output, given in metrics.items()}
    listed = metrics if isinstance(metrics, list) else [metrics]
    return [_metric_of_keras(each) for each in listed if _is_weighted(each) == weighted]


def _is_weighted(metric: Any) -> bool:
    return isinstance(metric, dict) and metric.get("weighted", False)


def _metric_of_keras(metric: Any) -> Any:
    import keras

    if isinstance(metric, dict) and "k" in metric:
        return keras.metrics.SparseTopKCategoricalAccuracy(metric["k"])
    return metric["name"] if isinstance(metric, dict) else metric


def _of_keras(weights: Any) -> Any:
    return list(weights) if isinstance(weights, tuple) else weights


def as_keras(loss: Any) -> Any:
    import keras

    if callable(loss) or isinstance(loss, str):
        return loss
    classes = {
        "sparse_categorical_crossentropy": keras.losses.SparseCategoricalCrossentropy,
        "categorical_crossentropy": keras.losses.CategoricalCrossentropy,
    }
    return classes[loss["name"]](**{n: option for n, option in loss.items() if n != "name"})


ON_EVERY = ("places with a mask", "outputs with weights")
"""The cases of more backends; the others are of one of each framework."""
BEFORE_IT = ("classes", "one-hot")
"""The cases of one framework: weights of classes become those of samples before any has a part."""
ON_ONE = ("outputs",)
"""The case of one replica alone: split, outputs have weights."""


def splits_of(case: str) -> list[tuple[str, int, int]]:
    if case in ON_ONE:
        return []
    if case in BEFORE_IT:
        return BACKENDS[:1]
    return EVERY if case in ON_EVERY else BACKENDS


@functools.cache
def results(
    backend: str, replicas: int, gradient_accumulation_steps: int
) -> dict[str, dict[str, Any]]:
    """What the first process found in each case, which all have their turn in one run."""
    run = (backend, replicas, gradient_accumulation_steps)
    names = [name for name in CASES if run == WHOLE or run in splits_of(name)]
    specs = {
        name: {**spec_of(name), "gradient_accumulation_steps": gradient_accumulation_steps}
        for name in names
    }
    return launched_in_turn(specs, trained, backend, replicas)[0]


@pytest.mark.parametrize("case", CASES)
def test_weighted_runs_equal_keras(case: str) -> None:
    whole = results(*WHOLE)[case]
    np.testing.assert_allclose(whole["found"], whole["expected"], rtol=1e-12)
    for split in splits_of(case):
        found = results(*split)[case]["found"]
        np.testing.assert_allclose(found, whole["found"], rtol=1e-12, err_msg=split[0])


def test_the_loss_of_an_output_is_computed_once() -> None:
    """TensorFlow gives it beside the metrics; the tests of captures cover torch."""
    for split in [each for each in EVERY if each[0].startswith("tf-")]:
        calls, predictions = results(*split)["outputs with weights"]["compared"]
        assert calls == predictions > 0, split


def heads() -> Any:
    import torch

    class Heads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.number, self.kind = torch.nn.Linear(6, 1), torch.nn.Linear(6, 3)

        def forward(self, inputs: Any) -> dict[str, Any]:
            return {"number": self.number(inputs), "kind": self.kind(inputs)}

    return Heads()


def portable_heads() -> Any:
    import keras

    inputs = keras.Input((6,))
    outputs = {"number": keras.layers.Dense(1)(inputs), "kind": keras.layers.Dense(3)(inputs)}
    return keras.Model(inputs, outputs)


def from_zeros(session: isotrain.Session, name: str) -> list[float]:
    """The losses and metrics of a run whose weights begin at 0."""
    zeros = {n: np.zeros_like(w) for n, w in session.read_state(("trainable",)).items()}
    session.write_state(zeros)
    found = [float(session.step(batch)) for batch in session.batches()]
    return [*found, *session.metrics().values()]


def test_native_models_equal_portable_ones() -> None:
    kinds = {"all": CROSS_ENTROPY, "some": CROSS_ENTROPY | {"ignore_class": 1}}
    losses = {n: {"number": "mean_squared_error", "kind": kind} for n, kind in kinds.items()}
    portable, native = (
        launched_in_turn(
            {
                n: spec_of("outputs with weights") | {"loss": losses[n], "model": model}
                for n in losses
            },
            from_zeros,
            "torch-ddp",
            replicas,
        )[0]
        for model, replicas in ((portable_heads, 1), ({"torch": heads}, 2))
    )
    for name in losses:
        np.testing.assert_allclose(native[name], portable[name], rtol=1e-12, err_msg=name)
