"""A global batch, as the replicas of one process get it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from isotrain.core.data.stream_state import StreamState


@dataclass(frozen=True, slots=True)
class Slice:
    """What one replica computes on at once.

    Attributes:
        inputs: array, or tuple or dict of arrays, of shape [max(count, 1), ...]; or what `to_device`
            made of it.
        targets: the same, or None; with their sample weights, where data give them, a `Weighted`.
        count: samples in it. When 0, the arrays hold one placeholder sample, so that the replica
            can take part in every collective; its weight is 0.
        weight: count * replicas / size of the global batch. A replica's contribution is the sum
            over its slices of weight * mean; the mean of the contributions over all replicas is
            then exactly the mean over the global batch.
    """

    inputs: Any
    targets: Any
    count: int
    weight: float


@dataclass(frozen=True, slots=True)
class Batch:
    """The part of one global batch that belongs to this process.

    Attributes:
        epoch: from 0.
        index: number of the global batch in its epoch, from 0.
        step: number of the global batch in the run, from 0.
        size: samples in the global batch, over all replicas.
        is_last_of_epoch: whether the next batch belongs to another epoch.
        even: whether every replica of the run has equally many samples of it; without accumulation,
            each weight is then exactly 1.
        slices: for each local replica its slices, one after the other in the order of the samples:
            as many as gradients are accumulated over.
        fingerprint: of the whole global batch, where every process must find the same and may not:
            in the first batch that is read of each epoch of a stream.
        mark: where the stream can be taken back to, to read on from there, if it has a state of its own.
    """

    epoch: int
    index: int
    step: int
    size: int
    is_last_of_epoch: bool
    even: bool
    slices: tuple[tuple[Slice, ...], ...]
    fingerprint: int | None = None
    mark: StreamState | None = None
