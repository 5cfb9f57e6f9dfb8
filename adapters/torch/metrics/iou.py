"""How far predicted and true classes overlap: intersection over union, for native models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from isotrain.adapters.torch.loss.functional import broadcast_weights, same_shape
from isotrain.adapters.torch.metrics.base import Metric

_SMALL = 1e-7


class IoUMetric(Metric):
    """The mean over some classes of what both have, divided by what either has."""

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
            name: Under which the number is given.
            device: Where to count.
            classes: How many there are.
            targets: Those that the mean is over.
            ignored: A class of which places do not count.
            axes: Of targets and predictions, along which a class is the place of the highest; None where they
                are classes.

        Raises:
            ValueError: There are not so many classes.
        """
        if max(targets) >= classes:
            raise ValueError(f"target_class_ids: expected less than {classes}, got {max(targets)}")
        self.name = name
        self._targets = list(targets)
        self._ignored = ignored
        self._axes = axes
        self._table = torch.zeros(classes, classes, dtype=torch.float64, device=device)
        self.sums = [self._table]

    def update(self, targets: Any, predictions: Any, count: int) -> None:
        self._add(targets, predictions, None)

    def update_weighted(self, targets: Any, predictions: Any, weights: Any) -> None:
        self._add(targets, predictions, weights)

    def _add(self, targets: Tensor, predictions: Tensor, weights: Tensor | None) -> None:
        true, found = same_shape(
            *(
                (tensor if axis is None else tensor.argmax(axis)).long()
                for tensor, axis in zip((targets, predictions), self._axes, strict=True)
            )
        )
        classes = len(self._table)
        counts = (true >= 0) & (true < classes) & (found >= 0) & (found < classes)
        if self._ignored is not None:
            counts &= true != self._ignored
        places = torch.where(counts, true * classes + found, 0).flatten()
        each = (
            counts.double()
            if weights is None
            else counts * broadcast_weights(weights, counts.double())
        )
        self._table.view(-1).index_add_(0, places, each.flatten())

    def named_results(self) -> dict[str, float]:
        """As Keras, in float32, with a little more than the number of classes that were seen."""
        both = self._table.diagonal()
        either = self._table.sum(0) + self._table.sum(1) - both
        both, either = both[self._targets].float(), either[self._targets].float()
        shares = torch.where(either > 0, both / (either + _SMALL), 0.0)
        return {self.name: float(shares.sum() / ((either > 0).float().sum() + _SMALL))}


class BinaryIoUMetric(IoUMetric):
    """The same for two classes, of which predictions give the probability of the second."""

    def __init__(
        self, device: torch.device, name: str, targets: Sequence[int], threshold: float
    ) -> None:
        super().__init__(name, device, 2, targets)
        self._threshold = threshold

    def _add(self, targets: Tensor, predictions: Tensor, weights: Tensor | None) -> None:
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
    """Of some classes."""
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
    """Of some classes, of targets that are one-hot and predictions that score every class."""
    kinds = (False, sparse_y_pred, axis)
    return iou(device, name, num_classes, target_class_ids, ignore_class, *kinds)


def mean_iou(
    make: Callable[..., Metric], device: torch.device, name: str, num_classes: int, **options: Any
) -> Metric:
    """Of all classes; `make` is one of these two."""
    return make(device, name, num_classes, target_class_ids=range(num_classes), **options)


def binary_iou(
    device: torch.device,
    name: str,
    target_class_ids: Sequence[int] = (0, 1),
    threshold: float = 0.5,
    dtype: Any = None,
) -> Metric:
    """Of two classes."""
    return BinaryIoUMetric(device, name, target_class_ids, threshold)
