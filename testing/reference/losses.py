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
"""`loss(targets, predictions)`: one loss per sample, and the derivative of each by the predictions."""
Objective = Callable[[Any, Any], tuple[Array, Any, Any]]
"""`objective(inputs, targets)`: losses, predictions, and the derivative of each loss by the outputs."""


def mean_squared_error(targets: Array, predictions: Array) -> tuple[Array, Array]:
    """The mean over a sample's numbers."""
    difference = _difference(targets, predictions)
    return _per_sample(difference**2), 2 * difference / _size(difference)


def mean_absolute_error(targets: Array, predictions: Array) -> tuple[Array, Array]:
    """The mean over a sample's numbers."""
    difference = _difference(targets, predictions)
    return _per_sample(np.abs(difference)), np.sign(difference) / _size(difference)


def sparse_categorical_crossentropy(
    targets: Array, predictions: Array, *, from_logits: bool = False
) -> tuple[Array, Array]:
    """Of logits, shape `[samples, classes]`, and labels from 0, shape `[samples]`.

    Raises:
        SpecError: The predictions are not said to be logits.
    """
    if not from_logits:
        raise SpecError(
            "loss: backend 'reference' has sparse_categorical_crossentropy of logits only: give it the"
            " option from_logits: true, and leave the softmax out of the model."
        )
    shifted = predictions - predictions.max(axis=1, keepdims=True)
    powers = np.exp(shifted)
    totals = powers.sum(axis=1, keepdims=True)
    rows, slopes = np.arange(len(predictions)), powers / totals
    losses = np.log(totals[:, 0]) - shifted[rows, targets]
    slopes[rows, targets] -= 1
    return losses, slopes


def accuracy(targets: Array, predictions: Array) -> Array:
    """Of a class per sample, given as a label; or of yes and no, given as one number above 1/2."""
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
    """Predictions less targets, which may lack a last axis of length 1.

    Raises:
        SpecError: They have not equally many numbers.
    """
    if targets.size != predictions.size:
        raise SpecError(
            f"loss: the targets have shape {targets.shape}, the predictions {predictions.shape}."
        )
    return np.asarray(predictions - targets.reshape(predictions.shape))


def _per_sample(values: Array) -> Array:
    return np.asarray(values.reshape(len(values), -1).mean(axis=1))


def _size(values: Array) -> int:
    return values.size // len(values)


def build_objective(spec: TrainingSpec, network: Network) -> Objective:
    """Makes the function that is minimised, from the spec's objective or loss.

    Raises:
        UnsupportedError: The losses are of several outputs.
    """
    if spec.objective is not None:
        own = import_strings.resolve(spec.for_framework("objective", "reference"))
        return lambda inputs, targets: _checked(own(network, (inputs, targets)))
    losses = spec.losses("reference")
    if set(losses) != {None} or any(metric.output for metric in spec.metrics):
        raise UnsupportedError(
            "backend 'reference' knows no losses and metrics of several outputs."
        )
    loss: Loss = _function("loss", losses[None], LOSSES)

    def objective(inputs: Any, targets: Any) -> tuple[Array, Any, Any]:
        outputs = network(inputs)
        losses, slopes = loss(targets, outputs)
        return losses, outputs, slopes

    return objective


def _checked(given: Any) -> tuple[Array, Any, Any]:
    if not isinstance(given, tuple) or len(given) != 3:
        raise SpecError(
            "objective: on backend 'reference' it returns (losses, predictions, slopes): one loss per"
            " sample, what metrics get, and the derivative of each loss by the model's outputs;"
            f" received {type(given).__name__!r}."
        )
    return given


class Means:
    """Metrics as they are added up: each the mean of a function's values over samples.

    Attributes:
        sums: For each metric the sum of its values and the number of samples: float64, one vector.
    """

    def __init__(self, metrics: Sequence[Component]) -> None:
        """Starts at nothing.

        Raises:
            SpecError: A metric is unknown, or two have one name.
            UnsupportedError: One counts by sample weights.
        """
        if any(each.weighted for each in metrics):
            raise UnsupportedError("metrics: backend 'reference' has none that count by weights.")
        self._functions = {
            each.label.rpartition(":")[2]: _function("metrics", each, METRICS) for each in metrics
        }
        if len(self._functions) < len(metrics) or "loss" in self._functions:
            raise SpecError("metrics: each needs a name of its own, which is not 'loss'.")
        self.sums = np.zeros(2 * len(self._functions))

    @property
    def of_each(self) -> dict[str, Array]:
        """The sums of each metric by its name, to be written in place."""
        pairs = self.sums.reshape(-1, 2)
        return dict(zip(self._functions, pairs, strict=True))

    def reset(self) -> None:
        """Starts at nothing again."""
        self.sums[...] = 0

    def add(self, targets: Any, predictions: Any, count: int) -> None:
        """Adds samples.

        Raises:
            SpecError: There are metrics, and an objective that gave no predictions.
        """
        if predictions is None and self._functions:
            raise SpecError("metrics: they need predictions, and the objective gave None for them.")
        for place, function in enumerate(self._functions.values()):
            value = float(np.mean(function(targets, predictions)))
            self.sums[2 * place : 2 * place + 2] += (value * count, count)

    def results(self, sums: Array) -> dict[str, float]:
        """The means, from the sums of all replicas."""
        pairs = sums.reshape(-1, 2)
        return {name: mean(*pair) for name, pair in zip(self._functions, pairs, strict=True)}


def mean(total: float, count: float) -> float:
    """The mean of so many values; 0 of none."""
    return float(total / count) if count else 0.0


def _function(field: str, given: Component, known: Mapping[str, Any]) -> Any:
    """The function that a spec's loss or metric stands for.

    Raises:
        SpecError: It is unknown.
    """
    if not given.is_reference and given.name not in known:
        raise SpecError(f"{field}: {unknown_name(f'{field} name', given.name, known)}")
    found = import_strings.resolve(given.name) if given.is_reference else known[given.name]
    named = functools.partial(found, **given.options) if given.options else found
    if given.order == "predictions-first":
        return lambda targets, predictions: named(predictions, targets)
    return named
