"""Binary cross-entropy on torch takes values that torch itself refuses, and keeps the bits of all others."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from isotrain.adapters.torch.base.binary_cross_entropy import (
    binary_cross_entropy,
    elementwise_of_any,
    probability_loss,
)

NAN = math.nan
PROBABILITIES = [0.25, 0.5, 0.75, 0.875]
IN_RANGE = [0.0, 1.0, 0.25, 1.0]


def losses_and_gradient(loss, probabilities, targets) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = torch.tensor(probabilities, requires_grad=True)
    losses = loss(leaf, torch.tensor(targets))
    losses.sum().backward()
    return losses.detach(), leaf.grad


@pytest.mark.parametrize("loss", [probability_loss, elementwise_of_any])
def test_values_in_range_keep_their_bits(loss) -> None:
    def native(probabilities, targets):
        return functional.binary_cross_entropy(probabilities, targets, reduction="none")

    expected = losses_and_gradient(native, PROBABILITIES, IN_RANGE)
    for result, reference in zip(
        losses_and_gradient(loss, PROBABILITIES, IN_RANGE), expected, strict=True
    ):
        assert torch.equal(result, reference)


@pytest.mark.parametrize("loss", [probability_loss, elementwise_of_any])
@pytest.mark.parametrize("target", [2.0, -1.0, NAN])
def test_a_target_out_of_range_counts_as_in_the_formula(loss, target: float) -> None:
    targets = [0.0, target, 0.25, 1.0]
    losses, gradient = losses_and_gradient(loss, PROBABILITIES, targets)
    p, t = np.array(PROBABILITIES), np.array(targets)
    np.testing.assert_allclose(losses, -(t * np.log(p) + (1 - t) * np.log(1 - p)), rtol=1e-6)
    np.testing.assert_allclose(gradient, (p - t) / (p * (1 - p)), rtol=1e-6)


@pytest.mark.parametrize("loss", [probability_loss, elementwise_of_any])
def test_a_nan_stays_one_and_alone(loss) -> None:
    losses, gradient = losses_and_gradient(loss, [0.25, NAN, 0.75], [0.0, 1.0, 1.0])
    assert losses.isnan().tolist() == gradient.isnan().tolist() == [False, True, False]


def test_other_errors_are_raised() -> None:
    with pytest.raises(RuntimeError, match="type"):
        probability_loss(torch.tensor([0.5]), torch.tensor([1]))
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        binary_cross_entropy(torch.tensor([NAN]), torch.tensor([1.0]))
