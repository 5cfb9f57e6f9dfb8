"""Signatures of pytrees, by which captured graphs are found."""

from __future__ import annotations

import torch

from isotrain.adapters.torch.base.pytree import signature
from isotrain.core.data.pytree import Weighted


def test_sample_weights_and_a_second_target_have_different_signatures() -> None:
    targets, weights = torch.zeros(4, 1), torch.ones(4, 1)
    assert signature(Weighted(targets, weights)) != signature((targets, weights))
    assert signature(Weighted(targets, weights)) == signature(Weighted(weights, targets))
