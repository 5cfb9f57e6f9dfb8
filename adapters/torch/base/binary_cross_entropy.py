"""Binary cross-entropy of probabilities that takes NaN and any target, as TensorFlow's does."""

from __future__ import annotations

import torch
from torch import Tensor

from isotrain.adapters.torch.base import private_api

_NONE, _MEAN = 0, 1
"""Reductions, as torch numbers them."""
_REFUSAL = "should be between 0 and 1"
"""Part of torch's error for a value outside [0, 1], or NaN."""


def binary_cross_entropy(
    probabilities: Tensor,
    targets: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    """Torch's `binary_cross_entropy`, but with a value where torch raises, or aborts the process on a GPU.

    The arguments are those of `aten.binary_cross_entropy`. Only losses of elements without weights, which are
    Keras' way to call it, take values outside [0, 1]; the other elements keep their bits.

    Args:
        probabilities: Predicted probabilities, any shape.
        targets: Target probabilities, same shape and dtype.
        weight: Weight of each element, any shape that broadcasts; None for ones.
        reduction: 0 for a loss per element, 1 for their mean, 2 for their sum.
    """
    is_elementwise = weight is None and reduction == _NONE
    if is_elementwise and probabilities.device.type != "cpu":
        return elementwise_of_any(probabilities, targets)
    try:
        return private_api.binary_cross_entropy(probabilities, targets, weight, reduction)
    except RuntimeError as error:
        if not is_elementwise or _REFUSAL not in str(error):
            raise
        return elementwise_of_any(probabilities, targets)


def probability_loss(probabilities: Tensor, targets: Tensor) -> Tensor:
    """`binary_cross_entropy` of each element, in the shape of both."""
    return binary_cross_entropy(probabilities, targets, None, _NONE)


def elementwise_of_any(probabilities: Tensor, targets: Tensor) -> Tensor:
    """Loss of each element, in the shape of both; by its formula where a value is NaN or outside [0, 1]."""
    is_valid = (probabilities >= 0) & (probabilities <= 1) & (targets >= 0) & (targets <= 1)
    in_range = (torch.where(is_valid, tensor, 0.5) for tensor in (probabilities, targets))
    losses = private_api.binary_cross_entropy(*in_range, None, _NONE)
    others = torch.where(is_valid, 0.5, probabilities)
    formula = -(targets * others.log() + (1 - targets) * (1 - others).log())
    return torch.where(is_valid, losses, formula)
