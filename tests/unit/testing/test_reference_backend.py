"""The parts of the reference backend: gradients against differences, functions against definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from isotrain.core.errors import IsotrainError, SpecError
from isotrain.core.spec.loading import load_spec
from isotrain.testing import reference_model
from isotrain.testing.reference.flatten import flatten, unflatten_into, unflatten_like
from isotrain.testing.reference.layers import BatchNormalization, Dense, Dropout, Embedding, Layer
from isotrain.testing.reference.losses_and_metrics import (
    accuracy,
    build_objective,
    mean_absolute_error,
    mean_squared_error,
    sparse_categorical_crossentropy,
)
from isotrain.testing.reference.network import Network
from isotrain.testing.reference.optimizers import clipped
from isotrain.testing.reference.tensor_ops import NumpyTensorOps

TINY = 2.0**-20


def slope(function: Callable[[], float], array: np.ndarray) -> np.ndarray:
    """The derivative of a function by each number of an array, from differences."""
    found = np.zeros(array.shape)
    for place in np.ndindex(array.shape):
        kept, values = array[place], []
        for step in (TINY, -TINY):
            array[place] = kept + step
            values.append(function())
        array[place] = kept
        found[place] = (values[0] - values[1]) / (2 * TINY)
    return found


@pytest.mark.parametrize(
    "layers",
    [
        [Dense(3, 2)],
        [Dense(3, 4, "tanh", name="a"), Dense(4, 2, "sigmoid", bias=False, name="b")],
        [Dense(3, 4, "relu", name="a"), BatchNormalization(4), Dense(4, 2, name="b")],
    ],
    ids=["linear", "smooth", "normalised"],
)
def test_gradients_are_those_of_the_loss(layers: list[Layer]) -> None:
    network, generator = Network(layers), np.random.default_rng(0)
    network.start(1, 0, "float64")
    network.training = True
    inputs, targets = generator.normal(size=(6, 3)), generator.normal(size=(6, 2))

    def loss() -> float:
        return float(mean_squared_error(targets, network(inputs))[0].mean())

    slopes = mean_squared_error(targets, network(inputs))[1] / len(inputs)
    for gradient, weight in zip(network.backward(slopes), network.trainable.values(), strict=True):
        np.testing.assert_allclose(gradient, slope(loss, weight), rtol=1e-6, atol=1e-8)


def test_embedding_gradients_add_up_for_repeated_indices() -> None:
    network = Network([Embedding(4, 1)])
    network.start(1, 0, "float64")
    network(np.array([3, 0, 3]))
    (gradient,) = network.backward(np.array([[1.0], [2.0], [4.0]]))
    assert gradient.tolist() == [[2.0], [0.0], [0.0], [5.0]]


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (mean_squared_error, np.array([[0.5, -1.0, 2.0], [1.0, 0.0, 1.0]])),
        (mean_absolute_error, np.array([[0.5, -1.0, 2.0], [1.0, 0.0, 1.0]])),
        (
            lambda y, x: sparse_categorical_crossentropy(y, x, from_logits=True),
            np.array([2, 0]),
        ),
    ],
)
def test_derivatives_of_losses(loss: Any, targets: np.ndarray) -> None:
    predictions = np.array([[0.25, 0.75, -1.0], [2.0, 0.5, 0.125]])
    found = slope(lambda: float(loss(targets, predictions)[0].sum()), predictions)
    np.testing.assert_allclose(loss(targets, predictions)[1], found, rtol=1e-6, atol=1e-9)


def test_targets_are_never_broadcast_against_predictions() -> None:
    predictions, targets = np.array([[1.0], [3.0]]), np.array([1.0, 1.0])
    losses, slopes = mean_squared_error(targets, predictions)
    assert losses.tolist() == [0.0, 4.0]
    assert slopes.tolist() == [[0.0], [4.0]]
    with pytest.raises(SpecError, match=r"shape \(1,\), the predictions \(2, 1\)"):
        mean_squared_error(targets[:1], predictions)


def test_arguments_of_a_callable_are_ordered_as_the_spec_says() -> None:
    def own(predictions: Any, targets: Any) -> Any:
        return predictions - targets, np.ones_like(predictions)

    network = Network([Dense(1, 1)])
    network.start(0, 0, "float64")
    fields = {"objective": None, "loss": {"call": own, "order": "predictions-first"}}
    objective = build_objective(load_spec(reference_model.spec(**fields)), network)
    losses, outputs, _ = objective(np.ones((2, 1)), np.full((2, 1), 5.0))
    assert np.array_equal(losses, outputs - 5.0)


def test_cross_entropy_is_that_of_the_definition() -> None:
    logits, labels = np.array([[1000.0, 0.0], [0.5, 1.5]]), np.array([0, 1])
    losses, _ = sparse_categorical_crossentropy(labels, logits, from_logits=True)
    np.testing.assert_allclose(losses, [0.0, np.log1p(np.exp(-1.0))], atol=1e-15)


def test_accuracy_of_classes_and_of_yes_and_no() -> None:
    classes = accuracy(np.array([1, 0]), np.array([[0.1, 0.9], [0.2, 0.8]]))
    assert classes.tolist() == [True, False]
    answers = accuracy(np.array([1.0, 0.0]), np.array([[0.9], [0.8]]))
    assert answers.tolist() == [True, False]


def test_weights_depend_on_the_seed_and_masks_on_the_replica() -> None:
    def started(seed: int, replica: int) -> Network:
        network = Network([Dense(4, 4), Dropout(0.5)])
        network.start(seed, replica, "float64")
        network.training = True
        return network

    first, again, other = started(1, 0), started(1, 1), started(2, 0)
    assert np.array_equal(first.trainable["dense/kernel"], again.trainable["dense/kernel"])
    assert not np.array_equal(first.trainable["dense/kernel"], other.trainable["dense/kernel"])
    inputs = np.ones((8, 4))
    assert not np.array_equal(first(inputs) == 0, again(inputs) == 0)


def test_layers_of_one_name_are_refused() -> None:
    with pytest.raises(SpecError, match=r"a name of its own, received \['dense', 'dense'\]"):
        Network([Dense(1, 1), Dense(1, 1)])


def test_arrays_as_one_vector() -> None:
    arrays = [np.zeros((2, 2), "float32"), np.zeros((), "int64"), np.zeros(3)]
    vector = np.arange(8.0)
    assert [part.dtype for part in unflatten_like(vector, arrays)] == [
        array.dtype for array in arrays
    ]
    unflatten_into(vector, arrays)
    assert np.array_equal(flatten(arrays), vector)
    assert flatten([]).shape == (0,)


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        ({"value": 2.0}, [[2.0, 0.0], [-2.0]]),
        ({"norm": 1.5}, [[1.5, 0.0], [-1.5]]),
        ({"norm": 3.5}, [[3.0, 0.0], [-3.5]]),
        ({"global_norm": 2.5}, [[1.5, 0.0], [-2.0]]),
        ({"global_norm": 7.0}, [[3.0, 0.0], [-4.0]]),
    ],
)
def test_clipping(bound: dict[str, float], expected: list[list[float]]) -> None:
    spec = load_spec(reference_model.spec(clip=bound))
    found = clipped(spec, [np.array([3.0, 0.0]), np.array([-4.0])])
    assert [gradient.tolist() for gradient in found] == expected


def test_functions_on_tensors() -> None:
    ops, vector = NumpyTensorOps(), np.array([1.0, -3.0, 2.0, 2.0])
    values, places = ops.top_k(ops.abs(vector), 3)
    assert values.tolist() == [3.0, 2.0, 2.0]
    assert places.tolist() == [1, 2, 3]
    assert [part.tolist() for part in ops.split(vector, [1, 3])] == [[1.0], [-3.0, 2.0], [2.0]]
    matrix = ops.reshape(vector, (2, 2))
    q, r = ops.qr(matrix)
    np.testing.assert_allclose(q @ r, matrix)
    with pytest.raises(IsotrainError, match="no bfloat16"):
        ops.cast(vector, "bfloat16")
