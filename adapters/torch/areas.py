"""The area under a curve of native models' metrics, from counts at many thresholds; as Keras has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isotrain.adapters.torch.metrics import ratio

_BEYOND = 1e-7
"""How far below 0 and above 1 the outermost thresholds lie."""
_HEIGHTS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "interpolation": lambda one, other: (one + other) / 2,
    "minoring": torch.minimum,
    "majoring": torch.maximum,
}
OPTIONS = frozenset(
    {"num_thresholds", "curve", "summation_method", "name", "dtype", "thresholds", "from_logits"}
)


def is_plain(options: Mapping[str, Any]) -> bool:
    """Whether these ask for one area under a ROC or precision-recall curve, which torch's functions give."""
    return set(options) <= OPTIONS and str(options.get("curve", "ROC")).upper() in ("ROC", "PR")


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
    """The function from true and false positives and negatives to the area.

    Raises:
        ValueError: There is no such way to sum.
    """
    if method.lower() not in _HEIGHTS:
        raise ValueError(f"summation_method: expected one of {', '.join(_HEIGHTS)}, got {method!r}")
    is_roc, heights = curve.upper() == "ROC", _HEIGHTS[method.lower()]
    if not is_roc and method.lower() == "interpolation":
        return _interpolated

    def found(tp: Tensor, fp: Tensor, tn: Tensor, fn: Tensor) -> Tensor:
        recall = ratio(tp, fn)
        x, y = (ratio(fp, tn), recall) if is_roc else (recall, ratio(tp, fp))
        return ((x[:-1] - x[1:]) * heights(y[:-1], y[1:])).sum()

    return found


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
    return torch.where(wanted > 0, areas / wanted, 0.0).sum()
