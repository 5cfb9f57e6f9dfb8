"""Losses and metrics of portable models: Keras' own by name, and a person's as Keras calls them.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from isotrain.adapters.common import resolve as choices
from isotrain.adapters.common.outputs import OutputSelector
from isotrain.adapters.keras import names as keras_names
from isotrain.adapters.keras import private as keras_private
from isotrain.plugin import (
    Component,
    SpecError,
    TrainingSpec,
    UnsupportedError,
)

_OF_LABELS = (
    "SparseCategoricalAccuracy",
    "SparseCategoricalCrossentropy",
    "SparseTopKCategoricalAccuracy",
)
_OF_OWN_SHAPES = (
    *("BinaryIoU", "CTC", "CategoricalGeneralizedCrossEntropy", "Circle"),
    *("IoU", "MeanIoU", "OneHotIoU", "OneHotMeanIoU"),
)


def fit(kind: str, targets: Any, predictions: Any, axis: int = -1) -> bool:
    """Whether one of Keras' own means targets and predictions of such shapes.

    All but few compare them one by one, and either may lack a last axis of length 1.

    Args:
        kind: The name of a class of losses or metrics.
        targets: A tensor; anything else is left to Keras.
        predictions: The same.
        axis: Of the predictions, along which it takes the classes to lie.
    """
    given, expected = (getattr(each, "shape", None) for each in (targets, predictions))
    if given is None or expected is None or kind in _OF_OWN_SHAPES:
        return True
    if kind in _OF_LABELS:
        if axis != -1:
            return True
        expected = expected[:-1]
    return (
        _alike(given, expected)
        or _alike(given, _squeezed(expected))
        or _alike(_squeezed(given), expected)
    )


def _squeezed(shape: Any) -> Any:
    """Without a last axis of length 1."""
    return shape[:-1] if list(shape)[-1:] == [1] else shape


def _alike(first: Any, second: Any) -> bool:
    """Whether they are equal as far as is known while TensorFlow traces."""
    pairs = zip(first, second, strict=False)
    known = all(one == other for one, other in pairs if one is not None and other is not None)
    return len(first) == len(second) and known


Loss = Callable[[Any, Any], Any]
"""`loss(targets, predictions)`: a scalar mean over the samples, or one value per sample."""
_SIMPLY = (Component("metric"),)
"""What a metric is by itself: of all that the model gives, without weights."""
_OF_SHAPES = (ValueError, TypeError, IndexError)
"""What Keras and the frameworks raise where shapes do not fit; torch a plain RuntimeError, too."""


class OutputLossMetric(keras.metrics.Metric):
    """The loss of one of several outputs, over all that counts in it, before `loss_weights` multiplies it."""

    def __init__(self, part: Callable[[Any, Any, Any], tuple[Any, Any | None]]) -> None:
        """Starts with no samples.

        Args:
            part: From targets, predictions and sample weights to the mean over what counts in a slice, and
                to how much that is; None where it is all samples.
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
        mean, counted = self._part(y_true, y_pred, sample_weight)
        count = keras.ops.shape(y_pred)[0] if counted is None else counted
        count = keras.ops.cast(count, "float64")
        self._total.assign_add(keras.ops.cast(mean, "float64") * count)
        self._count.assign_add(count)

    def result(self) -> Any:
        return keras.ops.divide_no_nan(self._total.value, self._count.value)


def build_losses(spec: TrainingSpec, framework: str) -> dict[str | None, Loss]:
    """Makes the spec's losses by output: Keras losses by name, or the person's own callables."""
    chosen = spec.losses(framework)
    return {output: _component(given, framework, "loss") for output, given in chosen.items()}


def build_metrics(spec: TrainingSpec, framework: str) -> list[keras.metrics.Metric]:
    """Makes the spec's metrics anew: Keras metrics by name, or the mean of a callable's values."""
    metrics = []
    for given in spec.metrics:
        if given.name in ("accuracy", "acc"):
            metrics.append(keras.metrics.MeanMetricWrapper(inferred_accuracy, name=given.name))
            continue
        metric = _component(given, framework, "metrics")
        if not isinstance(metric, keras.metrics.Metric):
            metric = keras.metrics.MeanMetricWrapper(metric, name=given.label.rpartition(":")[2])
        metrics.append(metric)
    shown = [given.shown(m.name) for m, given in zip(metrics, spec.metrics, strict=True)]
    choices.require_unique_names(shown)
    return metrics


def unbuilt_metrics(metrics: Iterable[keras.metrics.Metric]) -> list[str]:
    """The names of metrics that make their variables when they see the first samples."""
    return [metric.name for metric in metrics if not keras_private.is_built(metric)]


def sum_names(metric: keras.metrics.Metric) -> list[str]:
    """Names for what a metric adds up, in the order of its variables: those of the variables, numbered."""
    names = [variable.name for variable in metric.variables]
    return [
        name if name not in names[:place] else f"{name}#{names[:place].count(name)}"
        for place, name in enumerate(names)
    ]


_FIT = (
    "They would only agree by broadcasting. Change the shape of one of them; for targets that are labels of"
    " classes there are names that begin with 'sparse_'."
)


def require_sums(metrics: Sequence[keras.metrics.Metric]) -> None:
    """Makes sure that metrics have the variables that others' sums can be added to.

    Raises:
        UnsupportedError: One makes its variables when it sees the first samples.
    """
    late = unbuilt_metrics(metrics)
    if late:
        raise UnsupportedError(
            f"metrics: {', '.join(late)} makes its variables when it sees samples, and so cannot be"
            " added up over the workers of a parameter-server run. Leave it out, or give a"
            " function of your own,"
            " whose values are averaged."
        )


def update_metrics(
    metrics: Sequence[keras.metrics.Metric],
    targets: Any,
    predictions: Any,
    given: Sequence[Component] = (),
    names: OutputSelector | None = None,
) -> None:
    """Adds samples to metrics.

    Args:
        metrics: Of the spec, or some of them.
        targets: Of the samples, with their weights where they have some.
        predictions: Of the samples.
        given: What the spec says of each: which output it measures, and whether sample weights count in it;
            left out where it is all that the model gives, without weights.
        names: How outputs are told apart.

    Raises:
        SpecError: There are metrics, and an objective that gave no predictions.
    """
    choices.require_predictions(metrics, predictions)
    outputs = names or OutputSelector()
    for metric, chosen in zip(metrics, given or _SIMPLY * len(metrics), strict=True):
        *own, weights = outputs.sample(targets, predictions, chosen.output)
        weighted = chosen.weighted or isinstance(metric, OutputLossMetric)
        update_metric(metric, own[0], own[1], weights if weighted else None)


def update_metric(
    metric: keras.metrics.Metric, targets: Any, predictions: Any, weights: Any | None = None
) -> None:
    """Adds samples, each of which counts by its weight, to one metric."""
    call = checking_shapes("metrics", metric) if is_keras_builtin(metric) else metric.update_state
    # Keras multiplies masks into weights, on torch in place.
    weighing = () if weights is None else (keras.ops.copy(weights),)
    with keras_private.top_k_of_all_floats():
        call(*_as_columns(metric, targets, predictions), *weighing)


def checking_shapes(
    field: str, part: keras.losses.Loss | keras.metrics.Metric
) -> Callable[..., Any]:
    """A computation of Keras' own, which refuses targets and predictions that do not fit it by name.

    Args:
        field: Of the spec.
        part: Its loss or metric, which gets targets, predictions and anything else.
    """
    call = part.update_state if isinstance(part, keras.metrics.Metric) else part
    kind, axis = type(part).__name__, keras_private.class_axis(part)

    def refusing(targets: Any, predictions: Any, *others: Any) -> Any:
        if not fit(kind, targets, predictions, axis):
            raise SpecError(f"{_unfit(field, part.name, targets, predictions)}. {_FIT}")
        try:
            return call(targets, predictions, *others)
        except Exception as error:
            if not isinstance(error, _OF_SHAPES) and type(error) is not RuntimeError:
                raise
            raise SpecError(f"{_unfit(field, part.name, targets, predictions)}. {error}") from error

    return refusing


def _unfit(field: str, name: str, targets: Any, predictions: Any) -> str:
    shapes = [list(getattr(each, "shape", ())) for each in (targets, predictions)]
    return (
        f"{field}: {name!r} cannot be computed of targets of shape {shapes[0]} and predictions of shape"
        f" {shapes[1]}"
    )


def is_keras_builtin(part: keras.metrics.Metric | keras.losses.Loss) -> bool:
    """Whether all that a metric or a loss calls is Keras' own."""
    is_keras = type(part).__module__.partition(".")[0] == "keras"
    return is_keras and type(part) is not keras.metrics.MeanMetricWrapper


def _as_columns(metric: keras.metrics.Metric, targets: Any, predictions: Any) -> tuple[Any, Any]:
    """Gives Keras' own metrics one number per sample as a column: a row they would take for one sample."""
    if not is_keras_builtin(metric):
        return targets, predictions
    if all(len(getattr(each, "shape", ())) == 1 for each in (targets, predictions)):
        return targets[:, None], predictions[:, None]
    return targets, predictions


def ensure_built(metrics: Sequence[keras.metrics.Metric], targets: Any, predictions: Any) -> None:
    """Has metrics make variables that they lack from a placeholder, which does not count."""
    for metric in metrics:
        if not keras_private.is_built(metric):
            update_metrics([metric], targets, predictions)
            metric.reset_state()


def float64_results(name: str, result: Any) -> Any:
    """What a metric gives, as a tensor of float64 or a dict of such.

    Raises:
        SpecError: There is something else in it.
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
    """The numbers that a metric gives: one by its name, or several as `name/place`.

    Args:
        name: Of the metric.
        result: A number, an array, or a dict of these.
    """
    if isinstance(result, Mapping):
        return {
            place: value
            for key, part in result.items()
            for place, value in named_results(f"{name}/{key}", part).items()
        }
    values = np.asarray(keras.ops.convert_to_numpy(float64_results(name, result)))
    if values.size == 1:
        return {name: float(values.item())}
    return {
        "/".join([name, *map(str, place)]): float(value) for place, value in np.ndenumerate(values)
    }


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


def _component(given: Any, framework: str, field: keras_names.Field) -> Any:
    """Makes a loss or metric from a Keras name, or from the person's own callable or class."""
    chosen: Component = choices.resolve_for_framework(given, framework, field)
    if not chosen.is_reference:
        return _constructed(chosen, field)
    found = choices.build_custom(chosen, field)
    if isinstance(found, keras.losses.Loss | keras.metrics.Metric):
        return found
    return choices.as_function(found, chosen, field)


def _constructed(chosen: Component, field: keras_names.Field) -> Any:
    cls = _named(chosen.name, field)
    return choices.instantiate(cls, chosen, field, **choices.name_option(cls))


def _named(name: str, field: keras_names.Field) -> type:
    """The Keras class that a name in a spec stands for.

    Raises:
        SpecError: There is none, or not in the Keras that is installed.
    """
    wanted = keras_names.class_name(name, field)
    found: type | None = getattr(keras.losses if field == "loss" else keras.metrics, wanted, None)
    if found is None:
        raise SpecError(f"{field}: Keras {keras.__version__} has no {wanted}; later versions have.")
    return found
