"""Intersection over union (IoU) of predicted and true classes, for native models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from isotrain.adapters.torch.loss.shapes import broadcast_weights, same_shape
from isotrain.adapters.torch.metrics.base import Metric

_EPSILON = 1e-7


class IoUMetric(Metric):
    """Mean IoU over some classes, from a confusion matrix."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        classes: int,
        targets: Sequence[int],
        ignored: int | None = None,
        axes: tuple[int | None, int | None] = (None, None),
    ) -> None:
        """Starts with no samples.

        Args:
            name: Name of the result.
            device: Device of the counts.
            classes: Number of classes.
            targets: Classes that the mean is over.
            ignored: True class whose elements are not counted; None for none.
            axes: Class axes of targets and predictions, for an argmax; None where they are classes already.

        Raises:
            ValueError: A target class is not below the number of classes.
        """
        if max(targets) >= classes:
            raise ValueError(f"target_class_ids: expected less than {classes}, got {max(targets)}")
        self.name = name
        self._targets = list(targets)
        self._ignored = ignored
        self._axes = axes
        self._matrix = torch.zeros(classes, classes, dtype=torch.float64, device=device)
        self.sums = [self._matrix]

    def update(self, targets: Any, predictions: Any, count: int) -> None:
        self._add(targets, predictions, None)

    def update_weighted(self, targets: Any, predictions: Any, weights: Any) -> None:
        self._add(targets, predictions, weights)

    def _add(self, targets: Tensor, predictions: Tensor, weights: Tensor | None) -> None:
        """Adds samples to the confusion matrix `[classes, classes]`, without those of the ignored class."""
        true, predicted = same_shape(
            *(
                (tensor if axis is None else tensor.argmax(axis)).long()
                for tensor, axis in zip((targets, predictions), self._axes, strict=True)
            )
        )
        classes = len(self._matrix)
        mask = (true >= 0) & (true < classes) & (predicted >= 0) & (predicted < classes)
        if self._ignored is not None:
            mask &= true != self._ignored
        indices = torch.where(mask, true * classes + predicted, 0).flatten()
        counts = (
            mask.double() if weights is None else mask * broadcast_weights(weights, mask.double())
        )
        self._matrix.view(-1).index_add_(0, indices, counts.flatten())

    def named_results(self) -> dict[str, float]:
        """The mean over the classes that occur, in float32 and with epsilons, as Keras computes it."""
        intersection = self._matrix.diagonal()
        union = self._matrix.sum(0) + self._matrix.sum(1) - intersection
        intersection, union = intersection[self._targets].float(), union[self._targets].float()
        ious = torch.where(union > 0, intersection / (union + _EPSILON), 0.0)
        return {self.name: float(ious.sum() / ((union > 0).float().sum() + _EPSILON))}


class BinaryIoUMetric(IoUMetric):
    """IoU for two classes, where predictions are probabilities of class 1."""

    def __init__(
        self, device: torch.device, name: str, targets: Sequence[int], threshold: float
    ) -> None:
        super().__init__(name, device, 2, targets)
        self._threshold = threshold

    def _add(self, targets: Tensor, predictions: Tensor, weights: Tensor | None) -> None:
        """Adds samples, whose predictions `[samples, ...]` are compared with the threshold."""
        super()._add(targets, predictions.float() >= self._threshold, weights)


def iou(
    device: torch.device,
    name: str,
    num_classes: int,
    target_class_ids: Sequence[int],
    ignore_class: int | None = None,
    sparse_y_true: bool = True,
    sparse_y_pred: bool = True,
    axis: int = -1,
    dtype: Any = None,
) -> Metric:
    """IoU of some classes; options as Keras' `IoU`."""
    axes = (None if sparse_y_true else axis, None if sparse_y_pred else axis)
    return IoUMetric(name, device, num_classes, target_class_ids, ignore_class, axes)


def one_hot_iou(
    device: torch.device,
    name: str,
    num_classes: int,
    target_class_ids: Sequence[int],
    ignore_class: int | None = None,
    sparse_y_pred: bool = False,
    axis: int = -1,
    dtype: Any = None,
) -> Metric:
    """IoU of some classes from one-hot targets and class scores; options as Keras' `OneHotIoU`."""
    layout = (False, sparse_y_pred, axis)
    return iou(device, name, num_classes, target_class_ids, ignore_class, *layout)


def mean_iou(
    make: Callable[..., Metric], device: torch.device, name: str, num_classes: int, **options: Any
) -> Metric:
    """IoU of all classes; `make` is `iou` or `one_hot_iou`."""
    return make(device, name, num_classes, target_class_ids=range(num_classes), **options)


def binary_iou(
    device: torch.device,
    name: str,
    target_class_ids: Sequence[int] = (0, 1),
    threshold: float = 0.5,
    dtype: Any = None,
) -> Metric:
    """IoU of two classes; options as Keras' `BinaryIoU`."""
    return BinaryIoUMetric(device, name, target_class_ids, threshold)
