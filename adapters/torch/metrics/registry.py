"""The metrics of a native model, by their names or a person's own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from isotrain.adapters.common import resolve as choices
from isotrain.adapters.common.outputs import OutputSelector
from isotrain.adapters.keras import backend as keras_backend
from isotrain.adapters.keras import names as keras_names
from isotrain.adapters.torch.loss import functional
from isotrain.adapters.torch.loss.loss import PerOutputLoss, TotalLoss
from isotrain.adapters.torch.metrics import auc, confusion, iou, per_class
from isotrain.adapters.torch.metrics import base as metrics
from isotrain.adapters.torch.metrics.base import (
    MeanMetric,
    Metric,
    RootMeanMetric,
    as_output_metrics,
)
from isotrain.adapters.torch.metrics.confusion import ConfusionMetric, ConfusionMetricFromLogits
from isotrain.plugin import Component, TrainingSpec


class OutputLossMetric(Metric):
    """The loss of one output, over all that counts in it, before `loss_weights` multiplies it."""

    takes_weights = True

    def __init__(self, part: PerOutputLoss, device: torch.device) -> None:
        """Starts with no samples."""
        self.name = f"{part.output}_loss"
        self._part = part
        self._total = torch.zeros(2, dtype=torch.float64, device=device)
        self.sums = [self._total]

    def update(self, targets: Any, predictions: Any, count: int) -> None:
        own = OutputSelector().sample(targets, predictions, self._part.output)
        mean = self._part.measured(*own).double()
        if self._part.loss_denominators is None:
            self._total += torch.stack([mean * count, torch.full_like(mean, count)])
            return
        counted = self._part.loss_denominators(own[0]).to(mean)
        self._total += torch.stack([torch.where(counted > 0, mean * counted, 0.0), counted])

    def named_results(self) -> dict[str, float]:
        total, count = self._total.tolist()
        return {self.name: total / count if count else 0.0}


def output_losses(loss: TotalLoss | None, device: torch.device) -> list[Metric]:
    """One for each output that has a loss of its own; none where an objective gives the loss."""
    parts = [] if loss is None else loss.parts
    return [OutputLossMetric(part, device) for part in parts if part.output is not None]


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
            functional.binary_crossentropy,
            functional.categorical_crossentropy,
            functional.sparse_categorical_crossentropy,
            functional.kl_divergence,
            functional.poisson,
            functional.hinge,
            functional.squared_hinge,
            functional.categorical_hinge,
            functional.mean_squared_error,
            functional.mean_absolute_error,
            functional.mean_absolute_percentage_error,
            functional.mean_squared_logarithmic_error,
        )
    },
    "cosine_similarity": functional.cosine,
    "log_cosh_error": functional.log_cosh,
    "root_mean_squared_error": metrics.squared_error,
}
_COUNTS: Mapping[str, Callable[..., Any]] = {
    "true_positives": lambda tp, fp, tn, fn: tp,
    "false_positives": lambda tp, fp, tn, fn: fp,
    "true_negatives": lambda tp, fp, tn, fn: tn,
    "false_negatives": lambda tp, fp, tn, fn: fn,
    "precision": confusion.precision,
    "recall": confusion.recall,
}
_HIGHEST = {
    "sensitivity_at_specificity": (confusion.recall, confusion.specificity, "specificity"),
    "specificity_at_sensitivity": (confusion.specificity, confusion.recall, "sensitivity"),
    "precision_at_recall": (confusion.precision, confusion.recall, "recall"),
    "recall_at_precision": (confusion.recall, confusion.precision, "precision"),
}
_WHOLE: Mapping[str, Callable[..., Metric]] = {
    "f1_score": per_class.f1_score,
    "f_beta_score": per_class.FScore,
    "r2_score": per_class.R2Score,
    "io_u": iou.iou,
    "mean_io_u": functools.partial(iou.mean_iou, iou.iou),
    "one_hot_io_u": iou.one_hot_iou,
    "one_hot_mean_io_u": functools.partial(iou.mean_iou, iou.one_hot_iou),
    "binary_io_u": iou.binary_iou,
}
_NAMED_OTHERWISE = {"log_cosh_error": "logcosh", "f_beta_score": "fbeta_score"}


def build_metrics(spec: TrainingSpec, device: torch.device, loss: TotalLoss | None) -> list[Metric]:
    """Makes the spec's metrics anew, and the loss of each output where it gives several.

    Args:
        spec: Names them.
        device: Where to add up.
        loss: That the steps compute; None where an objective gives it.

    Raises:
        SpecError: There is none of a name, or it has no such options, or two would have one name.
    """
    found = [_built(given, device) for given in spec.metrics]
    found = [
        *as_output_metrics(found, spec.metrics, OutputSelector()),
        *output_losses(loss, device),
    ]
    choices.require_unique_names([metric.name for metric in found])
    return found


def _built(given: Any, device: torch.device) -> Metric:
    chosen: Component = choices.resolve_for_framework(given, "torch", "metrics")
    if chosen.name in ("accuracy", "acc"):
        return MeanMetric(metrics.inferred_accuracy, chosen.name, device)
    if chosen.is_reference:
        return _own(chosen, device)
    name = choices.snake_case(keras_names.class_name(chosen.name, "metrics"))
    made = functools.partial(_maker(name), device)
    shown = _NAMED_OTHERWISE.get(name, name)
    metric: Metric = choices.instantiate(made, chosen, "metrics", name=shown)
    return metric


def _maker(name: str) -> Callable[..., Metric]:
    """The function from a device, a name and the options of a metric to it."""
    for names, make in ((_MEANS, _mean), (_COUNTS, _counts), (_HIGHEST, _highest)):
        if name in names:
            return functools.partial(make, name)
    return _area if name == "auc" else _WHOLE[name]


def _own(chosen: Component, device: torch.device) -> Metric:
    found = choices.build_custom(chosen, "metrics")
    if keras_backend.is_keras_instance(found, "Metric"):
        from isotrain.adapters.torch.metrics.keras import KerasMetric

        return KerasMetric(found)
    function = choices.as_function(found, chosen, "metrics")
    return MeanMetric(function, chosen.label.rpartition(":")[2], device)


def _mean(which: str, device: torch.device, name: str, dtype: Any = None, **options: Any) -> Metric:
    inspect.signature(_MEANS[which]).bind(None, None, **options)
    kind = RootMeanMetric if which == "root_mean_squared_error" else MeanMetric
    function = metrics.as_columns(_MEANS[which])
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
    return ConfusionMetric(_COUNTS[which], name, device, several, top_k, class_id)


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
    return ConfusionMetric(
        confusion.max_where_at_least(number, where, value), name, device, thresholds, None, class_id
    )


def _area(
    device: torch.device,
    name: str,
    num_thresholds: int = 200,
    curve: str = "ROC",
    summation_method: str = "interpolation",
    thresholds: Any = None,
    from_logits: bool = False,
    dtype: Any = None,
    **of_labels: Any,
) -> Metric:
    number = auc.area(curve, summation_method)
    limits = auc.thresholds_of(thresholds, num_thresholds)
    if of_labels:
        return _area_of_labels(device, name, number, limits, from_logits, **of_labels)
    kind = ConfusionMetricFromLogits if from_logits else ConfusionMetric
    return kind(number, name, device, limits)


def _area_of_labels(
    device: torch.device,
    name: str,
    area: Callable[..., torch.Tensor],
    thresholds: list[float],
    from_logits: bool,
    *,
    multi_label: bool = False,
    num_labels: int | None = None,
    label_weights: Any = None,
) -> Metric:
    if num_labels is not None and not multi_label:
        raise ValueError("num_labels is for multi_label: true")
    number = auc.area_of_labels(area, multi_label, label_weights)
    labels = num_labels if label_weights is None else len(label_weights)
    scored = torch.sigmoid if from_logits else None
    return per_class.ConfusionMetricPerLabel(number, name, device, thresholds, labels, scored)
