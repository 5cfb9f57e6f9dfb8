"""Numbers that are off by their last bit: what comes of them tells how far rounding grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from isotrain.adapters.torch.trees import filled, leaves


def perturbed(tree: Any) -> Any:
    """A tree of tensors, each number of which is off by its last bit, upwards or downwards by chance."""
    generator = torch.Generator().manual_seed(0)
    return filled(tree, (_rounded(part, generator) for part in leaves(tree)))


@contextmanager
def perturbed_weights(weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within it, weights are off by their last bit; nobody who keeps one for a backward pass notices."""
    kept = [weight.data for weight in weights]
    for weight, changed in zip(weights, perturbed(kept), strict=True):
        weight.data = changed
    try:
        yield
    finally:
        for weight, data in zip(weights, kept, strict=True):
            weight.data = data


def _rounded(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
    return tensor * (1 + torch.finfo(tensor.dtype).eps * signs.to(tensor))
