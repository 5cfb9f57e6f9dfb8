"""Losses and metrics of portable models: Keras' own by name, and a person's as Keras calls them.

Imported by adapters only after `keras_backend.claim`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras

from isotrain.adapters import chosen as choices
from isotrain.adapters import keras_private
from isotrain.plugin import (
    Component,
    SpecError,
    TrainingSpec,
    UnsupportedError,
    unknown_name,
)

Loss = Callable[[Any, Any], Any]
"""`loss(targets, predictions)`: a scalar mean over the samples, or one value per sample."""


def build_loss(spec: TrainingSpec, framework: str, squeeze: bool = True) -> Loss:
    """Makes the spec's loss: a Keras loss by name, or the person's own callable.

    Args:
        spec: Names it.
        framework: Whose entry of the spec is taken.
        squeeze: Whether a callable gets targets and predictions without a last axis of length 1 that only
            one of them has, as Keras' own losses do; without it they are refused.
    """
    return _component(spec.loss, framework, "loss", _loss_classes(), squeeze)


def build_metrics(spec: TrainingSpec, framework: str) -> list[keras.metrics.Metric]:
    """Makes the spec's metrics anew: Keras metrics by name, or the mean of a callable's values."""
    metrics = []
    for given in spec.metrics:
        if given.name in ("accuracy", "acc"):
            metrics.append(keras.metrics.MeanMetricWrapper(inferred_accuracy, name=given.name))
            continue
        metric = _component(given, framework, "metrics", _metric_classes())
        if not isinstance(metric, keras.metrics.Metric):
            metric = keras.metrics.MeanMetricWrapper(metric, name=given.label.rpartition(":")[2])
        metrics.append(metric)
    names = [metric.name for metric in metrics]
    double = sorted({name for name in names if names.count(name) > 1 or name == "loss"})
    if double:
        raise SpecError(
            f"metrics: more than one result would be called {', '.join(double)} (the loss is always"
            " given as `loss`). Give one of them another name: the option `name`, or a callable of"
            " your own."
        )
    return metrics


def built_late(metrics: Iterable[keras.metrics.Metric]) -> list[str]:
    """The names of metrics that make their variables when they see the first samples."""
    return [metric.name for metric in metrics if not keras_private.is_built(metric)]


def require_sums(metrics: Sequence[keras.metrics.Metric]) -> None:
    """Makes sure that metrics have the variables that others' sums can be added to.

    Raises:
        UnsupportedError: One makes its variables when it sees the first samples.
    """
    late = built_late(metrics)
    if late:
        raise UnsupportedError(
            f"metrics: {', '.join(late)} makes its variables when it sees samples, and so cannot be"
            " added up over the workers of a served run. Leave it out, or give a function of your own,"
            " whose values are averaged."
        )


def update_metrics(metrics: Sequence[keras.metrics.Metric], targets: Any, predictions: Any) -> None:
    """Adds samples to metrics.

    Raises:
        SpecError: There are metrics, and an objective that gave no predictions.
    """
    if metrics and predictions is None:
        raise SpecError(
            "metrics: they need predictions, and the objective gave losses only. Let it return the"
            " pair (losses, predictions), or leave the metrics out."
        )
    for metric in metrics:
        metric.update_state(targets, predictions)


def inferred_accuracy(targets: Any, predictions: Any) -> Any:
    """Accuracy whose kind (binary, categorical, sparse categorical) follows from the shapes."""
    if len(predictions.shape) == 1:
        targets, predictions = keras.ops.reshape(targets, (-1, 1)), predictions[:, None]
    if predictions.shape[-1] == 1:
        return keras.metrics.binary_accuracy(targets, predictions)
    sparse = len(targets.shape) < len(predictions.shape) or targets.shape[-1] == 1
    if sparse:
        return keras.metrics.sparse_categorical_accuracy(targets, predictions)
    return keras.metrics.categorical_accuracy(targets, predictions)


def _component(
    given: Any, framework: str, field: str, classes: Mapping[str, type], squeeze: bool = True
) -> Any:
    """Makes a loss or metric from a Keras name, or from the person's own callable or class."""
    chosen: Component = choices.select(given, framework, field)
    if not chosen.is_reference:
        cls = _named(chosen.name, field, classes)
        return choices.constructed(cls, chosen, field, **_own_name(cls))
    found = choices.found(chosen, field)
    if isinstance(found, keras.losses.Loss | keras.metrics.Metric):
        return found
    return choices.as_function(found, chosen, field, squeeze=squeeze)


def _named(name: str, field: str, classes: Mapping[str, type]) -> type:
    """The Keras class of that name; abbreviations such as `mse` stand for functions named as a class."""
    if name in classes:
        return classes[name]
    with contextlib.suppress(ValueError):
        full = getattr(keras.losses.get(name), "__name__", "")
        if full in classes:
            return classes[full]
    raise SpecError(f"{field}: " + unknown_name(f"Keras {field} name", name, classes))


def _own_name(cls: type) -> dict[str, str]:
    """The option `name` of a class that would count its objects instead: auc, auc_1, ..."""
    name = inspect.signature(cls).parameters.get("name")
    counts = name is not None and name.default is None
    return {"name": choices.snake_case(cls.__name__)} if counts else {}


def _loss_classes() -> dict[str, type]:
    return _by_every_name(vars(keras.losses).values(), keras.losses.Loss)


def _metric_classes() -> dict[str, type]:
    return _by_every_name(vars(keras.metrics).values(), keras.metrics.Metric)


def _by_every_name(objects: Iterable[Any], base: type) -> dict[str, type]:
    """Class names and their snake-case forms, for the concrete subclasses of `base`."""
    classes = {
        item.__name__: item
        for item in objects
        if isinstance(item, type) and issubclass(item, base) and item is not base
    }
    snake = {choices.snake_case(name): cls for name, cls in classes.items()}
    return {**snake, **classes}
