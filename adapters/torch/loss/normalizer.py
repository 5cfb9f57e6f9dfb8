"""What the mean loss of some samples counts by in that of more, where it is not their number.

A loss that leaves targets out, or weighs classes, gives the mean over what counts. To be that of the whole
global batch, a slice's mean must count by what counts in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from isotrain.adapters.common import resolve as choices
from isotrain.adapters.keras import names as keras_names
from isotrain.plugin import Component

Denominator = Callable[[Any], Tensor]
"""From targets to the sum of their weights, a float64 scalar."""

MEAN_REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
IGNORE_INDEX = -100
"""What torch's losses ignore where nobody says what, and what most data sets have where nothing counts."""


def denominator_function(chosen: Component) -> Denominator | None:
    """What a loss of a native model counts by; None where all targets count alike."""
    if chosen.is_reference:
        return _of_torch(choices.build_custom(chosen, "loss"))
    ignored = chosen.options.get("ignore_class")
    reduction = chosen.options.get("reduction", MEAN_REDUCTIONS[0])
    if reduction not in MEAN_REDUCTIONS:  # its values are no means over what counts
        return None
    is_sparse = keras_names.class_name(chosen.name, "loss") == "SparseCategoricalCrossentropy"
    return functools.partial(_weight, ignored, None) if is_sparse and ignored is not None else None


def _of_torch(loss: Any) -> Denominator | None:
    """Of torch's cross-entropy and negative log-likelihood, as modules and as functions with options."""
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
    return functools.partial(_weight, ignored, weights)


def ignores_only_padding(count: Denominator | None) -> bool:
    """Whether a loss leaves out nothing but what torch ignores where nobody says what."""
    return isinstance(count, functools.partial) and count.args == (IGNORE_INDEX, None)


def _weight(ignored: int, weights: Tensor | None, targets: Tensor) -> Tensor:
    if targets.is_floating_point():  # of probabilities, torch divides by the number of samples
        return torch.tensor(float(len(targets)), dtype=torch.float64, device=targets.device)
    counts = targets != ignored
    if weights is None:
        return counts.sum(dtype=torch.float64)
    own = weights.to(targets.device)[torch.where(counts, targets, 0)]
    return own.where(counts, 0.0).sum(dtype=torch.float64)
