"""Losses with their derivatives, and metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from isotrain.plugin import (
    Component,
    SpecError,
    TrainingSpec,
    UnsupportedError,
    import_strings,
    unknown_name,
)
from isotrain.testing.reference.layers import Array
from isotrain.testing.reference.network import Network

Loss = Callable[[Any, Any], tuple[Array, Any]]
"""`loss(targets, predictions)`: losses, shape [samples], and their derivatives by the predictions."""
Objective = Callable[[Any, Any], tuple[Array, Any, Any]]
"""`objective(inputs, targets)`: losses, shape [samples], predictions, and derivatives by the outputs."""


def mean_squared_error(targets: Array, predictions: Array) -> tuple[Array, Array]:
    """Squared error, averaged per sample: losses, shape [samples], and derivatives like `predictions`."""
    difference = _difference(targets, predictions)
    return _per_sample(difference**2), 2 * difference / _size(difference)


def mean_absolute_error(targets: Array, predictions: Array) -> tuple[Array, Array]:
    """Absolute error, averaged per sample: losses, shape [samples], and derivatives like `predictions`."""
    difference = _difference(targets, predictions)
    return _per_sample(np.abs(difference)), np.sign(difference) / _size(difference)


def sparse_categorical_crossentropy(
    targets: Array, predictions: Array, *, from_logits: bool = False
) -> tuple[Array, Array]:
    """Cross-entropy of logits, shape `[samples, classes]`, and integer labels from 0, shape `[samples]`.

    Raises:
        SpecError: `from_logits` is not true, or a label is no class.
    """
    if not from_logits:
        raise SpecError(
            "loss: the NumPy backend has sparse_categorical_crossentropy of logits only: give it the"
            " option from_logits: true, and leave the softmax out of the model."
        )
    classes = predictions.shape[1]
    if (wrong := targets[(targets < 0) | (targets >= classes)]).size:
        raise SpecError(
            "loss: 'sparse_categorical_crossentropy' got a target that is no class; expected 0 to"
            f" {classes - 1}. Received {wrong.flat[0]}."
        )
    shifted = predictions - predictions.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    totals = exponentials.sum(axis=1, keepdims=True)
    rows, slopes = np.arange(len(predictions)), exponentials / totals
    losses = np.log(totals[:, 0]) - shifted[rows, targets]
    slopes[rows, targets] -= 1
    return losses, slopes


def accuracy(targets: Array, predictions: Array) -> Array:
    """Accuracy per sample, bool, shape [samples].

    Args:
        targets: Class labels, shape [samples]; or binary targets of one number per sample.
        predictions: Scores, shape [samples, classes]; or one number per sample, positive above 1/2.
    """
    if predictions.ndim > 1 and predictions.shape[-1] > 1:
        return np.asarray(predictions.argmax(axis=-1) == targets)
    return np.equal(predictions.reshape(-1) > 0.5, targets.reshape(-1) > 0.5)


LOSSES = {
    each.__name__: each
    for each in (mean_squared_error, mean_absolute_error, sparse_categorical_crossentropy)
}
METRICS: Mapping[str, Callable[[Any, Any], Array]] = {
    "accuracy": accuracy,
    "mean_absolute_error": lambda targets, outputs: mean_absolute_error(targets, outputs)[0],
    "mean_squared_error": lambda targets, outputs: mean_squared_error(targets, outputs)[0],
}


def _difference(targets: Array, predictions: Array) -> Array:
    """Predictions minus targets, shape of the predictions; targets may lack a last axis of length 1.

    Raises:
        SpecError: Their sizes differ.
    """
    if targets.size != predictions.size:
        raise SpecError(
            f"loss: the targets have shape {targets.shape}, the predictions {predictions.shape}."
        )
    return np.asarray(predictions - targets.reshape(predictions.shape))


def _per_sample(values: Array) -> Array:
    """Mean over all axes but the first: shape `[samples, ...]` to `[samples]`."""
    return np.asarray(values.reshape(len(values), -1).mean(axis=1))


def _size(values: Array) -> int:
    """Number of elements of a sample in an array `[samples, ...]`."""
    return values.size // len(values)


def build_objective(spec: TrainingSpec, network: Network) -> Objective:
    """Objective function of the spec, from its `objective` or its loss.

    Raises:
        UnsupportedError: The spec has losses or metrics for several outputs.
    """
    if spec.objective is not None:
        custom = import_strings.resolve(spec.for_framework("objective", "numpy"))
        return lambda inputs, targets: _checked(custom(network, (inputs, targets)))
    losses = spec.losses("numpy")
    if set(losses) != {None} or any(metric.output for metric in spec.metrics):
        raise UnsupportedError("the NumPy backend knows no losses and metrics of several outputs.")
    loss: Loss = _function("loss", losses[None], LOSSES)

    def objective(inputs: Any, targets: Any) -> tuple[Array, Any, Any]:
        outputs = network(inputs)
        losses, slopes = loss(targets, outputs)
        return losses, outputs, slopes

    return objective


def _checked(given: Any) -> tuple[Array, Any, Any]:
    """Result of an objective: losses of shape `[samples]`, predictions for metrics, and slopes."""
    if not isinstance(given, tuple) or len(given) != 3:
        raise SpecError(
            "objective: on the NumPy backend it returns (losses, predictions, slopes): one loss per"
            " sample, what metrics get, and the derivative of each loss by the model's outputs;"
            f" received {type(given).__name__!r}."
        )
    return given


class Means:
    """Running sums of metrics; each metric is the mean of a function's values over samples.

    Attributes:
        sums: Sum of values and number of samples of each metric, shape [2 * metrics], float64.
    """

    def __init__(self, metrics: Sequence[Component]) -> None:
        """Starts with sums of zero.

        Raises:
            SpecError: A metric is unknown, or two have one name.
            UnsupportedError: A metric is weighted by sample weights.
        """
        if any(each.weighted for each in metrics):
            raise UnsupportedError("metrics: the NumPy backend has none that count by weights.")
        self._functions = {
            each.label.rpartition(":")[2]: _function("metrics", each, METRICS) for each in metrics
        }
        if len(self._functions) < len(metrics) or "loss" in self._functions:
            raise SpecError("metrics: each needs a name of its own, which is not 'loss'.")
        self.sums = np.zeros(2 * len(self._functions))

    @property
    def of_each(self) -> dict[str, Array]:
        """Sums of each metric by name: views of shape [2], to be written in place."""
        pairs = self.sums.reshape(-1, 2)
        return dict(zip(self._functions, pairs, strict=True))

    def reset(self) -> None:
        """Sets the sums to zero."""
        self.sums[...] = 0

    def add(self, targets: Any, predictions: Any, count: int) -> None:
        """Adds `count` samples: targets and predictions, shapes [count, ...].

        Raises:
            SpecError: There are metrics, and the objective returned no predictions.
        """
        if predictions is None and self._functions:
            raise SpecError("metrics: they need predictions, and the objective gave None for them.")
        for index, function in enumerate(self._functions.values()):
            value = float(np.mean(function(targets, predictions)))
            self.sums[2 * index : 2 * index + 2] += (value * count, count)

    def results(self, sums: Array) -> dict[str, float]:
        """Means by name, from sums reduced over all replicas, shape [2 * metrics]."""
        pairs = sums.reshape(-1, 2)
        return {name: mean(*pair) for name, pair in zip(self._functions, pairs, strict=True)}


def mean(total: float, count: float) -> float:
    """Mean of `count` values, scalars; 0 when there are none."""
    return float(total / count) if count else 0.0


def _function(field: str, given: Component, known: Mapping[str, Any]) -> Any:
    """Function of a loss or metric of the spec, called with `(targets, predictions)`.

    Raises:
        SpecError: The name is unknown.
    """
    if not given.is_reference and given.name not in known:
        raise SpecError(f"{field}: {unknown_name(f'{field} name', given.name, known)}")
    function = import_strings.resolve(given.name) if given.is_reference else known[given.name]
    bound = functools.partial(function, **given.options) if given.options else function
    if given.order == "predictions-first":
        return lambda targets, predictions: bound(predictions, targets)
    return bound
