"""Creation of a native model's metrics from the spec: by Keras' names, or custom ones."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from isotrain.adapters.common import spec_components as choices
from isotrain.adapters.common.outputs import OutputSelector
from isotrain.adapters.keras import backend as keras_backend
from isotrain.adapters.keras import builtin_names as keras_names
from isotrain.adapters.torch.base.no_grad import WithoutGradients
from isotrain.adapters.torch.loss import functional
from isotrain.adapters.torch.loss.per_output import PerOutputLoss
from isotrain.adapters.torch.loss.total import TotalLoss
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
    """Loss of one output as a metric, `<output>_loss`, without its factor from `loss_weights`."""

    takes_weights = True

    def __init__(self, loss: PerOutputLoss, device: torch.device) -> None:
        """Starts with no samples."""
        self.name = f"{loss.output}_loss"
        self._loss = loss
        self._total = torch.zeros(2, dtype=torch.float64, device=device)
        self.sums = [self._total]

    def update(self, targets: Any, predictions: Any, count: int) -> None:
        sample = OutputSelector().sample(targets, predictions, self._loss.output)
        mean = self._loss.cached_mean(*sample).double()
        if self._loss.denominator is None:
            self._total += torch.stack([mean * count, torch.full_like(mean, count)])
            return
        denominator = self._loss.denominator(sample[0]).to(mean)
        total = torch.where(denominator > 0, mean * denominator, 0.0)
        self._total += torch.stack([total, denominator])

    def named_results(self) -> dict[str, float]:
        total, count = self._total.tolist()
        return {self.name: total / count if count else 0.0}


def output_losses(loss: TotalLoss | None, device: torch.device) -> list[Metric]:
    """Loss metrics of the outputs that have a loss of their own; none for an objective (`loss` is None)."""
    losses = [] if loss is None else loss.per_output
    return [OutputLossMetric(each, device) for each in losses if each.output is not None]


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
    "sparse_categorical_crossentropy": functional.sparse_categorical_crossentropy_metric,
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
_CONSTRAINED = {
    "sensitivity_at_specificity": (confusion.recall, confusion.specificity, "specificity"),
    "specificity_at_sensitivity": (confusion.specificity, confusion.recall, "sensitivity"),
    "precision_at_recall": (confusion.precision, confusion.recall, "recall"),
    "recall_at_precision": (confusion.recall, confusion.precision, "precision"),
}
"""Function to maximize, function with a lower bound, and the option that sets the bound."""
_CLASSES: Mapping[str, Callable[..., Metric]] = {
    "f1_score": per_class.f1_score,
    "f_beta_score": per_class.FScore,
    "r2_score": per_class.R2Score,
    "io_u": iou.iou,
    "mean_io_u": functools.partial(iou.mean_iou, iou.iou),
    "one_hot_io_u": iou.one_hot_iou,
    "one_hot_mean_io_u": functools.partial(iou.mean_iou, iou.one_hot_iou),
    "binary_io_u": iou.binary_iou,
}
_DISPLAY_NAMES = {"log_cosh_error": "logcosh", "f_beta_score": "fbeta_score"}
"""Names of results where they differ from the metric's name, as in Keras."""


def build_metrics(
    spec: TrainingSpec,
    device: torch.device,
    loss: TotalLoss | None,
    accuracy: Callable[[Any, Any], torch.Tensor] | None = None,
) -> list[Metric]:
    """Creates the spec's metrics, and loss metrics where the model has several outputs.

    Args:
        spec: Training spec with the metrics.
        device: Device of the sums.
        loss: Loss that the steps compute; None if an objective computes it.
        accuracy: Function for accuracies where predictions may not be whole; None: `inferred_accuracy`.

    Raises:
        SpecError: A name or an option does not exist, or two metrics have the same name.
    """
    built = [_build(declared, device, accuracy) for declared in spec.metrics]
    built = [
        *as_output_metrics(built, spec.metrics, OutputSelector()),
        *output_losses(loss, device),
    ]
    choices.require_unique_names([metric.name for metric in built])
    return built


def _build(
    declared: Any, device: torch.device, accuracy: Callable[[Any, Any], torch.Tensor] | None
) -> Metric:
    component: Component = choices.resolve_for_framework(declared, "torch", "metrics")
    is_cut = accuracy is not None and component.name in keras_names.ACCURACIES
    if component.name in ("accuracy", "acc") or (is_cut and not component.options):
        return MeanMetric(accuracy or metrics.inferred_accuracy, component.name, device)
    if component.is_reference:
        return _build_custom(component, device)
    name = choices.snake_case(keras_names.class_name(component.name, "metrics"))
    factory = functools.partial(_factory(name), device)
    display_name = _DISPLAY_NAMES.get(name, name)
    metric: Metric = choices.instantiate(factory, component, "metrics", name=display_name)
    return metric


def _factory(name: str) -> Callable[..., Metric]:
    """Function that creates a metric from a device, a name and its options."""
    for names, make in ((_MEANS, _mean), (_COUNTS, _counts), (_CONSTRAINED, _constrained)):
        if name in names:
            return functools.partial(make, name)
    return _auc if name == "auc" else _CLASSES[name]


def _build_custom(component: Component, device: torch.device) -> Metric:
    custom = choices.build_custom(component, "metrics")
    if keras_backend.is_keras_instance(custom, "Metric"):
        from isotrain.adapters.torch.metrics.keras import KerasMetric

        return KerasMetric(custom)
    function = choices.as_function(custom, component, "metrics")
    function = functools.partial(WithoutGradients(), function)
    return MeanMetric(function, component.label.rpartition(":")[2], device)


def _mean(key: str, device: torch.device, name: str, dtype: Any = None, **options: Any) -> Metric:
    inspect.signature(_MEANS[key]).bind(None, None, **options)
    metric_class = RootMeanMetric if key == "root_mean_squared_error" else MeanMetric
    function = metrics.as_columns(_MEANS[key])
    return metric_class(functools.partial(function, **options), name, device)


def _counts(
    key: str,
    device: torch.device,
    name: str,
    thresholds: Any = None,
    top_k: int | None = None,
    class_id: int | None = None,
    dtype: Any = None,
) -> Metric:
    if thresholds is None:
        thresholds = 0.5 if top_k is None else -1e10
    threshold_list = thresholds if isinstance(thresholds, list | tuple) else [thresholds]
    return ConfusionMetric(_COUNTS[key], name, device, threshold_list, top_k, class_id)


def _constrained(
    key: str,
    device: torch.device,
    name: str,
    num_thresholds: int = 200,
    class_id: int | None = None,
    dtype: Any = None,
    **bound: float,
) -> Metric:
    number, constrained, bound_name = _CONSTRAINED[key]
    ((option, least),) = bound.items()
    if option != bound_name or not 0 <= least <= 1 or num_thresholds < 1:
        raise ValueError(f"expected {bound_name} from 0 to 1, and num_thresholds of 1 or more")
    last = num_thresholds - 1
    thresholds = [index / last for index in range(num_thresholds)] if last else [0.5]
    return ConfusionMetric(
        confusion.max_where_at_least(number, constrained, least),
        name,
        device,
        thresholds,
        None,
        class_id,
    )


def _auc(
    device: torch.device,
    name: str,
    num_thresholds: int = 200,
    curve: str = "ROC",
    summation_method: str = "interpolation",
    thresholds: Any = None,
    from_logits: bool = False,
    dtype: Any = None,
    **label_options: Any,
) -> Metric:
    area = auc.area(curve, summation_method)
    threshold_list = auc.thresholds_of(thresholds, num_thresholds)
    if label_options:
        return _auc_of_labels(device, name, area, threshold_list, from_logits, **label_options)
    metric_class = ConfusionMetricFromLogits if from_logits else ConfusionMetric
    return metric_class(area, name, device, threshold_list)


def _auc_of_labels(
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
    """Area under a curve from predictions `[samples, labels]`, per label or over all of them."""
    if num_labels is not None and not multi_label:
        raise ValueError("num_labels needs multi_label: true")
    number = auc.area_of_labels(area, multi_label, label_weights)
    labels = num_labels if label_weights is None else len(label_weights)
    scored = torch.sigmoid if from_logits else None
    return per_class.ConfusionMetricPerLabel(number, name, device, thresholds, labels, scored)
