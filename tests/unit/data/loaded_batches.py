"""Loaders over sources made up, and what their batches hold."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any

import numpy as np

from isotrain.core.data.arrays import ArraySource, arrays
from isotrain.core.data.batch import Batch, Slice
from isotrain.core.data.loader import Loader
from isotrain.core.data.order.order import shuffled
from isotrain.core.data.order.samples import Samples


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
    source = chosen.pop("source", None) or source_of(length)
    if chosen.pop("shuffle") and chosen["global_batch_size"] > 0:
        chosen["order"] = shuffled(samples_of(source, **chosen))
    return Loader(source, **chosen)


def samples_of(source: Sized, **options: Any) -> Samples:
    """The samples of a source, with those of a loader's options that matter to an order."""
    names = ("global_batch_size", "seed", "drop_remainder")
    return Samples.of(source, **{name: options[name] for name in names})


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
