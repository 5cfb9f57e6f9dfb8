"""Loaders over sources made up, and what their batches hold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from isotrain.core.data.arrays import ArraySource, arrays
from isotrain.core.data.batch import Batch, Slice
from isotrain.core.data.loader import Loader


def source_of(length: int) -> ArraySource:
    """Sample i has the input [i, -i] and the target i."""
    values = np.arange(length, dtype=np.float64)
    return arrays(np.stack([values, -values], axis=1), np.arange(length))


def loader(length: int, **options) -> Loader:
    chosen = {
        "global_batch_size": 8,
        "replicas": 1,
        "seed": 5,
        "shuffle": True,
        "drop_remainder": False,
        "prefetch": 0,
        "epochs": 1,
    } | options
    chosen.setdefault("local_replicas", range(chosen["replicas"]))
    if "steps" in options:
        chosen["epochs"] = None
    return Loader(chosen.pop("source", None) or source_of(length), **chosen)


def real(micro_batch: Slice) -> list[int]:
    return micro_batch.targets[: micro_batch.count].tolist()


def samples(batch: Batch) -> list[int]:
    return [
        sample
        for micro_batches in batch.slices
        for micro_batch in micro_batches
        for sample in real(micro_batch)
    ]


def lists(batch: Batch) -> list:
    """All slices of a batch, in comparable form."""
    return [
        (p.inputs.tolist(), p.targets.tolist(), p.count, p.weight) for s in batch.slices for p in s
    ]


def facts(batch: Batch, slices: Callable[[Batch], list] = lists) -> tuple:
    """All fields of a batch, in comparable form."""
    numbers = (batch.epoch, batch.index, batch.step, batch.size, batch.is_last_of_epoch, batch.even)
    return *numbers, slices(batch)


def noisy(inputs, targets, random):
    """Changes its input in place, and draws in every way."""
    inputs += random.normal(0.0, 1.0, (2,))
    inputs *= np.where(random.bernoulli(0.5), -1.0, 1.0)[:, None]
    return inputs + random.integers(0, 10)[:, None], targets
