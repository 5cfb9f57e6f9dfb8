"""Samplers of torch's `DataLoader` as orders, of which the seed is the spec's."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from isotrain.core.data.order.mixing import interleaved
from isotrain.core.data.order.named_orders import weighted
from isotrain.core.data.order.order import MakeOrder

_BY_POSITION = (
    "SequentialSampler",
    "RandomSampler",
    "DistributedSampler",
    "WeightedRandomSampler",
    "SubsetRandomSampler",
)


def sampler_by_position(loader: Any) -> Any:
    """The sampler of a torch `DataLoader` whose batches are samples by position; None for any other.

    It is one of torch's own classes, since a subclass may have another order; also within a `BatchSampler`.
    """
    batches = loader.batch_sampler
    sampler = (
        getattr(batches, "sampler", None) if type(batches).__name__ == "BatchSampler" else None
    )
    return sampler if type(sampler).__name__ in _BY_POSITION else None


def order_of(sampler: Any, length: int) -> MakeOrder | None:
    """The order of a sampler of torch; None where it only says whether to shuffle, as the spec does.

    Args:
        sampler: A sampler by position.
        length: Number of samples in the data set.
    """
    kind = type(sampler).__name__
    if kind == "WeightedRandomSampler":
        weights = np.asarray(sampler.weights)
        return _weighted(weights, sampler.num_samples, sampler.replacement)
    if kind == "SubsetRandomSampler":
        return _in_turn(np.array([int(index) for index in sampler.indices]))
    if kind != "RandomSampler" or (not sampler.replacement and sampler.num_samples == length):
        return None
    if sampler.replacement:
        return _weighted(np.ones(length), sampler.num_samples, True)
    return _in_turn(np.arange(length), sampler.num_samples)


def _weighted(weights: np.ndarray, samples: int, replacement: bool) -> MakeOrder:
    return partial(weighted, weights=lambda _: weights, samples=samples, replacement=replacement)


def _in_turn(positions: np.ndarray, samples: int | None = None) -> MakeOrder:
    """An order of some positions, int64 [positions]: shuffled, and begun again when they are used up."""
    part = len(positions), positions.__getitem__
    return partial(interleaved, parts=[part], ratios=[1.0], samples=samples or len(positions))
