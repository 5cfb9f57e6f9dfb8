"""Area under a curve (AUC) from confusion counts at many thresholds, for native models; as in Keras."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from isotrain.adapters.torch.metrics.confusion import ratio

_MARGIN = 1e-7
"""Distance of the outermost thresholds from 0 and 1, outwards."""
_HEIGHTS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "interpolation": lambda left, right: (left + right) / 2,
    "minoring": torch.minimum,
    "majoring": torch.maximum,
}
"""Height of a strip of the area from the values at both sides, by `summation_method`."""


def thresholds_of(custom: Sequence[float] | None, count: int) -> list[float]:
    """Thresholds from below 0 to above 1: custom ones between these, or `count` at equal distances.

    Raises:
        ValueError: `count` is below 2, without custom thresholds.
    """
    if custom is None and count < 2:
        raise ValueError(f"num_thresholds: expected 2 or more, got {count}")
    inner = [i / (count - 1) for i in range(1, count - 1)] if custom is None else sorted(custom)
    return [-_MARGIN, *inner, 1 + _MARGIN]


def area(curve: str, method: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Function of tp, fp, tn and fn, each `[thresholds, ...]`, that returns the area, shape `[...]`.

    Raises:
        ValueError: The curve or the summation method does not exist.
    """
    if curve.upper() not in _CURVES or method.lower() not in _HEIGHTS:
        expected = (
            f"a curve of {', '.join(_CURVES)} and a summation_method of {', '.join(_HEIGHTS)}"
        )
        raise ValueError(f"expected {expected}; got {curve!r} and {method!r}")
    points, heights = _CURVES[curve.upper()], _HEIGHTS[method.lower()]
    if curve.upper() == "PR" and method.lower() == "interpolation":
        return _interpolated

    def curve_area(tp: Tensor, fp: Tensor, tn: Tensor, fn: Tensor) -> Tensor:
        x, y = points(tp, fp, tn, fn)
        return ((x[:-1] - x[1:]) * heights(y[:-1], y[1:])).sum(0)

    return curve_area


def area_of_labels(
    curve_area: Callable[..., Tensor], per_label: bool, weights: Sequence[float] | None
) -> Callable[[Tensor], Tensor]:
    """Function of counts `[4, thresholds, labels]` that returns the area, a scalar.

    Args:
        curve_area: Function of tp, fp, tn and fn that returns an area; see `area`.
        per_label: Whether to average the areas of the labels, rather than add up their counts.
        weights: Label weights, one per label; None for ones.
    """

    def number(counts: Tensor) -> Tensor:
        ones = counts.new_ones(counts.shape[-1])
        label_weights = ones if weights is None else counts.new_tensor(list(weights))
        if per_label:
            return (curve_area(*counts) * label_weights).sum() / label_weights.sum()
        return curve_area(*(counts @ label_weights))

    return number


def _gains(tp: Tensor, fp: Tensor, tn: Tensor, fn: Tensor) -> tuple[Tensor, Tensor]:
    """Recall gain and precision gain (Flach & Kull 2015) from counts of shape `[thresholds, ...]`."""
    odds = torch.where(tn + fp > 0, (tp + fn) / (tn + fp), 0.0)
    recall = torch.where(tp > 0, 1 - odds * fn / tp, 0.0).clamp(min=0)
    return recall, torch.where(tp > 0, 1 - odds * fp / tp, 1.0)


_CURVES: Mapping[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "ROC": lambda tp, fp, tn, fn: (ratio(fp, tn), ratio(tp, fn)),
    "PR": lambda tp, fp, tn, fn: (ratio(tp, fn), ratio(tp, fp)),
    "PRGAIN": _gains,
}
"""x and y of the curve's points from tp, fp, tn and fn, each `[thresholds, ...]`."""


def _interpolated(tp: Tensor, fp: Tensor, tn: Tensor, fn: Tensor) -> Tensor:
    """Area under the precision-recall curve (Davis & Goadrich 2006), counts `[thresholds, ...]`.

    Counts are interpolated linearly between thresholds.
    """
    positive = tp + fp
    tp_steps, positive_steps = tp[:-1] - tp[1:], positive[:-1] - positive[1:]
    slope = torch.where(positive_steps > 0, tp_steps / positive_steps, 0.0)
    intercept = tp[1:] - slope * positive[1:]
    is_defined = (positive[:-1] > 0) & (positive[1:] > 0)
    growth = torch.where(is_defined, positive[:-1] / positive[1:], 1.0)
    true = tp[1:] + fn[1:]
    areas = slope * (tp_steps + intercept * growth.log())
    return torch.where(true > 0, areas / true, 0.0).sum(0)
