"""The area under a curve of native models' metrics, from counts at many thresholds; as Keras has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from isotrain.adapters.torch.metrics.confusion import ratio

_BEYOND = 1e-7
"""How far below 0 and above 1 the outermost thresholds lie."""
_HEIGHTS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "interpolation": lambda one, other: (one + other) / 2,
    "minoring": torch.minimum,
    "majoring": torch.maximum,
}


def thresholds_of(given: Sequence[float] | None, count: int) -> list[float]:
    """The thresholds from below 0 to above 1.

    Raises:
        ValueError: There are fewer than two.
    """
    if given is None and count < 2:
        raise ValueError(f"num_thresholds: expected 2 or more, got {count}")
    inner = [i / (count - 1) for i in range(1, count - 1)] if given is None else sorted(given)
    return [-_BEYOND, *inner, 1 + _BEYOND]


def area(curve: str, method: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The function from true and false positives and negatives, thresholds first, to the area.

    Raises:
        ValueError: There is no such curve or way to sum.
    """
    if curve.upper() not in _CURVES or method.lower() not in _HEIGHTS:
        known = f"a curve of {', '.join(_CURVES)} and a summation_method of {', '.join(_HEIGHTS)}"
        raise ValueError(f"expected {known}; got {curve!r} and {method!r}")
    points, heights = _CURVES[curve.upper()], _HEIGHTS[method.lower()]
    if curve.upper() == "PR" and method.lower() == "interpolation":
        return _interpolated

    def found(tp: Tensor, fp: Tensor, tn: Tensor, fn: Tensor) -> Tensor:
        x, y = points(tp, fp, tn, fn)
        return ((x[:-1] - x[1:]) * heights(y[:-1], y[1:])).sum(0)

    return found


def area_of_labels(
    found: Callable[..., Tensor], each: bool, weights: Sequence[float] | None
) -> Callable[[Tensor], Tensor]:
    """The function from counts of shape `[4, thresholds, labels]` to the area.

    Args:
        found: Gives an area from counts.
        each: Whether labels have areas of their own, of which the mean is taken.
        weights: By which labels count; None where all count alike.
    """

    def number(counts: Tensor) -> Tensor:
        alike = counts.new_ones(counts.shape[-1])
        own = alike if weights is None else counts.new_tensor(list(weights))
        return (found(*counts) * own).sum() / own.sum() if each else found(*(counts @ own))

    return number


def _gains(tp: Tensor, fp: Tensor, tn: Tensor, fn: Tensor) -> tuple[Tensor, Tensor]:
    """Of recall and precision over those of a model that finds everything positive (Flach & Kull 2015)."""
    share = torch.where(tn + fp > 0, (tp + fn) / (tn + fp), 0.0)
    recall = torch.where(tp > 0, 1 - share * fn / tp, 0.0).clamp(min=0)
    return recall, torch.where(tp > 0, 1 - share * fp / tp, 1.0)


_CURVES: Mapping[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "ROC": lambda tp, fp, tn, fn: (ratio(fp, tn), ratio(tp, fn)),
    "PR": lambda tp, fp, tn, fn: (ratio(tp, fn), ratio(tp, fp)),
    "PRGAIN": _gains,
}


def _interpolated(tp: Tensor, fp: Tensor, tn: Tensor, fn: Tensor) -> Tensor:
    """Under a precision-recall curve whose counts are linear between thresholds (Davis & Goadrich 2006)."""
    positive = tp + fp
    gained, more = tp[:-1] - tp[1:], positive[:-1] - positive[1:]
    slope = torch.where(more > 0, gained / more, 0.0)
    intercept = tp[1:] - slope * positive[1:]
    both = (positive[:-1] > 0) & (positive[1:] > 0)
    growth = torch.where(both, positive[:-1] / positive[1:], 1.0)
    wanted = tp[1:] + fn[1:]
    areas = slope * (gained + intercept * growth.log())
    return torch.where(wanted > 0, areas / wanted, 0.0).sum(0)
