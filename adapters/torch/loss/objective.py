"""Losses of a native model's objective: means over samples, and means over weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from isotrain.adapters.common import callables
from isotrain.adapters.common.objective import Objective
from isotrain.adapters.torch.loss.per_output import mean_over_samples
from isotrain.adapters.torch.loss.total import means_and_denominators
from isotrain.plugin import WeightedLosses


def objective_computer(
    objective: Objective, model: nn.Module, called: Callable[..., Any]
) -> Callable[[Any, Any], tuple[torch.Tensor, Any]]:
    """Makes the function from inputs and targets to loss (shapes: see `LossModule`) and predictions.

    Args:
        objective: The spec's objective.
        model: Model to train.
        called: The model or its compiled form, which the objective gets.
    """

    def compute(inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        result = objective.result(objective(called, inputs, targets, model.training))
        objective.latest = terms = _terms(result.losses.values())
        plain = [mean for mean, denominator in terms if denominator is None]
        total = sum(plain[1:], plain[0]) if plain else torch.zeros_like(terms[0][0])
        if len(plain) == len(terms):
            return total, result.predictions
        means = [torch.zeros_like(m) if d is None else m for m, d in terms]
        denominators = [torch.zeros_like(m) if d is None else d for m, d in terms]
        return means_and_denominators(total, means, torch.stack(denominators)), result.predictions

    return compute


def _terms(losses: Iterable[Any]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Terms of several losses, of one dtype where one has weights: their sums are large numbers."""
    terms = [_term(each) for each in losses]
    if all(denominator is None for _, denominator in terms):
        return terms
    wide = functools.reduce(torch.promote_types, (mean.dtype for mean, _ in terms))
    return [(mean.to(wide), denominator) for mean, denominator in terms]


def _term(losses: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Mean of losses, a scalar, and the sum of their weights; None for a mean over samples."""
    if not isinstance(losses, WeightedLosses):
        return mean_over_samples(losses), None
    values = callables.require_tensor(losses.losses, "the loss or objective")
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    weights = losses.weights.detach().to(values.dtype).broadcast_to(values.shape)
    denominator = weights.sum()
    return (values * weights).sum() / torch.where(denominator > 0, denominator, 1.0), denominator
