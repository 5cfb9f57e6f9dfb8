"""Losses and metrics of class targets: what is no class is refused, or counts as wrong, on every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.isolated import run_isolated

import isotrain
from isotrain.testing.consecutive_sessions import launched_in_turn

CLASSES = 5
LETTERS, TIMES = 3, 6
SAMPLES = 10
"""Five steps; in the last two, torch replays what it has captured."""


def classifier() -> Any:
    from keras import Input, Sequential, layers

    return Sequential([Input((3,)), layers.Dense(CLASSES, activation="softmax")])


def native_classifier() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(3, CLASSES), nn.Softmax(-1))


def speller() -> Any:
    from keras import Input, Sequential, layers

    return Sequential([Input((TIMES, 3)), layers.Dense(CLASSES)])


def native_speller() -> Any:
    from torch import nn

    return nn.Linear(3, CLASSES)


def labelled(last: int) -> Any:
    """Samples with classes; only that of the last sample may be none."""
    classes = np.arange(SAMPLES) % CLASSES
    classes[-1] = last
    return np.random.default_rng(3).standard_normal((SAMPLES, 3)).astype("float32"), classes


def spelled(last: tuple[int, ...]) -> Any:
    """Samples with letters; only those of the last sample may be wrong."""
    letters = np.tile([1, 2, 0], (SAMPLES, 1))
    letters[-1] = last
    inputs = np.random.default_rng(3).standard_normal((SAMPLES, TIMES, 3))
    return inputs.astype("float32"), letters


def crowded() -> Any:
    """The last sample has as many letters as steps, two of which are equal."""
    inputs, _ = spelled((1, 2, 0))
    letters = np.tile([1, 2, 1, 2, 1, 0], (SAMPLES, 1))
    letters[-1] = [1, 2, 2, 1, 2, 1]
    return inputs, letters


ENTROPY = "sparse_categorical_crossentropy"
GENERALIZED = "categorical_generalized_cross_entropy"
NO_CLASS = "got a target that is no class; expected 0 to 4"
NO_LETTER = "'ctc' got a label that is no class; expected 0 to 4, other than the blank, 0"
REFUSED: dict[str, tuple[Any, Any, dict[str, Any], str, int]] = {
    "padding": (classifier, ENTROPY, {"last": -100}, NO_CLASS, -100),
    "negative": (classifier, ENTROPY, {"last": -1}, NO_CLASS, -1),
    "too large": (classifier, ENTROPY, {"last": 5}, NO_CLASS, 5),
    "generalized, negative": (classifier, GENERALIZED, {"last": -1}, NO_CLASS, -1),
    "generalized, too large": (classifier, GENERALIZED, {"last": 5}, NO_CLASS, 5),
    "letter": (speller, "ctc", {"last": (1, 7, 0)}, NO_LETTER, 7),
    "negative letter": (speller, "ctc", {"last": (1, -1, -1)}, NO_LETTER, -1),
    "blank": (speller, "ctc", {"last": (1, 0, 2)}, NO_LETTER, 0),
    "crowded": (speller, "ctc", {}, "'ctc' got more labels than the steps", 7),
}
"""Model, loss, arguments of the data, and the error with the value that it names."""
NATIVE = {classifier: native_classifier, speller: native_speller}


def spec_of(case: str, native: bool) -> dict[str, Any]:
    model, loss, arguments, *_ = REFUSED[case]
    data = crowded if case == "crowded" else spelled if model is speller else labelled
    return {
        "model": {"torch": NATIVE[model]} if native else model,
        "data": data,
        "data_args": arguments,
        "loss": loss,
        "optimizer": {"name": "sgd", "lr": 0.0625},
        "global_batch_size": 2,
        "epochs": 1,
        "shuffle": False,
        "threads": 1,
    }


def refused(session: isotrain.Session, case: str) -> tuple[int, str]:
    """Number of steps until the refusal, and its text."""
    steps = 0
    try:
        for batch in session.batches():
            session.step(batch)
            steps += 1
    except isotrain.IsotrainError as error:
        return steps, str(error)
    return steps, "nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "replicas", "native"),
    [
        ("torch-ddp", 1, False),
        ("torch-ddp", 1, True),
        pytest.param("tf-mirrored", 2, False, marks=pytest.mark.features),
        pytest.param("horovod-tf", 1, False, marks=pytest.mark.features),
    ],
)
def test_what_is_no_class_is_refused(backend: str, replicas: int, native: bool) -> None:
    specs = {case: spec_of(case, native) for case in REFUSED}
    returned = launched_in_turn(specs, refused, backend, replicas)[0]
    for case, (*_, text, value) in REFUSED.items():
        steps, told = returned[case]
        assert steps == SAMPLES // 2 - 1, (case, told)
        assert text in told, case
        assert f"Received {value}." in told, case


def half_of_scores(targets: Any, predictions: Any) -> Any:
    """A loss that takes any targets."""
    return (predictions - 0.5) ** 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "native"),
    [
        ("torch-ddp", False),
        ("torch-ddp", True),
        pytest.param("tf-mirrored", False, marks=pytest.mark.features),
    ],
)
def test_the_error_names_the_field_that_has_the_targets(backend: str, native: bool) -> None:
    plain = spec_of("too large", native)
    measured = {"loss": half_of_scores, "metrics": [ENTROPY]}
    specs = {"loss": plain, "metrics": {**plain, **measured}}
    returned = launched_in_turn(specs, told_at_the_end, backend, 1)[0]
    for field, told in returned.items():
        assert f"{field}: {ENTROPY!r} {NO_CLASS}" in told, told


def told_at_the_end(session: isotrain.Session, case: str) -> str:
    try:
        for batch in session.batches():
            session.step(batch)
        session.metrics()
    except isotrain.IsotrainError as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
@pytest.mark.failures
@pytest.mark.parametrize("backend", ["torch-ddp", "tf-multiworker"])
def test_a_worker_of_a_parameter_server_refuses_it_and_the_run_ends(
    backend: str, tmp_path: Path
) -> None:
    """The last weights are saved at the end, though the slice that failed never has a result."""
    spec = {**spec_of("negative", native=False), "strategy": "parameter-server"}
    with pytest.raises(isotrain.IsotrainError, match=f"{NO_CLASS}.*Received -1"):
        isotrain.run(
            spec, backend=backend, replicas=2, output=tmp_path, on_event=lambda event: None
        )


STRAY = [0, 2, 5, -1, -100, 1]
"""Targets of which only three are classes; each of those is among the two highest of its scores."""


def stray_top_k(session: isotrain.Session) -> list[float]:
    """Top-2 accuracy of stray targets, in each dtype, by Keras and, on torch, by the native function."""
    import keras

    from isotrain.adapters.keras.metrics import update_metric

    scores = np.eye(CLASSES)[[0, 2, 4, 4, 4, 1]] + np.linspace(0.25, 0, CLASSES)
    found = []
    for dtype in ("float32", "float64"):
        metric = keras.metrics.SparseTopKCategoricalAccuracy(k=2)
        targets, predictions = map(
            keras.ops.convert_to_tensor, (np.array(STRAY), scores.astype(dtype))
        )
        update_metric(metric, targets, predictions)
        found.append(float(metric.result()))
    if keras.backend.backend() == "torch":
        from isotrain.adapters.torch.metrics.base import sparse_top_k_categorical_accuracy

        found.append(
            float(sparse_top_k_categorical_accuracy(targets, predictions, k=2).mean().item())
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch-ddp", "tf-mirrored"])
def test_a_stray_target_is_never_among_the_highest(backend: str, tmp_path: Path) -> None:
    spec = spec_of("padding", native=False)
    found = run_isolated(stray_top_k, spec, backend, tmp_path / "run")
    assert found == [0.5] * len(found)
