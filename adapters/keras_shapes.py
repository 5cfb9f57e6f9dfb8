"""Which shapes Keras' own losses and metrics mean, where they would take others by broadcasting."""

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
