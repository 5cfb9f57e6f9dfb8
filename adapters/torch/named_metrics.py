"""The metrics of a native model, by their names or a person's own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from isotrain.adapters import chosen as choices
from isotrain.adapters import keras_backend, keras_names
from isotrain.adapters.outputs import Outputs
from isotrain.adapters.torch import areas, losses, metrics
from isotrain.adapters.torch.metrics import (
    Counts,
    CountsOfLogits,
    MeanOf,
    Metric,
    RootMeanOf,
    as_chosen,
)
from isotrain.adapters.torch.output_loss import output_losses
from isotrain.plugin import Component, TrainingSpec

_MEANS: Mapping[str, Callable[..., Any]] = {
    **{
        function.__name__: function
        for function in (
            metrics.accuracy,
            metrics.binary_accuracy,
            metrics.categorical_accuracy,
            metrics.sparse_categorical_accuracy,
            metrics.top_k_categorical_accuracy,
            metrics.sparse_top_k_categorical_accuracy,
            metrics.pearson_correlation,
            metrics.concordance_correlation,
            losses.binary_crossentropy,
            losses.categorical_crossentropy,
            losses.sparse_categorical_crossentropy,
            losses.kl_divergence,
            losses.poisson,
            losses.hinge,
            losses.squared_hinge,
            losses.categorical_hinge,
            losses.mean_squared_error,
            losses.mean_absolute_error,
            losses.mean_absolute_percentage_error,
            losses.mean_squared_logarithmic_error,
        )
    },
    "cosine_similarity": losses.cosine,
    "log_cosh_error": losses.log_cosh,
    "root_mean_squared_error": metrics.squared_error,
}
_COUNTS: Mapping[str, Callable[..., Any]] = {
    "true_positives": lambda tp, fp, tn, fn: tp,
    "false_positives": lambda tp, fp, tn, fn: fp,
    "true_negatives": lambda tp, fp, tn, fn: tn,
    "false_negatives": lambda tp, fp, tn, fn: fn,
    "precision": metrics.precision,
    "recall": metrics.recall,
}
_HIGHEST = {
    "sensitivity_at_specificity": (metrics.recall, metrics.specificity, "specificity"),
    "specificity_at_sensitivity": (metrics.specificity, metrics.recall, "sensitivity"),
    "precision_at_recall": (metrics.precision, metrics.recall, "recall"),
    "recall_at_precision": (metrics.recall, metrics.precision, "precision"),
}
_NAMED_OTHERWISE = {"log_cosh_error": "logcosh"}


def build_metrics(spec: TrainingSpec, device: torch.device) -> list[Metric]:
    """Makes the spec's metrics anew.

    Those that torch has no functions for (overlaps, scores of several classes, several curves at once), and
    weighted ones that are no means, are Keras', which is imported for them alone.

    Raises:
        SpecError: There is none of a name, or it has no such options, or two would have one name.
    """
    found = [_built(given, device) for given in spec.metrics]
    found = [*as_chosen(found, spec.metrics, Outputs()), *output_losses(spec, device)]
    choices.require_different_names([metric.name for metric in found])
    return found


def _built(given: Any, device: torch.device) -> Metric:
    chosen: Component = choices.select(given, "torch", "metrics")
    if chosen.name in ("accuracy", "acc"):
        return MeanOf(metrics.inferred_accuracy, chosen.name, device)
    if chosen.is_reference:
        return _own(chosen, device)
    name = choices.snake_case(keras_names.class_name(chosen.name, "metrics"))
    for names, make in ((_MEANS, _mean), (_COUNTS, _counts), (_HIGHEST, _highest)):
        if name in names and (make is _mean or not chosen.weighted):
            shown = _NAMED_OTHERWISE.get(name, name)
            bound = functools.partial(make, name, device)
            metric: Metric = choices.constructed(bound, chosen, "metrics", name=shown)
            return metric
    if name == "auc" and areas.is_plain(chosen.options) and not chosen.weighted:
        return choices.constructed(functools.partial(_area, device), chosen, "metrics", name=name)
    from isotrain.adapters.torch import keras_metrics

    return keras_metrics.build(chosen)


def _own(chosen: Component, device: torch.device) -> Metric:
    found = choices.found(chosen, "metrics")
    if keras_backend.is_a(found, "Metric"):
        from isotrain.adapters.torch.keras_metrics import KerasMetric

        return KerasMetric(found)
    function = choices.as_function(found, chosen, "metrics")
    return MeanOf(function, chosen.label.rpartition(":")[2], device)


def _mean(which: str, device: torch.device, name: str, dtype: Any = None, **options: Any) -> Metric:
    inspect.signature(_MEANS[which]).bind(None, None, **options)
    kind = RootMeanOf if which == "root_mean_squared_error" else MeanOf
    function = metrics.in_rows(_MEANS[which])
    return kind(functools.partial(function, **options), name, device)


def _counts(
    which: str,
    device: torch.device,
    name: str,
    thresholds: Any = None,
    top_k: int | None = None,
    class_id: int | None = None,
    dtype: Any = None,
) -> Metric:
    if thresholds is None:
        thresholds = 0.5 if top_k is None else -1e10
    several = thresholds if isinstance(thresholds, list | tuple) else [thresholds]
    return Counts(_COUNTS[which], name, device, several, top_k, class_id)


def _highest(
    which: str,
    device: torch.device,
    name: str,
    num_thresholds: int = 200,
    class_id: int | None = None,
    dtype: Any = None,
    **least: float,
) -> Metric:
    number, where, of = _HIGHEST[which]
    ((given, value),) = least.items()
    if given != of or not 0 <= value <= 1 or num_thresholds < 1:
        raise ValueError(f"expected {of} from 0 to 1, and num_thresholds of 1 or more")
    last = num_thresholds - 1
    thresholds = [index / last for index in range(num_thresholds)] if last else [0.5]
    return Counts(metrics.highest(number, where, value), name, device, thresholds, None, class_id)


def _area(
    device: torch.device,
    name: str,
    num_thresholds: int = 200,
    curve: str = "ROC",
    summation_method: str = "interpolation",
    thresholds: Any = None,
    from_logits: bool = False,
    dtype: Any = None,
) -> Metric:
    number = areas.area(curve, summation_method)
    kind = CountsOfLogits if from_logits else Counts
    return kind(number, name, device, areas.thresholds_of(thresholds, num_thresholds))
