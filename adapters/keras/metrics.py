"""Losses and metrics of portable models: Keras' built-in ones by name, and custom ones.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from isotrain.adapters.common import class_targets
from isotrain.adapters.common import spec_components as choices
from isotrain.adapters.common.outputs import OutputSelector
from isotrain.adapters.keras import builtin_names as keras_names
from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.shapes import fit
from isotrain.plugin import (
    Component,
    DataError,
    SpecError,
    TrainingSpec,
    UnsupportedError,
)

Loss = Callable[[Any, Any], Any]
"""`loss(targets, predictions)`: a scalar mean over the samples, or one value per sample."""
Accuracy = Callable[[Any, Any], Any]
"""`accuracy(targets, predictions)`: 1 or 0 for each sample, or each position."""
_UNWEIGHTED = (Component("metric"),)
"""Spec entry of a metric without options: it measures the model's whole output, unweighted."""
_OF_SHAPES = (ValueError, TypeError, IndexError)
"""Exceptions that Keras and the frameworks raise for shapes that do not fit; torch also a RuntimeError."""


class OutputLossMetric(keras.metrics.Metric):
    """Mean loss of one output as a metric, before `loss_weights`; accumulates total and count in float64."""

    def __init__(self, part: Callable[[Any, Any, Any], tuple[Any, Any | None]]) -> None:
        """Adds the metric's variables, which start at zero.

        Args:
            part: Function of targets, predictions and sample weights that returns the slice's mean loss and
                its denominator, both scalars; the denominator is None where it is the number of samples.
        """
        super().__init__(name="loss")
        self._part = part
        self._total = self.add_variable(
            shape=(), initializer="zeros", name="total", dtype="float64"
        )
        self._count = self.add_variable(
            shape=(), initializer="zeros", name="count", dtype="float64"
        )

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any | None = None) -> None:
        mean, denominator = self._part(y_true, y_pred, sample_weight)
        count = keras.ops.shape(y_pred)[0] if denominator is None else denominator
        count = keras.ops.cast(count, "float64")
        self._total.assign_add(keras.ops.cast(mean, "float64") * count)
        self._count.assign_add(count)

    def result(self) -> Any:
        return keras.ops.divide_no_nan(self._total.value, self._count.value)


def build_losses(spec: TrainingSpec, framework: str) -> dict[str | None, Loss]:
    """Makes the spec's losses, by output name: Keras losses, or the user's own functions."""
    components = spec.losses(framework)
    return {
        output: _component(component, framework, "loss") for output, component in components.items()
    }


def build_metrics(spec: TrainingSpec, framework: str) -> list[keras.metrics.Metric]:
    """Makes new metrics for the spec: Keras metrics, or the mean of a function's values."""
    metrics = []
    for component in spec.metrics:
        if component.name in ("accuracy", "acc"):
            metrics.append(keras.metrics.MeanMetricWrapper(inferred_accuracy, name=component.name))
            continue
        metric = _component(component, framework, "metrics")
        if not isinstance(metric, keras.metrics.Metric):
            name = component.label.rpartition(":")[2]
            metric = keras.metrics.MeanMetricWrapper(metric, name=name)
        metrics.append(metric)
    shown = [component.shown(m.name) for m, component in zip(metrics, spec.metrics, strict=True)]
    choices.require_unique_names(shown)
    return metrics


def unbuilt_metrics(metrics: Iterable[keras.metrics.Metric]) -> list[str]:
    """Names of the metrics that create their variables on the first update."""
    return [metric.name for metric in metrics if not keras_private.is_built(metric)]


def sum_names(metric: keras.metrics.Metric) -> list[str]:
    """Names of a metric's variables, in order; `#1`, `#2`, ... is appended to repeated names."""
    names = [variable.name for variable in metric.variables]
    return [
        name if name not in names[:index] else f"{name}#{names[:index].count(name)}"
        for index, name in enumerate(names)
    ]


_FIT = (
    "They would only agree by broadcasting. Change the shape of one of them; for targets that are labels of"
    " classes there are names that begin with 'sparse_'."
)


def require_sums(metrics: Sequence[keras.metrics.Metric]) -> None:
    """Checks that all metrics have their variables, to which sums of other processes can be added.

    Raises:
        UnsupportedError: A metric creates its variables on the first update.
    """
    unbuilt = unbuilt_metrics(metrics)
    if unbuilt:
        raise UnsupportedError(
            f"metrics: {', '.join(unbuilt)} makes its variables when it sees samples, and so cannot be"
            " added up over the workers of a parameter-server run. Leave it out, or give a"
            " function of your own,"
            " whose values are averaged."
        )


def update_metrics(
    metrics: Sequence[keras.metrics.Metric],
    targets: Any,
    predictions: Any,
    components: Sequence[Component] = (),
    outputs: OutputSelector | None = None,
) -> None:
    """Updates metrics with the samples of a batch.

    Args:
        metrics: Metrics of the spec, or some of them.
        targets: Targets, first axis samples; with the sample weights, where the data have them.
        predictions: Predictions, first axis samples.
        components: Spec entry of each metric: its output, and whether sample weights apply; empty for
            metrics of the whole output, unweighted.
        outputs: Selects one output's targets and predictions.

    Raises:
        SpecError: There are metrics, and an objective that returned no predictions.
    """
    choices.require_predictions(metrics, predictions)
    outputs = outputs or OutputSelector()
    for metric, component in zip(metrics, components or _UNWEIGHTED * len(metrics), strict=True):
        *pair, weights = outputs.sample(targets, predictions, component.output)
        is_weighted = component.weighted or isinstance(metric, OutputLossMetric)
        update_metric(metric, pair[0], pair[1], weights if is_weighted else None)


def update_metric(
    metric: keras.metrics.Metric, targets: Any, predictions: Any, weights: Any | None = None
) -> None:
    """Updates one metric with samples and their weights (shape `[samples]`, or None)."""
    call = checking_shapes("metrics", metric) if is_keras_builtin(metric) else metric.update_state
    # Keras multiplies masks into weights, on torch in place.
    weight_args = () if weights is None else (keras.ops.copy(weights),)
    with keras_private.top_k_of_all_targets():
        call(*_as_columns(metric, targets, predictions), *weight_args)


def checking_shapes(
    field: str, part: keras.losses.Loss | keras.metrics.Metric
) -> Callable[..., Any]:
    """Wraps a loss or metric of Keras so that shapes that do not fit raise a `SpecError` with its name.

    Args:
        field: Spec field, for the message.
        part: Loss or metric; its arguments start with targets and predictions.
    """
    call = part.update_state if isinstance(part, keras.metrics.Metric) else part
    kind, axis = type(part).__name__, keras_private.class_axis(part)

    def refusing(targets: Any, predictions: Any, *others: Any) -> Any:
        require_fit(field, part.name, kind, targets, predictions, axis)
        try:
            with _scope(field, part.name):
                return call(targets, predictions, *others)
        except SpecError:
            raise
        except Exception as error:
            if (target := class_targets.invalid_class(error)) is not None:
                expected = class_targets.expectation(field, part.name, predictions.shape[axis])
                raise class_targets.received(expected, target) from None
            if not isinstance(error, _OF_SHAPES) and type(error) is not RuntimeError:
                raise
            raise SpecError(f"{_unfit(field, part.name, targets, predictions)}. {error}") from error

    return refusing


def require_fit(
    field: str, name: str, kind: str, targets: Any, predictions: Any, axis: int = -1
) -> None:
    """Refuses targets that a loss or metric of Keras cannot take, or would only compare by broadcasting.

    Args:
        field: Spec field, for the message.
        name: Name of the loss or metric.
        kind: Its class name.
        targets: Targets, any shape.
        predictions: Predictions, or what has their shape.
        axis: Class axis of the predictions.

    Raises:
        DataError: The targets are text.
        SpecError: The shapes do not fit.
    """
    _refuse_text(field, name, targets)
    if not fit(kind, targets, predictions, axis):
        raise SpecError(f"{_unfit(field, name, targets, predictions)}. {_FIT}")


def _refuse_text(field: str, name: str, targets: Any) -> None:
    if getattr(targets, "dtype", None) == "string":
        raise DataError(
            f"data: the targets hold text, and {field}: {name!r} takes numbers only. Encode them in the data"
            " set or in a `collate` of the spec."
        )


def _scope(field: str, name: str) -> contextlib.AbstractContextManager[Any]:
    """On TensorFlow the scope from whose name `class_targets.in_scope` reads field and name."""
    if keras.backend.backend() != "tensorflow":
        return contextlib.nullcontext()
    scope: contextlib.AbstractContextManager[Any] = keras.name_scope(
        class_targets.scope(field, name)
    )
    return scope


def _unfit(field: str, name: str, targets: Any, predictions: Any) -> str:
    shapes = [list(getattr(each, "shape", ())) for each in (targets, predictions)]
    return (
        f"{field}: {name!r} cannot be computed of targets of shape {shapes[0]} and predictions of shape"
        f" {shapes[1]}"
    )


def is_keras_builtin(part: keras.metrics.Metric | keras.losses.Loss) -> bool:
    """Whether a metric or loss is one of Keras' classes and wraps no custom function."""
    is_keras = type(part).__module__.partition(".")[0] == "keras"
    return is_keras and type(part) is not keras.metrics.MeanMetricWrapper


def _as_columns(metric: keras.metrics.Metric, targets: Any, predictions: Any) -> tuple[Any, Any]:
    """Reshapes `[samples]` to `[samples, 1]` for Keras' metrics, which take a vector for one sample."""
    if not is_keras_builtin(metric):
        return targets, predictions
    if all(len(getattr(each, "shape", ())) == 1 for each in (targets, predictions)):
        return targets[:, None], predictions[:, None]
    return targets, predictions


def ensure_built(metrics: Sequence[keras.metrics.Metric], targets: Any, predictions: Any) -> None:
    """Builds unbuilt metrics by an update with placeholder targets and predictions, and resets them."""
    for metric in metrics:
        if not keras_private.is_built(metric):
            update_metrics([metric], targets, predictions)
            metric.reset_state()


def float64_results(name: str, result: Any) -> Any:
    """A metric's result as a float64 tensor of any shape, or a dict of these.

    Raises:
        SpecError: The result, or a value of the dict, is None or text.
    """
    if isinstance(result, Mapping):
        return {key: float64_results(f"{name}/{key}", part) for key, part in result.items()}
    if result is None or isinstance(result, str | bytes):
        raise SpecError(
            f"metrics: the result of {name!r} is {type(result).__name__!r}; expected a number, an array of"
            " numbers, or a dict of these."
        )
    return keras.ops.cast(keras.ops.convert_to_tensor(result), "float64")


def named_results(name: str, result: Any) -> dict[str, float]:
    """A metric's result as numbers: a single one by its name, several as `name/key` or `name/index`.

    Args:
        name: Metric name.
        result: Number, array of any shape, or dict of these.
    """
    if isinstance(result, Mapping):
        return {
            label: value
            for key, part in result.items()
            for label, value in named_results(f"{name}/{key}", part).items()
        }
    values = np.asarray(keras.ops.convert_to_numpy(float64_results(name, result)))
    if values.size == 1:
        return {name: float(values.item())}
    return {
        "/".join([name, *map(str, index)]): float(value) for index, value in np.ndenumerate(values)
    }


def inferred_accuracy(targets: Any, predictions: Any) -> Any:
    """Accuracy per sample: binary, categorical or sparse categorical, chosen by the shapes.

    Raises:
        DataError: The targets are text.
    """
    _refuse_text("metrics", "accuracy", targets)
    if len(predictions.shape) == 1:
        targets, predictions = keras.ops.reshape(targets, (-1, 1)), predictions[:, None]
    if predictions.shape[-1] == 1:
        return keras.metrics.binary_accuracy(targets, predictions)
    sparse = len(targets.shape) < len(predictions.shape) or targets.shape[-1] == 1
    if sparse:
        return keras.metrics.sparse_categorical_accuracy(targets, predictions)
    return keras.metrics.categorical_accuracy(targets, predictions)


def _component(entry: Any, framework: str, field: keras_names.Field) -> Any:
    """Makes a loss or metric from a Keras name, or from the user's function or class."""
    component: Component = choices.resolve_for_framework(entry, framework, field)
    if not component.is_reference:
        return _constructed(component, field)
    custom = choices.build_custom(component, field)
    if isinstance(custom, keras.losses.Loss | keras.metrics.Metric):
        return custom
    return choices.as_function(custom, component, field)


def _constructed(component: Component, field: keras_names.Field) -> Any:
    cls = _named(component.name, field)
    return choices.instantiate(cls, component, field, **choices.name_option(cls))


def _named(name: str, field: keras_names.Field) -> type:
    """The Keras class for a name in a spec.

    Raises:
        SpecError: The name is unknown, or the installed Keras has no such class.
    """
    class_name = keras_names.class_name(name, field)
    cls: type | None = getattr(keras.losses if field == "loss" else keras.metrics, class_name, None)
    if cls is None:
        raise SpecError(
            f"{field}: Keras {keras.__version__} has no {class_name}; later versions have."
        )
    return cls
