"""Denominators of native models' losses.

A loss that ignores targets or weighs classes gives the mean over what counts. To be averaged over the global
batch, a slice's mean must count by its denominator, the sum of the weights of its targets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from isotrain.adapters.torch.loss.functional import MEAN_REDUCTIONS

Denominator = Callable[[Any], Tensor]
"""Function from targets to the sum of their weights, a float64 scalar."""

IGNORE_INDEX = -100
"""Default `ignore_index` of torch's losses, which most data sets use for padding."""


def denominator_of_named(name: str, options: Mapping[str, Any]) -> Denominator | None:
    """Denominator of a loss that the spec names, with its options; None if all targets count alike."""
    ignored = options.get("ignore_class")
    is_mean = options.get("reduction", MEAN_REDUCTIONS[0]) in MEAN_REDUCTIONS
    if name != "sparse_categorical_crossentropy" or ignored is None or not is_mean:
        return None
    return functools.partial(_weight_sum, ignored, None)


def denominator_of_custom(loss: Any) -> Denominator | None:
    """Denominator of a custom loss; None if all targets count alike.

    Those with a denominator are torch's cross-entropy and negative log-likelihood, a module or a partial
    function, with the reduction `mean`.
    """
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        options = {name: getattr(loss, name) for name in ("ignore_index", "weight", "reduction")}
    elif isinstance(loss, functools.partial) and loss.func in (
        functional.cross_entropy,
        functional.nll_loss,
    ):
        options = dict(loss.keywords)
    else:
        return None
    ignored, weights = options.get("ignore_index", IGNORE_INDEX), options.get("weight")
    if options.get("reduction", "mean") != "mean":
        return None
    return functools.partial(_weight_sum, ignored, weights)


def ignores_only_padding(denominator: Denominator | None) -> bool:
    """Whether a loss ignores targets of `IGNORE_INDEX`, and counts all others alike."""
    return isinstance(denominator, functools.partial) and denominator.args == (IGNORE_INDEX, None)


def _weight_sum(ignored: int, weights: Tensor | None, targets: Tensor) -> Tensor:
    """Sum of the class weights of targets that are not ignored, a float64 scalar.

    Args:
        ignored: Class that does not count.
        weights: Class weights, shape `[classes]`; None for ones.
        targets: Classes (integers, any shape), or probabilities, shape `[samples, classes, ...]`.
    """
    if targets.is_floating_point():  # of probabilities, torch divides by the number of samples
        return torch.tensor(float(len(targets)), dtype=torch.float64, device=targets.device)
    mask = targets != ignored
    if weights is None:
        return mask.sum(dtype=torch.float64)
    target_weights = weights.to(targets.device)[torch.where(mask, targets, 0)]
    return target_weights.where(mask, 0.0).sum(dtype=torch.float64)
