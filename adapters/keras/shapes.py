"""Shapes of targets and predictions that the losses and metrics of Keras compare."""

from __future__ import annotations

from typing import Any

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
    """Whether the shapes of targets and predictions fit a loss or metric of Keras without broadcasting.

    Most compare elementwise, and either tensor may lack a last axis of length 1.

    Args:
        kind: Class name of the loss or metric.
        targets: Tensor of any shape; other objects count as fitting and are left to Keras.
        predictions: Tensor of any shape; other objects count as fitting.
        axis: Class axis of the predictions.
    """
    target_shape, expected = (getattr(each, "shape", None) for each in (targets, predictions))
    if target_shape is None or expected is None or kind in _OF_OWN_SHAPES:
        return True
    if kind in _OF_LABELS:
        if axis != -1:
            return True
        expected = expected[:-1]
    return (
        _alike(target_shape, expected)
        or _alike(target_shape, _squeezed(expected))
        or _alike(_squeezed(target_shape), expected)
    )


def _squeezed(shape: Any) -> Any:
    """A shape without its last axis, if that has length 1."""
    return shape[:-1] if list(shape)[-1:] == [1] else shape


def _alike(first: Any, second: Any) -> bool:
    """Whether two shapes are equal; lengths unknown during TensorFlow's tracing (None) match any."""
    pairs = zip(first, second, strict=False)
    is_equal = all(a == b for a, b in pairs if a is not None and b is not None)
    return len(first) == len(second) and is_equal
