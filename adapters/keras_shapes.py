"""Which shapes Keras' own losses and metrics mean, where they would take others by broadcasting.

Imported by adapters only after `keras_backend.claim`.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def fit(part: Any, targets: Any, predictions: Any) -> bool:
    """Whether one of Keras' own means targets and predictions of such shapes.

    All but few compare them one by one, and either may lack a last axis of length 1.

    Args:
        part: A loss or a metric.
        targets: A tensor; anything else is left to Keras.
        predictions: The same.
    """
    given, expected = (getattr(each, "shape", None) for each in (targets, predictions))
    name = type(part).__name__
    if given is None or expected is None or name in _OF_OWN_SHAPES:
        return True
    if name in _OF_LABELS:
        expected = expected[:-1]
    return _alike(_without_last_one(given), _without_last_one(expected))


def _without_last_one(shape: Any) -> list[int | None]:
    lengths = list(shape)
    return lengths[:-1] if lengths[-1:] == [1] else lengths


def _alike(first: Sequence[int | None], second: Sequence[int | None]) -> bool:
    """Whether they are equal as far as is known while TensorFlow traces."""
    pairs = zip(first, second, strict=False)
    known = all(one == other for one, other in pairs if one is not None and other is not None)
    return len(first) == len(second) and known
